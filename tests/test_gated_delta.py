"""The gated delta rule against its token-by-token twin and transformers' rule, and the choice of the rule."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as stock_rule

from workbench import Policy, update_step
from workbench.architectures import gated_delta as family
from workbench.model_sources import tiny_model
from workbench.ops import gated_delta
from workbench.ops.gated_delta import (
    FLA,
    PRODUCTS,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_reference,
    rule_of,
)

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
    loss = sum((x * torch.arange(x.numel()).double().cos().to(x.dtype).view_as(x)).sum() for x in (out, state))
    loss.backward()
    return {"out": out.detach(), "state": state.detach()} | {n: leaf.grad for n, leaf in leaves.items()}


def largest_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert all(float(truth[name].norm()) > 0 for name in truth)
    return max(float((found[n].double() - truth[n]).norm() / truth[n].norm()) for n in truth)


@pytest.mark.parametrize("decay", [0.0, 0.05, 1.0, 20.0])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (63, 1), (64, 3), (65, 1), (200, 2)])
def test_outputs_state_and_gradients_are_the_twins(tokens: int, groups: int, decay: float) -> None:
    """float64. Measured at most 5e-14, by rounding, where decays are strong; margin 20."""
    given = inputs(tokens, groups=groups, decay=decay)
    found, truth = (results(rule, given) for rule in (chunk_gated_delta_rule, chunk_gated_delta_rule_reference))
    assert largest_error(found, truth) < 1e-12


@pytest.mark.parametrize("decay", [0.05, 20.0])
def test_float32_loses_no_more_than_rounding(decay: float) -> None:
    """Against the float64 twin, next to transformers' rule: 20 underflows float32, and logarithms are cut at -61.

    Measured 4e-7 (transformers' 4e-7) and 3e-7 (2e-7); margin 4.
    """
    given = inputs(200, decay=decay)
    truth = results(chunk_gated_delta_rule_reference, given)
    single = {name: tensor.detach().float() for name, tensor in given.items()}
    error, theirs = (largest_error(results(rule, single), truth) for rule in (chunk_gated_delta_rule, stock_rule))
    print(decay, error, theirs)
    assert error < 4 * theirs


def test_the_comparison_can_fail() -> None:
    given = inputs(65)
    truth = results(chunk_gated_delta_rule_reference, given)
    other = given | {"initial_state": 1.001 * given["initial_state"]}
    assert largest_error(results(chunk_gated_delta_rule, other), truth) > 1e-5


def test_without_a_state_it_starts_from_zeros_and_hands_none_out() -> None:
    given = inputs(70)
    given.pop("initial_state")
    out, state = chunk_gated_delta_rule(**given)
    truth, _ = chunk_gated_delta_rule_reference(**given)
    assert state is None
    assert torch.allclose(out, truth, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- flash-linear-attention


class StandIn(types.ModuleType):
    """A module with fla's signature and conventions, over the twin; notes what it was called with.

    fla.ops.gated_delta_rule.chunk_gated_delta_rule (v0.4): q, k [B, T, H, K]; v [B, T, H, V]; g, beta [B, T, H], g a
    log decay; states [B, H, K, V]; float32 is refused.
    """

    def __init__(self) -> None:
        super().__init__("fla.ops.gated_delta_rule")
        self.calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert q.dtype == k.dtype == v.dtype == beta.dtype == torch.bfloat16
        assert g.dtype == torch.float32
        assert q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape == beta.shape
        assert scale == q.shape[-1] ** -0.5
        assert cu_seqlens is None
        assert initial_state is None or (
            initial_state.shape == (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
            and initial_state.dtype == torch.float32
        )
        self.calls.append({"tokens": q.shape[1], "l2norm": use_qk_l2norm_in_kernel, "state": initial_state is not None})
        return chunk_gated_delta_rule_reference(
            q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """fla installed, as far as imports see; whether a tensor's device can use it is the test's to say."""
    module = StandIn()
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "rule"),
    [
        ("cuda", torch.bfloat16, True, FLA),
        ("cuda", torch.float16, True, FLA),
        ("cuda", torch.float32, True, PRODUCTS),
        ("cuda", torch.bfloat16, False, PRODUCTS),
        ("cpu", torch.bfloat16, True, PRODUCTS),
    ],
)
def test_the_rule_is_chosen_by_capability(
    device: str, dtype: torch.dtype, installed: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "find_spec", lambda name: object() if installed and name == "fla" else None)
    query = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert rule_of(query) == rule  # type: ignore[arg-type]


def test_fla_gets_its_layout_and_conventions(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16, two value heads for each key head: output, state and every gradient are the float32 twin's.

    Measured at most 6e-3, bfloat16's rounding; a wrong scale, layout, norm or state would be of order 1.
    """
    monkeypatch.setattr(gated_delta, "rule_of", lambda query: FLA)
    given = inputs(70, groups=2)
    single = {name: x.detach().float() for name, x in given.items()}
    half = {name: x.bfloat16() if name in ("query", "key", "value", "beta") else x for name, x in single.items()}
    truth = results(chunk_gated_delta_rule_reference, {name: x.float() for name, x in half.items()})
    found = results(chunk_gated_delta_rule, half)
    assert stand_in.calls == [{"tokens": 70, "l2norm": True, "state": True}]
    assert found["out"].dtype == torch.bfloat16
    assert found["state"].dtype == torch.float32
    error = largest_error(found, {name: x.double() for name, x in truth.items()})
    print(error)
    assert error < 2e-2


def test_a_state_of_one_sequence_serves_a_batch(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that share a boundary: fla wants a state for each, its gradient is their sum."""
    monkeypatch.setattr(gated_delta, "rule_of", lambda query: FLA)
    given = {name: x.detach() for name, x in inputs(5).items()}
    shared = given["initial_state"][:1].float().requires_grad_()
    half = {name: given[name].bfloat16() for name in ("query", "key", "value", "beta")}
    out, _ = chunk_gated_delta_rule(**half, g=given["g"].float(), initial_state=shared)
    out.sum().backward()
    assert shared.grad is not None
    assert shared.grad.shape == shared.shape


def test_a_report_says_which_rule_ran(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 recurrent layers of 4: the capture's chunks, the responses, and the prompt's chunks again."""
    policy = Policy(tiny_model("qwen3_5").bfloat16())
    layers = policy.adapter.config.layer_types.count("linear_attention")
    options: dict[str, Any] = {"advantages": [1.0, -1.0], "chunk_tokens": 16}
    expected = layers * (2 + 2 + 2)
    report = update_step(policy, list(range(3, 36)), [[3, 4], [5, 6]], **options)
    assert report.counters["kernel_calls"] == {f"gated delta rule, {PRODUCTS}": expected}
    for module in (gated_delta, family):
        monkeypatch.setattr(module, "rule_of", lambda query: FLA)
    report = update_step(policy, list(range(3, 36)), [[3, 4], [5, 6]], **options)
    assert report.counters["kernel_calls"] == {f"gated delta rule, {FLA}": expected}
    assert len(stand_in.calls) == expected
    assert update_step(Policy(tiny_model("qwen3")), [3, 4], [[5]], advantages=[1.0]).counters["kernel_calls"] == {}
