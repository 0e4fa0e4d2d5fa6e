"""On a GPU: paged attention over FlashAttention-2 against the float32 twin, output and every gradient.

    python tests/gpu/check_attention.py

Exits with 0 if all checks passed, 1 if one failed, and 0 with the reason if there is no GPU. Seconds.

Not run on a GPU yet. bfloat16 keeps 8 bits: errors of 1e-2 relative to the largest value are its own; what would show a
wrong convention (scale, alignment of the causal mask, merged log-sum-exp) is an error of order 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workbench.ops import attention_kernels as kernels
from workbench.ops.attention import AttentionPage, paged_attention, paged_attention_reference

BOUND = 2e-2
SHAPES = [(8, 8, 64), (8, 2, 64), (16, 2, 128), (4, 1, 256)]  # query heads, key heads, width


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth.float()).abs().max() / truth.float().abs().max())


def check(query_heads: int, key_heads: int, width: int) -> float:
    """The largest relative error of output, dQ, dK, dV and the gradients of two pages."""
    draw = torch.Generator("cuda").manual_seed(0)

    def rows(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, width, device="cuda", generator=draw).bfloat16()

    query, key, value, grad = rows(query_heads, 257), rows(key_heads, 257), rows(key_heads, 257), rows(query_heads, 257)
    pages = [(rows(key_heads, 300), rows(key_heads, 300), 0), (rows(key_heads, 128), rows(key_heads, 128), 300)]
    assert kernels.kernel_of(query, value, None) == kernels.CUDA_FLASH
    sunk: dict[int, tuple[Tensor, Tensor]] = {}
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    given = [
        AttentionPage(k, v, start, lambda dk, dv, start=start: sunk.__setitem__(start, (dk, dv)))
        for k, v, start in pages
    ]
    options = {"start": 428, "scaling": width**-0.5}
    out = paged_attention(*leaves, pages=given, **options)
    out.backward(grad)
    twins = [x.float().requires_grad_() for x in (query, key, value)]
    stored = [(k.float().requires_grad_(), v.float().requires_grad_(), start) for k, v, start in pages]
    truth = paged_attention_reference(*twins, pages=[AttentionPage(*page) for page in stored], **options)
    truth.backward(grad.float())
    errors = [relative(out, truth)]
    errors += [relative(leaf.grad, twin.grad) for leaf, twin in zip(leaves, twins, strict=True)]
    for k, v, start in stored:
        errors += [relative(sunk[start][0], k.grad), relative(sunk[start][1], v.grad)]
    return max(errors)


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    failed = 0
    for shape in SHAPES:
        error = check(*shape)
        failed += error > BOUND
        print(f"{'ok' if error <= BOUND else 'FAILED'}: heads {shape[:2]}, width {shape[2]}: {error:.2e}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
