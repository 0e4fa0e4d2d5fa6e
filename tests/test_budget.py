"""memory_budget: what it chooses fits, measured; what cannot fit is refused with the smallest budget that would do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.helpers import float64_arithmetic, lora_policy, tiny_policy, token_ids
from workbench import InvalidInputError, ObjectiveConfig, Policy, StepReport, capture_prompt, update_step
from workbench.budget import Schedule, fit_schedule, parse_bytes

PROMPT, RESPONSE, GROUP = 600, 70, 2


def step(policy: Policy, budget: int | str | None, **options: Any) -> StepReport:
    responses = [token_ids(RESPONSE, seed) for seed in range(1, GROUP + 1)]
    return update_step(policy, token_ids(PROMPT), responses, advantages=[1.0, -1.0], memory_budget=budget, **options)


def smallest(policy: Policy, **options: Any) -> int:
    """The smallest budget, as the refusal of an impossible one states it."""
    with pytest.raises(InvalidInputError, match="not enough for 600 prompt tokens") as refused:
        step(policy, 1000, **options)
    found = re.search(r"smallest that would do is ([\d,]+) bytes \(chunk_tokens=", str(refused.value))
    assert found
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_measured_peak_stays_below_every_budget(family: str) -> None:
    """From the smallest upwards. The plan is an upper bound, so a budget is never used up; a larger budget never
    chooses a slower schedule: the operations and segments of the plan fall."""
    policy = tiny_policy(family)
    least = smallest(policy)
    chosen = []
    for budget in (least, int(1.3 * least), 2 * least, 100 * least):
        report = step(policy, budget)
        assert report.memory["peak_bytes"] <= report.counters["planned_bytes"] <= budget
        assert report.counters["prompt_chunks_captured"] == -(-(PROMPT - 1) // report.counters["chunk_tokens"])
        assert "memory_budget chose chunk_tokens" in report.metrics["notes"][-1]
        chosen.append((report.counters["checkpoint_layers"], -report.counters["chunk_tokens"]))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0][0]
    assert not chosen[-1][0], "with memory to spare nothing is computed twice"
    assert len(set(chosen)) >= 3


@pytest.mark.parametrize(
    ("family", "scope"),
    [("gemma3", "full"), ("glm_moe_dsa", "full"), ("glm_moe_dsa", "response_only"), ("qwen3_5 LoRA", "full")],
)
def test_the_smallest_budget_is_kept_in_every_family(family: str, scope: str) -> None:
    """Over eight families, with and without LoRA, five budgets each: 0.45 to 0.68 of the plan (tiny models)."""
    name, _, lora = family.partition(" ")
    policy = lora_policy(name) if lora else tiny_policy(name)
    least = smallest(policy, gradient_scope=scope)
    report = step(policy, least, gradient_scope=scope)
    assert 0.3 * least <= report.memory["peak_bytes"] <= least


def test_the_gradient_does_not_depend_on_the_budget() -> None:
    policy = tiny_policy("qwen3", torch.float64)
    with float64_arithmetic():
        step(policy, smallest(policy))
        tight = {name: p.grad for name, p in policy.trainable_parameters()}
        policy.model.zero_grad(set_to_none=True)
        step(policy, "1GB")
    for name, parameter in policy.trainable_parameters():
        torch.testing.assert_close(parameter.grad, tight[name], rtol=1e-9, atol=1e-12)


def test_an_optimizers_own_state_counts() -> None:
    policy = tiny_policy("qwen3", hidden_size=256, intermediate_size=1024)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    weights = sum(p.nbytes for p in policy.model.parameters())
    least = smallest(policy, optimizer=optimizer)
    assert least >= 4 * weights, "gradient, two moments and a temporary"
    report = step(policy, least, optimizer=optimizer)
    assert 3 * weights <= report.memory["peak_bytes"] <= least


@pytest.mark.parametrize("given", [False, True], ids=["captured here", "given"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_references_own_capture_counts(family: str, given: bool) -> None:
    """Rows of a long prompt are most of the step's bytes: a given state spares the policy's, not the reference's.
    Peaks are 0.89 to 0.94 of the smallest budget here."""
    policy, prompt = lora_policy(family), token_ids(4000)
    state = capture_prompt(policy, prompt, chunk_tokens=256) if given else None
    responses = [token_ids(20, seed) for seed in (1, 2)]

    def measured(budget: int) -> StepReport:
        return update_step(
            policy, prompt, responses, advantages=[1.0, -1.0], memory_budget=budget, state=state,
            gradient_scope="response_only", objective=ObjectiveConfig(beta=0.1),
        )  # fmt: skip

    with pytest.raises(InvalidInputError, match="smallest that would do") as refused:
        measured(1000)
    least = int(re.findall(r"would do is ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    assert 0.5 * least < measured(least).memory["peak_bytes"] <= least


def smallest_kept(policy: Policy, beta: float = 0.0, **options: Any) -> int:
    """The smallest budget of a response-only step on 3,000 tokens, after a step under it has kept it."""

    def measured(budget: int) -> StepReport:
        return update_step(
            policy, token_ids(3000), [token_ids(20, seed) for seed in (1, 2)], advantages=[1.0, -1.0],
            memory_budget=budget, gradient_scope="response_only", objective=ObjectiveConfig(beta=beta), **options,
        )  # fmt: skip

    with pytest.raises(InvalidInputError, match="smallest that would do") as refused:
        measured(1000)
    least = int(re.findall(r"would do is ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    assert measured(least).memory["peak_bytes"] <= least
    return least


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])
def test_boundaries_that_the_scope_does_not_need_are_nobodys(family: str) -> None:
    """A state may keep more than a step plans for: only what the plan counts is there before the step."""
    policy = tiny_policy(family)
    kept, forgotten = (
        capture_prompt(policy, token_ids(3000), chunk_tokens=64, keep_boundaries=keep) for keep in (True, False)
    )
    assert kept.nbytes > forgotten.nbytes
    assert smallest_kept(policy, state=kept) == smallest_kept(policy, state=forgotten)


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_on_a_cpu_rows_on_the_host_are_counted(family: str) -> None:
    policy = lora_policy(family)
    state = capture_prompt(policy, token_ids(3000), chunk_tokens=256, placement="host")
    assert smallest_kept(policy, beta=0.1, state=state) > state.nbytes


def test_a_given_state_is_not_the_steps_own() -> None:
    policy = tiny_policy("qwen3")
    state = capture_prompt(policy, token_ids(PROMPT), chunk_tokens=64)
    least = smallest(policy, state=state)
    assert least < smallest(policy)
    report = step(policy, least, state=state)
    assert report.memory["peak_bytes"] <= least
    assert report.counters["chunk_tokens"] == 64


@pytest.mark.parametrize(
    ("option", "value"),
    [("chunk_tokens", 64), ("block_tokens", 64), ("checkpoint_layers", True), ("placement", "host")],
)
def test_what_a_budget_chooses_must_not_be_given(option: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"memory_budget chooses {option}"):
        step(tiny_policy("qwen3"), "1GB", **{option: value})


def test_the_least_modelled_time_wins() -> None:
    """A fast schedule is one with few segments and no second forward; between equals the larger pieces."""
    policy = tiny_policy("qwen3")
    questions: dict[str, Any] = {"response_tokens": 100, "group_size": 2, "gradient_scope": "full"}
    found = fit_schedule(policy, "1GB", prompt_tokens=1500, **questions)
    assert (found.chunk_tokens, found.block_tokens, found.checkpoint_layers) == (2048, 128, False)
    assert str(found) == "chunk_tokens=2048, block_tokens=128, without layer checkpoints, rows on the device"
    assert isinstance(found, Schedule)


@pytest.mark.parametrize(
    ("text", "value"), [(1024, 1024), ("40GB", 40 * 10**9), ("1.5 GiB", 3 * 2**29), ("12", 12), ("512 mib", 2**29)]
)
def test_budgets_in_words(text: int | str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", [0, -1, 1.5, True, "", "GB", "40 gigs", "-1GB", "0MB", "nan", [1]])
def test_budgets_that_are_none(text: Any) -> None:
    with pytest.raises(InvalidInputError, match="neither a number of bytes > 0 nor text such as '40GB'"):
        parse_bytes(text)
