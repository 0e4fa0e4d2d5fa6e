"""Top-k selection: one strict order, so that every pass over the same scores selects the same keys (case 20).

Everything here is an equality of sets; the only arithmetic compared is in float64, with its measured error beside it.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.helpers import float64_arithmetic, tiny_policy, token_ids
from workbench import Policy, capture_prompt, score_responses
from workbench.architectures import latent_sparse
from workbench.model_sources import tiny_model
from workbench.ops.selection import select_topk


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


def test_no_graph_and_no_write():
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).relu().requires_grad_()
    before = scores.detach().clone()
    mask = select_topk(scores, torch.ones(9, dtype=torch.bool), 3)
    assert not mask.requires_grad
    assert torch.equal(scores.detach(), before)


# ---------------------------------------------------------------- in the model


def selections(policy: Policy, prompt: Tensor, chunk_tokens: int) -> list[list[Tensor]]:
    """By layer: the selection of each prompt position, as a list over chunks of bool [tokens, prefix + tokens]."""
    found: list[Tensor] = []
    attend = latent_sparse.paged_attention

    def record(*args, selection: Tensor, **kwargs):
        found.append(selection[0])
        return attend(*args, selection=selection, **kwargs)

    with mock.patch.object(latent_sparse, "paged_attention", record):
        capture_prompt(policy, prompt, chunk_tokens=chunk_tokens)
    layers = policy.adapter.num_layers
    return [found[layer::layers] for layer in range(layers)]


def test_shared_layers_reuse_the_last_full_layers_set():
    policy = tiny_policy("glm_moe_dsa")
    assert policy.adapter.config.indexer_types == ["full", "shared", "full", "shared"]
    for chunk in zip(*selections(policy, token_ids(40), 16), strict=True):
        assert chunk[0] is not chunk[2]
        assert torch.equal(chunk[0], chunk[1])
        assert torch.equal(chunk[2], chunk[3])
        assert int(chunk[0].sum(-1).max()) == min(12, chunk[0].shape[-1])
    assert not torch.equal(chunk[0], chunk[2])


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_every_chunk_size_selects_the_same_keys(family):
    policy = tiny_policy(family, torch.float64)
    with float64_arithmetic():
        whole = [layer[0] for layer in selections(policy, token_ids(40), 64)]
        for size in (1, 7, 16):
            for one, chunks in zip(whole, selections(policy, token_ids(40), size), strict=True):
                rows = [torch.nn.functional.pad(chunk, (0, 39 - chunk.shape[-1])) for chunk in chunks]
                assert torch.equal(torch.cat(rows), one)


def test_a_prompt_no_longer_than_the_top_k_is_dense():
    """index_topk 12: with 8 + 4 positions nothing is left out; with 30 something is."""
    sparse, dense = (Policy(tiny_model("glm_moe_dsa", index_topk=k)) for k in (12, 4096))
    for tokens, equal in ((9, True), (30, False)):
        prompt, responses = token_ids(tokens), [token_ids(4, 1)]
        scores = [score_responses(p, capture_prompt(p, prompt, chunk_tokens=5), responses)[0] for p in (sparse, dense)]
        assert torch.equal(*scores) is equal
