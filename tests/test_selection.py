"""Top-k selection: one strict order, so that every pass over the same scores selects the same keys (case 20).

Everything here is an equality of sets; the only arithmetic compared is in float64, with its measured error beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers import float64_arithmetic, tiny_policy, token_ids
from workbench import InvalidInputError, Policy, capture_prompt, score_responses
from workbench.architectures import ChunkContext, ChunkOutput, latent_sparse
from workbench.model_sources import tiny_model
from workbench.ops.selection import UNSELECTED, fingerprint, select_topk, stream_topk


def chosen(scores: list[float] | Tensor, k: int, visible: list[bool] | None = None) -> list[int]:
    scores = torch.as_tensor(scores)
    seen = torch.ones(scores.shape, dtype=torch.bool) if visible is None else torch.tensor(visible)
    mask = select_topk(scores, seen, k)
    assert mask.dtype == torch.bool
    assert mask.shape == scores.shape
    return mask.nonzero().flatten().tolist()


def sorted_order(scores: list[float], k: int) -> list[int]:
    """The definition: by score descending, then by position ascending."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ([0.1, 0.5, 0.3], 1, [1]),
        ([0.1, 0.5, 0.3], 2, [1, 2]),
        ([0.0, 0.0, 0.0, 0.0], 2, [0, 1]),  # all tied: the lowest positions
        ([0.0, 1.0, 0.0, 1.0, 0.0], 3, [0, 1, 3]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),  # -0.0 is 0.0
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([-1.0, -2.0, -1.0], 1, [0]),
        ([2.0, float("inf"), 2.0], 2, [0, 1]),
        ([1.0, 1.0 + 1e-7, 1.0], 1, [1]),  # next to nothing is not a tie
    ],
)
def test_higher_score_first_then_lower_position(scores, k, expected):
    assert chosen(scores, k) == expected == sorted_order(scores, k)


def test_only_visible_keys_are_chosen_and_all_of_them_if_few():
    scores, visible = [5.0, 1.0, 4.0, 0.0], [False, True, False, True]
    assert chosen(scores, 1, visible) == [1]
    assert chosen(scores, 2, visible) == chosen(scores, 3, visible) == chosen(scores, 9, visible) == [1, 3]
    assert chosen(scores, 2, [False] * 4) == []


@pytest.mark.parametrize("count", [1, 2, 17, 63, 64, 65, 500, 4097])
def test_ties_fall_the_same_way_in_every_shape(count):
    """`torch.topk` leaves ties open and changes its answer with the shape; a quarter of these scores are 0."""
    draw = torch.Generator().manual_seed(count)
    scores = torch.relu(torch.randint(-4, 5, (3, 5, count), generator=draw).float())
    visible = torch.ones(count, dtype=torch.bool)
    k = max(1, count // 3)
    mask = select_topk(scores, visible, k)
    for i in range(3):
        for j in range(5):
            alone = select_topk(scores[i, j], visible, k)
            assert torch.equal(alone, mask[i, j])
            assert alone.nonzero().flatten().tolist() == sorted_order(scores[i, j].tolist(), k)


def test_scores_to_the_right_that_are_invisible_do_not_matter():
    """A query sees the same set whether later keys exist yet (one long chunk) or not (a short one)."""
    scores = torch.relu(torch.randint(-4, 5, (50,), generator=torch.Generator().manual_seed(0)).float())
    for prefix in range(1, 51):
        visible = torch.arange(50) < prefix
        long = select_topk(scores, visible, 7)
        assert not long[prefix:].any()
        assert torch.equal(long[:prefix], select_topk(scores[:prefix], visible[:prefix], 7))


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("k", [1, 5, 20, 64])
def test_shards_select_the_set_that_one_would(shards, k):
    """Each shard's own top k, then the top k of what they propose: ties included, because positions stay in order."""
    scores = torch.relu(torch.randint(-6, 4, (8, 64), generator=torch.Generator().manual_seed(k)).float())
    visible = torch.ones(8, 64, dtype=torch.bool).tril(50)
    whole = select_topk(scores, visible, k)
    spans = torch.arange(64).tensor_split(shards)
    proposed = torch.cat([select_topk(scores[:, s], visible[:, s], k) for s in spans], dim=-1)
    assert torch.equal(select_topk(scores, proposed, k), whole)
    assert int(whole.sum(-1).max()) == min(k, 58)  # the last query sees 58 keys


def as_mask(positions: Tensor, count: int) -> Tensor:
    """Positions [..., k] as a bool mask [..., count]; each may occur once, UNSELECTED any number of times."""
    columns = torch.where(positions == UNSELECTED, count, positions).long()
    mask = torch.zeros(*positions.shape[:-1], count + 1, dtype=torch.int64)
    mask.scatter_add_(-1, columns, torch.ones_like(columns))
    assert int(mask[..., :count].max()) <= 1
    return mask[..., :count].bool()


@pytest.mark.parametrize("pages", [(64,), (1, 63), (20, 0, 7, 37), (1,) * 64], ids=lambda pages: f"{len(pages)} pages")
@pytest.mark.parametrize("k", [1, 5, 20, 64, 70])
def test_page_by_page_is_all_at_once(pages, k):
    """`stream_topk` against its twin: ties within a page and over page borders, queries that see little or nothing."""
    scores = torch.relu(torch.randint(-6, 4, (2, 8, 64), generator=torch.Generator().manual_seed(k)).float())
    visible = torch.ones(8, 64, dtype=torch.bool).tril(40)
    visible[3] = False
    visible[4, 1:] = False
    spans = list(itertools.accumulate(pages, initial=0))
    parts = [(a, scores[..., a:b], visible[..., a:b]) for a, b in itertools.pairwise(spans)]
    found = stream_topk(iter(parts), k)
    assert found.shape == (2, 8, k)
    assert found.dtype == torch.int32
    assert torch.equal(as_mask(found, 64), select_topk(scores, visible, k))


def test_pages_seen_by_everyone_need_no_mask_and_any_first_position():
    scores = torch.relu(torch.randint(-6, 4, (8, 30), generator=torch.Generator().manual_seed(0)).float())
    parts = [(100, scores[:, :11], None), (111, scores[:, 11:], None)]
    expected = select_topk(scores, torch.ones(30, dtype=torch.bool), 6)
    assert torch.equal(as_mask(stream_topk(parts, 6) - 100, 30), expected)


def test_nothing_to_select_from_is_an_error():
    with pytest.raises(InvalidInputError, match="at least one part"):
        stream_topk([], 3)


def test_no_graph_and_no_write():
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).relu().requires_grad_()
    before = scores.detach().clone()
    assert not select_topk(scores, torch.ones(9, dtype=torch.bool), 3).requires_grad
    assert not stream_topk([(0, scores, None)], 3).requires_grad
    assert torch.equal(scores.detach(), before)


def test_a_fingerprint_notices_any_change_of_ids_or_order():
    ids = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(0))
    same = fingerprint(ids.clone())
    assert same == fingerprint(ids)
    assert same.dim() == 0
    for place in range(24):
        changed = ids.clone()
        changed.view(-1)[place] += 1
        assert fingerprint(changed) != same
    swapped = ids[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.equal(swapped, ids)
    assert fingerprint(swapped) != same
    assert fingerprint(torch.zeros(3, dtype=torch.int64)) != fingerprint(torch.zeros(4, dtype=torch.int64))


# ---------------------------------------------------------------- in the model


def selected_keys(policy: Policy, ids: Tensor, chunk_tokens: int) -> dict[int, list[set[int]]]:
    """By layer that computes an index: the set of keys of each position but the last.

    Read off a scoring pass, because a capture stops before the attention of its last layer.
    """
    with recorded_keys(policy) as found:
        score_responses(policy, capture_prompt(policy, ids[:1]), [ids[1:]], block_tokens=chunk_tokens)
    return found


@contextmanager
def recorded_keys(policy: Policy) -> Iterator[dict[int, list[set[int]]]]:
    found: dict[int, list[set[int]]] = {}
    forward = policy.adapter.forward_chunk

    def record(ids: Tensor, context: ChunkContext, **options: Any) -> ChunkOutput:
        output = forward(ids, context, **options)
        for layer, selection in output.run.shared.items():
            for query in range(ids.shape[1]):
                everything = range(context.start + query + 1)
                keys = everything if selection is None else selection[0, query].tolist()  # None: dense so far
                found.setdefault(layer, []).append(set(keys) - {UNSELECTED})
        return output

    with mock.patch.object(policy.adapter, "forward_chunk", record):
        yield found


def test_only_full_layers_compute_an_index():
    """Shared layers reuse the last full one's: what they then attend to is compared with the stock model elsewhere."""
    policy = tiny_policy("glm_moe_dsa")
    assert policy.adapter.config.indexer_types == ["full", "shared", "full", "shared"]
    found = selected_keys(policy, token_ids(40), 16)
    assert set(found) == {0, 2}
    assert found[0] != found[2]
    for keys in found.values():
        assert [len(k) for k in keys] == [min(12, position + 1) for position in range(39)]
        assert all(max(k) <= position for position, k in enumerate(keys))


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_every_chunk_size_selects_the_same_keys(family):
    policy = tiny_policy(family, torch.float64)
    with float64_arithmetic():
        whole = selected_keys(policy, token_ids(40), 64)
        for size in (1, 7, 16):
            assert selected_keys(policy, token_ids(40), size) == whole


KINDS = {"glm_moe_dsa": {"indexer_types": ["full", "shared"]}}  # DeepSeek-V3.2 has no such field


@pytest.mark.parametrize(("family", "trials"), [("glm_moe_dsa", 6), ("deepseek_v32", 2)])
def test_a_capture_selects_the_same_sets_for_every_page_size(family, trials):
    """Quantised scores, so that ties are everywhere: pages of 1, 7, 64 and all 65 tokens.

    (30 trials of the selection alone are in test_selected_attention.py.)
    """
    small = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    policy = tiny_policy(family, torch.float64, **small, **KINDS.get(family, {}))
    exact = latent_sparse._index_scores
    ties = 0

    def quantised(*arguments: Any) -> Tensor:
        nonlocal ties
        scores = (exact(*arguments) * 2).round() / 2
        ties += int((scores[..., 1:] == scores[..., :-1]).sum())
        return scores

    with mock.patch.object(latent_sparse, "_index_scores", quantised):
        for trial in range(trials):
            ids = token_ids(66, trial)
            whole = captured_keys(policy, ids, 65)
            for size in (1, 7, 64):
                assert captured_keys(policy, ids, size) == whole
    assert ties > 1000 * trials, "neighbours that tie, over the four captures"


def captured_keys(policy: Policy, ids: Tensor, chunk_tokens: int) -> dict[int, list[set[int]]]:
    """The set of keys of each position in layer 0: a capture selects nothing in its last layer, here 1."""
    with recorded_keys(policy) as found:
        capture_prompt(policy, ids, chunk_tokens=chunk_tokens)
    return {0: found[0]}


def test_a_prompt_no_longer_than_the_top_k_is_dense():
    """index_topk 12: with 8 + 4 positions nothing is left out; with 30 something is."""
    sparse, dense = (Policy(tiny_model("glm_moe_dsa", index_topk=k)) for k in (12, 4096))
    for tokens, equal in ((9, True), (30, False)):
        prompt, responses = token_ids(tokens), [token_ids(4, 1)]
        scores = [score_responses(p, capture_prompt(p, prompt, chunk_tokens=5), responses)[0] for p in (sparse, dense)]
        assert torch.equal(*scores) is equal
