"""Adapters that leave the prompt alone, against full-sequence autograd of that very policy.

The truth masks the adapter position by position in one forward over prompt and response (hooks that multiply the output
of every lora_B by 0 or 1); the engine instead switches adapters off for whole segments. Measured over all families,
float64: at most 1.8e-14 relative L2; the bound leaves room for other BLAS builds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.helpers import float64_arithmetic, token_ids, train_adapter
from workbench import (
    InvalidInputError,
    ObjectiveConfig,
    Policy,
    StaleStateError,
    Tail,
    capture_prompt,
    load_policy,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.model_sources import TINY_FAMILIES, tiny_model

BOUND = 1e-12
LENGTHS = (1, 7, 12, 3)
ADVANTAGES = [1.0, -0.5, 0.7, -1.2]
SCOPES = ("response", "replay")


def scoped_policy(family: str, scope: str, dtype: torch.dtype = torch.float64, **options: Any) -> Policy:
    policy = load_policy(tiny_model(family), lora=options.pop("lora", 2), dtype=dtype, adapter_scope=scope, **options)
    train_adapter(policy.model)
    return policy


def responses() -> list[Tensor]:
    return [token_ids(length, 100 + i) for i, length in enumerate(LENGTHS)]


def truth(policy: Policy, prompt: Tensor, scope: str) -> oracle.Gradients:
    with oracle.adapter_from(policy.model, oracle.first_adapted(len(prompt), scope)):
        return oracle.grpo_gradient(policy.model, prompt, responses(), ADVANTAGES)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_gradient_and_logprobs_are_those_of_the_masked_model(family: str, scope: str) -> None:
    policy, prompt = scoped_policy(family, scope), token_ids(37)
    with float64_arithmetic():
        report = update_step(policy, prompt, responses(), advantages=ADVANTAGES, chunk_tokens=9, block_tokens=5)
        found = oracle.take_gradients(policy.model)
        assert oracle.relative_l2(found, truth(policy, prompt, scope)) <= BOUND
        with oracle.adapter_from(policy.model, oracle.first_adapted(len(prompt), scope)), torch.no_grad():
            expected = [oracle.sequence_logprobs(policy.model, prompt, r) for r in responses()]
    for mine, theirs in zip(report.logprobs, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert report.counters["prompt_chunks_walked"] == 0
    assert "the prompt was not walked" in report.metrics["notes"][0]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("prompt_tokens", "options"),
    [
        (1, {"block_tokens": 4, "checkpoint_layers": True}),
        (2, {"block_tokens": 6}),
        (9, {"block_tokens": 1}),
        (10, {"block_tokens": 3, "checkpoint_layers": True}),
    ],
)
def test_boundaries_blocks_and_layer_checkpoints(scope: str, prompt_tokens: int, options: dict[str, Any]) -> None:
    policy, prompt = scoped_policy("qwen3_5", scope), token_ids(prompt_tokens)
    with float64_arithmetic():
        update_step(policy, prompt, responses(), advantages=ADVANTAGES, chunk_tokens=9, **options)
        found = oracle.take_gradients(policy.model)
        assert oracle.relative_l2(found, truth(policy, prompt, scope)) <= BOUND


def test_the_mask_matters() -> None:
    """The comparison above can fail: the three scopes are different policies."""
    policy, prompt = scoped_policy("qwen3_5", "replay"), token_ids(37)
    with float64_arithmetic():
        update_step(policy, prompt, responses(), advantages=ADVANTAGES, chunk_tokens=9)
        found = oracle.take_gradients(policy.model)
        assert oracle.relative_l2(found, truth(policy, prompt, "response")) > 0.01
        assert oracle.relative_l2(found, oracle.grpo_gradient(policy.model, prompt, responses(), ADVANTAGES)) > 0.01


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "lora",
    [
        {"r": 2, "use_dora": True},
        {"r": 2, "target_modules": ["q_proj", "v_proj"], "target_parameters": ["mlp.experts.down_proj"]},
        {"r": 2, "target_modules": ["q_proj", "lm_head"]},
    ],
    ids=("dora", "experts", "head"),
)
def test_every_kind_of_adapter_stays_out_of_the_prompt(lora: dict[str, Any], scope: str) -> None:
    """Kinds that no mask over lora_B describes: full and response_only agree, and scores are those of decoding."""
    policy = scoped_policy("qwen3_5_moe", scope, torch.float32, lora=lora)
    prompt = token_ids(21)
    state = capture_prompt(policy, prompt, chunk_tokens=8)
    with policy.model.disable_adapter(), torch.no_grad():
        base = Policy(policy.model.get_base_model())
        assert capture_prompt(base, prompt, chunk_tokens=8).checksum() == state.checksum()
    sampled = sample_responses(policy, state, 2, max_new_tokens=6, eos_token_ids=None, seed=0)
    for response, score in zip(sampled, score_responses(policy, state, sampled), strict=True):
        torch.testing.assert_close(response.logprobs, score, rtol=0, atol=2e-5)
    first = score_responses(policy, state, [sampled[0].ids[:1]])[0]
    with torch.no_grad(), policy.model.disable_adapter():
        base_first = oracle.sequence_logprobs(policy.model, prompt, sampled[0].ids[:1])
    assert bool(torch.isclose(first, base_first, atol=2e-5)) == (scope == "response")


@pytest.mark.parametrize("scope", SCOPES)
def test_the_state_never_goes_stale(scope: str) -> None:
    policy, prompt = scoped_policy("qwen3_5", scope, torch.float32), token_ids(21)
    state = capture_prompt(policy, prompt, chunk_tokens=8)
    version = policy.weight_version
    optimizer = torch.optim.SGD([p for _, p in policy.trainable_parameters()], lr=0.5)
    for step in range(3):
        update_step(policy, prompt, responses(), advantages=ADVANTAGES, state=state, optimizer=optimizer)
        assert policy.weight_version == version + step + 1
        reused = score_responses(policy, state, responses())
        fresh = score_responses(policy, capture_prompt(policy, prompt, chunk_tokens=8), responses())
        assert all(torch.equal(a, b) for a, b in zip(reused, fresh, strict=True))
    with torch.no_grad():  # but the base weights are what it was captured under
        policy.model.get_base_model().model.norm.weight.add_(0.1)
    with pytest.raises(StaleStateError):
        score_responses(policy, state, responses())


def test_the_reference_shares_the_prompt_and_moves_no_more_than_the_base() -> None:
    policy, prompt = scoped_policy("qwen3_5", "response", torch.float32), token_ids(21)
    state = capture_prompt(policy, prompt, chunk_tokens=8)
    shared = score_responses(policy.reference, state, responses())
    with torch.no_grad(), policy.model.disable_adapter():
        expected = [oracle.sequence_logprobs(policy.model, prompt, r) for r in responses()]
    for mine, theirs in zip(shared, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    objective = ObjectiveConfig(beta=0.1)
    given = update_step(policy, prompt, responses(), advantages=ADVANTAGES, objective=objective, state=state)
    alone = update_step(policy, prompt, responses(), advantages=ADVANTAGES, objective=objective, chunk_tokens=8)
    assert given.loss == alone.loss
    assert given.metrics["kl_mean"] > 0.0


def test_a_response_of_one_token_has_nothing_to_learn_under_response() -> None:
    prompt, one = token_ids(21), [token_ids(1), token_ids(1, 1)]
    policy = scoped_policy("llama", "response", torch.float32)
    assert update_step(policy, prompt, one, advantages=[1.0, -1.0]).metrics["grad_norm"] == 0.0
    policy = scoped_policy("llama", "replay", torch.float32)
    assert update_step(policy, prompt, one, advantages=[1.0, -1.0]).metrics["grad_norm"] > 0.0


def test_refusals() -> None:
    with pytest.raises(InvalidInputError, match="this model has none; give lora="):
        Policy(tiny_model("llama"), adapter_scope="response")
    model = load_policy(tiny_model("llama"), lora=2).model
    model.get_base_model().model.norm.weight.requires_grad_()
    with pytest.raises(InvalidInputError, match=r"norm\.weight outside the adapter is trainable"):
        Policy(model, adapter_scope="replay")
    with pytest.raises(InvalidInputError, match="kv_b_proj to rows of the prompt again"):
        load_policy(tiny_model("glm_moe_dsa"), lora={"r": 2, "target_modules": ["kv_b_proj"]}, adapter_scope="response")
    policy = scoped_policy("llama", "response", torch.float32)
    with pytest.raises(InvalidInputError, match=r"Tail\(chunks=1\) reaches nothing with adapter_scope='response'"):
        update_step(policy, token_ids(9), responses(), advantages=ADVANTAGES, gradient_scope=Tail(1))
