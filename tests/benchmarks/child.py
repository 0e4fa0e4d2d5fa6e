"""One step of one mode, measured in a process of its own. Imported once by the fork server, so imports cost nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.heap import Heap
from tests.benchmarks.peers import MODES, prepare
from tests.benchmarks.problem import Case
from tests.flops import count_flops

if os.environ.get("HEAP_METER"):  # a fork server for CPU runs: what modes need is imported before the forks
    import transformers.trainer  # noqa: F401
OURS = ("full", "response_only")
PEAK_SIZE, PEAK_REPEATS = 1024, 12


def settle_process() -> None:
    """What every mode runs under, for the rest of this process: never call it in one that goes on to other things."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the engine does within a step: the recurrence is slow for every mode without
    torch.backends.cuda.matmul.allow_tf32 = False


def measure(mode: str, case: Case, device: str = "cpu") -> dict[str, Any]:
    """CPU seconds (on CUDA: seconds between events) and peak bytes above what was live before the step."""
    settle_process()
    model = prepared_model(mode, case, device)
    prompt, responses, advantages = _data(case, device)
    timer = _CudaTimer() if device == "cuda" else _CpuTimer()
    timer.start()
    MODES[mode](model, prompt, responses, advantages)
    seconds, peak, source = timer.stop()
    if mode.startswith(OURS):  # here gradients were allocated within the step
        peak -= sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return {"seconds": seconds, "peak_bytes": peak, "memory_source": source}


def count(mode: str, case: Case) -> int:
    """Operations of one step. Members of the whole-sequence modes cost the same, so one is counted."""
    alone = mode.startswith(("serial", "batched", "TRL"))
    counted = Case(case.family, case.prompt_tokens, 1) if alone else case
    settle_process()
    model = prepared_model(mode, counted)
    data = counted.data()
    return count_flops(lambda: MODES[mode](model, *data)) * (case.group if alone else 1)


def save_gradient(mode: str, case: Case, target: Path) -> None:
    settle_process()
    model = prepared_model(mode, case)
    MODES[mode](model, *case.data())
    torch.save({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, target)


def matmul_rate(device: str = "cpu") -> float:
    """Operations per second of a square float32 product, the best of a few: what no step can exceed."""
    settle_process()
    left, right = (torch.rand(PEAK_SIZE, PEAK_SIZE, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(PEAK_REPEATS):
        timer = _CudaTimer() if device == "cuda" else _CpuTimer()
        timer.start()
        left @ right
        best = min(best, timer.stop()[0])
    return 2 * PEAK_SIZE**3 / best


def prepared_model(mode: str, case: Case, device: str = "cpu") -> Any:
    """A model on which the mode has run once, on a small case; its gradients stand where the measurement wants them."""
    model = case.model().to(device)
    prepare(model, mode)
    for parameter in model.parameters():  # gradients are every mode's cost: allocate them before the mark
        parameter.grad = torch.zeros_like(parameter)
    # imports, kernels and allocator arenas are not the step's cost
    MODES[mode](model, *_data(Case(case.family, 70, 2), device))
    for parameter in model.parameters():
        if mode.startswith(OURS):
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()
    return model


def _data(case: Case, device: str) -> Any:
    prompt, responses, advantages = case.data()
    return prompt.to(device), [response.to(device) for response in responses], advantages


class _CpuTimer:
    """Process CPU seconds, which another process on the machine does not lengthen much, and the peak of the heap."""

    def start(self) -> None:
        self._heap = Heap()
        self._heap.mark()
        self._started = time.process_time()

    def stop(self) -> tuple[float, int, str]:
        return time.process_time() - self._started, self._heap.peak_bytes(), self._heap.source


class _CudaTimer:
    """Seconds between two events, and the caching allocator's peak above the start. No run on a GPU is recorded yet."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._bytes = torch.cuda.memory_allocated()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()

    def stop(self) -> tuple[float, int, str]:
        self._events[1].record()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self._bytes
        return self._events[0].elapsed_time(self._events[1]) / 1000, peak, "torch.cuda"
