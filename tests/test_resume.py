"""What a run goes on with: everything that was trained, in a new process, and as the same run or not at all."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.test_train import SMALL, TASKS, config_of, in_order, letters, policy_of, same_weights
from workbench import InvalidInputError, ObjectiveConfig, Policy, train
from workbench.canonical import canonical
from workbench.comm import digest
from workbench.model_sources import ByteTokenizer, tiny_model

STEPS = 4


class StoppedError(Exception):
    """What ends a run between two checkpoints here."""


def stopping(reward: Callable[..., list[float]], at: int) -> Callable[..., list[float]]:
    """The reward function, under its own name, until step `at`."""

    def stopped(trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step == at:
            raise StoppedError
        return reward(**columns)

    stopped.__name__ = reward.__name__
    return stopped


def whole_and_resumed(make: Callable[[], Policy], folder: Path, **options: Any) -> tuple[Policy, Policy]:
    """The same run, undisturbed and stopped in the middle."""
    options = {"num_steps": STEPS, "checkpoint_every": 1} | options
    whole, resumed = make(), make()
    train(whole, TASKS, in_order, config=config_of(**options, output_dir=folder / "whole"))
    with pytest.raises(StoppedError):
        train(make(), TASKS, stopping(in_order, 2), config=config_of(**options, output_dir=folder / "cut"))
    train(resumed, TASKS, in_order, config=config_of(**options, output_dir=folder / "cut", resume=True))
    return whole, resumed


# ---------------------------------------------------------------- everything that was trained


def with_a_trained_norm() -> Policy:
    policy = policy_of(lora=2)
    policy.model.get_base_model().model.norm.weight.requires_grad_(True)
    return policy


def with_float32_decays() -> Policy:
    policy = policy_of("qwen3_5", dtype=torch.bfloat16)
    for name, parameter in policy.model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    policy = Policy(policy.model)
    policy.tokenizer = ByteTokenizer()
    return policy


@pytest.mark.parametrize("make", [with_a_trained_norm, with_float32_decays])
def test_nothing_that_was_trained_is_lost(make: Callable[[], Policy], tmp_path: Path) -> None:
    """Weights beside the adapter, and weights that are wider than the model's dtype."""
    whole, resumed = whole_and_resumed(make, tmp_path)
    assert same_weights(whole, resumed)
    assert not same_weights(whole, make()), "and it was trained"


def test_settings_that_are_infinite_come_back(tmp_path: Path) -> None:
    objective = ObjectiveConfig(loss="cispo", clip_high=math.inf)
    whole, resumed = whole_and_resumed(policy_of, tmp_path, objective=objective, max_grad_norm=math.inf)
    assert same_weights(whole, resumed)


# ---------------------------------------------------------------- a new process


def test_another_process_goes_on(tmp_path: Path) -> None:
    """Sets of strings, as PEFT keeps target_modules, print in another order in every process."""

    def run(folder: str, dies_at: int, hash_seed: str) -> int:
        command = [sys.executable, "-m", "tests.resume_child", str(tmp_path / folder), str(dies_at)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()[-2000:]
        return done.returncode

    assert run("cut", 2, "1") == -signal.SIGKILL
    assert run("cut", -1, "2") == 0
    assert run("whole", -1, "3") == 0
    last = Path("checkpoints", "step-00000003", "adapter_model.safetensors")
    assert (tmp_path / "cut" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


class Plain:
    """No repr of its own."""


def test_one_text_for_one_value() -> None:
    assert canonical({"b": {3, 1}, "a": (1, None)}) == canonical({"a": [1, None], "b": {1, 3}})
    long = np.arange(5000)
    changed = long.copy()
    changed[2500] = 0
    assert canonical(long) != canonical(changed), "numpy's repr leaves the middle out"
    assert canonical(torch.tensor([1.0])) != canonical(torch.tensor([1]))
    assert canonical([Plain()]) == canonical([Plain()])
    assert digest([{"a"}, torch.tensor([1, 2])]) == digest([{"a"}, torch.tensor([1, 2])]) != digest([{"b"}])


# ---------------------------------------------------------------- as the same run


def with_reference(shift: float) -> Policy:
    frozen = tiny_model("llama", **SMALL)
    with torch.no_grad():
        frozen.model.norm.weight.add_(shift)
    return Policy(tiny_model("llama", **SMALL), ByteTokenizer(), reference=frozen)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rewards": letters}, r"differs in rewards \(\['in_order'\], now \['letters'\]\)"),
        ({"eval_tasks": TASKS[3:]}, "differs in eval_tasks"),
        ({"shift": 0.5}, r"differs in reference\.parameters"),
    ],
    ids=["rewards", "eval_tasks", "reference"],
)
def test_it_is_the_same_run_or_none(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_steps": 3, "eval_every": 2, "checkpoint_every": 1, "output_dir": tmp_path / "run",
        "objective": ObjectiveConfig(beta=0.1),
    }  # fmt: skip
    with pytest.raises(StoppedError):
        train(with_reference(0.0), TASKS, stopping(in_order, 1), config=config_of(**options), eval_tasks=TASKS[:1])

    def resume(policy: Policy, rewards: Any = in_order, eval_tasks: Any = TASKS[:1]) -> Any:
        return train(policy, TASKS, rewards, config=config_of(**options, resume=True), eval_tasks=eval_tasks)

    policy = with_reference(change.pop("shift", 0.0))
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in policy.trainable_parameters()}
    with pytest.raises(InvalidInputError, match=named):
        resume(policy, **change)
    assert all(torch.equal(before[name], p) for name, p in policy.trainable_parameters())
    assert resume(with_reference(0.0)).status == "completed"
