"""Sampling a group from one resident state.

Decoding one token at a time is another order of the same sums than scoring a whole response (and another kernel where
layers are recurrent). Log-probs of both, measured: float64 at most 1.3e-14 (bound 1e-12), float32 6.7e-6 (bound 2e-5).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.helpers import Snapshot, float64_arithmetic, lora_policy, tiny_policy, token_ids
from workbench import (
    InvalidInputError,
    ObjectiveConfig,
    Policy,
    Response,
    capture_prompt,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.memory import MemoryMeter
from workbench.model_sources import TINY_FAMILIES
from workbench.rollout import _sample

FAMILIES = pytest.mark.parametrize("family", TINY_FAMILIES)
PROMPT = token_ids(22)


def sample(policy: Policy, num_responses: int = 3, **options: Any) -> list[Response]:
    state = capture_prompt(policy, PROMPT, chunk_tokens=8)
    return sample_responses(policy, state, num_responses, **{"max_new_tokens": 16, "seed": 0} | options)


def ids_of(responses: list[Response]) -> list[list[int]]:
    return [response.ids.tolist() for response in responses]


def worst(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, truth, strict=True))


# ---------------------------------------------------------------- what is sampled


@FAMILIES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def test_every_member_has_the_log_probs_of_its_own_ids(family, dtype, bound):
    """16 tokens: beyond the sliding window of 12 and, after a prompt of 22, beyond the sparse top-k of 12. Members
    differ, so one that saw another's rows or carry would score differently."""
    policy = tiny_policy(family, dtype)
    context = float64_arithmetic() if dtype == torch.float64 else oracle.deterministic_index()
    with context:
        responses = sample(policy, eos_token_ids=None)
        scores = score_responses(policy, capture_prompt(policy, PROMPT, chunk_tokens=8), responses, block_tokens=7)
    assert len({tuple(ids) for ids in ids_of(responses)}) == 3
    assert worst([response.logprobs for response in responses], scores) <= bound
    for response in responses:
        assert (response.ids.dtype, response.logprobs.dtype) == (torch.int64, dtype)
        assert len(response) == len(response.logprobs) == 16
        assert not response.finished
    others = score_responses(policy, capture_prompt(policy, PROMPT), [responses[1], responses[2], responses[0]])
    assert worst([response.logprobs for response in responses], others) > 0.1


@FAMILIES
def test_next_to_no_temperature_is_the_stock_models_greedy_path(family):
    policy = tiny_policy(family, torch.float64)
    with float64_arithmetic(), torch.no_grad():
        responses = sample(policy, 2, max_new_tokens=8, temperature=1e-6, eos_token_ids=None)
        ids = PROMPT
        for _ in range(8):
            ids = torch.cat([ids, policy.model(input_ids=ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    assert ids_of(responses) == [ids[22:].tolist()] * 2


def test_a_prompt_of_one_token_and_a_group_of_one():
    policy = tiny_policy("qwen3_5", torch.float64)
    with float64_arithmetic():
        state = capture_prompt(policy, PROMPT[:1])
        responses = sample_responses(policy, state, 1, max_new_tokens=6, seed=0, eos_token_ids=None)
        scores = score_responses(policy, state, responses)
    assert worst([responses[0].logprobs], scores) <= 1e-12


def test_a_lora_policy_samples_from_the_adapted_model():
    policy = lora_policy("llama", trained=True)
    responses = sample(policy)
    own = score_responses(policy, capture_prompt(policy, PROMPT), responses)
    base = score_responses(policy.reference, capture_prompt(policy.reference, PROMPT), responses)
    assert worst([r.logprobs for r in responses], own) <= 2e-5 < 1e-3 < worst(own, base)


def test_padding_columns_are_never_sampled():
    policy = Policy(tiny_policy("llama").model, vocab_size=20)
    state = capture_prompt(policy, PROMPT % 20)
    responses = sample_responses(policy, state, 8, max_new_tokens=8, seed=0, eos_token_ids=None)
    sampled = torch.cat([response.ids for response in responses])
    assert int(sampled.max()) < 20
    assert len(sampled.unique()) > 10
    assert worst([r.logprobs for r in responses], score_responses(policy, state, responses)) <= 2e-5


# ---------------------------------------------------------------- seeds


def test_a_seed_decides_everything_and_touches_nothing():
    policy = tiny_policy("qwen3_5")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = sample(policy, seed=3), sample(policy, seed=3), sample(policy, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert ids_of(first) == ids_of(again) != ids_of(other)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(first, again, strict=True))


def test_without_a_seed_every_call_differs():
    """48 tokens, each repeated by chance with probability about 1/20: a false alarm in 1e62."""
    policy = tiny_policy("llama")
    torch.manual_seed(7)
    assert ids_of(sample(policy, seed=None)) != ids_of(sample(policy, seed=None))


@FAMILIES
def test_model_and_state_are_left_as_they_were(family):
    policy = tiny_policy(family)
    policy.model.train()
    state, before = capture_prompt(policy, PROMPT, chunk_tokens=8), Snapshot(policy.model)
    checksum = state.checksum()
    sample_responses(policy, state, 3, max_new_tokens=5, seed=0)
    assert before.differences() == []
    assert state.checksum() == checksum
    assert policy.weight_version == 0


# ---------------------------------------------------------------- end of sequence (case 18)


def cut(ids: list[int], ends: set[int]) -> list[int]:
    """Up to and including the first end id."""
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: first + 1]


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "glm_moe_dsa"])
def test_each_end_id_ends_the_member_that_samples_it_and_no_other(family):
    policy = tiny_policy(family)
    free = ids_of(sample(policy, 4, eos_token_ids=None))
    ends = {free[0][4], free[1][9], free[2][15]}
    responses = sample(policy, 4, eos_token_ids=sorted(ends))
    assert ids_of(responses) == [cut(ids, ends) for ids in free]
    for response in responses:
        ids = response.ids.tolist()
        assert response.finished == (ids[-1] in ends)
        assert not ends & set(ids[:-1])  # the end id is there once, at the end
        assert len(response.logprobs) == len(ids)
    assert [len(ids) for ids in ids_of(responses)] != [16] * 4


def test_an_end_id_in_the_very_last_slot_finishes():
    policy = tiny_policy("llama")
    (free,) = ids_of(sample(policy, 1, eos_token_ids=None))
    last = next(n for n in range(2, 16) if free[n] not in free[:n])
    (response,) = sample(policy, 1, max_new_tokens=last + 1, eos_token_ids=[free[last]])
    assert response.finished
    assert len(response) == last + 1
    (response,) = sample(policy, 1, max_new_tokens=last, eos_token_ids=[free[last]])
    assert not response.finished


def test_the_models_own_end_ids_are_the_default():
    """Every id that the configuration or the generation configuration names, as one number or as a list."""
    policy = tiny_policy("llama")
    free = ids_of(sample(policy, 4, eos_token_ids=None))
    model = policy.model
    model.config.eos_token_id, model.generation_config.eos_token_id = free[0][3], [free[1][2], free[0][3]]
    assert policy.eos_token_ids() == (free[1][2], free[0][3])
    expected = [cut(ids, {free[0][3], free[1][2]}) for ids in free]
    assert ids_of(sample(policy, 4)) == ids_of(sample(policy, 4, eos_token_ids=[])) == expected
    assert ids_of(sample(policy, 4, eos_token_ids=None)) == free
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert policy.eos_token_ids() == ()
    assert ids_of(sample(policy, 4)) == free


def test_decoding_stops_when_everyone_has_finished(monkeypatch):
    policy, passes = tiny_policy("llama"), []
    free = ids_of(sample(policy, 2, eos_token_ids=None))
    state, forward = capture_prompt(policy, PROMPT), policy.adapter.forward_chunk
    monkeypatch.setattr(
        policy.adapter, "forward_chunk", lambda ids, *a, **k: passes.append(ids) or forward(ids, *a, **k)
    )
    ends = {free[0][2], free[1][5]}
    longest = max(len(cut(ids, ends)) for ids in free)
    sample_responses(policy, state, 2, max_new_tokens=16, eos_token_ids=sorted(ends), seed=0)
    assert len(passes) == longest
    assert [tuple(ids.shape) for ids in passes] == [(1, 1)] + [(2, 1)] * (
        longest - 1
    )  # the last prompt token runs once


# ---------------------------------------------------------------- temperature and top-p


def test_log_probs_are_at_the_sampling_temperature_and_so_is_the_step():
    """Case 18: ratio 1. Taken from sampling, old log-probs differ from the replayed ones by float32 rounding only."""
    policy = tiny_policy("qwen3_5")
    responses = sample(policy, temperature=0.6)
    state = capture_prompt(policy, PROMPT)
    assert worst([r.logprobs for r in responses], score_responses(policy, state, responses, temperature=0.6)) <= 2e-5
    assert worst([r.logprobs for r in responses], score_responses(policy, state, responses)) > 0.1
    options = {"advantages": [1.0, -1.0, 0.5], "objective": ObjectiveConfig(temperature=0.6), "measure_memory": False}
    old = [response.logprobs for response in responses]
    sampled = update_step(policy, PROMPT, responses, old_logprobs=old, **options).metrics
    assert 0.0 < sampled["abs_log_ratio_mean"] <= 1e-5
    default = update_step(policy, PROMPT, responses, **options).metrics
    assert default["ratio_max"] == default["ratio_min"] == 1.0
    assert default["abs_log_ratio_mean"] == 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.05])
def test_frequencies_are_those_of_the_nucleus(temperature, top_p):
    """40,000 draws from 12 logits. |count - n p| / sqrt(n p (1 - p)) <= 5 for every id: with 12 cases of 12 ids a false
    alarm has probability 144 * 5.7e-7 = 8e-5 for an unlucky seed, and none for this one."""
    logits = torch.linspace(-1.5, 2.0, 12, dtype=torch.float64)[
        torch.randperm(12, generator=torch.Generator().manual_seed(1))
    ]
    draws = 40_000
    chosen, logprobs = _sample(logits.expand(draws, -1), temperature, top_p, torch.Generator().manual_seed(0))
    full = torch.softmax(logits / temperature, dim=-1)
    assert torch.equal(logprobs, torch.log_softmax(logits / temperature, dim=-1)[chosen])  # before top-p

    ranked = sorted(range(12), key=lambda i: -float(full[i]))
    nucleus, mass = [], 0.0
    for i in ranked:  # the smallest set whose mass reaches top_p
        if mass < top_p:
            nucleus.append(i)
            mass += float(full[i])
    counts = torch.bincount(chosen, minlength=12)
    for i in range(12):
        p = float(full[i]) / mass if i in nucleus else 0.0
        sigma = math.sqrt(draws * p * (1.0 - p))
        assert abs(float(counts[i]) - draws * p) <= 5 * sigma
    assert (len(nucleus) < 12) == (top_p < 1.0)


def test_tokens_of_probability_zero_are_never_sampled():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf]).expand(2000, -1)
    for top_p in (1.0, 0.7):
        chosen, logprobs = _sample(logits, 1.0, top_p, torch.Generator().manual_seed(0))
        assert set(chosen.tolist()) == {0, 2}
        assert bool(logprobs.isfinite().all())


def test_top_p_reaches_the_samples_and_not_the_log_probs():
    policy = tiny_policy("llama")
    narrow = sample(policy, top_p=1e-6)  # the most probable token only
    assert ids_of(narrow) == ids_of(sample(policy, temperature=1e-6))
    scores = score_responses(policy, capture_prompt(policy, PROMPT), narrow)
    assert worst([response.logprobs for response in narrow], scores) <= 2e-5


# ---------------------------------------------------------------- memory


def bytes_per_member(policy: Policy, prompt_tokens: int, new_tokens: int = 2) -> float:
    """What each of six more members adds to the peak of sampling: exact bytes of an exact meter."""
    state = capture_prompt(policy, token_ids(prompt_tokens), chunk_tokens=256)
    peaks = []
    for members in (2, 8):
        with MemoryMeter() as meter:
            sample_responses(policy, state, members, max_new_tokens=new_tokens, seed=0, eos_token_ids=None)
        peaks.append(meter.report()["peak_bytes"])
    return (peaks[1] - peaks[0]) / 6


@FAMILIES
def test_members_share_the_prompts_rows(family):
    """A member costs the same after a longer prompt; with sparse attention it also has an index score per position."""
    policy = tiny_policy(family)
    more_rows = [capture_prompt(policy, token_ids(n), keep_boundaries=False).nbytes for n in (257, 769)]
    growth = bytes_per_member(policy, 769) - bytes_per_member(policy, 257)
    if hasattr(policy.adapter.config, "index_topk"):
        assert 0 < growth <= 0.03 * (more_rows[1] - more_rows[0])  # measured 0.013: scores of one page at a time
    else:
        assert growth == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_member_costs_its_own_rows_and_carry(family):
    policy = tiny_policy(family)
    states = [capture_prompt(policy, token_ids(n), keep_boundaries=False).inventory() for n in (2, 34)]
    rows = sum(states[1][kind] - states[0][kind] for kind in ("keys", "values"))  # of 32 tokens
    carry = sum(states[0].get(kind, 0) for kind in ("recurrent", "conv"))
    short, long = bytes_per_member(policy, 30, 4), bytes_per_member(policy, 30, 36)
    assert long - short == rows + 32 * (8 + 4)  # an id and a log-probability each
    assert short <= 3 * carry + 6000  # measured 2.6 x (old and new carry) and 4,994 bytes of one token's activations


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_responses": 0}, "num_responses=0 must be an integer >= 1"),
        ({"num_responses": True}, "num_responses=True"),
        ({"num_responses": 2.0}, "num_responses=2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"eos_token_ids": 2}, r"eos_token_ids has shape \(\)"),
        ({"eos_token_ids": [2, 101]}, "eos_token_ids: id 101 at position 1 is outside the vocabulary"),
        ({"eos_token_ids": [2.0]}, "eos_token_ids has dtype"),
        ({"max_new_tokens": 11}, r"need 33 positions.*max_position_embeddings of 32.*max_positions=N"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_anything_runs(options, message, monkeypatch):
    policy = tiny_policy("llama", max_position_embeddings=32)
    state = capture_prompt(policy, PROMPT)
    monkeypatch.setattr(policy.adapter, "forward_chunk", lambda *a, **k: pytest.fail("it ran"))
    settings = {"num_responses": 2, "max_new_tokens": 10, "seed": 0} | options
    with pytest.raises(InvalidInputError, match=message):
        sample_responses(policy, state, settings.pop("num_responses"), **settings)
