"""On a GPU: the gated delta rule by flash-linear-attention against the float32 twin, output, state, every gradient.

    python tests/gpu/check_gated_delta.py

Exits with 0 if all checks passed, 1 if one failed, and 0 with the reason if there is no GPU or no
flash-linear-attention. Seconds, after Triton has compiled.

Not run on a GPU yet. bfloat16 keeps 8 bits, and fla rounds within the chunk as well: errors of 2e-2 are its own; a
wrong scale, layout, norm or state would show as an error of order 1.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from workbench import Policy, update_step
from workbench.model_sources import tiny_model
from workbench.ops.gated_delta import FLA, chunk_gated_delta_rule, chunk_gated_delta_rule_reference, rule_of

BOUND = 5e-2
CASES = [
    (1, 4, 1, True),
    (65, 4, 1, True),
    (500, 4, 2, True),
    (500, 4, 2, False),
]  # tokens, heads, groups, with a state


def inputs(tokens: int, heads: int, groups: int, with_state: bool) -> dict[str, Tensor]:
    draw = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=draw)

    value_heads, width = heads * groups, 64
    given = {
        "query": normal(1, tokens, heads, width).bfloat16(),
        "key": normal(1, tokens, heads, width).bfloat16(),
        "value": normal(1, tokens, value_heads, width).bfloat16(),
        "g": -normal(1, tokens, value_heads).abs(),
        "beta": normal(1, tokens, value_heads).sigmoid().bfloat16(),
    }
    return given | ({"initial_state": normal(1, value_heads, width, width)} if with_state else {})


def results(rule: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Output, final state, and the gradient of each input."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    out, state = rule(**leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
    weights = [torch.arange(x.numel(), device="cuda").cos().view_as(x) for x in (out, state)]
    (out.float() * weights[0]).sum().add((state.float() * weights[1]).sum()).backward()
    gradients = [leaf.grad for leaf in leaves.values()]
    return [out.detach(), state.detach(), *gradients]


def check(*case: Any) -> float:
    """The largest relative error of all results."""
    given = inputs(*case)
    assert rule_of(given["query"]) == FLA
    found = results(chunk_gated_delta_rule, given)
    truth = results(chunk_gated_delta_rule_reference, {name: x.float() for name, x in given.items()})
    return max(float((f.float() - t).norm() / t.norm()) for f, t in zip(found, truth, strict=True))


def step_runs_it() -> bool:
    """Whether a step of a bfloat16 hybrid says that fla's kernels ran, and no other."""
    policy = Policy(tiny_model("qwen3_5").bfloat16().to("cuda"))
    report = update_step(policy, list(range(3, 90)), [[3, 4], [5, 6]], advantages=[1.0, -1.0], chunk_tokens=32)
    return set(report.counters["kernel_calls"]) == {f"gated delta rule, {FLA}"}


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device")
        return 0
    if find_spec("fla") is None:
        print("skipped: flash-linear-attention is not installed (pip install flash-linear-attention)")
        return 0
    failed = 0
    for case in CASES:
        error = check(*case)
        failed += error > BOUND
        print(f"{'ok' if error <= BOUND else 'FAILED'}: tokens, heads, groups, state {case}: {error:.2e}")
    ran = step_runs_it()
    print("ok: a step ran fla's kernels" if ran else "FAILED: a step did not run fla's kernels")
    return int(failed > 0 or not ran)


if __name__ == "__main__":
    raise SystemExit(main())
