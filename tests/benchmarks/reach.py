"""How long a prompt this machine completes in full scope: `python -m tests.benchmarks.reach 131072`.

One step on the small hybrid (8 layers, hidden 128, random weights), in a process of its own, with layer checkpoints and
a walk checkpoint. The peak is the engine's own meter's, above the weights; the floor is what an exact gradient has to
hold at the boundary: the prompt's rows and their float32 gradients.

With `--interrupt` the process is killed (SIGKILL) in the middle of the walk and another one goes on. That run is not
recorded, since nobody saw the killed process's peak: its gradient norm is compared with the recorded, uninterrupted
one, which it equals to the bit on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.problem import VOCAB, Case
from workbench import Policy, WalkCheckpoint, update_step
from workbench.planner import Request, sizes
from workbench.planner.families import model_shape
from workbench.recordings import load_recording, save_recording
from workbench.walk_checkpoint import MANIFEST

FAMILY = "small-hybrid"


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """One step, from wherever the checkpoint stands."""
    torch.set_num_threads(options.threads)
    policy = Policy(Case(FAMILY, options.prompt_tokens, options.group).model())
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, VOCAB, (options.prompt_tokens,), generator=draw)
    responses = [torch.randint(3, VOCAB, (options.response_tokens,), generator=draw) for _ in range(options.group)]
    report = update_step(
        policy,
        prompt,
        responses,
        advantages=[1.0 if member % 2 else -1.0 for member in range(options.group)],
        chunk_tokens=options.chunk_tokens,
        checkpoint_layers=True,
        walk_checkpoint=WalkCheckpoint(options.folder, every_chunks=8),
    )
    return {
        "memory": {k: v for k, v in report.memory.items() if isinstance(v, int | dict)},
        "seconds": dict(report.seconds),
        "chunks_walked": report.counters["prompt_chunks_walked"],
        "grad_norm": report.metrics["grad_norm"],
    }


def spawn(options: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.reach", str(options.prompt_tokens), "--child"]
    for name in ("group", "response_tokens", "chunk_tokens", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    return subprocess.Popen([*command, "--folder", str(folder)], stdout=subprocess.PIPE, text=True, env=environment)


def interrupt_midway(options: argparse.Namespace, folder: Path) -> int:
    """Start a step and kill it when half of the walk is on disk; returns the position that was saved."""
    child, manifest = spawn(options, folder), folder / MANIFEST
    while child.poll() is None:
        time.sleep(0.2)
        if manifest.exists():
            position = json.loads(manifest.read_text())["position"]
            if position <= options.prompt_tokens // 2:
                child.kill()
                child.wait()
                return position
    raise SystemExit("the step ended before it could be interrupted")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, started = options.keep or Path(name), time.perf_counter()
        if options.interrupt:
            print(f"killed with the walk saved at position {interrupt_midway(options, folder):,}")
        child = spawn(options, folder)
        text = child.communicate()[0]
        seconds = time.perf_counter() - started
    if child.returncode:
        raise SystemExit(f"the step failed with exit status {child.returncode}")
    report = json.loads(text.splitlines()[-1])
    shape = model_shape(Case(FAMILY, 1, 1).config(), FAMILY)
    request = Request(positions=options.prompt_tokens, group_size=1, response_tokens=1, weights="fp32", training="full")
    rows = sizes.row_bytes_per_token(shape, request.compute_bytes)
    print(json.dumps(report, indent=1))
    return {
        "model": "hybrid, 8 layers, hidden 128",
        "scope": "full",
        "prompt_tokens": options.prompt_tokens,
        "group_size": options.group,
        "response_tokens": options.response_tokens,
        "peak_bytes": report["memory"]["peak_bytes"],
        "floor_bytes": 2 * rows * (options.prompt_tokens - 1),
        "step_seconds": round(seconds, 1),
        "grad_norm": report["grad_norm"],
    }


def compare(row: dict[str, Any], recorded: Sequence[Mapping[str, Any]]) -> None:
    """Say whether an interrupted run ended with the gradient norm of the recorded one; a difference is an error."""
    compared = ("prompt_tokens", "group_size", "response_tokens")
    same = [r for r in recorded if all(r[name] == row[name] for name in compared)]
    if not same:
        print(
            f"gone on with to its end, gradient norm {row['grad_norm']!r}; no uninterrupted run is recorded to compare"
        )
    elif same[0]["grad_norm"] == row["grad_norm"]:
        print(f"gone on with to its end: gradient norm {row['grad_norm']!r}, as without the interruption")
    else:
        raise SystemExit(f"gradient norm {row['grad_norm']!r}, without the interruption {same[0]['grad_norm']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt_tokens", type=int)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--interrupt", action="store_true", help="kill it in the middle of the walk and go on")
    parser.add_argument("--keep", type=Path, help="folder of the walk checkpoint: the same command goes on from there")
    parser.add_argument("--out", type=Path, default=Path("runs/reach.json"), help="rows of other lengths are kept")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options)))
        return
    row = measure(options)
    before = load_recording(options.out) if options.out.exists() else None
    kept = [] if before is None else list(before.rows)
    if options.interrupt:
        compare(row, kept)
        return
    rows = [r for r in kept if r["prompt_tokens"] != row["prompt_tokens"]] + [row]
    command = shlex.join(["python", "-m", "tests.benchmarks.reach", *sys.argv[1:]])
    save_recording(
        options.out,
        "reach",
        sorted(rows, key=lambda r: r["prompt_tokens"]),
        title="The longest prompts that completed here in full scope",
        command="; ".join(dict.fromkeys([*(before.command.split("; ") if before else ()), command])),
        notes=["step_seconds is wall time of one thread; other jobs on the machine lengthen it"],
    )
    print(f"peak {row['peak_bytes']:,} bytes, {row['peak_bytes'] / row['floor_bytes']:.3f} x the floor; {options.out}")


if __name__ == "__main__":
    main()
