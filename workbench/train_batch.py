"""The batch of one training step: sampled groups, their rewards, and what the losses need of the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workbench.advantages import group_advantages, reward_notes, zero_variance_members
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError
from workbench.inputs import check_positions, check_prompt
from workbench.objective import StepDenominators
from workbench.policy import Policy
from workbench.rewards import GIVEN_TO_REWARDS, RewardTable, compute_rewards
from workbench.seeds import derived_seed
from workbench.tasks import check_tokenizer, encode_prompt, is_conversational, read_tasks
from workbench.types import Response

RewardFunctions = Callable[..., Any] | Sequence[Callable[..., Any]]


@dataclass(frozen=True)
class Task:
    """One prompt: its ids [P], its text or messages, and the columns that reward functions get."""

    index: int
    prompt_ids: Tensor
    prompt: Any
    columns: Mapping[str, Any]


@dataclass
class Group:
    """The responses of one prompt. old_logprobs: of the first update on the batch, set there.

    learns: False where no gradient can come from the group.
    """

    task: Task
    responses: list[Response]
    advantages: list[float]
    learns: bool = True
    old_logprobs: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Batch:
    """groups: of this process. rewards: of all members, group after group. notes: remarks in words.

    denominators: of the whole batch, dropped groups left out.
    """

    groups: tuple[Group, ...]
    rewards: RewardTable
    denominators: StepDenominators
    num_zero_variance: int
    notes: tuple[str, ...]


def read_checked_tasks(
    policy: Policy, tasks: Any, rewards: RewardFunctions, name: str = "tasks", *, max_new_tokens: int = 0
) -> list[Task]:
    """Every task encoded and checked, before any work: prompts, the columns that rewards need, the tokenizer.

    max_new_tokens: what must find room after every prompt.
    """
    check_tokenizer(policy.tokenizer, policy.vocab_size)
    tokenizer: Any = policy.tokenizer
    rows = read_tasks(tasks, needs=tuple(needed_columns(rewards)))
    columns = set(rows[0])
    if reserved := columns & GIVEN_TO_REWARDS:
        raise InvalidInputError(f"{name}: {min(reserved)!r} is a name that reward functions already get; rename it")
    checked = []
    for index, row in enumerate(rows):
        if set(row) != columns:
            differing = ", ".join(sorted(set(row) ^ columns))
            raise InvalidInputError(f"{name}, row {index}: columns differ from row 0's ({differing})")
        try:
            ids = check_prompt(policy, row.get("prompt_ids", encode_prompt(tokenizer, row["prompt"])))
            check_positions(policy, ids.numel() + max_new_tokens, "prompt and max_new_tokens")
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}, row {index}: {error}") from error
        others = {key: value for key, value in row.items() if key not in ("prompt", "prompt_ids")}
        checked.append(Task(index, ids, row["prompt"], others))
    return checked


def needed_columns(rewards: RewardFunctions) -> Iterator[str]:
    """Columns that a reward function's signature requires."""
    for function in rewards if isinstance(rewards, Sequence) else [rewards]:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # no callable, which compute_rewards reports; or one without a signature
            continue
        for parameter in parameters:
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.default is parameter.empty and parameter.name not in GIVEN_TO_REWARDS:
                yield parameter.name


def task_order(num_tasks: int, seed: int) -> Callable[[int], int]:
    """Task at each place of an endless stream: every epoch is a permutation of its own, from the seed alone."""
    epochs: dict[int, list[int]] = {}

    def task_at(place: int) -> int:
        epoch, offset = divmod(place, num_tasks)
        if epoch not in epochs:
            epochs.clear()
            draw = torch.Generator().manual_seed(derived_seed(seed, "order", epoch))
            epochs[epoch] = torch.randperm(num_tasks, generator=draw).tolist()
        return epochs[epoch][offset]

    return task_at


def reward_responses(
    policy: Policy,
    tasks: Sequence[Task],
    responses: Sequence[Sequence[Response]],
    rewards: RewardFunctions,
    weights: Sequence[float] | None,
    trainer_state: SimpleNamespace,
) -> RewardTable:
    """Rewards of all responses, group after group, in one call of every reward function."""
    tokenizer: Any = policy.tokenizer
    prompts, completions, ids = [], [], []
    columns: dict[str, list[Any]] = {name: [] for name in tasks[0].columns}
    for task, group in zip(tasks, responses, strict=True):
        for response in group:
            text = tokenizer.decode(response.ids, skip_special_tokens=True)
            prompts.append(task.prompt)
            completions.append([{"role": "assistant", "content": text}] if is_conversational(task.prompt) else text)
            ids.append(response.ids.tolist())
            for name, value in task.columns.items():
                columns[name].append(value)
    return compute_rewards(
        rewards,
        prompts=prompts,
        completions=completions,
        completion_ids=ids,
        columns=columns,
        weights=weights,
        trainer_state=trainer_state,
    )


def make_batch(
    tasks: Sequence[Task], responses: Sequence[list[Response]], table: RewardTable, objective: ObjectiveConfig
) -> Batch:
    """Advantages and denominators over the whole batch, before any backward."""
    group_ids = [place for place, group in enumerate(responses) for _ in group]
    totals = list(table.totals)
    advantages = group_advantages(
        totals, group_ids=group_ids, scale=objective.advantage_scale, eps=objective.advantage_eps
    ).tolist()
    flat = zero_variance_members(totals, group_ids=group_ids)
    groups, lengths, num_flat, place = [], [], 0, 0
    for task, group in zip(tasks, responses, strict=True):
        nothing_to_learn = flat[place]
        num_flat += nothing_to_learn
        dropped = nothing_to_learn and objective.drop_zero_variance_groups
        learns = not nothing_to_learn or (objective.beta > 0.0 and not dropped)
        groups.append(Group(task, group, advantages[place : place + len(group)], learns))
        if not dropped:
            lengths += [len(response) for response in group]
        place += len(group)
    notes = reward_notes(totals, group_ids=group_ids)
    num_skipped = sum(not group.learns for group in groups)
    if num_skipped:
        notes.append(f"{num_skipped} of {len(groups)} groups were not replayed: no gradient can come from them")
    return Batch(tuple(groups), table, StepDenominators.from_lengths(lengths), num_flat, tuple(notes))
