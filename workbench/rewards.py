"""Rewards by TRL's reward-function signature: functions written for TRL's GRPOTrainer run unchanged.

A function is called as `f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, **columns)`
with lists of one entry per completion, and returns one number or None for each. Coroutine functions are awaited
together. The total is that of TRL: the weighted sum of what is neither None nor NaN.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn

from workbench.errors import InvalidInputError
from workbench.types import is_number

RewardFunction = Callable[..., Any]
Rewards = tuple[float | None, ...]
GIVEN_TO_REWARDS = frozenset(("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"))


@dataclass(frozen=True)
class RewardTable:
    """Rewards of a batch of completions.

    totals: one weighted sum per completion, None where no function gave a number (None or NaN): such a member takes no
    part in its group. by_function: what each function gave, NaN read as None. excluded: in words, which completions
    have no total and why. logged: values that functions handed to `log_metric` and `log_extra`, by name, in order.
    """

    totals: Rewards
    by_function: Mapping[str, Rewards]
    excluded: tuple[str, ...]
    logged: Mapping[str, tuple[Any, ...]]


def compute_rewards(
    functions: RewardFunction | Sequence[RewardFunction],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    weights: Sequence[float] | None = None,
    trainer_state: Any = None,
) -> RewardTable:
    """Call every reward function once and add up.

    prompts, completions, completion_ids and each column: one entry per completion. Prompts and completions are texts,
    or lists of messages where the prompt is one. weights: one per function, 1 by default.

    Raises InvalidInputError for lists of unequal length, a wrong weight, and a function that returns anything but one
    finite number, NaN or None per completion; it names function and index. An exception inside a function passes
    through with its traceback and a note that names the function.
    """
    named = _named(functions)
    scale = _checked_weights(weights, list(named))
    _check_lists(prompts, completions, completion_ids, columns)
    logged: dict[str, list[Any]] = {}
    arguments = {key: list(column) for key, column in columns.items()} | {
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [_as_list(ids) for ids in completion_ids],
        "trainer_state": trainer_state,
        "log_metric": lambda name, value: logged.setdefault(name, []).append(value),
        "log_extra": lambda name, values: logged.setdefault(name, []).extend(values),
    }
    by_function = {
        name: _checked_rewards(name, given, len(completions)) for name, given in _call_all(named, arguments).items()
    }
    totals = tuple(_total(row, scale) for row in zip(*by_function.values(), strict=True))
    told = {name: tuple(map(_scalar, values)) for name, values in logged.items()}
    return RewardTable(totals, by_function, _excluded(totals, list(named)), told)


def exact_answer(completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 if a completion begins with its answer, else 0.0: a reward function over the column `answer`.

    The rule: both are cut into words and single marks (white space and case do not count), and the answer's pieces are
    the completion's first ones. What follows does not count; an answer that comes later, as one of a list of guesses,
    does not either. Of a list of messages the last one's content is read.
    """
    if len(completions) != len(answer):
        raise InvalidInputError(f"exact_answer: {len(completions)} completions and {len(answer)} answers")
    pairs = zip(completions, answer, strict=True)
    return [_begins_with(text_of(text), right, index) for index, (text, right) in enumerate(pairs)]


def text_of(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"]) if completion else ""


def _begins_with(text: str, answer: str, index: int) -> float:
    if not isinstance(answer, str) or not (right := _pieces(answer)):
        raise InvalidInputError(f"exact_answer: completion {index} has no answer to compare with: {answer!r}")
    return float(_pieces(text)[: len(right)] == right)


def _pieces(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


# --- checks ------------------------------------------------------------------------------------------------------


def check_rewards(functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None) -> list[str]:
    """Refuse what `compute_rewards` would refuse before it calls any function; their names."""
    names = list(_named(functions))
    _checked_weights(weights, names)
    return names


def _named(functions: RewardFunction | Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    """Functions by name, in order; a name that comes twice gets a number."""
    several: list[Any] = list(functions) if isinstance(functions, Sequence) else [functions]
    if not several:
        raise InvalidInputError("rewards: give at least one reward function")
    named: dict[str, RewardFunction] = {}
    for index, function in enumerate(several):
        if isinstance(function, nn.Module | str) or not callable(function):
            raise InvalidInputError(
                f"rewards: entry {index} is a {type(function).__name__}, not a reward function; wrap a reward model in "
                "a function of (prompts, completions, **columns) that returns one number per completion"
            )
        name = getattr(function, "__name__", None) or type(getattr(function, "func", function)).__name__
        if hasattr(function, "func"):  # functools.partial
            name = getattr(function.func, "__name__", name)
        named[name if name not in named else f"{name}_{index}"] = function
    return named


def _checked_weights(weights: Sequence[float] | None, names: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    if not isinstance(weights, Sequence):
        raise InvalidInputError(f"weights: {weights!r} is no list of one number per reward function")
    if len(weights) != len(names):
        raise InvalidInputError(f"weights: {len(weights)} for {len(names)} reward functions ({', '.join(names)})")
    for name, weight in zip(names, weights, strict=True):
        if not is_number(weight) or not math.isfinite(weight):
            raise InvalidInputError(f"weights: {weight!r} for {name} is no finite number")
    return [float(weight) for weight in weights]


def _check_lists(prompts: Any, completions: Any, completion_ids: Any, columns: Mapping[str, Any]) -> None:
    for name in columns:
        if name in GIVEN_TO_REWARDS:
            raise InvalidInputError(f"columns: {name!r} is a name that reward functions already get")
    for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
        if isinstance(values, str) or len(values) != len(completions):
            raise InvalidInputError(
                f"{name} must have one entry per completion: {len(completions)}, not {len(values)} "
                f"in a {type(values).__name__}"
            )


def _checked_rewards(name: str, given: Any, num_completions: int) -> Rewards:
    if isinstance(given, Tensor) or hasattr(given, "tolist"):  # a tensor or array
        given = given.tolist()
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise InvalidInputError(
            f"reward function {name} returned a {type(given).__name__}, not a list of {num_completions} rewards"
        )
    if len(given) != num_completions:
        raise InvalidInputError(
            f"reward function {name} returned {len(given)} rewards for {num_completions} completions"
        )
    return tuple(_checked_reward(name, index, reward) for index, reward in enumerate(given))


def _scalar(value: Any) -> Any:
    """A scalar of torch or numpy as Python's."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _checked_reward(name: str, index: int, reward: Any) -> float | None:
    reward = _scalar(reward)
    if reward is None:
        return None
    if not isinstance(reward, Real):  # bool is one: a test that passed or not
        what = f"shape {tuple(reward.shape)}" if isinstance(reward, Tensor) else repr(reward)[:80]
        raise InvalidInputError(
            f"reward function {name}, completion {index}: a {type(reward).__name__} ({what}) is no reward; "
            "give a number, or None to leave the completion out"
        )
    value = float(reward)
    if math.isinf(value):
        raise InvalidInputError(f"reward function {name}, completion {index}: the reward is {value}")
    return None if math.isnan(value) else value


def _excluded(totals: Rewards, names: list[str]) -> tuple[str, ...]:
    givers = " and ".join(names)
    return tuple(
        f"completion {index}: no reward, {givers} gave None or NaN; it takes no part in its group"
        for index, total in enumerate(totals)
        if total is None
    )


def _total(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    terms = [weight * reward for weight, reward in zip(weights, row, strict=True) if reward is not None]
    return sum(terms) if terms else None


def _as_list(ids: Any) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


# --- calls -------------------------------------------------------------------------------------------------------


def _call_all(named: Mapping[str, RewardFunction], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What each function returns, in order. Functions are called one by one, coroutines then awaited together."""
    results: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    try:
        for name, function in named.items():
            with _naming(name):
                results[name] = function(**arguments)
            if inspect.isawaitable(results[name]):
                waiting[name] = results[name]
        return results | (_run(_gather(waiting)) if waiting else {})
    finally:
        for coroutine in waiting.values():  # left unawaited by an error in a function after it
            if inspect.iscoroutine(coroutine):
                coroutine.close()


class _naming:
    """Adds the function's name to an exception that passes through; the traceback stays."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            error.add_note(f"raised in the reward function {self._name}")


async def _gather(waiting: Mapping[str, Any]) -> dict[str, Any]:
    async def named(name: str, awaitable: Any) -> Any:
        with _naming(name):
            return await awaitable

    values = await asyncio.gather(*(named(name, awaitable) for name, awaitable in waiting.items()))
    return dict(zip(waiting, values, strict=True))


def _run(coroutine: Any) -> Any:
    """Run to the end also where a loop is running already, as in a notebook: in a thread with its own loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
