"""What a calibration run measured, as later plans use it. The run itself is `workbench.calibration`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError
from workbench.planner.flops import Rate
from workbench.planner.graph import saved_bytes_per_token
from workbench.planner.request import WEIGHT_BYTES, Request
from workbench.planner.shapes import Layer, ModelShape

# How far a measured slope is from what another run of the same widths shows: figures in tests/test_calibration.py.
MEASURED_BAND = 0.03
# A measurement of one width, used for another width of the same family through its ratio to the formula [assumed].
SCALED_BAND = 0.15
FORMAT = 1


@dataclass(frozen=True)
class Line:
    """fixed + per_token x tokens, in bytes."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured slopes of one model's widths on one machine.

    graph: {kind of layer: bytes that one layer keeps for its backward}; formula: the same slope as `graph.py` has it.
    capture: {kind of layer: bytes that one more layer adds to the peak of a capture, rows and carry left out}.
    transient: {phase: peak bytes of the reference beyond the plan's other terms; logits are never alive with it}.
    reference_layers: {kind of layer: how many the reference had}.
    rates: {phase: achieved operations per second, and the fixed time of a layer in a segment}.
    """

    model_type: str
    signature: str
    device: str
    weights: str
    training: str
    lora_rank: int
    checkpoint_layers: bool
    graph: Mapping[str, Line]
    formula: Mapping[str, float]
    capture: Mapping[str, Line]
    transient: Mapping[str, Line]
    reference_layers: Mapping[str, int]
    rates: Mapping[str, Rate]
    lengths: tuple[int, int]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def covers(self, shape: ModelShape, request: Request) -> str:
        """ "measured" for the same widths, "scaled" for the same family and training, "no" else."""
        if self.signature == signature(shape, request):
            return "measured"
        same = (self.model_type, WEIGHT_BYTES[self.weights], self.training, self.checkpoint_layers)
        asked = (shape.model_type, request.compute_bytes, request.training, request.rebuilds_layers)
        return "scaled" if same == asked and all(layer.kind in self.graph for layer, _ in shape.groups) else "no"

    def layer_graph(self, layer: Layer, request: Request, *, scaled: bool) -> Line:
        """Bytes one layer keeps; scaled: this run's ratio to the formula, applied to the layer's own formula."""
        line = self.graph[layer.kind]
        if not scaled:
            return line
        ratio = saved_bytes_per_token(layer, request) / self.formula[layer.kind]
        return Line(line.fixed * ratio, line.per_token * ratio)

    def capture_beyond(self, shape: ModelShape, tokens: int) -> float:
        """Peak of a capture beyond rows and carry: the reference's, and what the model's further layers add."""
        extra = 0.0
        for layer, count in shape.groups:
            extra += count * self.capture[layer.kind].at(tokens)
        at_reference = sum(n * self.capture[kind].at(tokens) for kind, n in self.reference_layers.items())
        return self.transient["capture"].at(tokens) + extra - at_reference

    def save(self, path: str | Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises InvalidInputError for a file that is none, or of another format."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            if raw.pop("format") != FORMAT:
                raise InvalidInputError(f"{path} is a calibration of another format; run the calibration again")
            for name in ("graph", "capture", "transient"):
                raw[name] = {key: Line(**line) for key, line in raw[name].items()}
            raw["rates"] = {key: Rate(**rate) for key, rate in raw["rates"].items()}
            return cls(**raw | {"lengths": tuple(raw["lengths"])})
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise InvalidInputError(f"{path} is not a calibration file: {error!r}") from None


def signature(shape: ModelShape, request: Request) -> str:
    """Equal for plans whose layers are measured by the same run: layer widths, dtype of activations and training.

    Not the number of layers, the vocabulary or the storage of frozen weights (nf4 computes in bf16).
    """
    layers = sorted(repr(layer) for layer, _ in shape.groups)
    last = repr(shape.layers[-1])  # it stops early in the prompt walk
    how = (request.compute_bytes, request.training, request.lora_rank, request.rebuilds_layers)
    parts = [shape.model_type, shape.hidden, layers, last, *how]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
