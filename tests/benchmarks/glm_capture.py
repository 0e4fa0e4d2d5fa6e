"""Capture of a long prompt by the engine and by transformers' own chunked forward, side by side, on a tiny GLM-MoE-DSA.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.glm_capture --output data/runs/glm_capture.json

Both run the same model in the same chunks, without a graph: transformers with its DynamicCache and its default
attention, without the language-model head. Time is process CPU time of one thread; repeats are interleaved and the
order alternates. Peaks count every tensor storage above the start (workbench.memory), in the same runs: the meter costs
about 5 microseconds an operation, below 1 % here, on both sides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from workbench import Policy, capture_prompt
from workbench.memory import MemoryMeter
from workbench.model_sources import tiny_model
from workbench.records import provenance, write_record

OVERRIDES = {"index_topk": 64}
SIDES = ("engine", "transformers")


def run_engine(model: Any, prompt: Tensor, chunk_tokens: int) -> int:
    """Resident bytes of the capture."""
    return capture_prompt(Policy(model), prompt, chunk_tokens=chunk_tokens).nbytes


@torch.no_grad()
def run_transformers(model: Any, prompt: Tensor, chunk_tokens: int) -> int:
    """Bytes of the filled cache."""
    cache = DynamicCache(config=model.config)
    for chunk in prompt[:-1].split(chunk_tokens):
        model.model(input_ids=chunk[None], cache=cache, use_cache=True)
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


RUNS: dict[str, Callable[[Any, Tensor, int], int]] = {"engine": run_engine, "transformers": run_transformers}


def measure(side: str, model: Any, prompt: Tensor, chunk_tokens: int) -> dict[str, float | int]:
    """One run: CPU seconds, resident bytes, peak bytes above weights and resident bytes."""
    with MemoryMeter("cpu") as meter:
        started = time.process_time()
        resident = RUNS[side](model, prompt, chunk_tokens)
        seconds = time.process_time() - started
    return {"cpu_seconds": seconds, "resident_bytes": resident, "peak_above": meter.report()["peak_bytes"] - resident}


def summary(runs: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """Figures of one length; ratio: engine over transformers, of the medians and of every pair of a repeat."""
    seconds = {side: [run["cpu_seconds"] for run in runs[side]] for side in SIDES}
    pairs = [a / b for a, b in zip(seconds["engine"], seconds["transformers"], strict=True)]
    return {
        side: {
            "cpu_seconds": seconds[side],
            "microseconds_per_token": 1e6 * statistics.median(seconds[side]) / tokens,
            "resident_bytes": runs[side][0]["resident_bytes"],
            "peak_bytes_above_weights_and_resident": max(run["peak_above"] for run in runs[side]),
        }
        for side in SIDES
    } | {
        "time_ratio": statistics.median(seconds["engine"]) / statistics.median(seconds["transformers"]),
        "time_ratio_of_each_repeat": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, nargs="+", default=[5, 3], help="of each length")
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model("glm_moe_dsa", **OVERRIDES)
    load_before = os.getloadavg()
    lengths = {}
    for tokens, repeats in zip(options.lengths, options.repeats, strict=True):
        prompt = torch.randint(3, 101, (tokens,), generator=torch.Generator().manual_seed(1))
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repeat in range(repeats):
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                runs[side].append(measure(side, model, prompt, options.chunk_tokens))
                print(f"P = {tokens:,}, repeat {repeat}, {side}: {runs[side][-1]}", flush=True)
        lengths[tokens] = summary(runs, tokens)
        print(f"P = {tokens:,}: engine / transformers = {lengths[tokens]['time_ratio']:.3f}", flush=True)
    record = {
        "name": "glm_capture",
        "model": {"family": "glm_moe_dsa (tiny_model)", "overrides": OVERRIDES, "dtype": "float32"},
        "chunk_tokens": options.chunk_tokens,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "lengths": lengths,
        "provenance": provenance(),
    }
    if options.output is not None:
        write_record(options.output, record)


if __name__ == "__main__":
    main()
