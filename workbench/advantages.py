"""Rewards of a step: advantages within groups, and what there is to say about them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from workbench.errors import InvalidInputError
from workbench.types import is_number

Rewards = Sequence[float | None] | Tensor
GroupIds = Sequence[Hashable] | Tensor | None


def group_advantages(rewards: Rewards, *, group_ids: GroupIds = None, scale: str = "group", eps: float = 0.0) -> Tensor:
    """Advantage of each member: its reward minus its group's mean, divided by a standard deviation.

    rewards: one per member. None or NaN: the member is left out of all statistics and its advantage is 0.
    group_ids: one per member, equal within a group; members of a group need not be adjacent. None: one group.
    scale: "group" divides by the group's sample standard deviation (divisor n - 1), "batch" by that of all
        rewards, "none" by nothing: TRL's three `scale_rewards`, but for its 1e-4 added to the deviation (`eps` here).
    eps: added to the standard deviation.

    A group of fewer than two different valid rewards has advantages of exactly 0, whatever `scale` and `eps`.
    Returns a 1-D float32 tensor on the CPU; statistics are float64. Raises InvalidInputError.
    """
    if scale not in ("group", "batch", "none"):
        raise InvalidInputError(f"scale={scale!r} is not one of group, batch, none")
    if not (is_number(eps) and 0.0 <= eps < math.inf):
        raise InvalidInputError(f"eps={eps!r} must be finite and >= 0")
    values = _as_rewards(rewards)
    advantages = torch.zeros_like(values)
    for members in _members_by_group(values, group_ids).values():
        valid = [index for index in members if not values[index].isnan()]
        if _all_equal(values[valid]):
            continue
        centred = values[valid] - values[valid].mean()
        if scale != "none":
            spread_over = values[valid] if scale == "group" else _valid(values)
            centred = centred / (spread_over.std(correction=1) + eps)
        advantages[valid] = centred
    return advantages.to(torch.float32)


def zero_variance_members(rewards: Rewards, *, group_ids: GroupIds = None) -> tuple[bool, ...]:
    """For each member, whether its group has nothing to learn from: no two of its valid rewards differ.

    These are the members that `ObjectiveConfig.drop_zero_variance_groups` drops. A dropped member takes no part in
    the step at all: leave it out of the `StepDenominators` too, as if it had not been sampled.
    """
    values = _as_rewards(rewards)
    flags = [False] * len(values)
    for members in _members_by_group(values, group_ids).values():
        equal = _all_equal(_valid(values[members]))
        for index in members:
            flags[index] = equal
    return tuple(flags)


def reward_notes(rewards: Rewards, *, group_ids: GroupIds = None) -> list[str]:
    """In words, for the report: each group that has nothing to learn from, and why."""
    values = _as_rewards(rewards)
    notes = []
    excluded = values.isnan().nonzero().flatten().tolist()
    if excluded:
        named = ", ".join(map(str, excluded))
        notes.append(f"no reward for response {named}: left out of its group's statistics, advantage 0")
    for group, members in _members_by_group(values, group_ids).items():
        valid = _valid(values[members])
        if _all_equal(valid):
            why = f"all {len(valid)} valid rewards of group {group} are equal"
            if len(valid) < 2:
                why = f"group {group} has {'only one' if len(valid) else 'no'} valid reward"
            notes.append(f"{why}: nothing to learn from it")
    return notes


def valid_rewards(rewards: Rewards) -> Tensor:
    """The rewards that are numbers, 1-D float64: None and NaN are left out."""
    return _valid(_as_rewards(rewards))


def _as_rewards(rewards: Rewards) -> Tensor:
    """1-D float64 on the CPU, None as NaN."""
    if isinstance(rewards, Mapping | Set | str | bytes | Iterator):
        raise InvalidInputError(f"rewards must be a list or tensor, one per response, not a {type(rewards).__name__}")
    if isinstance(rewards, Tensor):
        if rewards.is_meta or rewards.is_complex():
            raise InvalidInputError(f"rewards must be real numbers; got {rewards.dtype} on {rewards.device}")
        values = rewards.detach().to("cpu", torch.float64)
    else:
        try:
            numbers = [math.nan if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"rewards must be numbers or None, one per response: {error}") from error
        values = torch.tensor(numbers, dtype=torch.float64)
    if values.dim() != 1:
        raise InvalidInputError(f"rewards must be 1-D, one per response; got shape {tuple(values.shape)}")
    infinite = values.to(torch.float32).isinf().nonzero()
    if len(infinite):
        index = int(infinite[0])
        raise InvalidInputError(
            f"reward of response {index} is {float(values[index])}, which float32 cannot hold; use None to exclude it"
        )
    return values


def _members_by_group(values: Tensor, group_ids: GroupIds) -> dict[Hashable, list[int]]:
    """Member indices of each group, groups in order of first appearance."""
    try:
        ids = [0] * len(values) if group_ids is None else _as_group_ids(group_ids)
        set(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"group_ids must be hashable ids, one per response: {error}") from None
    if len(ids) != len(values):
        raise InvalidInputError(f"{len(values)} rewards but {len(ids)} group_ids: give one per response")
    groups: dict[Hashable, list[int]] = {}
    for index, group in enumerate(ids):
        groups.setdefault(group, []).append(index)
    return groups


def _as_group_ids(group_ids: Sequence[Hashable] | Tensor) -> list[Hashable]:
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    # a tensor hashes by identity: every member would be a group of its own
    return [i.item() if isinstance(i, Tensor) else i for i in ids]


def _valid(values: Tensor) -> Tensor:
    return values[~values.isnan()]


def _all_equal(valid: Tensor) -> bool:
    """Whether no two values differ by more than float64 rounding, which dividing by their deviation would blow up."""
    if len(valid) < 2:
        return True
    rounding = 4 * torch.finfo(torch.float64).eps * valid.abs().max()
    return bool(valid.max() - valid.min() <= rounding)
