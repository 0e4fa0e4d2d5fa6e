"""Measure on this machine what a plan can otherwise only assume: saved activations, workspace and achieved FLOP/s.

A few short runs of the engine on a model with the real layer widths but one layer of each kind, at two lengths:

1. For each kind of layer, how many more bytes stay alive when one more such layer is run forward for a walk.
2. Two small steps per length, and by how much each phase's peak exceeds the plan's other terms.
3. The same steps again without the meter, timed, at the shorter length and at TIMED_STRETCH times it.

Two lengths give a line, `fixed + per_token x tokens`; lengths are multiples of 64, the scan's sub-chunk.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.capture import capture_prompt, empty_carry
from workbench.errors import InvalidInputError
from workbench.loading import load_policy
from workbench.memory import MemoryMeter
from workbench.planner import Calibration, Gpu, Line, Plan, Request, plan_request
from workbench.planner.families import model_shape
from workbench.planner.flops import Rate, Work, work_by_phase
from workbench.planner.graph import saved_bytes_per_token
from workbench.planner.measured import signature
from workbench.planner.shapes import Layer, ModelShape
from workbench.planner.sources import model_config
from workbench.policy import Policy
from workbench.state.pages import GradientPages
from workbench.types import StepReport
from workbench.update import update_step
from workbench.walk import Segment, run_segment

LENGTHS = (128, 256)
# Long enough for several chunks, short enough that what is counted for every position hardly counts twice.
NUM_CHUNKS, SHORT_RESPONSE, SHORT_PROMPT = 3, 8, 64
# Timed steps need operations to outweigh their launches.
TIMED_STRETCH = 8
# Small, so that the head's logits never hide a backward's temporaries; a plan's own logits are exact anyway.
VOCAB = 64
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PHASES = ("capture", "replay", "prompt_gradient")


def calibrate(
    model: Any,
    *,
    weights: str = "fp32",
    training: str = "full",
    lora_rank: int = 16,
    checkpoint_layers: bool = False,
    device: str | torch.device = "cpu",
    lengths: tuple[int, int] = LENGTHS,
    seed: int = 0,
) -> Calibration:
    """Measure one model's layers; takes seconds for small widths, and memory for one layer of each kind.

    model: a transformers model or configuration (its weights are not used, only its widths), or a catalogue name.
    weights: "fp32" or "bf16"; the latter with LoRA also serves plans of nf4 weights, which compute in bf16.
    lengths: two segment lengths to fit lines through; near the chunk that is planned is best. device: where to run.
    The random state of torch is left alone.
    """
    if weights not in _DTYPES:
        raise InvalidInputError(f"calibrate: weights={weights!r} is not one of {', '.join(map(repr, _DTYPES))}")
    short, long = lengths
    if not (0 < short < long and short % 64 == long % 64 == 0):
        raise InvalidInputError(f"calibrate: lengths={lengths} must be two rising multiples of 64")
    config = _text_config(model)
    options: dict[str, Any] = {
        "weights": weights,
        "training": training,
        "lora_rank": lora_rank,
        "checkpoint_layers": checkpoint_layers,
    }
    bench = _Bench(config, options, torch.device(device), seed)
    marginal = {layer.kind: [bench.marginal_bytes(layer, t) for t in lengths] for layer in bench.kinds}
    graph = {kind: _line(lengths, [alive for alive, _ in found]) for kind, found in marginal.items()}
    capture = {kind: _line(lengths, [peak for _, peak in found]) for kind, found in marginal.items()}
    blank = Calibration(
        model_type=bench.shape.model_type,
        signature=signature(bench.shape, bench.request(short)),
        device=str(device),
        graph=graph,
        formula={layer.kind: float(saved_bytes_per_token(layer, bench.request(short))) for layer in bench.kinds},
        capture=capture,
        transient=dict.fromkeys(_PHASES, Line(0.0, 0.0)),
        reference_layers=bench.reference_layers,
        rates=dict.fromkeys(_PHASES, Rate(1.0)),
        lengths=lengths,
        provenance={"torch": torch.__version__, "threads": torch.get_num_threads()},
        **options,
    )
    beyond = [bench.beyond_plan(blank, tokens) for tokens in lengths]
    return replace(
        blank,
        transient={phase: _line(lengths, [found[phase] for found in beyond]) for phase in _PHASES},
        rates=bench.rates((short, TIMED_STRETCH * short)),
    )


class _Bench:
    """The reference model, one layer of each kind, and the measurements on it."""

    def __init__(self, config: Any, options: Mapping[str, Any], device: torch.device, seed: int) -> None:
        self._config, self._options, self._device, self._seed = config, options, device, seed
        self.shape = model_shape(config, type(config).__name__)
        self._indices = _one_of_each(self.shape)
        self.kinds: list[Layer] = list(dict.fromkeys(self.shape.layers))
        self._policy = self._build(self._indices)
        self._reference = model_shape(self._policy.adapter.config, "reference")
        self._alone: dict[int, tuple[float, float]] = {}

    def request(self, tokens: int, **changes: Any) -> Request:
        """Full scope, chunks of `tokens`, a response that hardly counts."""
        fields: dict[str, Any] = {
            "positions": NUM_CHUNKS * tokens + 1 + SHORT_RESPONSE,
            "group_size": 2,
            "response_tokens": SHORT_RESPONSE,
            "chunk_tokens": tokens,
            "block_tokens": tokens,
            "gradient_scope": "full",
            "optimizer": "none",
        }
        return Request(**(fields | dict(self._options) | changes))

    @property
    def reference_layers(self) -> dict[str, int]:
        return {layer.kind: count for layer, count in self._reference.groups}

    def marginal_bytes(self, layer: Layer, tokens: int) -> tuple[float, float]:
        """What one more layer of this kind keeps alive after a forward, and adds to the peak of a capture."""
        if tokens not in self._alone:
            self._alone[tokens] = self._bytes_alive(self._policy, tokens), self._capture_peak(self._policy, tokens)
        index = self.shape.layers.index(layer)
        at = self._indices.index(index)
        more = self._build([*self._indices[:at], index, *self._indices[at:]])
        alive, peak = self._alone[tokens]
        return self._bytes_alive(more, tokens) - alive, self._capture_peak(more, tokens) - peak

    def requests(self, tokens: int) -> tuple[tuple[Request, tuple[str, ...]], ...]:
        """Two steps and the phases that each is for.

        In the second the response is one block of `tokens` after a short prompt that is not walked.
        """
        replay = self.request(
            tokens,
            positions=SHORT_PROMPT + tokens,
            response_tokens=tokens,
            chunk_tokens=SHORT_PROMPT,
            gradient_scope="response_only",
        )
        return (self.request(tokens), ("capture", "prompt_gradient")), (replay, ("replay",))

    def rates(self, lengths: tuple[int, int]) -> dict[str, Rate]:
        """Seconds of each phase as fixed time per layer and segment plus operations over a rate; best of two runs."""
        found: dict[str, list[tuple[Work, float]]] = {phase: [] for phase in _PHASES}
        for tokens in lengths:
            for request, phases in self.requests(tokens):
                work = work_by_phase(self._reference, request)
                runs = [self._step(request, measure_memory=False).seconds for _ in range(2)]
                for phase in phases:
                    found[phase].append((work[phase], min(run[phase] for run in runs)))
        return {phase: _rate(*points, num_layers=len(self._reference.layers)) for phase, points in found.items()}

    def beyond_plan(self, blank: Calibration, tokens: int) -> dict[str, float]:
        """By phase, peak bytes of a step beyond a plan that has no workspace."""
        found = {}
        for request, phases in self.requests(tokens):
            report = self._step(request)
            planned = plan_request(self._reference, _UNLIMITED, request, replace(blank, signature=self._signature()))
            for phase in phases:
                found[phase] = report.memory["stage_peak_bytes"][phase] - _planned_above_start(planned, phase)
                found[phase] += planned.first_step_terms[phase]["logits"]
        return found

    def _signature(self) -> str:
        return signature(self._reference, self.request(LENGTHS[0]))

    def _step(self, request: Request, *, measure_memory: bool = True) -> StepReport:
        draw = torch.Generator().manual_seed(self._seed)
        vocab = self._policy.vocab_size
        prompt = torch.randint(vocab, (request.prompt_tokens,), generator=draw)
        responses = [torch.randint(vocab, (request.response_tokens,), generator=draw) for _ in range(2)]
        report = update_step(
            self._policy,
            prompt,
            responses,
            advantages=[1.0, -1.0],
            gradient_scope=request.gradient_scope,
            chunk_tokens=request.chunk_tokens,
            block_tokens=request.block_tokens,
            checkpoint_layers=request.checkpoint_layers,
            measure_memory=measure_memory,
        )
        self._policy.model.zero_grad(set_to_none=True)
        return report

    def _bytes_alive(self, policy: Policy, tokens: int) -> float:
        ids = torch.zeros(tokens, dtype=torch.int64)
        segment = Segment(ids, 0, (), empty_carry(policy), "calibration")
        pages = GradientPages(lambda start: False)
        with policy.active(), MemoryMeter(policy.device) as meter:
            live = run_segment(policy, segment, pages, checkpoint_layers=self._options["checkpoint_layers"])
            alive = meter.report()["live_bytes_at_end"]
            del live
            gc.collect()
        return float(alive)

    def _capture_peak(self, policy: Policy, tokens: int) -> float:
        """Peak of a capture of NUM_CHUNKS chunks, less the rows and the carries that it leaves."""
        prompt = torch.zeros(NUM_CHUNKS * tokens + 1, dtype=torch.int64)
        with MemoryMeter(policy.device) as meter:
            state = capture_prompt(policy, prompt, chunk_tokens=tokens, keep_boundaries=True, meter=meter)
        carry = sum(tensor.nbytes for layer in state.carry_at(state.positions) for tensor in layer.values())
        return meter.report()["peak_bytes"] - state.nbytes - 2 * carry

    def _build(self, indices: Sequence[int]) -> Policy:
        """A random policy with these layers of the configuration, in this order."""
        from transformers import AutoModelForCausalLM

        config = _with_layers(self._config, self.shape, indices)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[self._options["weights"]]).eval()
        rank = self._options["lora_rank"] if self._options["training"] == "lora" else None
        return load_policy(model, lora=rank, device=self._device, seed=self._seed)


_UNLIMITED = Gpu("this machine", 2**62, 1.0, 1.0, outside_bytes=0)


def _planned_above_start(planned: Plan, phase: str) -> int:
    """The plan's counterpart of a stage's peak in `StepReport.memory`."""
    at_start = planned.first_step_terms["capture"]
    terms = planned.first_step_terms[phase]
    return sum(terms.values()) - at_start["weights"] - at_start["adapter"]


def _line(lengths: tuple[int, int], found: Sequence[float]) -> Line:
    """The line through two measurements."""
    slope = (found[1] - found[0]) / (lengths[1] - lengths[0])
    return Line(found[0] - slope * lengths[0], slope)


def _rate(short: tuple[Work, float], long: tuple[Work, float], *, num_layers: int) -> Rate:
    """The line of seconds over operations; timing noise that turns it round leaves the rate of the longer run."""
    (less, less_seconds), (more, more_seconds) = short, long
    whole = Rate(more.flops / more_seconds)
    if more_seconds <= less_seconds:
        return whole
    rate = (more.flops - less.flops) / (more_seconds - less_seconds)
    fixed = (less_seconds - less.flops / rate) / (less.segments * num_layers)
    return Rate(rate, fixed) if fixed > 0 else whole


def _text_config(model: Any) -> Any:
    if isinstance(model, str):
        return model_config(model)
    return getattr(model, "config", model).get_text_config()


def _one_of_each(shape: ModelShape) -> list[int]:
    """Indices of the first layer of each kind, in order, then the last layer, which walks treat differently."""
    firsts = [shape.layers.index(layer) for layer, _ in shape.groups]
    return [*firsts, len(shape.layers) - 1]


def _with_layers(config: Any, shape: ModelShape, indices: Sequence[int]) -> Any:
    """The configuration with these layers only."""
    reduced = copy.deepcopy(config)
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        listed = getattr(config, name, None)
        if listed is not None:
            setattr(reduced, name, [listed[index] for index in indices])
    if hasattr(config, "decoder_sparse_step"):  # which layers have experts follows from their index there
        dense = [at for at, index in enumerate(indices) if shape.layers[index].feed_forward.kind == "dense"]
        reduced.decoder_sparse_step, reduced.mlp_only_layers = 1, dense
    reduced.num_hidden_layers = len(indices)
    reduced.vocab_size, reduced.pad_token_id = VOCAB, None
    return reduced
