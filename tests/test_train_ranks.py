"""train() over ranks: the run of one process, however its work is divided; what it writes, refuses, and leaves behind.

The worlds are those of test_ranks.py; runs are in train_ranks_cases.py, float64. Bounds are relative to how far the run
moved the weights: 1e-11; measured 2e-15 over data ranks, 5e-14 (hybrid, experts) over context ranks. CPU, torch 2.13.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.test_ranks import names_of, result_of
from workbench import InvalidInputError, Policy, update_step
from workbench.comm import Mesh
from workbench.errors import RankFailedError
from workbench.launch import launch, main
from workbench.model_sources import tiny_model


@pytest.mark.parametrize(("size", "name"), names_of("train: "))
def test_a_run_over_ranks_is_the_run_of_one_process(worlds, size: int, name: str) -> None:
    found = result_of(worlds, size, name)
    assert found["differences"] == [], "ids, rewards, ages, notes: every entry of every line and evaluation"
    assert found["apart"] <= 1e-11 * found["moved"]
    assert (found["moved"] > 0.1) == ("nothing to learn" not in name)
    for rank in range(size):
        assert result_of(worlds, size, name, rank)["lines_of_ranks_differ"] == 0
    assert found["sums"] == found["updates"], "gradients travel once per update, however many groups there are"


def test_the_cases_are_what_their_names_say(worlds) -> None:
    assert 1 in result_of(worlds, 2, "train: a data rank without a group to learn from")["skipped"]
    nothing = result_of(worlds, 2, "train: nothing to learn")
    assert "no group had anything to learn from: the weights are unchanged" in nothing["notes"]
    assert max(max(ages) for ages in result_of(worlds, 2, "train: reused states")["ages"] if ages) == 2
    for axis in ("data", "context"):
        drift = result_of(worlds, 2, f"train: drift rule, {axis} ranks")
        assert "x margin 1.5 <= 2" in " ".join(drift["decisions"]), "a state was reused because the rule said so"
        assert drift["ages"] == [[0, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize(("size", "name"), names_of("train resumes"))
def test_a_resumed_run_ends_bitwise_as_an_undisturbed_one(worlds, size: int, name: str) -> None:
    for rank in range(size):
        found = result_of(worlds, size, name, rank)
        assert found["bitwise"]
        assert found["lines_equal"]
    assert found["num_lines"] == 8
    assert found["status"] == "completed"
    assert found["ranks"]["data"] == 2
    assert found["checkpoints"] == [f"step-0000000{step}" for step in range(5)]
    # Gone on with on one process: the same but for rounding. Weights of size 0.1 to 1; measured 2e-16 and 1e-15.
    assert result_of(worlds, size, name)["on_one_process"] <= 1e-12


@pytest.mark.parametrize(("size", "name"), names_of("train evaluates"))
def test_held_out_tasks_are_divided(worlds, size: int, name: str) -> None:
    found = result_of(worlds, size, name)
    assert found["equal"]
    assert found["num_responses"] == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_tasks", "RanksDisagreeError: ranks disagree on train's tasks"),
        ("other_seed", "RanksDisagreeError: ranks disagree on train's configuration"),
        ("other_weights", "RanksDisagreeError: weights differ between ranks: model.norm.weight on rank [1]"),
        ("evaluated_other_tasks", "RanksDisagreeError: ranks disagree on evaluate's tasks"),
        ("evaluated_other_seed", "RanksDisagreeError: ranks disagree on evaluate's options"),
        ("too_few_prompts", "prompts_per_step=1 over 2 data ranks leaves ranks without work"),
        ("frozen_prompt", "use adapter_scope='all', or ranks for data only"),
        ("experts_on_disk", "checkpoints of experts that are spread over ranks are not implemented"),
        ("not_a_mesh", "comm is a int; workbench.parallel.open_mesh(...) makes a Mesh"),
    ],
)
def test_what_ranks_cannot_do_is_one_error_before_any_work(worlds, name: str, message: str) -> None:
    for rank in range(2):
        assert message in result_of(worlds, 2, f"train refuses: {name}", rank)["error"]


def test_an_optimizer_on_a_part_of_the_gradient_is_refused() -> None:
    policy, mesh = Policy(tiny_model("qwen3")), Mesh().for_accumulation()
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    with pytest.raises(InvalidInputError, match="would step on this rank's part of the gradient"):
        update_step(policy, [3, 4, 5], [[6], [7]], advantages=[1.0, -1.0], comm=mesh, optimizer=optimizer)


# ---------------------------------------------------------------- accelerate


def test_accelerate_prepares_the_optimizer_and_changes_nothing(worlds) -> None:
    for rank in range(2):
        found = result_of(worlds, 2, "accelerate: prepared", rank)
        assert (found["name"], found["equal"]) == ("AcceleratedOptimizer", True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bf16", "mixed_precision='bf16' cannot be honoured"),
        ("fp16", "mixed_precision='fp16' cannot be honoured"),
        ("accumulation", "gradient_accumulation_steps=4 reaches nothing"),
        ("dynamo", "dynamo_backend reaches nothing"),
        ("fsdp", "accelerate is configured for FSDP"),
    ],
)
def test_accelerate_settings_that_cannot_be_honoured(worlds, setting: str, message: str) -> None:
    for rank in range(2):
        assert message in result_of(worlds, 2, "accelerate: settings", rank)[setting]


# ---------------------------------------------------------------- ends before its end


def test_a_killed_rank_fails_the_run_and_its_record_says_so(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 was ended by SIGKILL \[stage sample: "):
        launch(
            "tests.train_ranks_cases:killed_in_training", {"folder": str(tmp_path / "run")}, ranks=2, folder=tmp_path
        )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert record["error"].startswith("RankFailedError: ")
    assert record["results"]["num_steps"] == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()


def test_ctrl_c_of_the_documented_command_leaves_an_interrupted_record(tmp_path: Path) -> None:
    """docs/many_ranks.md's command, on shorter prompts; Ctrl-C comes once the first update is written."""
    arguments = ["dp=2", "prompt_tokens=192", "chunk_tokens=96", "prompts_per_step=2", "group_size=2", "num_tasks=4"]
    arguments += ["num_held_out=2", "held_out_samples=1", "num_needles=2", "eval_every=500", "num_steps=500"]
    command = ["--nproc", "2", "--runs", str(tmp_path), "workbench.training_study:improve_on_ranks", *arguments]
    done = threading.Event()

    def interrupt() -> None:
        while not done.is_set() and not any(path.stat().st_size for path in tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.1)
        if not done.is_set():
            signal.raise_signal(signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        status = main([*command, f"folder={tmp_path}"])
    finally:
        done.set()
        watcher.join()
    assert status == 130
    (path,) = tmp_path.glob("*/run.json")
    record = json.loads(path.read_text())
    assert record["status"] == "interrupted"
    assert record["results"]["ranks"] == {"data": 2, "context": 1, "experts": 1}
    assert record["results"]["num_updates"] >= 1
