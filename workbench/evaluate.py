"""Held-out reward: sampled responses to tasks that training does not see."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from workbench.capture import capture_prompt
from workbench.comm import Mesh
from workbench.inputs import check_positive, check_ranks, entry_point
from workbench.policy import Policy
from workbench.progress import progress
from workbench.rewards import check_rewards
from workbench.rollout import sample_responses
from workbench.seeds import derived_seed
from workbench.train_batch import (
    RewardFunctions,
    Task,
    read_checked_tasks,
    reward_responses,
)
from workbench.train_metrics import reward_metrics
from workbench.train_ranks import TrainRanks, require_same_tasks
from workbench.types import Response


@entry_point
def evaluate(
    policy: Policy,
    tasks: Any,
    rewards: RewardFunctions,
    *,
    num_samples: int = 1,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    eos_token_ids: Sequence[int] | None = (),
    chunk_tokens: int = 1024,
    reward_weights: Sequence[float] | None = None,
    seed: int = 0,
    comm: Mesh | None = None,
) -> dict[str, Any]:
    """Rewards of `num_samples` sampled responses to every task: means and deviations by function, lengths, truncation.

    tasks, rewards, reward_weights: as in `train`. The same seed draws the same random numbers whatever the weights, so
    evaluations along a run compare like with like. Rewards get a trainer_state of step 0 of 0. comm: the mesh of ranks:
    data ranks divide the tasks, context ranks share each, and all get the result of one process. Raises
    InvalidInputError before any work.
    """
    check_rewards(rewards, reward_weights)
    check_ranks(policy, comm)
    ranks = TrainRanks(policy, comm)
    check_positive("max_new_tokens", max_new_tokens)
    checked = read_checked_tasks(policy, tasks, rewards, max_new_tokens=max_new_tokens)
    require_same_tasks(ranks, "evaluate's tasks", checked)
    drawn = (num_samples, max_new_tokens, temperature, eos_token_ids, chunk_tokens, reward_weights, seed)
    ranks.require_same("evaluate's options", drawn)
    ranks.require_same_weights()
    return evaluate_tasks(
        ranks,
        checked,
        rewards,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_token_ids=eos_token_ids,
        chunk_tokens=chunk_tokens,
        reward_weights=reward_weights,
        seed=seed,
        trainer_state=SimpleNamespace(global_step=0, max_steps=0),
    )


def evaluate_tasks(
    ranks: TrainRanks,
    tasks: Sequence[Task],
    rewards: RewardFunctions,
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Sequence[int] | None,
    chunk_tokens: int,
    reward_weights: Sequence[float] | None,
    seed: int,
    trainer_state: SimpleNamespace,
) -> dict[str, Any]:
    """`evaluate` of tasks that are checked already. trainer_state: what the rewards get."""
    check_positive("num_samples", num_samples)
    policy = ranks.policy
    own: dict[int, list[Response]] = {}
    for task in progress([t for t in tasks if ranks.takes(t.index, len(tasks))], "evaluate", unit="task"):
        ranks.stage("evaluate")
        state = capture_prompt(
            policy, task.prompt_ids, chunk_tokens=chunk_tokens, keep_boundaries=False, comm=ranks.of_a_prompt
        )
        own[task.index] = sample_responses(
            policy,
            state,
            num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            eos_token_ids=eos_token_ids,
            seed=derived_seed(seed, "evaluate", task.index),
        )
        del state
    responses = ranks.all_responses(own)
    table = ranks.rewards_of_first(
        lambda: reward_responses(policy, tasks, responses, rewards, reward_weights, trainer_state)
    )
    lengths = [len(response) for group in responses for response in group]
    return {
        **reward_metrics(table),
        "num_responses": len(lengths),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "truncated_fraction": sum(not r.finished for group in responses for r in group) / len(lengths),
    }
