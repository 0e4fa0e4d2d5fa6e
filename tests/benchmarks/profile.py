"""Where the time of one step goes, by family of operation: `python -m tests.benchmarks.profile hybrid:4096:8`.

With --account instead, for this repository's modes: peak bytes by ledger and by stage, and operations by stage.

One thread, one step after a warm-up, torch's profiler. An operator's time is its own, without that of the operators it
calls, by the wall clock: another process on the same core lengthens it, so shares are to be read, and rates against the
printed rate of a large product only on an idle machine. Autograd's nodes and what no operator accounts for (Python, the
profiler itself, about a tenth) stand apart.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.child import matmul_rate, prepared_model
from tests.benchmarks.peers import MODES, OPTIONS
from tests.benchmarks.problem import RESPONSE_TOKENS, Case
from workbench import Policy, update_step
from workbench.performance_study import FULL
from workbench.planner import Request
from workbench.planner.families import model_shape
from workbench.planner.flops import exact_gradient_flops, work_by_phase

FAMILIES = {
    "products: projections, head": ("aten::mm", "aten::addmm", "aten::addmm_"),
    "products: batched, recurrence": ("aten::bmm", "aten::baddbmm", "aten::baddbmm_"),
    "attention kernel": ("_scaled_dot_product_flash_attention",),
    "triangular solves": ("aten::linalg_solve_triangular", "aten::triangular_solve"),
    "convolution": ("conv", "mkldnn"),
    "copies, concatenation, filling": (
        "copy_",
        "cat",
        "fill_",
        "zero_",
        "clone",
        "contiguous",
        "index",
        "empty",
        "pad",
    ),
    "views and shapes": (
        "view", "transpose", "aten::t", "as_strided", "slice", "select", "reshape", "unsqueeze", "squeeze", "expand",
        "permute", "detach", "split", "narrow", "alias", "flatten", "unbind", "aten::to", "resize", "diagonal",
    ),
    "reductions": ("aten::sum", "aten::mean", "cumsum", "softmax", "logsumexp", "aten::norm", "flip"),
}  # fmt: skip
ELEMENTWISE = "elementwise"
AUTOGRAD = "autograd's own"
OUTSIDE = "outside operators: Python"


def family_of(operator: str) -> str:
    """The family of an operator, of one of autograd's nodes, or of a function of our own with a backward."""
    for family, names in FAMILIES.items():
        if any(operator == name if name.startswith("aten::") else name in operator for name in names):
            return family
    return ELEMENTWISE if operator.startswith("aten::") else AUTOGRAD


def product_flops(operator: str, shapes: Sequence[Sequence[int]]) -> int:
    """Operations of one matrix product, by the shapes of what it was given; 0 for other operators."""
    if family_of(operator).startswith("products"):
        left, right = [shape for shape in shapes if shape][-2:]
        return 2 * math.prod(left) * right[-1]
    return 0


def profiled(mode: str, case: Case) -> tuple[Any, float]:
    """The profiler's events of one step and the wall seconds it took."""
    model, data = prepared_model(mode, case), case.data()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        started = time.perf_counter()
        MODES[mode](model, *data)
        seconds = time.perf_counter() - started
    return found, seconds


def rows_of(found: Any, seconds: float) -> list[tuple[str, int, float, float]]:
    """(family, calls, seconds, operations per second) of every family, the longest first."""
    calls, spent, flops = defaultdict(int), defaultdict(float), defaultdict(int)
    for event in found.key_averages(group_by_input_shape=True):
        family = family_of(event.key)
        calls[family] += event.count
        spent[family] += event.self_cpu_time_total / 1e6
        flops[family] += event.count * product_flops(event.key, event.input_shapes)
    spent[OUTSIDE] = seconds - sum(spent.values())
    return sorted(((f, calls[f], t, flops[f] / t) for f, t in spent.items()), key=lambda row: -row[2])


def print_account(mode: str, case: Case) -> None:
    """Bytes by the engine's own meter, the parameters' gradients among them; operations as the planner counts them."""
    prompt, responses, advantages = case.data()
    report = update_step(Policy(case.model()), prompt, responses, advantages=advantages, **OPTIONS[mode])
    print(f"{case}, {mode}: most bytes alive by ledger (not all at one time) and by stage, MB")
    for name, value in report.memory.items():
        if name == "stage_peak_bytes":
            print("  by stage:", {stage: round(peak / 1e6, 1) for stage, peak in value.items()})
        elif isinstance(value, int):
            print(f"  {name:24} {value / 1e6:8.1f}")
    request = Request(
        positions=case.prompt_tokens,
        group_size=case.group,
        response_tokens=RESPONSE_TOKENS,
        weights="fp32",
        training="full",
        **OPTIONS[mode],
    )
    shape = model_shape(case.config(), str(case))
    flops = {stage: work.flops for stage, work in work_by_phase(shape, request).items()}
    least = exact_gradient_flops(
        shape, prompt_tokens=case.prompt_tokens, response_tokens=RESPONSE_TOKENS, group_size=case.group,
        through_prompt=not mode.startswith("response_only"),
    )  # fmt: skip
    print("GFLOP by stage:", {stage: round(count / 1e9) for stage, count in flops.items()}, end="")
    print(f", in all {sum(flops.values()) / 1e9:.0f}; without computing anything again {least / 1e9:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="hybrid:4096:8", help="such as hybrid:4096:8")
    parser.add_argument("--mode", choices=list(MODES), default=FULL)
    parser.add_argument("--operators", type=int, default=0, metavar="N", help="also the N longest operators and shapes")
    parser.add_argument("--account", action="store_true", help="bytes by ledger and operations by stage, no profile")
    options = parser.parse_args()
    family, tokens, group = options.case.split(":")
    case = Case(family, int(tokens), int(group))
    if options.account:
        if options.mode not in OPTIONS:
            parser.error(f"--account reads this repository's own meter: --mode must be one of {list(OPTIONS)}")
        print_account(options.mode, case)
        return
    rate = matmul_rate()
    found, seconds = profiled(options.mode, case)
    print(f"{case}, {options.mode}: {seconds:.1f} s, profiled; a large product runs at {rate / 1e9:.0f} GFLOP/s")
    for name, calls, spent, speed in rows_of(found, seconds):
        print(
            f"  {name:38} {100 * spent / seconds:5.1f} %  {calls:8,} calls"
            + (f"  {speed / 1e9:5.0f} GFLOP/s" if speed else "")
        )
    if options.operators:
        print(
            found.key_averages(group_by_input_shape=True).table(
                "self_cpu_time_total", row_limit=options.operators, max_shapes_column_width=90
            )
        )


if __name__ == "__main__":
    main()
