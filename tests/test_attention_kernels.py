"""Which kernel serves, and the CUDA call without a GPU: shapes by fake tensors, conventions by an emulated kernel."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from workbench.ops import attention_kernels as kernels
from workbench.ops.attention import AttentionPage, paged_attention, paged_attention_reference


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_cuda_has_flash", lambda device: True)


def on_cuda(dtype: torch.dtype = torch.bfloat16, width: int = 64, value_width: int = 64) -> tuple[Tensor, Tensor]:
    return torch.empty(1, 4, 32, width, dtype=dtype, device="cuda"), torch.empty(
        1, 2, 96, value_width, dtype=dtype, device="cuda"
    )


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("given", "masked", "expected"),
    [
        ({}, False, kernels.CUDA_FLASH),
        ({"dtype": torch.float16}, False, kernels.CUDA_FLASH),
        ({}, True, kernels.PRODUCTS),
        ({"dtype": torch.float32}, False, kernels.PRODUCTS),
        ({"width": 60, "value_width": 60}, False, kernels.PRODUCTS),
        ({"width": 320, "value_width": 320}, False, kernels.PRODUCTS),
        ({"value_width": 32}, False, kernels.PRODUCTS),
    ],
)
def test_the_kernel_is_chosen_by_capability(given: dict[str, Any], masked: bool, expected: str) -> None:
    with FakeTensorMode():
        query, value = on_cuda(**given)
        mask = torch.zeros(1, 1, 32, 96, device="cuda") if masked else None
        assert kernels.kernel_of(query, value, mask) == expected


def test_without_the_hardware_products_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_cuda_has_flash", lambda device: False)
    with FakeTensorMode():
        assert kernels.kernel_of(*on_cuda(), None) == kernels.PRODUCTS
    assert kernels.kernel_of(torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1), None) == kernels.CPU_FLASH


@pytest.mark.usefixtures("fused")
def test_the_cuda_call_has_the_operators_shapes() -> None:
    """The real operators with fake tensors: arguments are accepted, and grouped heads are not repeated."""
    with FakeTensorMode():
        query, rows = on_cuda()
        out, lse = kernels.forward(query, rows, rows, False, None, 0.1)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
        found = kernels.backward(out, query, rows, rows, out, lse, False, None, 0.1)
        assert [x.shape for x in found] == [query.shape, rows.shape, rows.shape]
        assert kernels.query_gradient(out, query, rows, rows, out, lse, None, 0.1).shape == query.shape


# ---------------------------------------------------------------- an emulated kernel


def emulated_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, debug: bool, *, scale: float
) -> tuple[Any, ...]:
    """The operator's tuple: output, log-sum-exp, cumulative lengths (none), lengths, random state, unused, mask."""
    assert dropout_p == 0.0
    assert not debug
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scale
    if is_causal:  # from the upper left, as the operator with equal lengths
        assert query.shape[2] == key.shape[2]
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -math.inf)
    out = torch.softmax(scores, -1) @ value.repeat_interleave(groups, 1)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, scores.logsumexp(-1), None, None, query.shape[2], key.shape[2], state, state[:0], out.new_empty(0)


def emulated_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FlashAttention-2's formulas, from whatever output and log-sum-exp are given."""
    assert (cum_q, cum_k, max_q, max_k, dropout_p) == (None, None, query.shape[2], key.shape[2], 0.0)
    assert lse.is_contiguous()
    assert seed.dtype == offset.dtype == torch.uint64
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    probabilities = torch.exp(query @ keys.transpose(-1, -2) * scale - lse[..., None])
    if is_causal:
        probabilities = probabilities.tril()
    delta = (grad_out * out).sum(-1, keepdim=True)
    dscores = probabilities * (grad_out @ values.transpose(-1, -2) - delta) * scale
    dkey, dvalue = dscores.transpose(-1, -2) @ query, probabilities.transpose(-1, -2) @ grad_out
    return dscores @ keys, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dkey, dvalue))


@pytest.mark.parametrize("wanted", [True, False])
def test_paged_attention_over_the_emulated_kernel(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages and a causal block, grouped heads, float64, against the twin."""
    monkeypatch.setattr(
        kernels, "kernel_of", lambda q, v, mask: kernels.CUDA_FLASH if mask is None else kernels.PRODUCTS
    )
    monkeypatch.setattr(kernels, "FLASH_FORWARD", emulated_forward)
    monkeypatch.setattr(kernels, "FLASH_BACKWARD", emulated_backward)
    draw = torch.Generator().manual_seed(0)

    def rows(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=draw)

    query, key, value, grad = rows(4, 7), rows(2, 7), rows(2, 7), rows(4, 7)
    pages = [(rows(2, 5), rows(2, 5), 0), (rows(2, 6), rows(2, 6), 5)]
    sunk: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(function: Any, *, twin: bool) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        stored = [(k.clone().requires_grad_(twin), v.clone().requires_grad_(twin), start) for k, v, start in pages]
        sinks = [
            (lambda dk, dv, start=start: sunk.__setitem__(start, (dk, dv))) if wanted and not twin else None
            for *_, start in stored
        ]
        given = [AttentionPage(k, v, start, sink) for (k, v, start), sink in zip(stored, sinks, strict=True)]
        out = function(*leaves, pages=given, start=11, scaling=0.3)
        out.backward(grad)
        if twin and wanted:
            sunk.update({start + 100: (k.grad, v.grad) for k, v, start in stored})
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    found, truth = attend(paged_attention, twin=False), attend(paged_attention_reference, twin=True)
    for one, other in zip(found, truth, strict=True):
        assert float((one - other).abs().max()) < 1e-13
    for start in (0, 5) if wanted else ():
        for one, other in zip(sunk[start], sunk[start + 100], strict=True):
            assert float((one - other).abs().max()) < 1e-13


def test_the_emulation_takes_what_the_operators_take() -> None:
    """Names and order of the real schemas; torch may call an argument otherwise, but not in another place."""
    forward = [a.name for a in torch.ops.aten._scaled_dot_product_flash_attention.default._schema.arguments]
    backward = [a.name for a in torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema.arguments]
    assert forward == ["query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert len(backward) == len(inspect.signature(emulated_backward).parameters)
    assert backward[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"]
    assert backward[8:] == ["max_q", "max_k", "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale"]
