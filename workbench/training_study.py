"""Does the scope of the gradient matter for learning? GRPO runs on a bundled model, all scopes side by side.

    python -m workbench.training_study improve    the whole model, exact gradient, 1,024 tokens, three seeds
    python -m workbench.training_study tune       every arm at every learning rate, one seed, LoRA, 512 tokens
    python -m workbench.training_study run        every arm at its best learning rate, three other seeds
    python -m workbench.training_study collect    the runs found so far into data/runs/training*.json

Each run writes its own folder and is skipped when it is there, so a study can be interrupted and gone on with, and
`--worker 0/2`, `--worker 1/2` split it over processes. The best learning rate of an arm is the one with the highest
held-out reward at the end of its tuning run; tuning seeds are not counted in the result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench import load_policy
from workbench.errors import InvalidInputError
from workbench.recordings import RUNS_FOLDER, Recording, save_recording
from workbench.records import read_record
from workbench.rewards import exact_answer
from workbench.tasks import make_tasks
from workbench.train import train
from workbench.train_config import TrainConfig
from workbench.types import GradientScope, Tail

ANSWERS = ("token", "sentence")
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
HELD_OUT_SEED = 10_000
_NEW_TOKENS = {"token": 2, "sentence": 10}
# Facts hidden in a prompt, so that the half-trained model starts near 0.4 in both: it names single values well.
_NUM_NEEDLES = {"token": 24, "sentence": 8}


@dataclass(frozen=True)
class Arm:
    """One way of taking the gradient. adapter_scope: where the LoRA adapter is on (`load_policy`)."""

    name: str
    gradient_scope: GradientScope
    adapter_scope: str = "all"


ARMS = (
    Arm("full", "full"),
    Arm("tail", Tail(1)),
    Arm("response_only", "response_only"),
    # on from the last prompt token on: an adapter that is off there too cannot change the first answer token
    Arm("prefix_frozen", "response_only", "replay"),
)


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What every run of a study has in common.

    model, kind: of `load_policy` and `make_tasks`. tuning_steps: of the runs that choose a learning rate.
    num_tasks: training prompts, num_held_out: others, never trained on. lora: rank of the adapter that all arms train;
    None trains the whole model.
    """

    model: str = "tiny-hybrid-half"
    kind: str = "multi_key"
    prompt_tokens: int = 512
    num_steps: int = 40
    tuning_steps: int = 20
    prompts_per_step: int = 6
    group_size: int = 8
    num_tasks: int = 240
    num_held_out: int = 24
    held_out_samples: int = 4
    eval_every: int = 20
    lora: int | None = 16
    chunk_tokens: int = 256


# The whole model with the exact gradient: does a policy get better at all?
IMPROVE = StudyConfig(
    prompt_tokens=1024, num_steps=100, prompts_per_step=8, num_tasks=800, num_held_out=32, eval_every=20, lora=None,
    chunk_tokens=512,
)  # fmt: skip
IMPROVE_LEARNING_RATE = 1e-4  # 2e-4 learns as fast, 1e-3 not at all: found on other training prompts


@dataclass(frozen=True)
class Run:
    """One cell of the study."""

    arm: Arm
    answer: str
    learning_rate: float
    seed: int
    num_steps: int

    @property
    def name(self) -> str:
        return f"{self.arm.name}-{self.answer}-{self.learning_rate:g}-seed{self.seed}-{self.num_steps}"


def tuning_runs(config: StudyConfig, answers: Sequence[str] = ANSWERS) -> Iterator[Run]:
    for answer in answers:
        for learning_rate in LEARNING_RATES:
            for arm in ARMS:
                yield Run(arm, answer, learning_rate, TUNING_SEED, config.tuning_steps)


def improving_runs() -> Iterator[Run]:
    """The same arm on three seeds, answers of a sentence."""
    for seed in SEEDS:
        yield Run(ARMS[0], "sentence", IMPROVE_LEARNING_RATE, seed, IMPROVE.num_steps)


def final_runs(config: StudyConfig, folder: Path, answers: Sequence[str] = ANSWERS) -> Iterator[Run]:
    """Three seeds of every arm at its best learning rate. Raises InvalidInputError if a tuning run is missing."""
    for seed in SEEDS:
        for answer in answers:
            for arm in ARMS:
                yield Run(arm, answer, best_learning_rate(config, folder, arm, answer), seed, config.num_steps)


def best_learning_rate(config: StudyConfig, folder: Path, arm: Arm, answer: str) -> float:
    rewards = {}
    for run in tuning_runs(config, [answer]):
        if run.arm == arm:
            rewards[run.learning_rate] = _curves(folder, run)["held_out"][-1]["reward_mean"]
    return max(rewards, key=rewards.__getitem__)


def perform(run: Run, config: StudyConfig, folder: Path) -> None:
    """Train one cell, unless its folder says that it is complete."""
    torch.manual_seed(run.seed)
    policy = load_policy(config.model, lora=config.lora, adapter_scope=run.arm.adapter_scope, seed=run.seed)
    task_options: dict[str, Any] = {
        "tokenizer": policy.tokenizer, "prompt_tokens": config.prompt_tokens, "answer_style": run.answer,
        "num_needles": _NUM_NEEDLES[run.answer],
    }  # fmt: skip
    tasks = make_tasks(config.kind, config.num_tasks, seed=run.seed, **task_options)
    held_out = make_tasks(config.kind, config.num_held_out, seed=HELD_OUT_SEED, **task_options)
    train(
        policy,
        tasks,
        exact_answer,
        eval_tasks=held_out,
        config=TrainConfig(
            num_steps=run.num_steps,
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            max_new_tokens=_NEW_TOKENS[run.answer],
            learning_rate=run.learning_rate,
            adam_betas=(0.9, 0.95),  # a memory of twenty steps: these runs are short
            gradient_scope=run.arm.gradient_scope,
            chunk_tokens=config.chunk_tokens,
            eval_every=config.eval_every,
            eval_samples=config.held_out_samples,
            seed=run.seed,
            output_dir=folder / run.name,
            resume=True,
            measure_memory=False,
        ),
    )


def collect(config: StudyConfig, folder: Path, path: Path, runs: Sequence[Run]) -> Recording:
    """The curves of complete runs as one recording of kind "training"."""
    rows: list[Mapping[str, Any]] = []
    missing: list[str] = []
    for run in runs:
        if not _is_complete(folder, run):
            missing.append(run.name)
            continue
        rows += _rows(run, config, folder)
    notes = [f"not run: {', '.join(missing)}"] if missing else []
    return save_recording(
        path,
        "training",
        rows,
        title=f"GRPO on {config.model}, {config.kind}, {config.prompt_tokens:,} tokens",
        command="python -m workbench.training_study tune && python -m workbench.training_study run",
        notes=notes,
    )


def _rows(run: Run, config: StudyConfig, folder: Path) -> Iterator[Mapping[str, Any]]:
    curves = _curves(folder, run)
    held_out = {point["step"]: point["reward_mean"] for point in curves["held_out"]}
    lines = [json.loads(line) for line in (folder / run.name / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"] + 1: (line["reward_mean"], line["seconds"]["total"]) for line in lines}
    for step in range(run.num_steps + 1):
        reward, seconds = rewards.get(step, (None, None))
        yield {
            "model": config.model, "task": config.kind, "answer": run.answer, "scope": run.arm.name,
            "adapter_scope": run.arm.adapter_scope, "learning_rate": run.learning_rate, "seed": run.seed,
            "step": step, "reward_mean": reward, "held_out_reward": held_out.get(step), "step_seconds": seconds,
        }  # fmt: skip


def _is_complete(folder: Path, run: Run) -> bool:
    path = folder / run.name / "run.json"
    return path.is_file() and read_record(path)["status"] == "completed"


def _curves(folder: Path, run: Run) -> Mapping[str, Any]:
    if not _is_complete(folder, run):
        raise InvalidInputError(
            f"{folder / run.name}: no complete run; `python -m workbench.training_study tune` first"
        )
    return read_record(folder / run.name / "run.json")["results"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["improve", "tune", "run", "collect"])
    parser.add_argument("--folder", type=Path, default=Path("runs/training_study"))
    parser.add_argument("--answers", nargs="+", choices=ANSWERS, default=list(ANSWERS))
    parser.add_argument("--worker", default="0/1", help="this process's share, as in 0/2")
    options = parser.parse_args(arguments)
    folder, answers = options.folder, options.answers
    if options.what == "collect":
        collect(IMPROVE, folder / "improve", RUNS_FOLDER / "training.json", list(improving_runs()))
        runs = [*tuning_runs(StudyConfig(), answers), *final_runs(StudyConfig(), folder, answers)]
        collect(StudyConfig(), folder, RUNS_FOLDER / "training_scopes.json", runs)
        return
    config = IMPROVE if options.what == "improve" else StudyConfig()
    if options.what == "improve":
        runs, folder = list(improving_runs()), folder / "improve"
    else:
        runs = list(tuning_runs(config, answers) if options.what == "tune" else final_runs(config, folder, answers))
    worker, workers = map(int, options.worker.split("/"))
    for number, run in enumerate(runs[worker::workers], 1):
        print(f"{number} of {len(runs[worker::workers])}: {run.name}", flush=True)
        if not _is_complete(folder, run):
            perform(run, config, folder)


if __name__ == "__main__":
    main()
