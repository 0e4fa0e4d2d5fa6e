"""Gradients as vectors: groups of parameters, zero gradients, and leaving the model's own gradients alone."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers import Snapshot, lora_policy, tiny_policy
from workbench.gradients import (
    compare_by,
    compare_gradients,
    gradients_set_aside,
    layer_of,
    parameter_family,
    take_gradient,
)


def test_parts_add_up_to_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    names = [f"model.layers.{i}.{kind}.weight" for i in range(3) for kind in ("self_attn.q", "mlp.up")] + ["lm_head.x"]
    right = {name: torch.randn(4, 3, generator=draw, dtype=torch.float64) for name in names}
    found = {name: g + 0.3 * torch.randn(4, 3, generator=draw, dtype=torch.float64) for name, g in right.items()}
    a, b = (torch.cat([g[name].reshape(-1) for name in names]) for g in (found, right))
    whole = compare_gradients(found, right)
    assert whole.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-12)
    assert whole.relative_l2 == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
    assert list(whole.by_layer) == [0, 1, 2]
    parts = compare_by(found, right, parameter_family)
    assert set(parts) == {"attention", "mlp", "other"}
    weights = {key: sum(float(right[n].square().sum()) for n in names if parameter_family(n) == key) for key in parts}
    total = sum(part.relative_l2**2 * weights[key] for key, part in parts.items()) / sum(weights.values())
    assert whole.relative_l2 == pytest.approx(total**0.5, rel=1e-12)


def test_a_zero_gradient_has_no_angle_and_no_relative_size() -> None:
    zero, one = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    assert math.isnan(compare_gradients(zero, one).cosine)
    assert compare_gradients(zero, one).relative_l2 == 1.0
    assert math.isnan(compare_gradients(one, zero).relative_l2)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_next", "glm_moe_dsa"])
def test_every_parameter_of_a_decoder_layer_has_a_family(family: str) -> None:
    for policy in (tiny_policy(family), lora_policy(family)):
        names = [name for name, _ in policy.trainable_parameters()]
        assert {layer_of(name) for name in names} >= set(range(policy.adapter.num_layers))
        assert all(parameter_family(name) != "other" for name in names if layer_of(name) is not None)


def test_set_aside_and_take() -> None:
    policy = tiny_policy("qwen3")
    first = policy.trainable_parameters()[0][1]
    first.grad = torch.full_like(first, 2.0)
    before = Snapshot(policy.model)
    with gradients_set_aside(policy):
        assert first.grad is None
        first.grad = torch.ones_like(first)
        taken = take_gradient(policy)
    assert before.differences() == []
    assert [name for name, g in taken.items() if g.any()] == [policy.trainable_parameters()[0][0]]
