"""Time and peak memory of one GRPO step, this repository against its peers: `python -m tests.benchmarks.step`.

One process per mode and repeat, one thread, modes interleaved (A B C, A B C, ...), so that a slow phase of the machine
hits all alike. Time is process CPU seconds of the step. Memory is the peak heap above what was live before the step,
the parameters' gradients left out (they are allocated before the mark). Two small cases first check that every mode
leaves the same gradient. Runs of one mode spread by 10 to 20 %: a ratio below 1.2 is not resolved by one pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tests.benchmarks.heap import Heap, child_environment, compiled_meter
from tests.benchmarks.peers import MODES, prepare_trl, repair
from tests.benchmarks.problem import Case
from workbench.records import provenance

FAST = [Case("hybrid", 1024, 2), Case("hybrid", 1024, 8), Case("hybrid", 4096, 2), Case("hybrid", 4096, 8)]
LONG = [Case("hybrid", 16384, 2), Case("hybrid", 16384, 8), Case("small-hybrid", 65536, 2)]
DENSE = [Case("dense", 2048, 8)]
TOO_LARGE = {"serial", "batched", "TRL", "batched + checkpointing", "TRL + checkpointing", "serial + checkpointing"}
GRADIENT_BOUND = 5e-6  # relative L2 from the serial mode, float32; measured at most 1.9e-6


def skipped(mode: str, case: Case) -> str | None:
    """Why a mode is left out of a case, or None."""
    if case.prompt_tokens >= 16384 and mode in TOO_LARGE:
        return "minutes to hours or more memory than the machine has"
    if case.prompt_tokens >= 65536 and mode.startswith("shared prefix"):
        return "more memory than the machine has, or hours"
    if case.prompt_tokens >= 4096 and case.group >= 8 and mode in {"serial", "batched", "TRL"}:
        return "more than 4 GB and no faster than with checkpointing"
    return None


# ---------------------------------------------------------------- the child: one step


def run_child(mode: str, case: Case, gradient: Path | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = case.model()
    repair(model)
    if mode.startswith("TRL"):
        prepare_trl(model)
    prompt, responses, advantages = case.data()
    for parameter in model.parameters():  # gradients are every mode's cost: allocate them before the mark
        parameter.grad = torch.zeros_like(parameter)
    warm = Case(case.family, 70, 2).data()
    MODES[mode](model, *warm)  # imports, kernels and allocator arenas are not the step's cost
    for parameter in model.parameters():
        parameter.grad = None if mode.startswith(("full", "response_only")) else parameter.grad.zero_()
    heap = Heap()
    heap.mark()
    started = time.process_time()
    MODES[mode](model, prompt, responses, advantages)
    seconds = time.process_time() - started
    peak = heap.peak_bytes()
    if mode.startswith(("full", "response_only")):  # here gradients were allocated within the step
        peak -= sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    if gradient is not None:
        torch.save({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradient)
    return {"cpu_seconds": seconds, "peak_bytes": peak, "memory_source": heap.source}


# ---------------------------------------------------------------- the parent


def spawn(mode: str, case: Case, meter: Path | None, gradient: Path | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.step", "--child", mode, json.dumps(asdict(case))]
    command += [str(gradient)] if gradient else []
    done = subprocess.run(command, env=child_environment(meter), capture_output=True, text=True, check=False)
    if done.returncode:
        return {
            "error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else f"exit {done.returncode}"
        }
    return json.loads(done.stdout.splitlines()[-1])


def check_gradients(modes: list[str], family: str) -> dict[str, float]:
    """Relative L2 of every exact mode's gradient from the serial mode's, on a small case."""
    case = Case(family, 300, 3)
    truth: dict[str, Tensor] | None = None
    errors: dict[str, float] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "gradient.pt"
            if "error" in spawn(mode, case, None, file):
                continue
            found = torch.load(file)
        truth = truth or found
        difference = sum(float((found[n] - truth[n]).double().square().sum()) for n in truth)
        norm = sum(float(g.double().square().sum()) for g in truth.values())
        errors[mode] = (difference / norm) ** 0.5
    wrong = {m: e for m, e in errors.items() if e > GRADIENT_BOUND and not m.startswith("response_only")}
    if wrong:
        raise SystemExit(f"these modes do not compute the same gradient, so they cannot be compared: {wrong}")
    return errors


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"error": runs[0]["error"]}
    seconds = [run["cpu_seconds"] for run in good]
    peaks = [run["peak_bytes"] for run in good]
    return {
        "cpu_seconds": {"min": min(seconds), "median": statistics.median(seconds), "max": max(seconds)},
        "peak_bytes": {"min": min(peaks), "median": statistics.median(peaks), "max": max(peaks)},
        "memory_source": good[0]["memory_source"],
        "repeats": len(good),
    }


def run_all(cases: list[Case], modes: list[str], repeats: int, out: Path) -> dict[str, Any]:
    meter = compiled_meter()
    record: dict[str, Any] = {"provenance": provenance(), "repeats": repeats, "cases": []}
    record["gradient_relative_l2"] = {
        family: check_gradients(modes, family) for family in dict.fromkeys(c.family for c in cases)
    }
    for case in cases:
        runs: dict[str, list[dict[str, Any]]] = {m: [] for m in modes if skipped(m, case) is None}
        for mode in tqdm([m for _ in range(repeats) for m in runs], desc=str(case)):
            runs[mode].append(spawn(mode, case, meter))
        left_out = {m: skipped(m, case) for m in modes if skipped(m, case)}
        record["cases"].append(asdict(case) | {"modes": {m: summary(r) for m, r in runs.items()}, "left_out": left_out})
        out.write_text(json.dumps(record, indent=1))  # whatever happens next, this case is kept
        print_case(record["cases"][-1])
    return record


def print_case(case: dict[str, Any]) -> None:
    print(f"\n{case['family']}  P = {case['prompt_tokens']:,}  G = {case['group']}")
    for mode, figures in case["modes"].items():
        if "error" in figures:
            print(f"  {mode:46} {figures['error']}")
            continue
        s, b = figures["cpu_seconds"], figures["peak_bytes"]
        print(f"  {mode:46} {s['median']:8.1f} s  ({s['min']:.1f} - {s['max']:.1f})  {b['median'] / 1e6:9.1f} MB")
    for mode, why in case["left_out"].items():
        print(f"  {mode:46} left out: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="16k and 64k prompts as well")
    parser.add_argument(
        "--only", nargs="*", metavar="CASE", help="cases such as hybrid:4096:8 instead of the default set"
    )
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/step_benchmark.json"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        mode, case, *gradient = arguments.child
        print(json.dumps(run_child(mode, Case(**json.loads(case)), Path(gradient[0]) if gradient else None)))
        return
    cases = [*FAST, *DENSE, *(LONG if arguments.long else [])]
    if arguments.only:
        parts = [name.split(":") for name in arguments.only]
        cases = [Case(family, int(tokens), int(group)) for family, tokens, group in parts]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    run_all(cases, arguments.modes, arguments.repeats, arguments.out)
    print(f"\nwritten: {arguments.out}")


if __name__ == "__main__":
    main()
