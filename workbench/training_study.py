"""Does the scope of the gradient matter for learning? GRPO runs on a bundled model, all scopes side by side.

    python -m workbench.training_study improve    the whole model, exact gradient, 1,024 tokens, three seeds
    python -m workbench.training_study tune       every arm at every learning rate, one seed, LoRA, 1,024 tokens
    python -m workbench.training_study run        every arm at its best learning rate, three other seeds
    python -m workbench.training_study gemma      one longer run on Gemma 3 270M, 1,024 tokens, LoRA
    python -m workbench.training_study collect    the runs found so far into data/runs/training*.json
    python -m workbench.launch --nproc 2 workbench.training_study:improve_on_ranks dp=2     improve, over ranks

Each run writes its own folder and is skipped when it is complete, so a study can be interrupted and gone on with, and
`--worker 0/2`, `--worker 1/2` split it over processes. The best learning rate of an arm is the one with the highest
held-out reward at the end of its tuning run; tuning seeds are not counted in the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workbench import load_policy
from workbench.comm import Mesh
from workbench.errors import InvalidInputError, WorkbenchError
from workbench.model_sources import quiet_loading
from workbench.recordings import RUNS_FOLDER, Recording, save_recording
from workbench.records import RunRecord, read_record
from workbench.study_problems import REWARDS
from workbench.tasks import make_tasks
from workbench.train import train
from workbench.train_config import TrainConfig
from workbench.training_curves import TUNING_SEED, curve_rows
from workbench.types import GradientScope, Tail

ANSWERS = ("token", "sentence")
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # 1e-4 changed no held-out answer in 15 steps (not recorded)
SEEDS = (0, 1, 2)
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
    None trains the whole model. reward: of REWARDS. num_needles, max_new_tokens: None leaves them to the answer style.
    """

    model: str = "tiny-hybrid-half"
    kind: str = "multi_key"
    prompt_tokens: int = 1024
    num_steps: int = 20
    tuning_steps: int = 15
    prompts_per_step: int = 8
    group_size: int = 12  # 6 x 8 samples a step taught nothing in 20 steps (512 tokens, not recorded)
    num_tasks: int = 240
    num_held_out: int = 24
    held_out_samples: int = 4
    eval_every: int = 10
    lora: int | None = 16
    chunk_tokens: int = 512
    reward: str = "exact_answer"
    num_needles: int | None = None
    max_new_tokens: int | None = None
    checkpoint_every: int | None = None

    @property
    def columns(self) -> Mapping[str, Any]:
        """What every row of a recording says of a run."""
        return {"model": self.model, "task": self.kind}


# Every arm with an adapter.
SCOPES = StudyConfig()
# The whole model with the exact gradient: does a policy get better at all?
IMPROVE = StudyConfig(
    prompt_tokens=1024, num_steps=70, prompts_per_step=8, group_size=16, num_tasks=560, num_held_out=48, eval_every=14,
    lora=None, chunk_tokens=512,
)  # fmt: skip
IMPROVE_LEARNING_RATE = 3e-4  # found by hand on other training prompts; those runs were not recorded
IMPROVE_COMMAND = "python -m workbench.training_study improve"
# A pretrained model that seldom repeats the fact word by word: the graded reward tells its responses apart. Measured on
# one x86-64 core: 23 CPU seconds per prompt of a step (capture 3.6, sampling 5.8, update 13.7).
GEMMA = StudyConfig(
    model="gemma3-270m", prompt_tokens=1024, num_steps=60, prompts_per_step=2, group_size=4, num_tasks=120,
    num_held_out=8, eval_every=10, lora=8, chunk_tokens=512, reward="answer_similarity", num_needles=4,
    max_new_tokens=16, checkpoint_every=2,
)  # fmt: skip
GEMMA_LEARNING_RATE = 2e-4
GEMMA_COMMAND = "python -m workbench.training_study gemma"
SCOPES_COMMAND = "python -m workbench.training_study tune && python -m workbench.training_study run"


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
    """The same arm on three seeds, answers of one token."""
    for seed in SEEDS:
        yield Run(ARMS[0], "token", IMPROVE_LEARNING_RATE, seed, IMPROVE.num_steps)


def gemma_run(num_steps: int = GEMMA.num_steps) -> Run:
    return Run(ARMS[0], "sentence", GEMMA_LEARNING_RATE, 0, num_steps)


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


def perform(run: Run, config: StudyConfig, folder: Path, *, comm: Mesh | None = None) -> RunRecord:
    """Train one cell, over ranks where there are some, or go on with it from its last checkpoint."""
    torch.manual_seed(run.seed)
    with quiet_loading():
        policy = load_policy(config.model, lora=config.lora, adapter_scope=run.arm.adapter_scope, seed=run.seed)
    task_options: dict[str, Any] = {
        "tokenizer": policy.tokenizer, "prompt_tokens": config.prompt_tokens, "answer_style": run.answer,
        "num_needles": config.num_needles or _NUM_NEEDLES[run.answer],
    }  # fmt: skip
    tasks = make_tasks(config.kind, config.num_tasks, seed=run.seed, **task_options)
    held_out = make_tasks(config.kind, config.num_held_out, seed=HELD_OUT_SEED, **task_options)
    return train(
        policy,
        tasks,
        REWARDS[config.reward],
        eval_tasks=held_out,
        comm=comm,
        config=TrainConfig(
            num_steps=run.num_steps,
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            max_new_tokens=config.max_new_tokens or _NEW_TOKENS[run.answer],
            learning_rate=run.learning_rate,
            adam_betas=(0.9, 0.95),  # a memory of twenty steps: these runs are short
            gradient_scope=run.arm.gradient_scope,
            chunk_tokens=config.chunk_tokens,
            eval_every=config.eval_every,
            eval_samples=config.held_out_samples,
            checkpoint_every=config.checkpoint_every,
            seed=run.seed,
            output_dir=folder / run.name,
            resume=True,
            measure_memory=False,
        ),
    )


def improve_on_ranks(
    *, dp: int = 1, seed: int = 0, folder: str = "runs/training_study/improve_on_ranks", **changes: Any
) -> dict[str, Any]:
    """One seed of `improve` on every rank of a launch; dp: data ranks, the others share each prompt's tokens.

    changes: fields of StudyConfig, such as num_steps=2 or prompt_tokens=256. Returns the results of the run's record.
    """
    from workbench.parallel import open_mesh

    config = replace(IMPROVE, **changes)
    run = Run(ARMS[0], "token", IMPROVE_LEARNING_RATE, seed, config.num_steps)
    return dict(perform(run, config, Path(folder), comm=open_mesh(dp=dp)).results)


def curves(run: Run, config: StudyConfig, folder: Path) -> list[Mapping[str, Any]]:
    """The rows that a run has so far, complete or not."""
    about = {
        "answer": run.answer,
        "scope": run.arm.name,
        "adapter_scope": run.arm.adapter_scope,
        "learning_rate": run.learning_rate,
        "seed": run.seed,
    }
    return list(curve_rows(folder / run.name, **config.columns, **about))


def collect(
    config: StudyConfig, folder: Path, path: Path, runs: Sequence[Run], *, command: str, partial: bool = False
) -> Recording:
    """The curves of complete runs as one recording of kind "training"; a note names the runs that are not there.

    command: what makes the runs again. partial: take what incomplete runs have so far, and say so.
    Raises InvalidInputError if there is nothing to take.
    """
    missing = [run for run in runs if not _is_complete(folder, run)]
    rows = [row for run in runs if partial or run not in missing for row in curves(run, config, folder)]
    if not rows:
        raise InvalidInputError(f"{folder}: none of {len(runs)} runs is complete; {command} makes them")
    names = ", ".join(run.name for run in missing)
    return save_recording(
        path,
        "training",
        rows,
        title=f"GRPO on {config.model}, {config.kind}, {config.prompt_tokens:,} tokens",
        command=command,
        notes=[
            "step_seconds: CPU seconds of the process",
            *([f"{'not complete' if partial else 'not run'}: {names}"] if missing else []),
        ],
    )


def _is_complete(folder: Path, run: Run) -> bool:
    path = folder / run.name / "run.json"
    return path.is_file() and read_record(path)["status"] == "completed"


def _curves(folder: Path, run: Run) -> Mapping[str, Any]:
    if not _is_complete(folder, run):
        raise InvalidInputError(
            f"{folder / run.name}: no complete run; `python -m workbench.training_study tune` first"
        )
    return read_record(folder / run.name / "run.json")["results"]


def _collect_all(folder: Path, answers: Sequence[str]) -> None:
    """Each recording whose runs are there; the first that cannot be made is an error, after the others are saved."""
    parts: tuple[tuple[str, StudyConfig, Path, str, Callable[[], Iterable[Run]]], ...] = (
        ("training", IMPROVE, folder / "improve", IMPROVE_COMMAND, improving_runs),
        ("training_scopes", SCOPES, folder, SCOPES_COMMAND, lambda: _scope_runs(folder, answers)),
        ("training_gemma", GEMMA, folder / "gemma", GEMMA_COMMAND, lambda: [gemma_run()]),
    )
    problems = []
    for name, config, where, command, runs in parts:
        path, partial = RUNS_FOLDER / f"{name}.json", config is GEMMA
        try:
            recording = collect(config, where, path, list(runs()), command=command, partial=partial)
            print(f"{name}.json: {len(recording.rows)} rows")
        except InvalidInputError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _scope_runs(folder: Path, answers: Sequence[str]) -> Iterator[Run]:
    yield from tuning_runs(SCOPES, answers)
    yield from final_runs(SCOPES, folder, answers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["improve", "tune", "run", "gemma", "collect"])
    parser.add_argument("--folder", type=Path, default=Path("runs/training_study"))
    parser.add_argument("--answers", nargs="+", choices=ANSWERS, default=list(ANSWERS))
    parser.add_argument("--worker", default="0/1", help="this process's share, as in 0/2")
    parser.add_argument("--num-steps", type=int, help="of gemma, to see what a step costs; default: the whole run")
    options = parser.parse_args(arguments)
    folder, answers = options.folder, options.answers
    if options.num_steps is not None and options.what != "gemma":
        raise InvalidInputError("--num-steps belongs to gemma: the other runs have the lengths that the study compares")
    if options.what == "collect":
        _collect_all(folder, answers)
        return
    config, runs = SCOPES, []
    if options.what == "improve":
        config, folder, runs = IMPROVE, folder / "improve", list(improving_runs())
    elif options.what == "gemma":
        config, folder, runs = GEMMA, folder / "gemma", [gemma_run(options.num_steps or GEMMA.num_steps)]
    elif options.what == "tune":
        runs = list(tuning_runs(config, answers))
    else:
        runs = list(final_runs(config, folder, answers))
    worker, workers = map(int, options.worker.split("/"))
    for number, run in enumerate(runs[worker::workers], 1):
        print(f"{number} of {len(runs[worker::workers])}: {run.name}", flush=True)
        if not _is_complete(folder, run):
            perform(run, config, folder)


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        raise SystemExit(f"error: {error}") from error
