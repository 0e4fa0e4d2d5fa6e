"""What of the benchmarks can be checked without running them: CUDA's timer on a stand-in, the profile's families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.benchmarks import child, profile, step
from tests.benchmarks.problem import Case
from workbench.recordings import load_recording


class StandInCuda:
    """torch.cuda as far as the timer uses it; notes the order of calls. Its clock: 250 ms per recorded event."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.live, self.peak = 1000, 5000

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")
        self.peak = self.live

    def memory_allocated(self) -> int:
        return self.live

    def max_memory_allocated(self) -> int:
        return self.peak

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        outer = self

        class Event:
            def record(self) -> None:
                outer.calls.append("record")
                self.at = 250.0 * outer.calls.count("record")

            def elapsed_time(self, other: Any) -> float:
                assert outer.calls[-1] == "synchronize", "an event that has not happened has no time"
                return other.at - self.at

        return Event()


def test_cuda_is_timed_by_events_and_measured_by_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work before the start and memory held then are not the step's; the clock is read once the step has ended."""
    cuda = StandInCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    timer = child._CudaTimer()
    timer.start()
    assert cuda.calls == ["synchronize", "reset", "record"]
    cuda.peak = 1700
    assert timer.stop() == (0.25, 700, "torch.cuda")
    assert cuda.calls[3:] == ["record", "synchronize"]


def test_operators_fall_into_families() -> None:
    found = {
        "aten::addmm": "products: projections, head",
        "aten::baddbmm": "products: batched, recurrence",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention kernel",
        "aten::convolution_backward": "convolution",
        "aten::copy_": "copies, concatenation, filling",
        "aten::transpose": "views and shapes",
        "aten::sum": "reductions",
        "aten::silu": profile.ELEMENTWISE,
        "autograd::engine::evaluate_function: MulBackward0": profile.AUTOGRAD,
    }
    assert {operator: profile.family_of(operator) for operator in found} == found


def test_a_product_counts_a_multiply_and_an_add() -> None:
    assert profile.product_flops("aten::mm", [[3, 4], [4, 5]]) == 2 * 3 * 4 * 5
    assert profile.product_flops("aten::addmm", [[5], [3, 4], [4, 5], [], []]) == 2 * 3 * 4 * 5
    assert profile.product_flops("aten::bmm", [[2, 3, 4], [2, 4, 5]]) == 2 * 2 * 3 * 4 * 5
    assert profile.product_flops("aten::mul", [[3, 4], [3, 4]]) == 0


def test_a_profile_accounts_for_the_whole_step() -> None:
    """A tiny step: shares sum to one, and products, attention and the recurrence were all seen."""
    found, seconds = profile.profiled("response_only, chunk 512", Case("small-hybrid", 80, 2))
    rows = profile.rows_of(found, seconds)
    assert sum(spent for _, _, spent, _ in rows) == pytest.approx(seconds)
    calls = {family: count for family, count, _, _ in rows}
    assert all(calls[family] > 0 for family in (*profile.FAMILIES, profile.ELEMENTWISE, profile.AUTOGRAD))


def test_notes_are_kept_with_the_recording(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's circumstances, as given; the children are replaced, so nothing is measured."""
    target = tmp_path / "performance.json"
    monkeypatch.setattr(step, "Children", StandInChildren)
    monkeypatch.setattr(step, "gradient_errors", lambda children, modes, family: dict.fromkeys(modes, 1e-7))
    arguments = ["step", "--only", "hybrid:64:2", "--modes", "serial", "--repeats", "1", "--out", str(target)]
    monkeypatch.setattr("sys.argv", [*arguments, "--note", "one other job", "--note", "a laptop"])
    step.main()
    notes = load_recording(target).notes
    assert list(notes) == [step.MEASURED["cpu"], "one other job", "a laptop"]


class StandInChildren:
    def call(self, function: Any, *_: Any) -> Any:
        measured = {"seconds": 1.0, "peak_bytes": 10, "memory_source": "malloc"}
        return 1e11 if function is child.matmul_rate else measured
