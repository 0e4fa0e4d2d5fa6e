"""The gated delta rule against its token-by-token twin and transformers' rule, and the choice of the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from workbench.ops import gated_delta
from workbench.ops.gated_delta import chunk_gated_delta_rule, chunk_gated_delta_rule_reference

NAMES = ("query", "key", "value", "g", "beta", "initial_state")


def inputs(tokens: int, *, batch: int = 2, heads: int = 2, groups: int = 1, decay: float = 1.0) -> dict[str, Tensor]:
    """Leaves in float64. decay: scale of the log decays; 20 underflows float32 within a few tokens."""
    draw = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    width, value_width, value_heads = 8, 12, heads * groups
    tensors = (
        normal(batch, tokens, heads, width),
        normal(batch, tokens, heads, width),
        normal(batch, tokens, value_heads, value_width),
        -decay * normal(batch, tokens, value_heads).abs(),
        normal(batch, tokens, value_heads).sigmoid(),
        normal(batch, value_heads, width, value_width),
    )
    return {name: tensor.requires_grad_() for name, tensor in zip(NAMES, tensors, strict=True)}


def results(rule: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output, final state and the gradient of every input, of a loss that weighs every element differently."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    out, state = rule(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
    loss = sum((x * torch.arange(x.numel(), dtype=x.dtype).view_as(x).cos()).sum() for x in (out, state))
    loss.backward()
    return {"out": out.detach(), "state": state.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def largest_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert all(float(truth[name].norm()) > 0 for name in truth)
    return max(float((found[n].double() - truth[n]).norm() / truth[n].norm()) for n in truth)


@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0, 20.0])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (63, 1), (64, 3), (65, 1), (200, 2)])
def test_outputs_state_and_gradients_are_the_twins(tokens: int, groups: int, decay: float) -> None:
    """float64. Measured at most 4e-14, by rounding; margin 25."""
    given = inputs(tokens, groups=groups, decay=decay)
    if decay == 0.0:
        given["g"] = torch.zeros_like(given["g"])
    error = largest_error(results(chunk_gated_delta_rule, given), results(chunk_gated_delta_rule_reference, given))
    print(tokens, groups, decay, error)
    assert error < 1e-12
