"""Capture: the state and what follows from it do not depend on how the prompt was cut; failures name their place.

float64: measured at most 2e-14 of a tensor's largest value over all families and cuts; 1e-12 leaves room for
rounding, and a token dropped, doubled or misplaced at a cut shows in the first digits (`test_the_comparison_can_fail`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers import Snapshot, float64_arithmetic, tiny_policy, token_ids
from workbench import (
    InvalidInputError,
    NonFiniteError,
    Policy,
    ResidentState,
    capture_prompt,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.model_sources import TINY_FAMILIES

FLOAT64 = 1e-12
P = 26
RESPONSES = [token_ids(5, seed=1), token_ids(1, seed=2)]
FAMILIES = pytest.mark.parametrize("family", TINY_FAMILIES)


def content(policy: Policy, state: ResidentState) -> dict[str, Tensor]:
    """All rows by layer and kind, pages joined; the carry at the boundary; scores of two responses."""
    found: dict[str, Tensor] = {}
    for layer in range(policy.adapter.num_layers):
        for name in dict.fromkeys(name for page in state.pages for name in page.layers[layer]):
            rows = [page.layers[layer][name] for page in state.pages]
            found[f"layer {layer} {name}"] = torch.cat(rows, dim=-2)
        for name, carry in state.carry_at(state.positions)[layer].items():
            found[f"layer {layer} {name}"] = carry
    scores = score_responses(policy, state, RESPONSES)
    return found | {f"scores {i}": score for i, score in enumerate(scores)}


def worst_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest error of any tensor over its largest true value."""
    assert found.keys() == truth.keys()
    errors = []
    for name, expected in truth.items():
        assert found[name].shape == expected.shape, name
        scale = float(expected.abs().max())
        assert scale > 0.0, f"{name} is all zero: nothing to compare"
        errors.append(float((found[name] - expected).abs().max()) / scale)
    return max(errors)


# ---------------------------------------------------------------- chunks (case 12)


@FAMILIES
def test_the_state_does_not_depend_on_the_chunk_size(family):
    """Chunks of 1, 2, 3 (shorter than the convolution kernel of 4), P - 1 (the boundary), one more and one less."""
    overrides = {"sliding_window": P + 10} if family == "gemma3" else {}  # a window forgets rows, see below
    policy = tiny_policy(family, torch.float64, **overrides)
    prompt = token_ids(P)
    with float64_arithmetic():
        whole = content(policy, capture_prompt(policy, prompt))
        for size in (1, 2, 3, P - 2, P - 1, P, P + 5):
            cut = content(policy, capture_prompt(policy, prompt, chunk_tokens=size))
            assert worst_error(cut, whole) <= FLOAT64, size


@FAMILIES
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_prompts_shorter_than_the_convolution_kernel(family, tokens):
    """The same ids split between prompt and response in every way score the same."""
    policy = tiny_policy(family, torch.float64)
    ids = token_ids(9)
    with float64_arithmetic():
        (all_scores,) = score_responses(policy, capture_prompt(policy, ids[:1]), [ids[1:]])
        for size in (1, 2, 3, 100):
            state = capture_prompt(policy, ids[:tokens], chunk_tokens=size)
            assert state.positions == tokens - 1
            (scores,) = score_responses(policy, state, [ids[tokens:]])
            error = float((scores - all_scores[tokens - 1 :]).abs().max())
            assert error <= FLOAT64  # absolute: log-probabilities of order 1 to 10


def test_a_sliding_window_scores_the_same_in_every_cut():
    """Window 12, prompts around it; pages keep at most 11 rows, so only scores can be compared."""
    policy = tiny_policy("gemma3", torch.float64)
    with float64_arithmetic():
        for tokens in (11, 12, 13, 40):
            whole = score_responses(policy, capture_prompt(policy, token_ids(tokens)), RESPONSES)
            for size in (1, 5, 11, 12, 13, 39):
                for boundaries in (True, False):
                    state = capture_prompt(policy, token_ids(tokens), chunk_tokens=size, keep_boundaries=boundaries)
                    for scores, expected in zip(score_responses(policy, state, RESPONSES), whole, strict=True):
                        assert float((scores - expected).abs().max()) <= FLOAT64


def test_the_comparison_can_fail():
    """A cut that loses or repeats one token, and a carry of the wrong place."""
    policy, prompt = tiny_policy("qwen3_5", torch.float64), token_ids(P)
    with float64_arithmetic():
        whole = content(policy, capture_prompt(policy, prompt))
        swapped = prompt.clone()
        swapped[3:5] = prompt[3:5].flip(0)
        assert worst_error(content(policy, capture_prompt(policy, swapped)), whole) > 1e-3
        late = capture_prompt(policy, prompt, chunk_tokens=5)
        late._carries[late.positions] = late._carries[20]
        assert worst_error(content(policy, late), whole) > 1e-3


# ---------------------------------------------------------------- boundaries


@FAMILIES
def test_without_boundaries_less_is_kept_and_scores_are_the_same(family):
    """Bitwise: rows that a window hides are not read, so it does not matter whether they are there."""
    policy = tiny_policy(family)
    kept, forgotten = (capture_prompt(policy, token_ids(61), chunk_tokens=8, keep_boundaries=b) for b in (True, False))
    assert not any(name.startswith("boundary_") for name in forgotten.inventory())
    has_less_to_keep = any(name.startswith("boundary_") for name in kept.inventory()) or family == "gemma3"
    assert (forgotten.nbytes < kept.nbytes) is has_less_to_keep
    for block in (3, 100):
        scores = (score_responses(policy, state, RESPONSES, block_tokens=block) for state in (kept, forgotten))
        assert all(torch.equal(a, b) for a, b in zip(*scores, strict=True))


def test_boundaries_are_the_carries_that_a_shorter_prompt_would_leave():
    policy, prompt = tiny_policy("qwen3_next"), token_ids(P)
    state = capture_prompt(policy, prompt, chunk_tokens=8)
    for position in (8, 16, 24):
        shorter = capture_prompt(policy, prompt[: position + 1], chunk_tokens=8).carry_at(position)
        for layer, expected in zip(state.carry_at(position), shorter, strict=True):
            assert layer.keys() == expected.keys()
            assert all(torch.equal(layer[name], expected[name]) for name in layer)
    assert all(layer == {} for layer in state.carry_at(0))


# ---------------------------------------------------------------- it leaves no trace


@FAMILIES
def test_nothing_of_the_model_changes_and_nothing_has_a_graph(family):
    policy = tiny_policy(family)
    policy.model.train()
    before = Snapshot(policy.model)
    state = capture_prompt(policy, token_ids(P), chunk_tokens=8)
    assert before.differences() == []
    assert not any(t.requires_grad for t in (*state.row_tensors(), *state.carry_tensors()))
    assert policy.weight_version == state.weight_version == 0


def test_every_form_of_ids_is_the_same_prompt():
    policy, ids = tiny_policy("llama"), token_ids(P)
    forms = [ids, ids.tolist(), tuple(ids.tolist()), ids.to(torch.int32), ids.to(torch.uint8), ids.numpy()]
    assert len({capture_prompt(policy, form).checksum() for form in forms}) == 1
    with torch.inference_mode():
        inside = capture_prompt(policy, ids).checksum()
    assert inside == capture_prompt(policy, ids).checksum()


# ---------------------------------------------------------------- NaN and infinity


def poison(policy: Policy, layer: int) -> None:
    with torch.no_grad():
        policy.model.model.layers[layer].input_layernorm.weight[0] = torch.nan


@FAMILIES
def test_nan_in_a_layer_is_named_with_its_chunk(family):
    for layer in range(tiny_policy(family).adapter.num_layers):
        policy = tiny_policy(family)
        poison(policy, layer)
        with pytest.raises(NonFiniteError, match=rf"^capture, prompt chunk \[0, 8\): .* output of layer {layer} \("):
            capture_prompt(policy, token_ids(P), chunk_tokens=8)


def test_the_first_bad_chunk_is_named():
    """A token that overflows, first met at position 17."""
    policy, ids = tiny_policy("llama"), token_ids(P)
    ids[ids == 50], ids[17] = 51, 50
    with torch.no_grad():
        policy.model.model.embed_tokens.weight[50] = torch.inf
    with pytest.raises(NonFiniteError, match=r"prompt chunk \[16, 24\)"):
        capture_prompt(policy, ids, chunk_tokens=8)


def after_capture(policy: Policy) -> list[tuple[str, Callable[[], object]]]:
    state = capture_prompt(policy, token_ids(P), chunk_tokens=8)
    step = {"advantages": [1.0, 1.0], "chunk_tokens": 8, "block_tokens": 2}
    return [
        (r"response 1, tokens \[0, 3\)", lambda: score_responses(policy, state, [[], [5, 6, 7]], allow_stale=True)),
        ("sampling, position 25", lambda: sample_responses(policy, state, 2, max_new_tokens=2, allow_stale=True)),
        (r"response 1, tokens \[0, 2\)", lambda: update_step(policy, token_ids(P), [[], [5, 6, 7]], **step)),
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "glm_moe_dsa"])
def test_what_capture_cannot_see_is_named_later(family):
    """The last layer's mixer and MLP, the final norm and the head reach no state; they do reach every score."""
    policy = tiny_policy(family)
    calls, model = after_capture(policy), policy.model
    places = [
        (model.model.layers[-1].post_attention_layernorm.weight, f"output of layer {policy.adapter.num_layers - 1}"),
        (model.model.norm.weight, "final norm"),
        (model.lm_head.weight, "language-model head"),
    ]
    for weight, where in places if family != "gemma3" else places[:2]:  # its head is its embedding
        before = weight.detach().clone()
        with torch.no_grad():
            weight[0] = torch.nan
        for place, call in calls:
            with pytest.raises(NonFiniteError) as caught:
                call()
            assert where in str(caught.value)
            if where != "language-model head":
                caught.match(place)
        with torch.no_grad():
            weight.copy_(before)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_ids is empty"),
        (torch.zeros(0, dtype=torch.int64), "prompt_ids is empty"),
        ([5, 101], "id 101 at position 1 is outside the vocabulary of 101"),
        ([5, 6, -1], "id -1 at position 2 is outside"),
        ([5.0, 6.0], "dtype torch.float32; token ids are integers"),
        (torch.tensor([5.0]), "token ids are integers"),
        ([True, False], "token ids are integers"),
        ([[5, 6]], r"shape \(1, 2\); give a 1-D"),
        (torch.tensor(5), r"shape \(\)"),
        ([[5], [6, 7]], "not a sequence of token ids"),
        ("some text", "not a sequence of token ids"),
        (None, "not a sequence of token ids"),
    ],
    ids=repr,
)
def test_bad_prompts(prompt, message):
    with pytest.raises(InvalidInputError, match=message):
        capture_prompt(tiny_policy("llama"), prompt)


@pytest.mark.parametrize("chunk_tokens", [0, -1, 1.5, True, None, "8"])
def test_bad_chunk_sizes(chunk_tokens):
    with pytest.raises(InvalidInputError, match="chunk_tokens="):
        capture_prompt(tiny_policy("llama"), [5, 6], chunk_tokens=chunk_tokens)


def test_bad_placement():
    with pytest.raises(InvalidInputError, match="placement='disk' is not one of device, host"):
        capture_prompt(tiny_policy("llama"), [5, 6], placement="disk")


def test_prompts_beyond_the_models_positions_name_the_limit_and_the_option():
    model = tiny_policy("llama", max_position_embeddings=16).model
    capture_prompt(Policy(model), token_ids(16))
    with pytest.raises(InvalidInputError, match=r"17 positions.*max_position_embeddings of 16.*max_positions=N"):
        capture_prompt(Policy(model), token_ids(17))
    assert capture_prompt(Policy(model, max_positions=20), token_ids(20)).positions == 19
    with pytest.raises(InvalidInputError, match="of 8"):
        capture_prompt(Policy(model, max_positions=8), token_ids(9))
