"""Counting floating-point operations of everything the engine runs: torch's counter, taught the CPU's own operators.

torch counts matrix products, convolutions and the CUDA attention kernels. The CPU's flash attention and triangular
solves would count nothing, and a causal kernel would count the half that it skips. One multiply-add is two operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten
Shape = tuple[int, ...]


def attention_pairs(query: Shape, key: Shape, causal: bool) -> int:
    """(query, key) pairs that are computed, over batch and query heads; causal: the lower triangle of equal length."""
    tokens, rows = query[-2], key[-2]
    pairs = tokens * (tokens + 1) // 2 if causal else tokens * rows
    return math.prod(query[:-2]) * pairs


def _flash_forward(
    query: Shape, key: Shape, value: Shape, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> int:
    """Two products: scores, and the weighted sum of values."""
    return 2 * (query[-1] + value[-1]) * attention_pairs(query, key, is_causal)


def _flash_backward(
    grad_out: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    logsumexp: Shape,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Five: scores again, dV, dP, dQ, dK."""
    return 2 * (3 * query[-1] + 2 * value[-1]) * attention_pairs(query, key, is_causal)


def _triangular_solve(matrix: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """n^2 operations for each column of each right side."""
    return math.prod(right[:-2]) * matrix[-1] ** 2 * right[-1]


def _product_into(_: Shape, left: Shape, right: Shape, *__: Any, **___: Any) -> int:
    """addmm_ and baddbmm_, which torch counts out of place only."""
    return 2 * math.prod(left) * right[-1]


def _convolution_backward(grad_out: Shape, given: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Gradients of the input and of the weight, a forward each. torch's own count forgets the groups."""
    return 2 * 2 * math.prod(grad_out) * math.prod(weight[1:])


CPU_OPERATORS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _flash_forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    aten.linalg_solve_triangular: _triangular_solve,
    aten.addmm_: _product_into,
    aten.baddbmm_: _product_into,
    aten.convolution_backward: _convolution_backward,
}


def count_flops(work: Callable[[], Any]) -> int:
    """Operations of one call of `work`. Not to be combined with a memory measurement: the mode keeps things alive."""
    with FlopCounterMode(display=False, custom_mapping=CPU_OPERATORS) as counter:
        work()
    return counter.get_total_flops()
