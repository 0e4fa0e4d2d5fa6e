"""The byte terms of every phase of a step: value, band, formula in words, and how it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from workbench.planner import graph, sizes
from workbench.planner.measured import MEASURED_BAND, SCALED_BAND, Calibration
from workbench.planner.request import Request, largest_layer
from workbench.planner.shapes import ModelShape
from workbench.planner.sources import Gpu

PHASES = ("load", "capture", "score", "replay", "prompt_gradient", "optimizer")
TERMS = (
    "weights", "adapter", "optimizer", "rows", "carry", "boundary_carries", "gradient_pages", "graph", "logits",
    "workspace", "outside",
)  # fmt: skip

# What one layer holds at once beyond what stays, as a share of what the largest layer saves, before a calibration.
# Measured on Qwen3 and Qwen3.5 layers of width 128 (torch 2.13, CPU, float32, full training and LoRA): a forward
# without a graph 0.37 to 0.71, a backward 0.11 to 0.48.
FORWARD_SHARE, BACKWARD_SHARE = 0.5, 0.35
WORKSPACE_BAND = (0.5, 1.5)
LOGITS_BAND = (0.75, 1.25)


@dataclass(frozen=True)
class Term:
    """Bytes per rank of one term in one phase. origin: exact (from the configuration), measured, or assumed."""

    phase: str
    term: str
    value: int
    low: int
    high: int
    formula: str
    origin: str
    unit: str = "bytes per rank"


@dataclass(frozen=True)
class TermBuilder:
    """All terms of one request on one model and machine."""

    shape: ModelShape
    request: Request
    gpu: Gpu
    calibration: Calibration | None = None

    def build(self, *, first_step: bool) -> tuple[Term, ...]:
        """first_step: Adam's moments do not exist before its first call."""
        return tuple(term for phase in PHASES for term in self._phase(phase, first_step))

    def _phase(self, phase: str, first_step: bool) -> Iterator[Term]:
        resident = phase in ("capture", "score", "replay", "prompt_gradient")
        if phase == "optimizer":  # a prefix-frozen prompt is kept for the next step
            resident = self.request.adapter_scope == "response"
        trained = phase in ("replay", "prompt_gradient", "optimizer")
        yield from self._static(phase, trained, moments=not first_step or phase == "optimizer")
        yield from self._resident(phase, resident)
        yield self._gradient_pages(phase)
        yield self._graph(phase)
        yield self._logits(phase)
        yield self._workspace(phase)
        reserve = self.gpu.reserve_bytes
        yield _exact(phase, "outside", reserve, "context, libraries and fragmentation outside the allocator: 3.64 % "
                     "of the card, where LongStraw ran out of memory", origin="assumed")  # fmt: skip

    def _static(self, phase: str, trained: bool, *, moments: bool) -> Iterator[Term]:
        shape, request = self.shape, self.request
        gradients = sizes.gradient_bytes(shape, request) if trained else 0
        lora = request.training == "lora"
        weights = sizes.weight_bytes(shape, request) + (0 if lora else gradients)
        yield _exact(phase, "weights", weights, f"{request.weights} linears + embedding, head, norms, convolution in "
                     f"{8 * request.compute_bytes}-bit" + ("" if lora or not trained else " + their gradients"))  # fmt: skip
        adapter = sizes.adapter_bytes(shape, request) + gradients if lora else 0
        yield _exact(phase, "adapter", adapter, f"LoRA r={request.lora_rank}: sum of r (in + out) x 4 B"
                     + (" x 2 with gradients" if trained else ""))  # fmt: skip
        moments_bytes = sizes.optimizer_bytes(shape, request) if moments else 0
        yield _exact(phase, "optimizer", moments_bytes, "AdamW: 2 moments x trained parameters x their bytes")

    def _resident(self, phase: str, resident: bool) -> Iterator[Term]:
        shape, request = self.shape, self.request
        on_device = resident and request.placement == "device"
        rows = sizes.rows_bytes(shape, request) if on_device else 0
        yield _exact(phase, "rows", rows, f"{sizes.row_bytes_per_token(shape, request.compute_bytes):,} B/token in "
                     f"layers that keep all x {request.rank_tokens(request.positions):,} tokens per rank"
                     " (+ capped windows)")  # fmt: skip
        carry = 2 * sizes.rank_carry_bytes(shape, request) if resident else 0
        yield _exact(phase, "carry", carry, "2 x (recurrent state fp32 + convolution tail), split by heads over ranks")
        boundaries = sizes.boundary_carries_bytes(shape, request) if on_device else 0
        yield _exact(phase, "boundary_carries", boundaries, f"{request.num_chunks:,} chunk boundaries x one carry")

    def _gradient_pages(self, phase: str) -> Term:
        held = phase in ("replay", "prompt_gradient") and self.request.placement == "device"
        if phase == "prompt_gradient":
            held = held and bool(self.request.walked_chunks)
        pages = sizes.gradient_pages_bytes(self.shape, self.request) if held else 0
        return _exact(
            phase, "gradient_pages", pages, "row elements with a gradient x 4 B x tokens that the scope walks"
        )

    # ------------------------------------------------------------ what an implementation decides

    def segment_tokens(self, phase: str) -> int:
        """Tokens per rank of the segment that a phase runs at once."""
        request = self.request
        if phase in ("capture", "prompt_gradient"):
            tokens = request.largest_chunk if phase == "capture" or request.walked_chunks else 0
        else:
            tokens = request.largest_block if phase in ("score", "replay") else 0
        return -(-tokens // request.context_parallel)

    @cached_property
    def _cover(self) -> str:
        return "no" if self.calibration is None else self.calibration.covers(self.shape, self.request)

    def _graph(self, phase: str) -> Term:
        tokens = self.segment_tokens(phase) if phase in ("replay", "prompt_gradient") else 0
        value = round(self._graph_bytes(phase, tokens)) if tokens else 0
        if value < 0:
            value = 0
        low, high, origin = self._band(graph.GRAPH_BAND, MEASURED_BAND)
        how = "layer inputs + attention outputs + one layer" if self.request.rebuilds_layers else "all layers"
        return Term(phase, "graph", value, round(low * value), round(high * value),
                    f"saved activations, {how}: bytes/token x {tokens:,} tokens (its own rows are under rows)", origin)  # fmt: skip

    def _graph_bytes(self, phase: str, tokens: int) -> float:
        shape, request = self.shape, self.request
        padding = sum(count * graph.padding_bytes(layer, tokens) for layer, count in shape.groups)
        if self.calibration is not None and self._cover != "no":
            lines = [(self.calibration.layer_graph(layer, request, scaled=self._cover == "scaled"), count)
                     for layer, count in shape.groups]  # fmt: skip
            saved = sum(count * line.at(tokens) for line, count in lines)
            saved += 0 if request.rebuilds_layers else padding
            # The reference's last layer stops early in a walk, which shows as a negative transient.
            return max(0.0, saved + min(0.0, self._transient(phase, tokens)))
        per_layer = graph.kept_between_layers_bytes if request.rebuilds_layers else graph.saved_bytes_per_token
        kept = sum(count * (per_layer(layer, request) + graph.mask_bytes_per_token(layer, request, request.positions))
                   for layer, count in shape.groups)  # fmt: skip
        fixed = sum(count * graph.kept_per_segment_bytes(layer, request) for layer, count in shape.groups)
        if request.rebuilds_layers:
            kept += largest_layer(shape, lambda layer: graph.saved_bytes_per_token(layer, request))
            padding = largest_layer(shape, lambda layer: graph.padding_bytes(layer, tokens))
        elif phase == "prompt_gradient":  # the last layer stops once its rows and carry are there
            last = shape.layers[-1]
            kept += graph.state_only_bytes_per_token(last, request) - graph.saved_bytes_per_token(last, request)
        own_rows = sizes.row_bytes_per_token(shape, request.compute_bytes, windowed=True)
        return tokens * max(0, kept - (own_rows if phase == "replay" else 0)) + fixed + padding

    def _logits(self, phase: str) -> Term:
        value = graph.head_logits_bytes(self.shape, self.request) if phase in ("score", "replay") else 0
        low, high = LOGITS_BAND
        return Term(phase, "logits", value, round(low * value), round(high * value),
                    f"{graph.HEAD_ROWS} rows x vocabulary x {graph.HEAD_BYTES_PER_LOGIT} B", "exact")  # fmt: skip

    def _workspace(self, phase: str) -> Term:
        tokens = self.segment_tokens(phase)
        value = round(self._workspace_bytes(phase, tokens))
        low, high, origin = self._band(WORKSPACE_BAND, 2 * MEASURED_BAND) if tokens else (0.0, 1.0, "assumed")
        return Term(phase, "workspace", value, round(low * value), round(high * value),
                    "temporaries of one layer, rows and carry before they are copied, a staged layer", origin)  # fmt: skip

    def _workspace_bytes(self, phase: str, tokens: int) -> float:
        """Temporaries beyond the other terms; the head's logits are freed before those of a backward come."""
        if phase == "load":
            return 0.0
        if phase == "optimizer":  # torch's foreach AdamW holds one temporary per trained parameter
            return sizes.gradient_bytes(self.shape, self.request) if self.request.optimizer == "adamw" else 0.0
        transient = max(0.0, self._transient(phase, tokens)) if tokens else 0.0
        logits = graph.head_logits_bytes(self.shape, self.request) if phase == "replay" else 0
        return self._staged_bytes(phase) + max(0.0, transient - logits)

    def _transient(self, phase: str, tokens: int) -> float:
        forward = phase in ("capture", "score")
        if self.calibration is None or self._cover == "no":
            return self._assumed_capture(tokens) if forward else self._assumed_backward(tokens)
        if self._cover == "measured":
            if forward:
                return self.calibration.capture_beyond(self.shape, tokens)
            return self._padded_transient(self.calibration.transient[phase].at(tokens), tokens)
        line = self.calibration.transient["capture" if forward else phase]
        own = largest_layer(self.shape, lambda layer: graph.saved_bytes_per_token(layer, self.request))
        return line.at(tokens) * own / max(self.calibration.formula.values())

    def _padded_transient(self, transient: float, tokens: int) -> float:
        """With layer checkpoints the rebuilt layer, scan and padding, is part of what was measured beyond the plan."""
        if not self.request.rebuilds_layers:
            return transient
        return transient + largest_layer(self.shape, lambda layer: graph.padding_bytes(layer, tokens))

    def _assumed_capture(self, tokens: int) -> float:
        """One layer's temporaries, or the chunk's rows and carry before they are copied; convolution inputs."""
        shape, request = self.shape, self.request
        largest = largest_layer(shape, lambda layer: graph.saved_bytes_per_token(layer, request) * tokens
                                + graph.padding_bytes(layer, tokens))  # fmt: skip
        fresh = sizes.row_bytes_per_token(shape, request.compute_bytes, windowed=True) * tokens
        convolutions = sum(count * graph.capture_kept_bytes(layer, request) for layer, count in shape.groups)
        return max(FORWARD_SHARE * largest, fresh) + convolutions * tokens

    def _assumed_backward(self, tokens: int) -> float:
        shape, request = self.shape, self.request
        largest = largest_layer(shape, lambda layer: graph.saved_bytes_per_token(layer, request) * tokens
                                + graph.padding_bytes(layer, tokens))  # fmt: skip
        return BACKWARD_SHARE * largest + graph.largest_weight_gradient_bytes(shape, request)

    def _staged_bytes(self, phase: str) -> float:
        """Rows on the host: one layer's are on the device at a time, with their gradients where they have any."""
        if self.request.placement == "device" or phase == "optimizer":
            return 0.0
        rows = sizes.largest_layer_rows_bytes(self.shape, self.request)
        with_gradient = phase == "prompt_gradient" or (phase == "replay" and bool(self.request.walked_chunks))
        return rows * (1 + (4 // self.request.compute_bytes if with_gradient else 0))

    def _band(self, assumed: tuple[float, float], measured: float) -> tuple[float, float, str]:
        if self._cover == "no":
            return *assumed, "assumed"
        width = measured if self._cover == "measured" else SCALED_BAND
        return 1 - width, 1 + width, "measured"


def host_bytes(shape: ModelShape, request: Request) -> int:
    """Rows, their gradients and boundary carries of one rank in host memory."""
    if request.placement == "device":
        return 0
    total = sizes.rows_bytes(shape, request) + sizes.boundary_carries_bytes(shape, request)
    return total + sizes.gradient_pages_bytes(shape, request)


def _exact(phase: str, term: str, value: int, formula: str, origin: str = "exact") -> Term:
    return Term(phase, term, value, value, value, formula, origin)
