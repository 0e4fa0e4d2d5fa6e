"""Gradients of all trainable parameters as vectors: taking them out of a model, and comparing two of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workbench.policy import Policy

Gradient = dict[str, Tensor]
Key = TypeVar("Key", bound=Hashable)

# Names of a decoder layer's direct children, in any family: module name -> what a reader calls it.
_FAMILIES = {"self_attn": "attention", "linear_attn": "gated_delta", "mlp": "mlp"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class GradientComparison:
    """How far a gradient is from the right one, over some parameters, in float64.

    relative_l2: |found - right| / |right|. cosine: of the angle between them. norm_ratio: |found| / |right|.
    NaN where the right gradient (or, for the cosine, either) is zero.
    by_layer: relative L2 within each decoder layer.
    """

    cosine: float
    relative_l2: float
    norm_ratio: float
    by_layer: Mapping[int, float]


def take_gradient(policy: Policy) -> Gradient:
    """The gradients of all trainable parameters, taken out of the model; a parameter without one counts as zeros."""
    taken = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in policy.trainable_parameters()
    }
    policy.model.zero_grad(set_to_none=True)
    return taken


@contextmanager
def gradients_set_aside(policy: Policy) -> Iterator[None]:
    """For the duration `.grad` of every trainable parameter is free for other use; afterwards it is as it was."""
    parameters = [p for _, p in policy.trainable_parameters()]
    before = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def layer_of(name: str) -> int | None:
    """The decoder layer that a parameter belongs to; None outside the layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def parameter_family(name: str) -> str:
    """What kind of module of a decoder layer a parameter belongs to: attention, gated_delta, mlp, norm; else other."""
    found = _LAYER.search(name)
    if found is None:
        return "other"
    return _FAMILIES.get(found[2], "norm" if "norm" in found[2] else "other")


def compare_gradients(found: Gradient, right: Gradient) -> GradientComparison:
    """`found` against `right`, both over the same parameters."""
    layers = compare_by(found, right, layer_of)
    by_layer = {layer: part.relative_l2 for layer, part in layers.items() if layer is not None}
    products = sum((_Products.of(found[name], right[name]) for name in right), _Products())
    return products.comparison(dict(sorted(by_layer.items())))


def compare_by(found: Gradient, right: Gradient, key: Callable[[str], Key]) -> dict[Key, GradientComparison]:
    """The comparison within each group of parameters that share `key(name)`; groups whose right gradient is 0: NaN."""
    groups: dict[Key, _Products] = {}
    for name in right:
        group = key(name)
        groups[group] = groups.get(group, _Products()) + _Products.of(found[name], right[name])
    return {group: products.comparison({}) for group, products in groups.items()}


@dataclass(frozen=True)
class _Products:
    """Squared norms and the inner product, float64; parts of a gradient add up."""

    found: float = 0.0
    right: float = 0.0
    inner: float = 0.0
    difference: float = 0.0

    @classmethod
    def of(cls, found: Tensor, right: Tensor) -> _Products:
        a, b = found.detach().reshape(-1).double(), right.detach().reshape(-1).double()
        return cls(float(a @ a), float(b @ b), float(a @ b), float((a - b).square().sum()))

    def __add__(self, other: _Products) -> _Products:
        return _Products(
            self.found + other.found,
            self.right + other.right,
            self.inner + other.inner,
            self.difference + other.difference,
        )

    def comparison(self, by_layer: Mapping[int, float]) -> GradientComparison:
        return GradientComparison(
            cosine=_ratio(self.inner, (self.found * self.right) ** 0.5),
            relative_l2=_ratio(self.difference, self.right) ** 0.5,
            norm_ratio=_ratio(self.found, self.right) ** 0.5,
            by_layer=by_layer,
        )


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0.0 else float("nan")
