"""What subnormal numbers cost, and the gated delta rule with and without them: `python -m tests.benchmarks.subnormals`.

One thread, CPU time, the best of a few runs; seconds in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.ops.gated_delta import chunk_gated_delta_rule

TOKENS, HEADS, WIDTH, RUNS, REPEATS = 512, 4, 64, 6, 4


def milliseconds(work: Callable[[], object]) -> float:
    """The best mean of RUNS."""
    work()
    best = float("inf")
    for _ in range(RUNS):
        started = time.process_time()
        for _ in range(REPEATS):
            work()
        best = min(best, (time.process_time() - started) / REPEATS)
    return 1000 * best


def rule_inputs() -> dict[str, Tensor]:
    """Decays as transformers initialises them: each head forgets at a rate of its own, from 1 % to everything."""
    draw = torch.Generator().manual_seed(0)
    rates = torch.empty(HEADS).uniform_(0.01, 16, generator=draw)
    query, key, value = (torch.randn(1, TOKENS, HEADS, WIDTH, generator=draw) for _ in range(3))
    given = {
        "query": query,
        "key": key,
        "value": value,
        "g": -rates * F.softplus(torch.randn(1, TOKENS, HEADS, generator=draw) + 1),
        "beta": torch.rand(1, TOKENS, HEADS, generator=draw),
        "initial_state": 0.1 * torch.randn(1, HEADS, WIDTH, WIDTH, generator=draw),
    }
    return {name: tensor.requires_grad_() for name, tensor in given.items()}


def rule_and_backward(given: dict[str, Tensor]) -> None:
    out, state = chunk_gated_delta_rule(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch.autograd.backward([out, state], [1e-3 * torch.ones_like(out), 1e-3 * torch.ones_like(state)])


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    matrices = torch.rand(32, WIDTH, WIDTH, generator=draw)
    for name, tensors in (("normal", matrices), ("subnormal results", matrices * 1e-20)):
        spent = milliseconds(lambda tensors=tensors: torch.bmm(tensors, tensors))
        print(f"32 products of 64 x 64, {name:18} {spent:8.3f} ms  {2e-6 * 32 * WIDTH**3 / spent:6.0f} GFLOP/s")
    for argument in (-1.0, -95.0, -200.0):
        filled = torch.full((32, WIDTH, WIDTH), argument)
        print(f"exp of 131,072 times {argument:6.0f}          {milliseconds(filled.exp):8.3f} ms")
    given = rule_inputs()
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        spent = milliseconds(lambda: rule_and_backward(given))
        print(f"gated delta rule and backward, subnormals {'flushed' if flush else 'kept   '} {spent:8.2f} ms")


if __name__ == "__main__":
    main()
