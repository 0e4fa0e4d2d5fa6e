"""`plan(model, gpu, ...)`: what fits, what binds, how long it takes, and how sure each figure is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError
from workbench.planner import flops, sizes
from workbench.planner.measured import Calibration
from workbench.planner.request import Request
from workbench.planner.shapes import ModelShape
from workbench.planner.sources import Gpu, find_gpu, find_model
from workbench.planner.terms import PHASES, TERMS, Term, TermBuilder, host_bytes
from workbench.types import GradientScope

# Allocated to reserved bytes: what the caching allocator cannot hand out again, above the weights [assumed].
FRAGMENTATION = 1.10

Bytes = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Plan:
    """One request, planned. All bytes are per rank; "peak" is of the allocator, so without the term `outside`.

    terms: {phase: {term: bytes}} in steady state; first_step_terms: before Adam's moments exist.
    peak_bytes, first_step_peak_bytes: the largest phase. step_peak_bytes: the part of it above what lives before
        the step, which is what `StepReport.memory["peak_bytes"]` measures.
    peak_band: lowest and highest peak that the terms' bands allow.
    host_bytes: in host memory. seconds: {phase: s}, calibrated if a calibration was given, else at 50 % of peak.
    seconds_lines: {"roofline" | "half of peak" | "calibrated": {phase: s}}.
    verdict: "fits" (even the upper band does), "no" (the middle does not), "probe" between. binding: the largest
        term of the peak phase. notes: what the figures do not say.
    """

    shape: ModelShape
    gpu: Gpu
    request: Request
    details: tuple[Term, ...]
    first_step_details: tuple[Term, ...]
    host_bytes: int
    seconds_lines: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...]
    calibration: Calibration | None = None

    @property
    def terms(self) -> Bytes:
        return _by_phase(self.details)

    @property
    def first_step_terms(self) -> Bytes:
        return _by_phase(self.first_step_details)

    @property
    def peak_phase(self) -> str:
        return max(PHASES, key=lambda phase: _allocated(self.details, phase))

    @property
    def peak_bytes(self) -> int:
        return _allocated(self.details, self.peak_phase)

    @property
    def first_step_peak_bytes(self) -> int:
        return max(_allocated(self.first_step_details, phase) for phase in PHASES)

    @property
    def peak_band(self) -> tuple[int, int]:
        return tuple(max(_allocated(self.details, phase, side) for phase in PHASES) for side in ("low", "high"))  # type: ignore[return-value]

    @property
    def step_peak_bytes(self) -> int:
        """Above weights and adapter (and Adam's moments), without the optimizer call: what the engine's meter shows."""
        return max(0, self._step_peak("value"))

    @property
    def step_peak_band(self) -> tuple[int, int]:
        return max(0, self._step_peak("low")), self._step_peak("high")

    def _step_peak(self, side: str) -> int:
        before = sizes.weight_bytes(self.shape, self.request) + sizes.adapter_bytes(self.shape, self.request)
        phases = ("capture", "replay", "prompt_gradient")
        return max(_allocated(self.first_step_details, phase, side) for phase in phases) - before

    @property
    def required_bytes(self) -> int:
        """Peak and what is outside the allocator."""
        return self.peak_bytes + self.gpu.reserve_bytes

    @property
    def ceiling_bytes(self) -> int:
        return self.gpu.memory_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.ceiling_bytes - self.required_bytes

    @property
    def verdict(self) -> str:
        if self.required_bytes > self.ceiling_bytes:
            return "no"
        loaded = _allocated(self.details, "load")
        high = loaded + (self.peak_band[1] - loaded) * (FRAGMENTATION if self.gpu.reserve_bytes else 1.0)
        return "fits" if high + self.gpu.reserve_bytes <= self.ceiling_bytes else "probe"

    @property
    def binding(self) -> str:
        """The largest term of the peak phase."""
        terms = self.terms[self.peak_phase]
        return max((term for term in TERMS if term != "outside"), key=lambda term: terms[term])

    @property
    def seconds(self) -> Mapping[str, float]:
        return self.seconds_lines.get("calibrated", self.seconds_lines["half of peak"])

    def to_frame(self) -> list[dict[str, Any]]:
        """One row per phase and term, for `pandas.DataFrame(...)` or a table (pandas is not a dependency)."""
        first = {(term.phase, term.term): term.value for term in self.first_step_details}
        return [
            {
                "phase": term.phase,
                "term": term.term,
                "bytes": term.value,
                "low_bytes": term.low,
                "high_bytes": term.high,
                "first_step_bytes": first[term.phase, term.term],
                "unit": term.unit,
                "origin": term.origin,
                "formula": term.formula,
            }
            for term in self.details
        ]

    def __str__(self) -> str:
        scope, gib = self.request.gradient_scope, 2**30
        return (
            f"{self.shape.name} on {self.request.context_parallel} x {self.gpu.name}, {self.request.positions:,} "
            f"positions, G={self.request.group_size}, {scope}: {self.verdict}, peak {self.peak_bytes / gib:.1f} GiB of "
            f"{self.ceiling_bytes / gib:.1f} in {self.peak_phase}, bound by {self.binding}, "
            f"{sum(self.seconds.values()):,.0f} s a step"
        )


def plan(
    model: Any,
    gpu: str | Gpu,
    *,
    positions: int,
    group_size: int,
    response_tokens: int,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    gradient_scope: GradientScope = "full",
    calibration: Calibration | str | Path | None = None,
    **options: Any,
) -> Plan:
    """Plan one GRPO step of this engine: bytes per rank by phase and term, seconds by phase, and a verdict.

    model: a catalogue name, a folder or config.json, a hub id, a mapping of configuration fields, a transformers
        configuration or model. gpu: a catalogue name or a `Gpu`.
    positions: prompt plus one response; response_tokens: of it; group_size: responses.
    gradient_scope: "full", "response_only", Tail(chunks), Sampled(fraction, seed), or "prefix_frozen", which is
        response_only with adapter_scope="response" (adapters off in the prompt, so nothing is left out).
    calibration: a `Calibration` of this machine or its file; used where it covers the model.
    options: the further fields of `Request` (weights, training, lora_rank, placement, chunk_tokens, block_tokens,
        checkpoint_layers, adapter_scope, quantize_experts, optimizer, num_gpus).

    Counted: the text model of one policy. Not counted: a reference model of its own, vision towers, multi-token
    prediction layers, sampling. Raises InvalidInputError, UnsupportedModelError.
    """
    if gradient_scope == "prefix_frozen":
        if options.get("adapter_scope", "response") == "all":
            raise InvalidInputError("gradient_scope='prefix_frozen' and adapter_scope='all' say different things")
        gradient_scope, options = "response_only", {"adapter_scope": "response", **options}
    request = _request(
        options,
        positions=positions,
        group_size=group_size,
        response_tokens=response_tokens,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        gradient_scope=gradient_scope,
    )
    if isinstance(calibration, str | Path):
        calibration = Calibration.load(calibration)
    return plan_request(find_model(model), find_gpu(gpu), request, calibration)


def plan_request(shape: ModelShape, gpu: Gpu, request: Request, calibration: Calibration | None = None) -> Plan:
    """The same, from its parts."""
    request.check_model(shape)
    builder = TermBuilder(shape, request, gpu, calibration)
    cover = "no" if calibration is None else calibration.covers(shape, request)
    return Plan(
        shape=shape,
        gpu=gpu,
        request=request,
        details=builder.build(first_step=False),
        first_step_details=builder.build(first_step=True),
        host_bytes=host_bytes(shape, request),
        seconds_lines=seconds_lines(shape, gpu, request, calibration if cover != "no" else None),
        notes=tuple(_notes(shape, request, calibration, cover)),
        calibration=calibration,
    )


def _request(options: dict[str, Any], **given: Any) -> Request:
    known = Request.__dataclass_fields__
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(known)}"
            raise InvalidInputError(f"plan: unknown option {name!r}: {hint}")
    return Request(**given, **options)


def seconds_lines(
    shape: ModelShape, gpu: Gpu, request: Request, calibration: Calibration | None
) -> dict[str, dict[str, float]]:
    """{"roofline" | "half of peak" | "calibrated": {phase: seconds}} of one step; without a calibration, no third."""
    work = flops.work_by_phase(shape, request)
    optimizer = flops.optimizer_seconds(sizes.gradient_bytes(shape, request), gpu.bytes_per_second)

    def line(rates: Mapping[str, flops.Rate]) -> dict[str, float]:
        ranks, layers, link = request.context_parallel, len(shape.layers), gpu.link_gb_per_s * 1e9
        seconds = {
            phase: flops.phase_seconds(done, rates[phase], ranks, layers, gpu.bytes_per_second, link)
            for phase, done in work.items()
        }
        return seconds | {"optimizer": optimizer if request.optimizer == "adamw" else 0.0}

    peak = gpu.flops_per_second
    lines = {
        "roofline": line(dict.fromkeys(work, flops.Rate(peak))),
        "half of peak": line(dict.fromkeys(work, flops.Rate(flops.HALF_OF_PEAK * peak))),
    }
    if calibration is not None:
        lines["calibrated"] = line(calibration.rates)
    return lines


def _notes(shape: ModelShape, request: Request, calibration: Calibration | None, cover: str) -> list[str]:
    notes = []
    if request.positions > shape.max_positions:
        notes.append(f"{request.positions:,} positions are beyond the model's native {shape.max_positions:,}")
    if request.gradient_scope == "response_only" and request.adapter_scope == "all":
        notes.append("response_only leaves out the prompt's part of the gradient; it is not the full gradient")
    if request.adapter_scope == "response":
        notes.append("prefix-frozen: the adapter is off in the prompt; its capture is reused, so later steps skip it")
    if shape.num_experts:
        notes.append("routed experts are unevenly loaded; expect a spread over ranks that no configuration shows")
        if request.weights == "nf4" and request.quantize_experts:
            notes.append("expert tensors counted as NF4; a quantiser of nn.Linear alone leaves them in 16 bits")
    if request.context_parallel > 1:
        notes.append(
            "context parallel: chunk tokens, rows and carry heads are split over ranks, weights are not; "
            "the carry is the first rank's, which keeps the convolution tails"
        )
    if calibration is not None and cover == "no":
        notes.append(f"the calibration of {calibration.model_type} does not cover this model or training; not used")
    return notes


def _by_phase(details: tuple[Term, ...]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}
    for term in details:
        table[term.phase][term.term] = term.value
    return table


def _allocated(details: tuple[Term, ...], phase: str, side: str = "value") -> int:
    """Bytes of a phase that go through the allocator."""
    return sum(getattr(term, side) for term in details if term.phase == phase and term.term != "outside")
