"""Reward functions as TRL calls them: totals, exclusion, async, and one clear error for each bad result."""

from __future__ import annotations

import asyncio
import functools
import math
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.errors import InvalidInputError
from workbench.rewards import compute_rewards, exact_answer

BATCH: dict[str, Any] = {
    "prompts": ["p", "p", "q"],
    "completions": ["red .", "blue", "is green"],
    "completion_ids": [[1, 2], [3], torch.tensor([4, 5])],
    "columns": {"answer": ["red", "red", "green"]},
}


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def gives(value: Any) -> Callable[..., Any]:
    def constant(**_: Any) -> Any:
        return value

    return constant


def test_functions_get_what_trl_gives_them():
    seen: dict[str, Any] = {}

    def spy(prompts: list, completions: list, completion_ids: list, answer: list, **kwargs: Any) -> list[int]:
        seen.update(kwargs, prompts=prompts, ids=completion_ids, answer=answer)
        kwargs["log_metric"]("length", 2.5)
        kwargs["log_extra"]("note", ["a", "b", "c"])
        return [1, 2, 3]

    table = compute_rewards(spy, **BATCH, trainer_state="state")
    assert table.totals == (1.0, 2.0, 3.0)
    assert seen["ids"] == [[1, 2], [3], [4, 5]]
    assert seen["answer"] == BATCH["columns"]["answer"]
    assert seen["trainer_state"] == "state"
    assert table.logged == {"length": (2.5,), "note": ("a", "b", "c")}


def test_totals_are_weighted_sums_of_what_was_given():
    some = gives([1.0, None, math.nan])
    table = compute_rewards([length, some], **BATCH, weights=[0.5, 2.0])
    assert table.totals == (0.5 * 5 + 2.0, 0.5 * 4, 0.5 * 8)
    assert table.by_function == {"length": (5.0, 4.0, 8.0), "constant": (1.0, None, None)}
    assert table.excluded == ()


def test_a_completion_without_any_reward_is_left_out_and_named():
    table = compute_rewards([gives([1.0, None, 0.0]), gives([None, math.nan, 2.0])], **BATCH)
    assert table.totals == (1.0, None, 2.0)
    assert len(table.excluded) == 1
    assert "completion 1" in table.excluded[0]
    assert "constant and constant_1 gave None or NaN" in table.excluded[0]


def test_totals_are_those_of_trl():
    """The formula of GRPOTrainer: nansum over functions of reward x weight, NaN where all are NaN."""
    first, second = [0.25, None, math.nan], [math.nan, 4.0, None]
    matrix = torch.tensor([[0.25, math.nan], [math.nan, 4.0], [math.nan, math.nan]])
    expected = (matrix * torch.tensor([2.0, 0.5])).nansum(dim=1)
    table = compute_rewards([gives(first), gives(second)], **BATCH, weights=[2.0, 0.5])
    assert table.totals[:2] == tuple(expected[:2].tolist())
    assert table.totals[2] is None


def test_coroutines_are_awaited_together():
    """Each waits for the other: one after the other they would never end."""
    one, two = asyncio.Event(), asyncio.Event()

    async def first(**_: Any) -> list[float]:
        one.set()
        await asyncio.wait_for(two.wait(), 5)
        return [1.0, 1.0, 1.0]

    async def second(**_: Any) -> list[float]:
        two.set()
        await asyncio.wait_for(one.wait(), 5)
        return [2.0, 2.0, 2.0]

    table = compute_rewards([first, length, second], **BATCH)
    assert list(table.by_function) == ["first", "length", "second"]
    assert table.totals == (8.0, 7.0, 11.0)

    async def from_a_notebook() -> Any:  # where a loop is running already
        return compute_rewards(asynchronous, **BATCH)

    async def asynchronous(**_: Any) -> list[float]:
        return [3.0, 3.0, 3.0]

    assert asyncio.run(from_a_notebook()).totals == (3.0, 3.0, 3.0)


def test_tensors_numpy_and_booleans_count_as_rewards():
    assert compute_rewards(gives(torch.tensor([1, 2, 3])), **BATCH).totals == (1.0, 2.0, 3.0)
    assert compute_rewards(gives(torch.arange(3.0).numpy()), **BATCH).totals == (0.0, 1.0, 2.0)
    assert compute_rewards(gives([True, False, torch.tensor(0.5)]), **BATCH).totals == (1.0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 2.0], "constant returned 2 rewards for 3 completions"),
        (1.0, "constant returned a float"),
        (None, "constant returned a NoneType"),
        ("abc", "constant returned a str"),
        ({"a": 1, "b": 2, "c": 3}, "constant returned a dict"),
        (["1", 2, 3], "constant, completion 0: a str"),
        ([1, 2, [3]], "constant, completion 2: a list"),
        ([1, math.inf, 2], "constant, completion 1: the reward is inf"),
        ([1, 2, 1j], "constant, completion 2: a complex"),
        (torch.zeros(3, 2), "constant, completion 0: a list"),
        ([torch.zeros(2), 1, 2], r"constant, completion 0: a Tensor \(shape \(2,\)\)"),
    ],
)
def test_a_bad_result_is_named(returned: Any, message: str):
    with pytest.raises(InvalidInputError, match=message):
        compute_rewards(gives(returned), **BATCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"functions": []}, "at least one"),
        ({"functions": ["length"]}, "entry 0 is a str"),
        ({"functions": torch.nn.Linear(1, 1)}, "wrap a reward model"),
        ({"weights": [1.0, 2.0]}, "2 for 1 reward functions"),
        ({"weights": [math.nan]}, "no finite number"),
        ({"weights": ["1"]}, "no finite number"),
        ({"prompts": ["p"]}, "prompts must have one entry per completion: 3, not 1"),
        ({"completion_ids": [[1]]}, "completion_ids must"),
        ({"columns": {"answer": "red"}}, "answer must have one entry"),
        ({"columns": {"prompts": ["", "", ""]}}, "'prompts' is a name"),
    ],
)
def test_bad_arguments_stop_before_any_call(change: dict[str, Any], message: str):
    def never(**_: Any) -> None:
        raise AssertionError("called")

    arguments = {"functions": never} | BATCH | change
    with pytest.raises(InvalidInputError, match=message):
        compute_rewards(**arguments)


def test_an_exception_keeps_its_traceback_and_names_the_function():
    def broken(**_: Any) -> list[float]:
        raise KeyError("inside")

    async def broken_later(**_: Any) -> list[float]:
        raise KeyError("inside")

    async def waits(**_: Any) -> list[float]:
        return [0.0] * 3

    for functions in (broken, [broken_later], [waits, broken]):  # the last: no coroutine is left unawaited
        with pytest.raises(KeyError) as caught:
            compute_rewards(functions, **BATCH)
        text = "".join(traceback.format_exception(caught.value))
        assert "raised in the reward function broken" in text
        assert "in broken" in text


def test_names():
    table = compute_rewards([length, length, functools.partial(length)], **BATCH)
    assert list(table.by_function) == ["length", "length_1", "length_2"]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("red", "red", 1.0),
        ("  Red.\nand more", "red", 1.0),
        ("reddish", "red", 0.0),
        ("blue red", "red", 0.0),
        ("", "red", 0.0),
        ("the code of fish is red .", "the code of fish is red.", 1.0),
        ("the code of fish is", "the code of fish is red", 0.0),
        ([{"role": "assistant", "content": "red"}], "red", 1.0),
        ([], "red", 0.0),
        ("1,2 , 3", "1, 2, 3", 1.0),
    ],
)
def test_exact_answer(completion: Any, answer: str, reward: float):
    assert exact_answer([completion], answer=[answer]) == [reward]


def test_exact_answer_needs_answers():
    with pytest.raises(InvalidInputError, match="completion 1 has no answer"):
        exact_answer(["red", "red"], answer=["red", " "])
    with pytest.raises(InvalidInputError, match="2 completions and 1 answers"):
        exact_answer(["red", "red"], answer=["red"])
