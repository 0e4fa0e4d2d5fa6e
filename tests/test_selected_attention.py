"""Attention over selected rows against its slow twin: output, dQ, own and page row gradients.

float64: measured at most 2e-15 of a tensor's largest value; 1e-13 leaves room for another summation order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from workbench.memory import MemoryMeter
from workbench.ops import selected_attention as ops
from workbench.ops.attention import AttentionMemo, AttentionPage, paged_attention
from workbench.ops.selected_attention import RowPage, selected_attention, selected_attention_reference

FLOAT64 = 1e-13


@dataclass
class Problem:
    """pages: [1 or B, N, W] tensors that follow each other from position 0; selection: int32 [B, T, K]."""

    query: Tensor
    own: Tensor
    pages: list[Tensor]
    selection: Tensor
    grad_out: Tensor

    @property
    def starts(self) -> list[int]:
        return list(itertools.accumulate((page.shape[1] for page in self.pages), initial=0))

    def to(self, dtype: torch.dtype) -> Problem:
        tensors = [x.to(dtype) for x in (self.query, self.own, self.grad_out)]
        return Problem(*tensors[:2], [p.to(dtype) for p in self.pages], self.selection, tensors[2])

    def member(self, index: int) -> Problem:
        one = slice(index, index + 1)
        pages = [page[one] if page.shape[0] > 1 else page for page in self.pages]
        return Problem(self.query[one], self.own[one], pages, self.selection[one], self.grad_out[one])


def problem(
    page_rows: Sequence[int] = (5, 1, 7), *, batch: int = 1, heads: int = 3, tokens: int = 6, k: int = 4, width: int = 8
) -> Problem:
    """Random rows; every query selects at most k visible positions, itself always, the rest UNSELECTED."""
    draw = torch.Generator().manual_seed(sum(page_rows) + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    prefix = sum(page_rows)
    selection = torch.full((batch, tokens, k), -1, dtype=torch.int32)
    for member, token in itertools.product(range(batch), range(tokens)):
        others = torch.randperm(prefix + token, generator=draw)[: k - 1]
        keys = torch.cat([others, torch.tensor([prefix + token])])
        selection[member, token, : len(keys)] = keys[torch.randperm(len(keys), generator=draw)].int()
    pages = [normal(1, rows, width) for rows in page_rows]
    shape = (batch, heads, tokens, width)
    return Problem(normal(*shape), normal(batch, tokens, width), pages, selection, normal(*shape))


def run(given: Problem, *, sinks: Sequence[int] | None = None, memo: AttentionMemo | None = None) -> dict[str, Tensor]:
    query, own = given.query.clone().requires_grad_(), given.own.clone().requires_grad_()
    wanted = range(len(given.pages)) if sinks is None else sinks
    found = {f"page {i}": torch.zeros_like(given.pages[i]) for i in wanted}
    pages = [
        RowPage(
            page,
            start,
            (lambda rows, gradient, i=i: found[f"page {i}"][0].index_add_(0, rows, gradient)) if i in wanted else None,
        )
        for i, (page, start) in enumerate(zip(given.pages, given.starts, strict=False))
    ]
    options = {"start": given.starts[-1], "selection": given.selection, "scaling": 0.3}
    out = selected_attention(query, own, pages=pages, memo=memo, **options)
    out.backward(given.grad_out)
    return {"out": out.detach(), "dquery": query.grad, "down": own.grad} | found


def reference(given: Problem) -> dict[str, Tensor]:
    query, own = given.query.clone().requires_grad_(), given.own.clone().requires_grad_()
    leaves = [page.clone().requires_grad_() for page in given.pages]
    pages = [RowPage(page, start) for page, start in zip(leaves, given.starts, strict=False)]
    options = {"start": given.starts[-1], "selection": given.selection, "scaling": 0.3}
    out = selected_attention_reference(query, own, pages=pages, **options)
    out.backward(given.grad_out)
    found = {"out": out.detach(), "dquery": query.grad, "down": own.grad}
    return found | {f"page {i}": leaf.grad for i, leaf in enumerate(leaves)}


def worst_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest error of any tensor over the truth's largest value in it; against zeros it is absolute."""
    assert found.keys() == truth.keys()
    errors = [0.0]
    for name, expected in truth.items():
        assert found[name].shape == expected.shape, name
        if expected.numel():
            error = float((found[name].double() - expected.double()).abs().max())
            errors.append(error / (float(expected.abs().max()) or 1.0))
    assert float(truth["out"].abs().max()) > 0.0
    return max(errors)


@pytest.fixture(params=[None, 1, 2000], ids=["all queries at once", "one at a time", "a few at a time"])
def gather_bytes(request, monkeypatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(ops, "GATHER_BYTES", request.param)


@pytest.mark.parametrize("page_rows", [(), (9,), (5, 1, 7), (5, 0, 3), (1,) * 6], ids=str)
@pytest.mark.parametrize("k", [1, 4, 40])
@pytest.mark.usefixtures("gather_bytes")
def test_it_is_one_softmax_over_what_is_selected(page_rows, k):
    given = problem(page_rows, k=k)
    assert worst_error(run(given), reference(given)) <= FLOAT64


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.usefixtures("gather_bytes")
def test_members_that_share_pages_are_as_each_alone(tokens):
    given = problem(batch=3, tokens=tokens)
    joint, alone = run(given), [run(given.member(i)) for i in range(3)]
    expected = {
        name: sum(one[name] for one in alone) if name.startswith("page") else torch.cat([one[name] for one in alone])
        for name in joint
    }
    assert worst_error(joint, expected) <= FLOAT64
    assert worst_error(joint, reference(given)) <= FLOAT64


def test_pages_of_the_members_own_rows():
    """Decoding: a page with rows for each member."""
    given = problem(batch=3, tokens=1)
    own_page = given.pages[2] + torch.arange(3.0, dtype=torch.float64)[:, None, None]
    given = replace(given, pages=[*given.pages[:2], own_page])
    joint = run(given, sinks=[0, 1])["out"]
    for i in range(3):
        assert worst_error({"out": joint[i : i + 1]}, {"out": reference(given.member(i))["out"]}) <= FLOAT64


def test_a_page_without_a_sink_changes_nothing_else():
    given = problem()
    everything, some = run(given), run(given, sinks=[1])
    assert set(everything) - set(some) == {"page 0", "page 2"}
    assert all(torch.equal(some[name], everything[name]) for name in some)


def test_a_memo_replaces_the_forward_and_nothing_else(monkeypatch):
    given, memo = problem(), AttentionMemo()
    plain, first = run(given), run(given, memo=memo)
    assert memo.result is not None
    memo.result = tuple(tensor.clone() for tensor in memo.result)
    marked = memo.result[0].add_(1.0)  # the second pass must take this, not compute again
    second = run(given, memo=memo)
    assert all(torch.equal(first[name], plain[name]) for name in plain)
    assert torch.equal(second["out"], marked)
    assert all(torch.equal(second[name], plain[name]) for name in plain if name != "out")


def test_a_selection_of_everything_visible_is_paged_attention():
    """The dense path of short prefixes and the gathering path are the same attention."""
    given = problem(k=19)
    selection = torch.arange(19, dtype=torch.int32).expand(1, 6, 19).clone()
    for token in range(6):
        selection[0, token, 13 + token + 1 :] = -1
    given = replace(given, selection=selection)
    pages = [AttentionPage(p[:, None], p[:, None], s) for p, s in zip(given.pages, given.starts, strict=False)]
    own = given.own[:, None]
    dense = paged_attention(given.query, own, own, pages=pages, start=13, scaling=0.3)
    assert worst_error({"out": run(given)["out"]}, {"out": dense}) <= FLOAT64


def test_the_comparison_can_fail():
    given = problem()
    truth = reference(given)
    other = given.selection.clone()
    other[0, 3, 0] = next(i for i in range(16) if i not in other[0, 3].tolist())
    assert worst_error(run(replace(given, selection=other)), truth) > 1e-2
    moved = replace(given, pages=[given.pages[0].roll(1, dims=1), *given.pages[1:]])
    assert worst_error(run(moved), truth) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_errs_no_more_than_the_twin(dtype):
    given = problem((70, 33, 64), tokens=40, k=48, width=32).to(dtype)
    truth = reference(given.to(torch.float64))
    found, twin = worst_error(run(given), truth), worst_error(reference(given), truth)
    print("ERR", dtype, found, twin)
    assert 0.0 < found <= 2 * twin


def test_gathered_rows_stay_within_their_bound():
    """Memory beyond inputs and results does not grow with tokens x K: exact bytes of an exact meter."""
    extra = []
    for tokens in (64, 256):
        given = problem((300,), tokens=tokens, k=64, width=32, heads=2).to(torch.float32)
        with pytest.MonkeyPatch.context() as patch, MemoryMeter() as meter:
            patch.setattr(ops, "GATHER_BYTES", 16 * 64 * 32 * 4)  # rows of 16 queries
            run(given)
            extra.append(meter.report()["peak_bytes"] - 5 * given.query.nbytes - 3 * given.own.nbytes)
    print("EXTRA", extra)
    assert extra[1] < 1.1 * extra[0]
