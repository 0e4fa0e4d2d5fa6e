"""The drift oracle against transformers' own forward with a stale cache, and the cases whose drift is known."""

from __future__ import annotations

from collections.abc import Sequence
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
    ResidentState,
    StaleStateError,
    capture_prompt,
    measure_drift,
    sample_responses,
    score_responses,
    update_step,
)

PROMPT = token_ids(45)
RESPONSES = [token_ids(7, seed=1), token_ids(3, seed=2), token_ids(5, seed=3)]
REWARDS = [0.0, 1.0, 0.5]
CHUNK = 16
FAMILIES = ("qwen3", "gemma3", "qwen3_5", "glm_moe_dsa")


def move_weights(policy: Policy, size: float = 0.02, seed: int = 9) -> None:
    """An update of the size that some optimizer steps would make, the same for every run."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=size)


def stale_state(policy: Policy, **options: Any) -> ResidentState:
    state = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK, **options)
    move_weights(policy)
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("current", [True, False], ids=["same version", "lr 0"])
def test_drift_of_the_same_weights_is_exactly_zero(family: str, current: bool) -> None:
    policy = lora_policy(family, trained=True)
    state = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK)
    if not current:
        optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=0.0)
        update_step(policy, PROMPT, RESPONSES, rewards=REWARDS, optimizer=optimizer, state=state)
    report = measure_drift(policy, state, PROMPT, RESPONSES, rewards=REWARDS)
    assert report.state_age == (0 if current else 1)
    assert report.max_abs_logprob_drift == report.mean_abs_logprob_drift == report.kl == report.kl_sampled == 0.0
    assert (report.ratio_min, report.ratio_mean, report.ratio_max) == (1.0, 1.0, 1.0)
    assert report.loss_drift_pct == report.gradient_relative_l2 == 0.0
    assert report.gradient_cosine == pytest.approx(1.0, abs=1e-12)
    assert [d.relative_l2 for d in report.state_distance] == [0.0] * len(report.state_distance) != []


def cached_logprobs(model: Any, cache: Any, prompt: Tensor, response: Tensor, by_token: bool) -> Tensor:
    """Log-softmax rows [R, V] of a response by transformers' own forward on its own cache of prompt[:-1]."""
    inputs = torch.cat([prompt[-1:], response[:-1]])
    pieces = inputs.split(1 if by_token else len(inputs))
    logits = [model(input_ids=piece[None], cache=cache, use_cache=True).logits[0] for piece in pieces]
    return torch.log_softmax(torch.cat(logits), dim=-1)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_reused_and_fresh_are_those_of_transformers_with_its_own_cache(family: str) -> None:
    """transformers fills its cache under the old weights and scores under the new ones: staleness by its own means."""
    policy = tiny_policy(family, torch.float64)
    model, by_token = policy.model, family == "qwen3_5"  # its stock recurrence continues a cache by single tokens only
    with float64_arithmetic(), torch.no_grad():
        state = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK)
        caches = [model(input_ids=PROMPT[None, :-1], use_cache=True).cache for _ in RESPONSES]
        move_weights(policy, 0.01)
        report = measure_drift(policy, state, PROMPT, RESPONSES, gradient=False)
        for index, response in enumerate(RESPONSES):
            reused = cached_logprobs(model, caches[index], PROMPT, response, by_token)
            fresh = oracle_rows(model, response)
            drift = (reused - fresh).gather(-1, response[:, None])[:, 0]
            assert drift.abs().mean() > 1e-3
            # Measured: at most 7.1e-15 on x86-64; the bound leaves room for other kernels' order of summation.
            torch.testing.assert_close(report.logprob_drift[index], drift, rtol=0, atol=1e-11)
            kl = (reused.exp() * (reused - fresh)).sum(dim=-1)
            torch.testing.assert_close(report.kl_by_token[index], kl, rtol=0, atol=1e-11)


def oracle_rows(model: Any, response: Tensor) -> Tensor:
    logits = model(input_ids=torch.cat([PROMPT, response])[None], use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


def take(policy: Policy) -> Tensor:
    return torch.cat([g.reshape(-1) for g in oracle.take_gradients(policy.model).values()]).double()


@pytest.mark.parametrize("given_old", [False, True])
def test_loss_and_gradient_are_those_of_the_steps_themselves(given_old: bool) -> None:
    policy = lora_policy("qwen3_5", trained=True)
    objective = ObjectiveConfig(loss="gspo", temperature=0.7, max_grad_norm=1e-9)  # clipping is the optimizer's
    state = stale_state(policy)
    fresh = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK)
    reused_scores = score_responses(policy, state, RESPONSES, temperature=0.7, allow_stale=True)
    old = [scores - 0.1 for scores in reused_scores] if given_old else None
    report = measure_drift(
        policy, state, PROMPT, RESPONSES, rewards=REWARDS, objective=objective, old_logprobs=old, fresh=fresh
    )
    losses, gradients = [], []
    for either in (state, fresh):
        step = update_step(
            policy, PROMPT, RESPONSES, rewards=REWARDS, state=either, allow_stale=True, gradient_scope="response_only",
            objective=ObjectiveConfig(loss="gspo", temperature=0.7), old_logprobs=old or reused_scores,
        )  # fmt: skip
        losses.append(step.loss)
        gradients.append(take(policy))
    reused, right = gradients
    assert (report.loss_reused, report.loss_fresh) == tuple(losses)
    assert report.loss_drift_pct == pytest.approx(100 * abs(losses[0] - losses[1]) / abs(losses[1]))
    # float64 sums in another order.
    assert report.gradient_cosine == pytest.approx(float(reused @ right / (reused.norm() * right.norm())), rel=1e-10)
    assert report.gradient_norm_ratio == pytest.approx(float(reused.norm() / right.norm()), rel=1e-10)
    assert report.gradient_relative_l2 == pytest.approx(float((reused - right).norm() / right.norm()), rel=1e-10)
    assert report.gradient_cosine < 0.999


def test_figures_by_response_position_and_kind() -> None:
    policy = tiny_policy("qwen3_5")
    state = stale_state(policy)
    fresh = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK)
    responses = [*RESPONSES, []]
    report = measure_drift(policy, state, PROMPT, responses, gradient=False, fresh=fresh, block_tokens=2)
    pairs = zip(
        score_responses(policy, state, responses, allow_stale=True),
        score_responses(policy, fresh, responses),
        strict=True,
    )
    drift = [reused - current for reused, current in pairs]
    every = torch.cat(drift).double()
    # Blocks of 2 tokens against one block: float32 rounding, measured 2e-6.
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(report.logprob_drift, drift, strict=True))
    assert report.num_tokens == 15
    assert report.mean_abs_logprob_drift == pytest.approx(float(every.abs().mean()), rel=1e-3)
    assert report.max_abs_logprob_drift == pytest.approx(float(every.abs().max()), rel=1e-3)
    assert report.ratio_mean == pytest.approx(float(torch.exp(-every).mean()), rel=1e-3)
    assert report.kl_sampled == pytest.approx(float((torch.expm1(-every) + every).mean()), rel=1e-2)
    assert report.mean_by_response[3] == 0.0
    assert report.mean_by_position[6] == pytest.approx(float(drift[0][6].abs()), rel=1e-3)
    assert len(report.mean_by_position) == 7
    assert report.gradient_cosine is report.loss_reused is report.loss_drift_pct is None
    found = {(d.layer, d.kind, d.name): d.relative_l2 for d in report.state_distance}
    assert {(0, "carry", "recurrent"), (0, "carry", "conv"), (2, "rows", "keys"), (2, "rows", "values")} <= set(found)
    keys = [torch.cat([page.layers[2]["keys"] for page in s.pages], dim=-2).double() for s in (state, fresh)]
    assert found[2, "rows", "keys"] == pytest.approx(float((keys[0] - keys[1]).norm() / keys[1].norm()), rel=1e-9)
    assert report.distance_by_kind() == {
        kind: max(v for (_, k, _), v in found.items() if k == kind) for kind in ("rows", "carry")
    }


def test_nothing_is_left_behind_and_the_cost_is_stated() -> None:
    policy = lora_policy("qwen3_5", trained=True)
    state = stale_state(policy)
    update_step(policy, PROMPT, RESPONSES, rewards=REWARDS)  # leaves gradients
    before, checksum = Snapshot(policy.model), state.checksum()
    report = measure_drift(policy, state, PROMPT, RESPONSES, rewards=REWARDS)
    assert before.differences() == []
    assert state.checksum() == checksum
    assert set(report.seconds) == {"capture", "score", "gradient", "state_distance", "total"}
    assert report.seconds["total"] == pytest.approx(sum(v for k, v in report.seconds.items() if k != "total"))
    assert report.memory["peak_bytes"] > state.nbytes  # a fresh capture was alive


def test_an_error_in_the_middle_puts_gradients_back(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = lora_policy("qwen3")
    state = stale_state(policy)
    update_step(policy, PROMPT, RESPONSES, rewards=REWARDS)
    before = Snapshot(policy.model)
    calls = []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return update_step(*args, **options)

    monkeypatch.setattr("workbench.drift.update_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_drift(policy, state, PROMPT, RESPONSES)
    assert before.differences() == []


def test_a_zero_gradient_has_no_angle() -> None:
    policy = lora_policy("qwen3")
    report = measure_drift(policy, stale_state(policy), PROMPT, RESPONSES, advantages=[0.0] * 3)
    assert report.loss_drift_pct == 0.0
    assert report.gradient_cosine != report.gradient_cosine  # NaN


def test_every_token_of_a_host_state_is_compared() -> None:
    policy = lora_policy("qwen3_5", trained=True)
    on_device = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK)
    on_host = capture_prompt(policy, PROMPT, chunk_tokens=CHUNK, placement="host")
    move_weights(policy)
    a, b = (measure_drift(policy, state, PROMPT, RESPONSES) for state in (on_device, on_host))
    assert (a.mean_abs_logprob_drift, a.state_distance) == (b.mean_abs_logprob_drift, b.state_distance)


def wrong(case: str, policy: Policy, state: ResidentState) -> Sequence[Any]:
    other = tiny_policy("qwen3")
    cases: dict[str, Sequence[Any]] = {
        "another prompt": ((token_ids(45, seed=4), RESPONSES), {}),
        "chunk_tokens=8": ((PROMPT, RESPONSES), {"chunk_tokens": 8}),
        "exactly one of rewards": ((PROMPT, RESPONSES), {"rewards": REWARDS, "advantages": REWARDS}),
        "3 responses but 2": ((PROMPT, RESPONSES), {"rewards": [1.0, 0.0]}),
        "another policy": ((PROMPT, RESPONSES), {"fresh": capture_prompt(other, PROMPT, chunk_tokens=CHUNK)}),
        "same chunk_tokens": ((PROMPT, RESPONSES), {"fresh": capture_prompt(policy, PROMPT, chunk_tokens=8)}),
        "responses is empty": ((PROMPT, []), {}),
    }
    return cases[case]


@pytest.mark.parametrize(
    "message",
    ["another prompt", "chunk_tokens=8", "exactly one of rewards", "3 responses but 2", "another policy",
     "same chunk_tokens", "responses is empty"],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(message: str) -> None:
    policy = tiny_policy("qwen3")
    state = stale_state(policy)
    arguments, options = wrong(message, policy, state)
    with pytest.raises(InvalidInputError, match=message):
        measure_drift(policy, state, *arguments, **options)


def test_a_stale_state_is_no_fresh_one_and_takes_no_full_scope() -> None:
    policy = tiny_policy("qwen3")
    state = stale_state(policy)
    with pytest.raises(StaleStateError, match="fresh"):
        measure_drift(policy, state, PROMPT, RESPONSES, fresh=state)
    with pytest.raises(StaleStateError, match=r"captured at weight version 0, the policy is at 1.*no other scope"):
        update_step(policy, PROMPT, RESPONSES, rewards=REWARDS, state=state, gradient_scope="full", allow_stale=True)


def test_samples_of_the_reused_state_make_the_sampled_kl_meet_the_exact_one() -> None:
    """k3 at samples of the reused policy is unbiased: over many samples its mean is the exact KL, position by position.

    The k3 terms of 150 first tokens have a measured standard error of 12 % of the mean; the bound is 4 of those.
    """
    policy = tiny_policy("qwen3")
    state = stale_state(policy)
    responses = sample_responses(policy, state, 150, max_new_tokens=1, eos_token_ids=None, seed=0, allow_stale=True)
    report = measure_drift(policy, state, PROMPT, responses, gradient=False)
    drift = torch.cat(report.logprob_drift).double()
    terms = torch.expm1(-drift) + drift
    error = float(terms.std() / terms.numel() ** 0.5)
    assert report.kl > 5 * error  # or the comparison says nothing
    assert abs(report.kl_sampled - report.kl) < 4 * error
