"""Time and peak memory of one GRPO step, this repository against its peers: `python -m tests.benchmarks.step`.

One process per mode and repeat, one thread, modes interleaved (A B C, A B C, ...), so that a slow phase of the machine
hits all alike. Time is process CPU seconds of the step (on CUDA: between events). Memory is the peak heap above what
was live before the step, the parameters' gradients left out (they are allocated before the mark). Operations are
counted in runs of their own. On small cases first: every mode must leave the same gradient. Runs of one mode spread by
10 to 20 %: a ratio below 1.2 is not resolved by one pair. A mode that takes longer than `--repeat-below` seconds runs
once.

TRL and PrefixGrouper are used where they are installed (`pip install trl prefix-grouper==0.0.1.post1`). keys_values is
not on the package index and is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tests.benchmarks import child
from tests.benchmarks.heap import child_environment, compiled_meter
from tests.benchmarks.peers import MODES
from tests.benchmarks.problem import RESPONSE_TOKENS, Case
from workbench.planner import Request, sizes
from workbench.planner.families import model_shape
from workbench.planner.flops import exact_gradient_flops
from workbench.recordings import load_recording, save_recording

SHORT = [
    Case("hybrid", 1024, 2),
    Case("hybrid", 4096, 2),
    Case("hybrid", 4096, 8),
    Case("dense", 2048, 8),
]
LONG = [Case("hybrid", 1024, 8), Case("hybrid", 16384, 2), Case("hybrid", 16384, 8), Case("small-hybrid", 65536, 2)]
WHOLE_SEQUENCE = ("serial", "batched", "TRL")
MEASURED = {
    "cpu": "one thread; CPU seconds; subnormals flushed; peak heap above the start, parameter gradients left out",
    "cuda": "seconds between events; the allocator's peak above the start, parameter gradients left out",
}
GRADIENT_CASE = (300, 3)
GRADIENT_BOUND = 5e-6  # relative L2 from the serial mode, float32; measured at most 1.9e-6


def left_out(mode: str, case: Case) -> str | None:
    """Why a mode is left out of a case, or None."""
    package = {"TRL": "trl", "PrefixGrouper": "prefix_grouper"}.get(mode.split()[0])
    if package is not None and find_spec(package) is None:
        return f"{package} is not installed"
    if mode.startswith("PrefixGrouper") and case.family != "dense":
        return "it splits attention only: a recurrence would run on from one response into the next"
    if case.prompt_tokens >= 16384 and mode.startswith(WHOLE_SEQUENCE):
        return "minutes to hours, or more memory than the machine has"
    if case.prompt_tokens >= 65536 and mode.startswith("shared prefix"):
        return "more memory than the machine has, or hours"
    if case.prompt_tokens >= 2048 and mode in WHOLE_SEQUENCE:
        return "gigabytes; measured at 1,024 tokens, and here with checkpointing"
    if mode == "batched + checkpointing" and (case.group >= 8 or case.prompt_tokens >= 2048):
        return "TRL's is the same computation, and is measured"
    return None


# ---------------------------------------------------------------- processes


class Children:
    """Runs functions of `tests.benchmarks.child`, each call in a fresh process that has everything imported."""

    def __init__(self) -> None:
        os.environ.update(child_environment(compiled_meter()))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.benchmarks.child", *(["trl"] if find_spec("trl") else [])])

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result, or {"error": text}: a peer that runs out of memory must not end the benchmark."""
        with ProcessPoolExecutor(1, mp_context=self._context, max_tasks_per_child=1) as pool:
            try:
                return pool.submit(function, *arguments).result()
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"[:300]}


def gradient_errors(children: Children, modes: Sequence[str], family: str) -> dict[str, float]:
    """Relative L2 of every mode's gradient from full-sequence autograd (the serial mode), on a small case."""
    case = Case(family, *GRADIENT_CASE)
    truth: dict[str, Tensor] | None = None
    errors: dict[str, float] = {}
    for mode in dict.fromkeys(["serial", *modes]):
        if left_out(mode, case):
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed = children.call(child.save_gradient, mode, case, file := Path(folder) / "gradient.pt")
            if failed:
                raise SystemExit(f"{mode}: {failed['error']}")
            found = torch.load(file)
        truth = truth or found
        difference = sum(float((found[n] - truth[n]).double().square().sum()) for n in truth)
        norm = sum(float(g.double().square().sum()) for g in truth.values())
        errors[mode] = (difference / norm) ** 0.5
    wrong = {m: e for m, e in errors.items() if e > GRADIENT_BOUND and not m.startswith("response_only")}
    if wrong:
        raise SystemExit(f"these modes do not compute the same gradient, so they cannot be compared: {wrong}")
    return errors


# ---------------------------------------------------------------- a case


def measured_rows(
    children: Children, case: Case, modes: Sequence[str], options: argparse.Namespace, errors: dict[str, float]
) -> Iterator[list[dict[str, Any]]]:
    """One row for each mode that runs in this case; again after every mode, so that nothing measured is ever lost."""
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes if left_out(mode, case) is None}
    rates: list[float] = []
    flops: dict[str, int] = {}

    def rows() -> list[dict[str, Any]]:
        done = {mode: found for mode, found in runs.items() if found}
        return [row(case, mode, found, flops.get(mode), max(rates), errors[mode]) for mode, found in done.items()]

    for repeat in range(options.repeats):
        rates.append(children.call(child.matmul_rate, options.device))
        for mode in tqdm(list(runs), desc=f"{case}, run {repeat + 1}"):
            if repeat and runs[mode][0]["seconds"] > options.repeat_below:
                continue
            found = children.call(child.measure, mode, case, options.device)
            if "error" in found:
                print(f"{case}: {mode} failed: {found['error']}")
                del runs[mode]
                continue
            runs[mode].append(found)
            yield rows()
    for mode in runs if options.flops else ():
        flops[mode] = children.call(child.count, mode, case)
        yield rows()


def row(
    case: Case, mode: str, runs: list[dict[str, Any]], flops: int | None, rate: float, error: float
) -> dict[str, Any]:
    shape = model_shape(case.config(), str(case))
    seconds = [run["seconds"] for run in runs]
    return {
        "family": case.family,
        "mode": mode,
        "prompt_tokens": case.prompt_tokens,
        "group_size": case.group,
        "response_tokens": RESPONSE_TOKENS,
        "cpu_seconds": statistics.median(seconds),
        "cpu_seconds_min": min(seconds),
        "cpu_seconds_max": max(seconds),
        "peak_bytes": statistics.median([run["peak_bytes"] for run in runs]),
        "memory_source": runs[0]["memory_source"],
        "flops": flops,
        "limit_flops": exact_gradient_flops(
            shape,
            prompt_tokens=case.prompt_tokens,
            response_tokens=RESPONSE_TOKENS,
            group_size=case.group,
            through_prompt=not mode.startswith("response_only"),
        ),
        "matmul_flops_per_second": rate,
        "floor_bytes": floor_bytes(case, mode),
        "gradient_error": error,
        "repeats": len(runs),
    }


def floor_bytes(case: Case, mode: str) -> int:
    """Rows of the prompt in float32 and, where the gradient goes through it, as much again for their gradient."""
    request = Request(positions=case.prompt_tokens, group_size=1, response_tokens=1, weights="fp32", training="full")
    rows = sizes.row_bytes_per_token(model_shape(case.config(), str(case)), request.compute_bytes)
    return (case.prompt_tokens - 1) * rows * (1 if mode.startswith("response_only") else 2)


def _case_of(row: dict[str, Any]) -> Case:
    return Case(row["family"], row["prompt_tokens"], row["group_size"])


def print_rows(case: Case, rows: Sequence[dict[str, Any]], modes: Sequence[str]) -> None:
    print(f"\n{case.family}  P = {case.prompt_tokens:,}  G = {case.group}")
    for r in rows:
        share = r["limit_flops"] / r["matmul_flops_per_second"] / r["cpu_seconds"]
        print(
            f"  {r['mode']:38} {r['cpu_seconds']:8.1f} s  ({r['cpu_seconds_min']:.1f} - {r['cpu_seconds_max']:.1f})"
            f"  {r['peak_bytes'] / 1e6:9.1f} MB  {100 * share:5.0f} % of the limit"
        )
    for mode in modes:
        if why := left_out(mode, case):
            print(f"  {mode:38} left out: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="more groups, 16k and 64k prompts as well")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="cases such as hybrid:4096:8 instead of the default")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--repeat-below", type=float, default=15.0, metavar="SECONDS")
    parser.add_argument("--flops", action="store_true", help="count operations too, in runs of their own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/performance.json"))
    parser.add_argument("--append", action="store_true", help="keep what the file has of other cases and modes")
    parser.add_argument(
        "--note",
        action="append",
        default=[],
        metavar="TEXT",
        help="kept with the recording, such as what else the machine was doing; may be given several times",
    )
    options = parser.parse_args()
    cases = [*SHORT, *(LONG if options.long else [])]
    if options.only:
        parts = [name.split(":") for name in options.only]
        cases = [Case(family, int(tokens), int(group)) for family, tokens, group in parts]
    children = Children()
    before = load_recording(options.out) if options.append and options.out.exists() else None
    rows = [] if before is None else list(before.rows)
    command = shlex.join(["python", "-m", "tests.benchmarks.step", *sys.argv[1:]])
    errors = {f: gradient_errors(children, options.modes, f) for f in dict.fromkeys(case.family for case in cases)}
    for case in cases:
        kept, new = [r for r in rows if not (_case_of(r) == case and r["mode"] in options.modes)], []
        for new in measured_rows(children, case, options.modes, options, errors[case.family]):
            save_recording(
                options.out,
                "performance",
                kept + new,
                title="One GRPO step against its peers: time, peak bytes, operations",
                command="; ".join(dict.fromkeys([*(before.command.split("; ") if before else ()), command])),
                notes=list(dict.fromkeys([MEASURED[options.device], *(before.notes if before else ()), *options.note])),
            )
        rows = kept + new
        print_rows(case, new, options.modes)
    print(f"\nwritten: {options.out}")


if __name__ == "__main__":
    main()
