"""The byte terms of every phase of a step: value, band, formula in words, and how it is known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from workbench.planner import graph, sizes
from workbench.planner.measured import MEASURED_BAND, SCALED_BAND, Calibration
from workbench.planner.request import Request
from workbench.planner.shapes import ModelShape
from workbench.planner.sources import Gpu
from workbench.planner.transients import Transients

PHASES = ("load", "capture", "score", "replay", "prompt_gradient", "optimizer")
TERMS = (
    "weights",
    "adapter",
    "optimizer",
    "rows",
    "carry",
    "boundary_carries",
    "gradient_pages",
    "graph",
    "logits",
    "workspace",
    "outside",
)

EXACT_BAND = (1.0, 1.0)
WORKSPACE_BAND = (0.5, 1.5)
# Copies of a logit that are alive at once were counted on a CPU in float32; another dtype or kernel may differ by one.
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
        # From the replay on, trained parameters have gradients; they stand with their parameters.
        trained = phase in ("replay", "prompt_gradient", "optimizer")
        yield self._weights(phase, trained)
        yield self._adapter(phase, trained)
        yield self._optimizer(phase, moments=not first_step or phase == "optimizer")
        yield from self._resident(phase)
        yield self._gradient_pages(phase)
        yield self._graph(phase)
        yield self._logits(phase)
        yield self._workspace(phase)
        outside = "context, libraries and fragmentation outside the allocator, as LongStraw's out-of-memory point shows"
        yield _term(phase, "outside", self.gpu.reserve_bytes, outside, origin="assumed")

    # ------------------------------------------------------------ exact from the configuration

    def _weights(self, phase: str, trained: bool) -> Term:
        shape, request = self.shape, self.request
        value, bits = sizes.weight_bytes(shape, request), 8 * request.compute_bytes
        formula = f"{request.weights} linears + embedding, head, norms, convolution in {bits} bits"
        if request.training == "full" and trained:
            value, formula = value + sizes.gradient_bytes(shape, request), formula + " + their gradients"
        return _term(phase, "weights", value, formula)

    def _adapter(self, phase: str, trained: bool) -> Term:
        shape, request = self.shape, self.request
        value, formula = sizes.adapter_bytes(shape, request), f"LoRA r = {request.lora_rank}: sum of r (in + out) x 4 B"
        if request.training == "lora" and trained:
            value, formula = value + sizes.gradient_bytes(shape, request), formula + " + their gradients"
        return _term(phase, "adapter", value, formula)

    def _optimizer(self, phase: str, *, moments: bool) -> Term:
        value = sizes.optimizer_bytes(self.shape, self.request) if moments else 0
        return _term(phase, "optimizer", value, "AdamW: 2 moments x trained parameters x their bytes")

    def _resident(self, phase: str) -> Iterator[Term]:
        """What a captured prompt leaves; a prefix-frozen one is kept for the next step."""
        shape, request = self.shape, self.request
        resident = phase in ("capture", "score", "replay", "prompt_gradient")
        resident = resident or (phase == "optimizer" and request.adapter_scope == "response")
        on_device = resident and request.placement == "device"
        per_token, tokens = (
            sizes.row_bytes_per_token(shape, request.compute_bytes),
            request.rank_tokens(request.positions),
        )
        rows = f"{per_token:,} B of all layers that keep every row x {tokens:,} tokens per rank (+ capped windows)"
        yield _term(phase, "rows", sizes.rows_bytes(shape, request) if on_device else 0, rows)
        carry = "2 x (float32 recurrent state / ranks + convolution tail, which the first rank keeps)"
        yield _term(phase, "carry", 2 * sizes.rank_carry_bytes(shape, request) if resident else 0, carry)
        boundaries = sizes.boundary_carries_bytes(shape, request) if on_device else 0
        yield _term(phase, "boundary_carries", boundaries, f"{request.num_chunks:,} chunk boundaries x one carry")

    def _gradient_pages(self, phase: str) -> Term:
        request = self.request
        held = request.placement == "device" and (
            phase == "replay" or (phase == "prompt_gradient" and bool(request.walked_chunks))
        )
        formula = "row elements that take a gradient x 4 B x tokens that the scope walks"
        return _term(phase, "gradient_pages", sizes.gradient_pages_bytes(self.shape, request) if held else 0, formula)

    def _logits(self, phase: str) -> Term:
        value = graph.head_logits_bytes(self.shape, self.request) if phase in ("score", "replay") else 0
        formula = f"{graph.HEAD_ROWS} rows x vocabulary x {graph.HEAD_BYTES_PER_LOGIT} B"
        return _term(phase, "logits", value, formula, LOGITS_BAND)

    # ------------------------------------------------------------ decided by the implementation

    @cached_property
    def _transients(self) -> Transients:
        return Transients(self.shape, self.request, self.calibration)

    def _graph(self, phase: str) -> Term:
        tokens = self._transients.segment_tokens(phase)
        value = self._transients.graph_bytes(phase)
        how = "layer inputs, attention outputs, one layer" if self.request.rebuilds_layers else "every layer"
        formula = f"saved activations of {how} per token x {tokens:,} tokens"
        return _term(phase, "graph", value, formula, *self._known(phase, graph.GRAPH_BAND, MEASURED_BAND))

    def _workspace(self, phase: str) -> Term:
        formula = "temporaries of one layer beyond the logits, rows before they are copied, a staged layer"
        value = self._transients.workspace_bytes(phase)
        return _term(phase, "workspace", value, formula, *self._known(phase, WORKSPACE_BAND, 2 * MEASURED_BAND))

    def _known(self, phase: str, assumed: tuple[float, float], measured: float) -> tuple[tuple[float, float], str]:
        """Band and origin."""
        if self._transients.cover == "no":
            return assumed, "assumed"
        width = measured if self._transients.is_interpolated(phase) else SCALED_BAND
        return (1 - width, 1 + width), "measured"


def host_bytes(shape: ModelShape, request: Request) -> int:
    """Rows, their gradients and boundary carries of one rank in host memory."""
    if request.placement == "device":
        return 0
    total = sizes.rows_bytes(shape, request) + sizes.boundary_carries_bytes(shape, request)
    return total + sizes.gradient_pages_bytes(shape, request)


def _term(
    phase: str,
    name: str,
    value: float,
    formula: str,
    band: tuple[float, float] = EXACT_BAND,
    origin: str = "exact",
) -> Term:
    low, high = band
    return Term(phase, name, round(value), round(low * value), round(high * value), formula, origin)
