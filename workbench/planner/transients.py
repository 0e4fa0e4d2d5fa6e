"""Graph and workspace of each phase: measured lines where a calibration covers the model, formulas where none does.

A phase's peak beyond what is resident is the larger of two moments: the head's logits beside the graph, or one layer's
temporaries beside it. Logits are a term of their own, so `workspace` is what temporaries take beyond them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from workbench.planner import graph, sizes
from workbench.planner.measured import Calibration
from workbench.planner.request import Request
from workbench.planner.shapes import Layer, ModelShape

# What one layer holds at once beyond what stays, as a share of what the largest layer saves, before a calibration.
# Measured on Qwen3 and Qwen3.5 layers of width 128 (torch 2.13, CPU, float32, full training and LoRA): a forward
# without a graph 0.37 to 0.71, a backward 0.11 to 0.48.
FORWARD_SHARE, BACKWARD_SHARE = 0.5, 0.35
_FORWARD_PHASES, _WALK_PHASES = ("capture", "score"), ("replay", "prompt_gradient")


@dataclass(frozen=True)
class Transients:
    """Bytes per rank that live for one segment."""

    shape: ModelShape
    request: Request
    calibration: Calibration | None

    @cached_property
    def cover(self) -> str:
        """How the calibration serves: "measured", "scaled" or "no"."""
        return "no" if self.calibration is None else self.calibration.covers(self.shape, self.request)

    @property
    def _measured(self) -> Calibration | None:
        return None if self.cover == "no" else self.calibration

    def segment_tokens(self, phase: str) -> int:
        """Tokens per rank of the chunk or block that a phase runs at once."""
        request, tokens = self.request, 0
        if phase == "capture" or (phase == "prompt_gradient" and request.walked_chunks):
            tokens = request.largest_chunk
        elif phase in ("score", "replay"):
            tokens = request.largest_block
        return -(-tokens // request.context_parallel)

    def is_interpolated(self, phase: str) -> bool:
        """Measured at these widths, for a segment at most twice as long as the longest measured one.

        Masks and index scores grow with the square of a chunk, so a line holds near the lengths it was fitted to.
        """
        if self.calibration is None or self.cover != "measured":
            return False
        return self.segment_tokens(phase) <= 2 * self.calibration.lengths[1]

    # ------------------------------------------------------------ graph

    def graph_bytes(self, phase: str) -> float:
        """What a walked segment saves for its backward; its own rows count under rows."""
        tokens = self.segment_tokens(phase)
        if phase not in _WALK_PHASES or not tokens:
            return 0.0
        return self._formula_graph(phase, tokens) if self._measured is None else self._measured_graph(phase, tokens)

    def _measured_graph(self, phase: str, tokens: int) -> float:
        assert self.calibration is not None
        saved, scaled = 0.0, self.cover == "scaled"
        for layer, count in self.shape.groups:
            saved += count * self.calibration.layer_graph(layer, self.request, scaled=scaled).at(tokens)
            saved += 0 if self.request.rebuilds_layers else count * graph.padding_bytes(layer, tokens)
        # Negative where the walk's last layer stops early and that outweighs the temporaries.
        return max(0.0, saved + min(0.0, self._transient(phase, tokens)))

    def _formula_graph(self, phase: str, tokens: int) -> float:
        shape, request = self.shape, self.request
        per_layer = graph.kept_between_layers_bytes if request.rebuilds_layers else graph.saved_bytes_per_token
        kept = fixed = 0
        for layer, count in shape.groups:
            kept += count * per_layer(layer, request)
            fixed += count * graph.kept_per_segment_bytes(layer, request)
            fixed += 0 if request.rebuilds_layers else count * graph.padding_bytes(layer, tokens)
        if request.rebuilds_layers:
            fixed += self._largest(lambda layer: graph.padding_bytes(layer, tokens))
            kept += self._largest(lambda layer: graph.saved_bytes_per_token(layer, request))
        elif phase == "prompt_gradient":  # the last layer stops once its rows and carry are there
            last = shape.layers[-1]
            kept += graph.state_only_bytes_per_token(last, request) - graph.saved_bytes_per_token(last, request)
        if phase == "replay":
            kept -= sizes.row_bytes_per_token(shape, request.compute_bytes, windowed=True)
        return tokens * max(0, kept) + fixed

    # ------------------------------------------------------------ workspace

    def workspace_bytes(self, phase: str) -> float:
        """Temporaries beyond the other terms."""
        shape, request = self.shape, self.request
        if phase == "load":
            return 0.0
        if phase == "optimizer":  # torch's foreach AdamW holds one temporary per trained parameter
            return sizes.gradient_bytes(shape, request) if request.optimizer == "adamw" else 0.0
        tokens = self.segment_tokens(phase)
        transient = max(0.0, self._transient(phase, tokens)) if tokens else 0.0
        logits = graph.head_logits_bytes(shape, request) if phase == "replay" else 0
        return self._staged_bytes(phase) + max(0.0, transient - logits)

    def _transient(self, phase: str, tokens: int) -> float:
        forward = phase in _FORWARD_PHASES
        measured = self._measured
        if measured is None:
            return self._assumed_forward(tokens) if forward else self._assumed_backward(tokens)
        if self.cover == "scaled":
            own = self._largest(lambda layer: graph.saved_bytes_per_token(layer, self.request))
            line = measured.transient["capture" if forward else phase]
            return line.at(tokens) * own / max(measured.formula.values())
        if forward:
            return measured.capture_beyond(self.shape, tokens)
        # With layer checkpoints the rebuilt layer, its padding included, is part of what was measured.
        padding = self._largest(lambda layer: graph.padding_bytes(layer, tokens)) if self.request.rebuilds_layers else 0
        return measured.transient[phase].at(tokens) + padding

    def _assumed_forward(self, tokens: int) -> float:
        """One layer's temporaries, or the chunk's rows before they are copied."""
        shape, request = self.shape, self.request
        fresh = sizes.row_bytes_per_token(shape, request.compute_bytes, windowed=True) * tokens
        temporaries = FORWARD_SHARE * self._largest_saved(tokens) + self._attention(tokens)
        return max(temporaries, fresh)

    def _assumed_backward(self, tokens: int) -> float:
        weight = graph.largest_weight_gradient_bytes(self.shape, self.request)
        return BACKWARD_SHARE * self._largest_saved(tokens) + self._attention(tokens) + weight

    def _attention(self, tokens: int) -> int:
        return self._largest(lambda layer: graph.attention_workspace_bytes(layer, self.request, tokens))

    def _staged_bytes(self, phase: str) -> float:
        """Rows on the host: one layer's are on the device at a time, with their gradients where they have any."""
        if self.request.placement == "device":
            return 0.0
        rows = sizes.largest_layer_rows_bytes(self.shape, self.request)
        with_gradient = phase in _WALK_PHASES and bool(self.request.walked_chunks)
        return rows * (1 + (4 // self.request.compute_bytes if with_gradient else 0))

    def _largest_saved(self, tokens: int) -> float:
        request = self.request
        return self._largest(
            lambda layer: graph.saved_bytes_per_token(layer, request) * tokens + graph.padding_bytes(layer, tokens)
        )

    def _largest(self, size: Callable[[Layer], int]) -> int:
        return max(size(layer) for layer, _ in self.shape.groups)
