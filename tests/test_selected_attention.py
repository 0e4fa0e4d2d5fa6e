"""Attention over gathered rows and the streamed selection that feeds it, against their slow twins.

float64 on 2 x86-64 cores: outputs and all gradients measured at most 4e-16 relative (bound 1e-13: sums in another
order); float32 at most 2.4e-7 (bound 2e-6).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.errors import InvalidInputError
from workbench.memory import MemoryMeter
from workbench.ops import selected_attention as module
from workbench.ops.attention import AttentionMemo, AttentionPage, paged_attention
from workbench.ops.selected_attention import RowPage, selected_attention, selected_attention_reference
from workbench.ops.selection import UNSELECTED, fingerprint, select_topk, stream_topk

WIDTH, HEADS = 6, 3


def relative(found: Tensor, truth: Tensor) -> float:
    assert float(truth.norm()) > 0.0
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def problem(page_sizes: list[int], tokens: int, k: int, batch: int, dtype: torch.dtype) -> dict[str, Tensor | list]:
    draw = torch.Generator().manual_seed(0)
    prefix = sum(page_sizes)
    rows = [torch.randn(1, size, WIDTH, generator=draw, dtype=dtype) for size in page_sizes]
    visible = torch.ones(tokens, prefix + tokens, dtype=torch.bool).tril(prefix)
    scores = torch.randint(0, 4, (batch, tokens, prefix + tokens), generator=draw).float()  # many ties
    return {
        "query": torch.randn(batch, HEADS, tokens, WIDTH, generator=draw, dtype=dtype),
        "own": torch.randn(batch, tokens, WIDTH, generator=draw, dtype=dtype),
        "rows": rows,
        "selection": stream_topk([(0, scores, visible)], k),
        "grad": torch.randn(batch, HEADS, tokens, WIDTH, generator=draw, dtype=dtype),
    }


def run_engine(p: dict, memo: AttentionMemo | None = None) -> list[Tensor]:
    query, own = p["query"].clone().requires_grad_(), p["own"].clone().requires_grad_()
    gradients = [torch.zeros_like(rows) for rows in p["rows"]]
    pages, start = [], 0
    for rows, gradient in zip(p["rows"], gradients, strict=True):
        sink = lambda index, values, into=gradient: into[0].index_add_(0, index, values)  # noqa: E731
        pages.append(RowPage(rows, start, sink))
        start += rows.shape[1]
    out = selected_attention(query, own, pages=pages, start=start, selection=p["selection"], scaling=0.4, memo=memo)
    out.backward(p["grad"])
    return [out.detach(), query.grad, own.grad, *gradients]


def run_reference(p: dict) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (p["query"], p["own"], *p["rows"])]
    pages = [RowPage(rows, 0) for rows in leaves[2:]]
    start = sum(rows.shape[1] for rows in p["rows"])
    out = selected_attention_reference(
        leaves[0], leaves[1], pages=pages, start=start, selection=p["selection"], scaling=0.4
    )
    out.backward(p["grad"])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


CASES = [([7, 1, 5], 4, 6, 1), ([3], 1, 2, 1), ([8, 8], 5, 100, 1), ([5, 4], 3, 4, 2), ([1, 1, 1], 6, 1, 1)]


@pytest.mark.parametrize(("page_sizes", "tokens", "k", "batch"), CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_output_and_all_gradients(page_sizes, tokens, k, batch, dtype, bound):
    p = problem(page_sizes, tokens, k, batch, dtype)
    for found, truth in zip(run_engine(p), run_reference(p), strict=True):
        assert found.shape == truth.shape
        if float(truth.norm()) == 0.0:  # a page of which nothing is selected
            assert float(found.norm()) == 0.0
        else:
            assert relative(found, truth) <= bound


def test_gathering_a_few_queries_at_a_time_changes_nothing(monkeypatch):
    p = problem([7, 6], 9, 5, 1, torch.float64)
    whole = run_engine(p)
    monkeypatch.setattr(module, "GATHER_BYTES", 2 * 5 * WIDTH * 8)  # two queries
    for found, truth in zip(run_engine(p), whole, strict=True):
        assert relative(found, truth) <= 1e-13


def test_a_filled_memo_replaces_the_forward_and_not_the_backward(monkeypatch):
    p, memo = problem([7, 6], 9, 5, 1, torch.float64), AttentionMemo()
    first = run_engine(p, memo)
    calls = []
    weighted = module._weighted
    monkeypatch.setattr(module, "_weighted", lambda *a: calls.append(1) or weighted(*a))
    second = run_engine(p, memo)
    assert len(calls) == 1, "dQ alone"
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_unselected_row_gets_no_gradient_and_a_wrong_row_would_be_seen():
    p = problem([4], 1, 1, 1, torch.float64)
    p["selection"] = torch.tensor([[[2]]], dtype=torch.int32)
    _, _, own, page = run_engine(p)
    assert own.abs().sum() == 0
    assert page[0].abs().sum(dim=-1).nonzero().flatten().tolist() == [2]
    right = run_reference(p)[0]
    p["selection"] = torch.tensor([[[1]]], dtype=torch.int32)
    assert relative(run_engine(p)[0], right) > 0.1


def test_members_are_as_each_alone_and_pages_may_be_their_own():
    """Prompt pages are shared by the batch; while decoding, a member's earlier rows are a page of the batch's size."""
    p = problem([5, 4], 1, 4, 3, torch.float64)
    own_page = p["rows"][1] + torch.arange(3.0, dtype=torch.float64)[:, None, None]

    def attend(members: slice) -> Tensor:
        pages = [RowPage(p["rows"][0], 0), RowPage(own_page[members], 5)]
        inputs = (p["query"][members], p["own"][members])
        return selected_attention(*inputs, pages=pages, start=9, selection=p["selection"][members], scaling=0.4)

    joint = attend(slice(0, 3))
    for i in range(3):
        assert relative(joint[i : i + 1], attend(slice(i, i + 1))) <= 1e-13
    assert relative(joint[:1], joint[1:2]) > 0.1


def test_a_page_without_a_sink_changes_nothing_else():
    p = problem([7, 6], 4, 6, 1, torch.float64)
    truth, found = run_engine(p), torch.zeros_like(p["rows"][1])
    query, own = p["query"].clone().requires_grad_(), p["own"].clone().requires_grad_()
    pages = [RowPage(p["rows"][0], 0), RowPage(p["rows"][1], 7, lambda index, g: found[0].index_add_(0, index, g))]
    out = selected_attention(query, own, pages=pages, start=13, selection=p["selection"], scaling=0.4)
    out.backward(p["grad"])
    for one, other in zip([out.detach(), query.grad, own.grad, found], [*truth[:3], truth[4]], strict=True):
        assert torch.equal(one, other)


def test_selecting_everything_is_paged_attention():
    """Prefixes shorter than the top-k take the dense path: it must be the same attention."""
    p = problem([7, 6], 4, 100, 1, torch.float64)
    own = p["own"][:, None]
    pages = [AttentionPage(rows[:, None], rows[:, None], start) for rows, start in zip(p["rows"], (0, 7), strict=True)]
    dense = paged_attention(p["query"], own, own, pages=pages, start=13, scaling=0.4)
    assert relative(run_engine(p)[0], dense) <= 1e-13


def test_memory_grows_with_tokens_and_not_with_tokens_times_k(monkeypatch):
    """Exact bytes of an exact meter; rows of 16 queries are gathered at a time."""
    k = 64
    monkeypatch.setattr(module, "GATHER_BYTES", 16 * k * WIDTH * 4)
    peaks, sizes = [], []
    for tokens in (64, 256):
        p = problem([300], tokens, k, 1, torch.float32)
        with MemoryMeter() as meter:
            run_engine(p)
        peaks.append(meter.report()["peak_bytes"])
        sizes.append(p["query"].nbytes + p["own"].nbytes)
    inputs, gathered = sizes[1] - sizes[0], (256 - 64) * k * WIDTH * 4
    assert peaks[1] - peaks[0] < 4 * inputs < gathered / 3  # measured 2.8 x; all rows gathered at once are 16 x


@pytest.mark.parametrize("page_size", [1, 7, 64, 1000])
def test_streamed_selection_is_the_same_for_every_page_size(page_size):
    """30 trials with quantised scores: sets are identical to those over all keys at once, also where queries tie."""
    ties = 0
    for trial in range(30):
        draw = torch.Generator().manual_seed(trial)
        scores = torch.randint(-2, 3, (1, 5, 130), generator=draw).float() * 0.5
        scores[scores == 0] *= -1  # -0.0
        visible = torch.ones(5, 130, dtype=torch.bool).tril(125)
        parts = [(a, scores[..., a : a + page_size], visible[:, a : a + page_size]) for a in range(0, 130, page_size)]
        found = stream_topk(iter(parts), 16)
        truth = select_topk(scores, visible, 16)
        ties += int((scores == scores.gather(-1, found[..., -1:].long())).sum(dim=-1).gt(1).sum())
        assert all(
            set(row.tolist()) == set(want.nonzero().flatten().tolist())
            for row, want in zip(found[0], truth[0], strict=True)
        )
    assert ties > 100, "ties at the last place are what this is about"


def test_fewer_keys_than_k_are_padded():
    found = stream_topk([(10, torch.tensor([[0.5, 2.0]]), None)], 4)
    assert found.tolist() == [[11, 10, UNSELECTED, UNSELECTED]]
    with pytest.raises(InvalidInputError, match="at least one part"):
        stream_topk([], 4)


def test_fingerprints_see_order_and_value():
    ids = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    assert int(fingerprint(ids)) == int(fingerprint(ids.clone().long()))
    seen = {int(fingerprint(t)) for t in (ids, ids.flip(0), ids.flip(1), ids + 1, torch.tensor([3, 1, 2, 1]))}
    assert len(seen) == 5
