"""From a recipe to a folder that `load_policy` reads: weights, tokenizer, and a record of how good they are."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from workbench.errors import InvalidInputError
from workbench.policy import Policy
from workbench.progress import progress
from workbench.records import provenance, write_record
from workbench.tiny_models.evaluation import Accuracy, measure
from workbench.tiny_models.recipes import Recipe
from workbench.tiny_models.training import Training, TrainingStep

RECORD_FILE = "training.json"
_CURVE_STEPS = 10  # the record holds means over this many steps
SAMPLED_TOKENS = 1024
_MANY_NEEDLES = 32

Measure = Callable[[Policy], list[Accuracy]]


@dataclass(frozen=True)
class MadeModel:
    """A trained model: the policy, its training curve, its held-out accuracies, and whether training was cut short."""

    policy: Policy
    steps: tuple[TrainingStep, ...]
    accuracies: tuple[Accuracy, ...]
    interrupted: bool


def measure_standard(
    policy: Policy, *, prompt_tokens: Sequence[int] = (512, 1024, 2048, 4096), num_tasks: int = 10
) -> list[Accuracy]:
    """The figures that every bundled model is described by: a single fact, one of eight, and one of many.

    One of eight at every length; groups are sampled at SAMPLED_TOKENS, or at the first length if that is not given.
    """
    at = SAMPLED_TOKENS if SAMPLED_TOKENS in prompt_tokens else prompt_tokens[0]
    return [
        *measure(policy, kind="needle", prompt_tokens=[at], num_tasks=num_tasks),
        *measure(policy, prompt_tokens=prompt_tokens, num_tasks=num_tasks, sampled_tokens=at),
        *measure(policy, prompt_tokens=[at], num_tasks=num_tasks, num_needles=_MANY_NEEDLES, sampled_tokens=at),
    ]


def make_model(recipe: Recipe, folder: Path | None = None, *, measuring: Measure = measure_standard) -> MadeModel:
    """Train, measure and save. Ctrl-C ends training early: what there is is measured, saved and marked.

    folder: must not exist; it appears at the end, whole. None: nothing is saved. Bitwise the same weights come out on
    the same machine with the same versions and thread count; elsewhere rounding differs and so do the weights.
    """
    if folder is not None and folder.exists():
        raise InvalidInputError(f"{folder} exists; nothing is overwritten, give another folder")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in the same order, whatever the machine's number of cores
    steps: list[TrainingStep] = []
    interrupted = False
    try:
        training = Training(recipe)
        try:
            for step in progress(training.steps(), recipe.name, total=recipe.total_steps, unit="step"):
                steps.append(step)  # noqa: PERF402 (Ctrl-C keeps what there is)
        except KeyboardInterrupt:
            interrupted = True
        policy = Policy(training.model.eval(), training.tokenizer)
        made = MadeModel(policy, tuple(steps), tuple(measuring(policy)), interrupted)
    finally:
        torch.set_num_threads(threads)
    if folder is not None:
        _save(made, recipe, folder)
    return made


def curve(steps: Sequence[TrainingStep]) -> list[dict[str, object]]:
    """Means over each ten steps of one stage and length."""
    rows: list[dict[str, object]] = []
    for (stage, tokens), run in itertools.groupby(steps, key=lambda step: (step.stage, step.tokens)):
        of_stage = list(run)
        for at in range(0, len(of_stage), _CURVE_STEPS):
            part = of_stage[at : at + _CURVE_STEPS]
            rows.append(
                {
                    "stage": stage,
                    "step": part[-1].step + 1,
                    "tokens": tokens,
                    "loss": round(fmean(step.loss for step in part), 4),
                    "accuracy": round(fmean(step.accuracy for step in part), 4),
                    "cpu_seconds": part[-1].cpu_seconds,
                }
            )
    return rows


def _save(made: MadeModel, recipe: Recipe, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model: Any = made.policy.model
        model.save_pretrained(work)
        made.policy.tokenizer.save_pretrained(work)
        record = {
            "name": recipe.name,
            "command": f"python -m workbench.tiny_models {recipe.name}",
            "interrupted": made.interrupted,
            "recipe": asdict(recipe),
            "num_parameters": sum(parameter.numel() for parameter in made.policy.model.parameters()),
            "accuracies": [asdict(accuracy) for accuracy in made.accuracies],
            "curve": curve(made.steps),
            "provenance": provenance(),
        }
        write_record(work / RECORD_FILE, record)
        work.chmod(0o755)  # mkdtemp's 0700, and safetensors' 0600, would hide it from others
        for file in work.iterdir():
            file.chmod(0o644)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
