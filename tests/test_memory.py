"""The memory meter: byte-exact against sums written out by hand, and against the allocator's own event log.

Everything here is an equality of integers; there is no tolerance to choose.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import InvalidInputError, WorkbenchError
from workbench.memory import MemoryMeter

F4 = 4  # bytes of a float32


def floats(count: int) -> Tensor:
    return torch.ones(count)


# ---------------------------------------------------------------- storages


def test_a_matmul_chain_holds_what_the_shapes_say():
    x, a, b = torch.ones(8, 16), torch.ones(16, 32), torch.ones(32, 4)
    with MemoryMeter() as meter:
        hidden = x @ a  # 8 x 32
        out = hidden @ b  # 8 x 4: both live here
        del hidden
        after = meter.report()["live_bytes_at_end"]
    assert meter.report()["peak_bytes"] == (8 * 32 + 8 * 4) * F4
    assert after == out.untyped_storage().nbytes() == 8 * 4 * F4
    assert meter.report()["source"] == "tensor storages"


def test_a_freed_tensor_does_not_count_towards_the_next_peak():
    with MemoryMeter() as meter:
        big = floats(100)
        del big
        small = floats(30)
        assert meter.report()["live_bytes_at_end"] == 30 * F4
    assert meter.report()["peak_bytes"] == 100 * F4
    assert small.numel() == 30


def test_views_share_one_storage_and_hold_all_of_it():
    with MemoryMeter() as meter:
        base = floats(24)
        views = [base.view(4, 6).t(), base[3:5], *base.split(8), base.expand(2, 24), base.detach()]
        del base
        assert meter.report()["live_bytes_at_end"] == 24 * F4
        del views
        assert meter.report()["live_bytes_at_end"] == 0
    assert meter.report()["peak_bytes"] == 24 * F4


def test_in_place_operations_allocate_nothing():
    with MemoryMeter() as meter:
        x = floats(10)
        x.add_(1.0).mul_(2.0)
        x[2:4].fill_(7.0)
    assert meter.report()["peak_bytes"] == 10 * F4


def test_a_view_of_a_tensor_from_before_the_start_costs_nothing():
    weight = torch.ones(64, 64)
    with MemoryMeter() as meter:
        weight.t()[3].add_(1.0)
        out = weight.t() @ torch.ones(64)
    assert meter.report()["peak_bytes"] == 2 * 64 * F4  # the vector and the product
    assert out.numel() == 64


def test_an_unsafe_view_is_a_view_although_its_schema_says_new():
    before = floats(12)
    with MemoryMeter() as meter:
        torch.ops.aten._unsafe_view(before, [3, 4])
    assert meter.report()["peak_bytes"] == 0


def test_a_result_that_is_an_argument_is_not_new_whatever_the_operator_declares():
    """As the collectives do: `c10d::allreduce_` returns its argument and declares a new tensor."""
    with torch.library._scoped_library("workbench_test", "FRAGMENT") as library:
        library.define("same(Tensor[] xs) -> Tensor[]")
        library.impl("same", lambda xs: list(xs), "CompositeExplicitAutograd")
        before = floats(12)
        with MemoryMeter() as meter:
            torch.ops.workbench_test.same([before])
    assert meter.report()["peak_bytes"] == 0


def test_memory_that_enters_from_python_or_numpy_counts():
    with MemoryMeter() as meter:
        x = torch.tensor([1.0, 2.0, 3.0])
        assert meter.report()["live_bytes_at_end"] == 3 * F4
        y = torch.from_numpy(x.double().numpy().copy())  # float64
        assert meter.report()["live_bytes_at_end"] == 3 * F4 + 3 * 8
    assert y.numel() == 3


def test_several_results_of_one_operation_count_each():
    with MemoryMeter() as meter:
        values, indices = floats(6).sort()
    assert meter.report()["live_bytes_at_end"] == 6 * F4 + 6 * 8  # float32 values, int64 indices; the input is gone
    assert meter.report()["peak_bytes"] == 2 * 6 * F4 + 6 * 8
    assert len(values) == len(indices)


@pytest.mark.parametrize("known", [True, False], ids=["made inside", "made before"])
def test_resizing_a_storage_frees_the_old_and_allocates_the_new(known):
    outside = torch.empty(0)
    with MemoryMeter() as meter:
        out = torch.empty(0) if known else outside
        torch.add(floats(5), 1.0, out=out)
        assert meter.report()["live_bytes_at_end"] == 5 * F4
        out.resize_(9)
        assert meter.report()["live_bytes_at_end"] == 9 * F4
        out.untyped_storage().resize_(0)  # not an operation: noticed when the storage is next returned
        out.detach()
        assert meter.report()["live_bytes_at_end"] == 0


def test_other_devices_and_storageless_results_do_not_count():
    with MemoryMeter() as meter:
        meta = torch.empty(1000, device="meta")
        indices, values = torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0])
        sparse = torch.sparse_coo_tensor(indices, values, (1000,), check_invariants=True)
        report = meter.report()
    assert report["live_bytes_at_end"] == 2 * 8 + 2 * F4  # the indices and the values, which the sparse tensor shares
    assert report["unmeasured_tensors"] >= 1
    assert (meta.numel(), sparse.shape[0]) == (1000, 1000)


# ---------------------------------------------------------------- autograd


def test_the_graph_of_a_forward_pass_is_what_it_saves_for_backward():
    x = torch.ones(50, requires_grad=True)
    with MemoryMeter() as meter:
        y = x.exp().sin().sum()  # exp saves its result, sin its input: the same tensor; sin's result is freed
        assert meter.report()["live_bytes_at_end"] == (50 + 1) * F4
        y.backward()
        del y
        assert meter.report()["live_bytes_at_end"] == 50 * F4  # x.grad; the graph is gone
    assert x.grad is not None


def test_temporaries_of_backward_are_seen():
    x = torch.ones(1000, requires_grad=True)
    with MemoryMeter() as meter:
        y = x.exp().exp().sum()  # saved: two results of exp
        with meter.stage("backward"):
            y.backward()
    # sum's gradient is an expanded scalar; first product (1000) beside both results, then one result is released
    # before the second product. Peak: 2 saved + 1 product, and the two scalars (y and its gradient).
    assert meter.report()["stage_peak_bytes"]["backward"] == (3 * 1000 + 2) * F4


class Square(torch.autograd.Function):
    """x**2 with a forward temporary, a saved tensor and backward temporaries of known sizes."""

    @staticmethod
    def forward(ctx, x):
        scratch = torch.zeros(300)
        ctx.save_for_backward(x * 2.0)
        del scratch
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        scratch = torch.zeros(500)
        return slope * grad + scratch[:100]


def test_a_custom_function_is_seen_forward_and_backward():
    x = torch.ones(100, requires_grad=True)
    with MemoryMeter() as meter:
        with meter.stage("forward"):
            y = Square.apply(x)
        assert meter.report()["live_bytes_at_end"] == 200 * F4  # the slope and y
        grad = torch.ones(100)
        with meter.stage("backward"), meter.ledger("backward"):
            y.backward(grad)
    peaks = meter.report()["stage_peak_bytes"]
    assert peaks["forward"] == (300 + 100) * F4
    # y, slope, incoming gradient; scratch, product, sum
    assert peaks["backward"] == (3 * 100 + 500 + 2 * 100) * F4
    assert meter.report()["backward"] == (500 + 2 * 100) * F4


def test_backward_inside_a_custom_function_is_seen():
    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                out = (leaf * leaf).sum()
            return torch.autograd.grad(out, leaf)[0] * grad

    x = torch.ones(400, requires_grad=True)
    with MemoryMeter() as meter:
        y = Recompute.apply(x)
        with meter.stage("backward"):
            y.backward()
    # Seen only if the inner graph is: the two halves of d(leaf * leaf) and their sum, beside y, its seed, out and its.
    assert meter.report()["stage_peak_bytes"]["backward"] == (3 * 400 + 4) * F4


def test_the_meter_keeps_no_tensor_and_no_graph_alive():
    meter = MemoryMeter()
    gc.disable()  # only reference counts may free here: a cycle through the meter would show
    try:
        with meter:
            x = torch.ones(10, requires_grad=True)
            y = (x * 2.0).exp()
            storage, saved = weakref.ref(y.untyped_storage()), weakref.ref(y)  # exp saves its result
            meter.tag("rows", [y])
            del y
            assert (storage(), saved()) == (None, None)
            z = x.exp()
        book, kept = weakref.ref(meter._book), weakref.ref(z.untyped_storage())
        del meter  # while z lives: its record must not hold the book
        assert book() is None
        del z
        assert kept() is None
    finally:
        gc.enable()


def test_frees_after_the_block_change_nothing():
    with MemoryMeter() as meter:
        x = floats(10)
    before = meter.report()
    del x
    assert meter.report() == before
    assert before["live_bytes_at_end"] == 10 * F4


# ---------------------------------------------------------------- cross-check


def training_step() -> None:
    """A two-layer network, its loss and its backward, with temporaries that overlap in an unobvious way."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(24, 40, generator=generator).requires_grad_()
    w2 = torch.randn(40, 10, generator=generator).requires_grad_()
    x = torch.randn(16, 24, generator=generator)
    for _ in range(2):  # the second round adds to existing gradients
        hidden = torch.tanh(x @ w1) * torch.sigmoid(x @ w1)
        out = (hidden @ w2).square().mean()
        out.backward()


def custom_function_step() -> None:
    x = torch.ones(100, requires_grad=True)
    (Square.apply(Square.apply(x)) * x).sum().backward()


def peak_by_allocator_events(step: Callable[[], None]) -> int:
    """Peak bytes above the start from the profiler's log of every CPU allocation and free, kernel scratch included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("step", [training_step, custom_function_step])
def test_the_peak_equals_the_one_in_the_allocators_event_log(step):
    step()  # the first call may fill caches
    by_events = peak_by_allocator_events(step)
    with MemoryMeter() as meter:
        step()
    assert by_events > 1000
    assert meter.report()["peak_bytes"] == by_events
    assert meter.report()["live_bytes_at_end"] == 0


# ---------------------------------------------------------------- ledgers and stages


def test_ledgers_split_the_live_bytes_and_keep_their_own_peaks():
    with MemoryMeter() as meter:
        with meter.ledger("rows"):
            rows = floats(10)
            with meter.ledger("logits"):
                logits = floats(40)
            del logits
            more = floats(5)
        graph = floats(20)
    report = meter.report()
    assert (report["rows"], report["logits"], report["graph"]) == (15 * F4, 40 * F4, 20 * F4)
    assert report["peak_bytes"] == 50 * F4  # rows and logits; the ledgers' peaks do not coincide
    assert len(rows) + len(more) + len(graph) == 35


def test_a_storage_stays_in_the_ledger_of_its_allocation():
    with MemoryMeter() as meter:
        with meter.ledger("rows"):
            rows = floats(10)
        with meter.ledger("other"):
            view = rows[2:]
            rows.add_(1.0)
    assert (meter.report()["rows"], meter.report()["other"]) == (10 * F4, 0)
    assert len(view) == 8


def test_a_ledger_gives_back_what_is_freed():
    with MemoryMeter() as meter, meter.ledger("logits"):
        for count in (30, 40, 20):
            logits = floats(count)
            del logits
    assert meter.report()["logits"] == 40 * F4


def test_tag_moves_bytes_between_ledgers_once():
    with MemoryMeter() as meter:
        x, y = floats(10), floats(7)
        meter.tag("rows", [x, x[3:]])
        meter.tag("rows", x)
        assert meter.report()["live_bytes_at_end"] == 17 * F4
        z = floats(10)  # fits where x was: the peak of "graph" stays 17
        del x, y, z
    report = meter.report()
    assert (report["rows"], report["graph"]) == (10 * F4, 17 * F4)
    assert report["peak_bytes"] == 27 * F4


def test_adopted_tensors_have_a_ledger_and_are_not_above_the_start():
    weights, seen, tied = floats(100), floats(50), None
    tied = weights[:10]
    with MemoryMeter() as meter:
        seen.add_(1.0)  # seen before it is adopted
        meter.adopt("weights", [weights, tied, seen])
        (weights * 2.0).sum()
    report = meter.report()
    assert report["weights"] == 150 * F4
    assert report["peak_bytes"] == (100 + 1) * F4
    assert report["live_bytes_at_end"] == 0


def test_freeing_an_adopted_tensor_lowers_the_live_bytes():
    old = floats(100)
    with MemoryMeter() as meter:
        meter.adopt("state", [old])
        del old
        assert meter.report()["live_bytes_at_end"] == -100 * F4
        new = floats(130)
    assert meter.report()["peak_bytes"] == 30 * F4
    assert meter.report()["state"] == 100 * F4
    assert len(new) == 130


def test_stages_report_their_own_peaks_nest_and_can_be_entered_again():
    with MemoryMeter() as meter:
        held = floats(10)
        with meter.stage("replay"):
            floats(20)
            with meter.stage("head"):
                floats(50)
            floats(30)
        floats(200)
        with meter.stage("replay"):
            floats(70)
        with meter.stage("idle"):
            pass
    report = meter.report()
    assert report["stage_peak_bytes"] == {"replay": 80 * F4, "head": 60 * F4, "idle": 10 * F4}
    assert report["peak_bytes"] == 210 * F4
    assert len(held) == 10


def test_a_report_inside_a_stage_does_not_disturb_it():
    with MemoryMeter() as meter, meter.stage("one"):
        floats(40)
        assert meter.report()["stage_peak_bytes"] == {"one": 40 * F4}
        floats(30)
    assert meter.report()["stage_peak_bytes"] == {"one": 40 * F4}


def test_ledgers_stages_and_the_mode_are_restored_after_an_exception():
    def interrupted_capture() -> None:
        with meter.stage("capture"), meter.ledger("rows"):
            floats(10)
            raise KeyError

    def interrupted_step() -> None:
        with meter:
            with pytest.raises(KeyError):
                interrupted_capture()
            floats(25)
            raise ZeroDivisionError

    meter = MemoryMeter()
    with pytest.raises(ZeroDivisionError):
        interrupted_step()
    floats(1000)
    report = meter.report()
    assert (report["rows"], report["graph"]) == (10 * F4, 25 * F4)
    assert report["stage_peak_bytes"] == {"capture": 10 * F4}
    assert report["peak_bytes"] == 25 * F4


# ---------------------------------------------------------------- being a guest


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_outside_and_inside_still_see_everything():
    outer, inner = Counting(), Counting()
    with outer, MemoryMeter() as meter, inner:
        floats(10).mul_(2.0)
    assert outer.calls == inner.calls == 2
    assert meter.report()["peak_bytes"] == 10 * F4


def test_a_device_with_an_index_is_the_same_device():
    with MemoryMeter("cpu:0") as meter:
        floats(10)
    assert meter.report()["peak_bytes"] == 10 * F4


def test_two_meters_measure_each_from_its_own_start():
    with MemoryMeter() as outer:
        held = floats(10)
        with MemoryMeter() as inner:
            floats(5)
    assert (outer.report()["peak_bytes"], inner.report()["peak_bytes"]) == (15 * F4, 5 * F4)
    assert len(held) == 10


def test_values_and_gradients_are_bitwise_those_without_a_meter():
    def gradient() -> Tensor:
        x = torch.linspace(-2.0, 2.0, 31, dtype=torch.float64, requires_grad=True)
        (torch.softmax(x, 0) * x.sin()).sum().backward()
        assert x.grad is not None
        return x.grad

    plain = gradient()
    with MemoryMeter():
        metered = gradient()
    assert plain.abs().max() > 0.01
    assert torch.equal(plain, metered)


def test_a_disabled_meter_does_nothing_and_says_so():
    meter = MemoryMeter(enabled=False)
    counting = Counting()
    with counting, meter, meter.stage("capture"), meter.ledger("peak_bytes"):
        meter.adopt("weights", [floats(3)])
        meter.tag("rows", floats(3))
    assert counting.calls == 2
    assert meter.report() == {"source": "not measured"}


def test_misuse_is_refused():
    meter = MemoryMeter()
    with pytest.raises(WorkbenchError, match="inside its `with` block"):
        meter.adopt("weights", [floats(1)])
    with pytest.raises(WorkbenchError, match="inside its `with` block"):
        meter.report()
    with meter, pytest.raises(InvalidInputError, match="'source' is taken"):
        meter.tag("source", [])
    with pytest.raises(WorkbenchError, match="inside its `with` block"), meter.stage("late"):
        pass
    with pytest.raises(WorkbenchError, match="make a new one"), meter:
        pass


def test_the_overhead_per_operation_is_microseconds():
    """Best of many short runs. Measured 5.4 us (Xeon, one thread); 60 us leaves room for a busy shared machine and
    would still catch a pytree walk over module arguments or a scan over all records."""
    x = torch.ones(4)
    kept = [torch.ones(1) for _ in range(500)]

    def best_seconds() -> float:
        runs = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                x * x
            runs.append((time.perf_counter() - start) / 100)
        return min(runs)

    plain = best_seconds()
    with MemoryMeter() as meter:
        kept += [torch.ones(1) for _ in range(500)]
        metered = best_seconds()
    assert metered - plain < 60e-6
    assert meter.report()["live_bytes_at_end"] == 500 * F4


# ---------------------------------------------------------------- CUDA


def test_on_cuda_the_peaks_come_from_the_allocators_counters(monkeypatch):
    """The window arithmetic, with an allocator played by a script: start 1000, peaks per window as listed."""
    peaks = iter([1010, 1500, 1200, 1100])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    with MemoryMeter("cuda") as meter:
        with meter.stage("capture"):  # windows: before 10, stage 500
            pass
        with meter.stage("replay"):  # windows: between 200, stage 100
            peaks = iter([1100, 1050])
    report = meter.report()
    assert report["stage_peak_bytes"] == {"capture": 500, "replay": 100}
    assert (report["peak_bytes"], report["live_bytes_at_end"], report["source"]) == (500, 0, "torch.cuda")
    assert resets == 6 * [torch.device("cuda", 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_cuda_device_ledgers_are_exact_and_peaks_cover_them():
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    with MemoryMeter("cuda") as meter:
        with meter.stage("forward"), meter.ledger("rows"):
            y = x.exp().sum()
        with meter.stage("backward"), meter.ledger("backward"):
            y.backward()
    report = meter.report()
    assert report["rows"] == (2**20 + 1) * F4  # exp's result and the sum
    assert report["backward"] >= 2**20 * F4  # seen although autograd runs in another thread
    assert report["peak_bytes"] >= report["stage_peak_bytes"]["backward"] >= 2 * 2**20 * F4
