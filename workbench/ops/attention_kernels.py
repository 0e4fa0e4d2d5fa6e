"""One softmax part of paged attention by the fastest kernel at hand: output with log-sum-exp, and the gradients.

Three kernels, chosen by capability (`kernel_of`), with the same meaning:

- "cpu flash": the fused kernel that torch ships for the CPU; takes masks.
- "cuda flash": FlashAttention-2 as torch ships it, half precision, no mask. It returns the log-sum-exp, and its
  backward takes any output and log-sum-exp, the merged ones here, as torch's own ring attention uses it
  (torch/distributed/tensor/experimental). Written from the operators' schemas; checked by shapes and by an emulation of
  the kernel, not run on a GPU yet (tests/gpu/check_attention.py).
- "products": plain matrix products in the accumulation dtype, for everything else.

Shapes: query [B, Hq, T, D]; key, value [B, Hkv, N, D], Hq a multiple of Hkv; mask additive [B or 1, 1, T, N];
log-sum-exp [B, Hq, T].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.types import accumulation_dtype

CPU_FLASH, CUDA_FLASH, PRODUCTS = "cpu flash", "cuda flash", "products"
FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# FlashAttention-2: compute capability 8.0 and newer, head widths of whole 16-byte vectors up to 256.
FLASH_CAPABILITY, FLASH_WIDTH, FLASH_WIDTH_STEP = (8, 0), 256, 8

# Measured on one AVX-512 core, 4 heads of 64: 20 to 25 % less time than the flash kernel's whole backward; 512 rows at
# a time are slower than that.
ROWS_OF_QUERY_GRADIENT = 128


def kernel_of(query: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Which kernel serves these inputs."""
    if query.device.type == "cpu":
        return CPU_FLASH
    if query.device.type != "cuda" or mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
        return PRODUCTS
    width = query.shape[-1]
    fits = width == value.shape[-1] and width <= FLASH_WIDTH and width % FLASH_WIDTH_STEP == 0
    return CUDA_FLASH if fits and _cuda_has_flash(query.device) else PRODUCTS


def _cuda_has_flash(device: torch.device) -> bool:
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, T, D] and log-sum-exp [B, Hq, T]. causal: T equals N, and a query sees the rows up to its own."""
    kernel = kernel_of(query, value, mask)
    if kernel == CPU_FLASH:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    if kernel == CUDA_FLASH:
        out, lse, *_ = FLASH_FORWARD(query, key, value, 0.0, causal, False, scale=scaling)
        return out, lse
    scores = _scores(query, key, causal, mask, scaling)
    lse = torch.logsumexp(scores, dim=-1)
    probabilities = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (probabilities @ _grouped(value, query).to(probabilities.dtype)), lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV of this part, given the output and log-sum-exp of the whole softmax."""
    kernel = kernel_of(query, value, mask)
    if kernel == CPU_FLASH:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scaling
        )
    if kernel == CUDA_FLASH:
        return _cuda_flash_backward(grad_out, query, key, value, out, lse, causal, scaling)
    scores = _scores(query, key, causal, mask, scaling)
    probabilities = torch.exp(scores - lse[..., None])
    dtype = probabilities.dtype
    grad, keys, values = grad_out.to(dtype), _grouped(key, query).to(dtype), _grouped(value, query).to(dtype)
    delta = (grad * out.to(dtype)).sum(dim=-1, keepdim=True)
    dscores = probabilities * (grad @ values.transpose(-1, -2) - delta) * scaling
    dq = dscores @ keys
    dk = _sum_groups(dscores.transpose(-1, -2) @ query.to(dtype), key)
    dv = _sum_groups(probabilities.transpose(-1, -2) @ grad, value)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _cuda_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The random state belongs to dropout, of which there is none; lengths are equal, so there are no offsets."""
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0, dtype=torch.uint64)
    return FLASH_BACKWARD(
        grad_out.to(query.dtype), query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2],
        0.0, causal, state, unused, scale=scaling,
    )  # fmt: skip


def query_gradient(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scaling: float,
) -> Tensor:
    """dQ [B, Hq, T, D] alone, where key and value [1, Hkv, N, D] take no gradient: three products instead of five.

    ROWS_OF_QUERY_GRADIENT rows at a time, so that scores stay in the cache; query heads that share a key head, and
    members, are more queries of one problem. In the accumulation dtype. A fused CUDA kernel outruns this with all five.
    """
    batch, query_heads = query.shape[:2]
    if kernel_of(query, value, mask) == CUDA_FLASH:
        keys, values = (x.expand(batch, -1, -1, -1) for x in (key, value))
        return backward(grad_out, query, keys, values, out, lse, False, None, scaling)[0]
    dtype, heads = accumulation_dtype(query.dtype), key.shape[1]

    def fold(x: Tensor) -> Tensor:
        """[B, Hq, T, W] -> [Hkv, B * groups * T, W]"""
        return x.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3).to(dtype)

    queries, grad = fold(query), fold(grad_out)
    negative_lse = -fold(lse[..., None])
    negative_delta = -(grad * fold(out)).sum(dim=-1, keepdim=True)
    folded_mask = None if mask is None else fold(mask.expand(batch, query_heads, -1, -1))
    result = torch.zeros_like(queries)
    for first in range(0, key.shape[2], ROWS_OF_QUERY_GRADIENT):
        rows = slice(first, first + ROWS_OF_QUERY_GRADIENT)
        keys, values = key[0, :, rows].to(dtype), value[0, :, rows].to(dtype)
        scores = torch.baddbmm(negative_lse, queries, keys.transpose(1, 2), alpha=scaling)
        probabilities = (scores if folded_mask is None else scores.add_(folded_mask[..., rows])).exp_()
        dscores = torch.baddbmm(negative_delta, grad, values.transpose(1, 2)).mul_(probabilities)
        result.baddbmm_(dscores, keys, alpha=scaling)
    return result.unflatten(1, (batch, -1, query.shape[2])).transpose(0, 1).flatten(1, 2)


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scaling: float) -> Tensor:
    scores = (query @ _grouped(key, query).transpose(-1, -2)).to(accumulation_dtype(query.dtype)) * scaling
    if causal:
        tokens = query.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + mask


def _grouped(rows: Tensor, query: Tensor) -> Tensor:
    return rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1)


def _sum_groups(grad: Tensor, rows: Tensor) -> Tensor:
    return grad.unflatten(1, (rows.shape[1], -1)).sum(dim=2)
