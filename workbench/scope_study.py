"""What each gradient scope leaves out of the full gradient, by layer and kind of module; whether `Sampled` is unbiased.

`python -m workbench.scope_study` records it for the bundled models in `data/runs/gradient_scope.json`;
notebooks/55_gradient_scope.ipynb reads the recording, or measures again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench import (
    Sampled,
    Tail,
)
from workbench.gradients import (
    Gradient,
    GradientComparison,
    compare_by,
    compare_gradients,
    layer_of,
    parameter_family,
)
from workbench.progress import progress
from workbench.recordings import RUNS_FOLDER, Recording, save_recording
from workbench.records import run_folder
from workbench.scope_problems import (
    ScopeParameters,
    ScopeProblem,
    mean_of_draws,
    middle_setting,
    open_setting,
    scope_gradients,
    scope_name,
    settings,
)
from workbench.study_problems import family_of, rows_of_other_models, shipped_recording
from workbench.types import GradientScope

Row = Mapping[str, Any]

# ---------------------------------------------------------------- rows


def scope_rows(parameters: ScopeParameters) -> Iterator[Row]:
    """Every setting against the full gradient: the whole, each layer, and each kind of module.

    Prompt length, response length and learning rate are varied one at a time around their middle value, which keeps
    the number of settings small.
    """
    runs = list(itertools.product(parameters.models, settings(parameters), parameters.seeds))
    for model, setting, seed in progress(runs, "scope settings", unit="setting"):
        prompt_tokens, response_tokens, learning_rate = setting
        group = open_setting(model, parameters, prompt_tokens, response_tokens, seed)
        if learning_rate > 0.0:
            group.train(learning_rate, parameters.num_updates)
        full = group.gradient("full")
        common = {
            "model": model,
            "family": family_of(group.policy),
            "seed": seed,
            "prompt_tokens": group.prompt_tokens,
            "response_tokens": response_tokens,
            "learning_rate": learning_rate,
        }
        for scope, adapter_scope, gradient in scope_gradients(group, parameters, seed):
            detailed = setting == middle_setting(parameters)
            for part in compared_parts(gradient, full) if detailed else [whole_part(gradient, full)]:
                yield {**common, "scope": scope, "adapter_scope": adapter_scope, **part}


def compared_parts(found: Gradient, full: Gradient) -> Iterator[Row]:
    """Columns layer, parameter_family, cosine, relative_l2: of the whole, of each layer, of each kind of module."""
    yield whole_part(found, full)
    groups: tuple[tuple[Callable[[str], Hashable], bool], ...] = ((layer_of, True), (parameter_family, False))
    for key, is_layer in groups:
        for name, comparison in sorted(compare_by(found, full, key).items(), key=str):
            if name is not None:
                yield _part(name, "all", comparison) if is_layer else _part(None, str(name), comparison)


def whole_part(found: Gradient, full: Gradient) -> Row:
    return _part(None, "all", compare_gradients(found, full))


def _part(layer: Any, family: str, comparison: GradientComparison) -> Row:
    return {
        "layer": layer,
        "parameter_family": family,
        "cosine": comparison.cosine,
        "relative_l2": comparison.relative_l2,
    }


# ---------------------------------------------------------------- what the rows say


def means_by(rows: Iterable[Row], key: str, column: str) -> dict[Any, tuple[float, float, float]]:
    """Lowest, mean and highest of `column` over the rows that share `key`; NaN and None are left out."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row[column] is not None and row[column] == row[column]:
            found.setdefault(row[key], []).append(row[column])
    return {name: (min(v), sum(v) / len(v), max(v)) for name, v in found.items()}


def convergence_exponent(errors: Mapping[int, float]) -> float:
    """Slope of log error against log number of draws, by least squares: -1/2 for an unbiased estimate."""
    x, y = (torch.tensor([float(v) for v in values]).double().log() for values in (list(errors), list(errors.values())))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


LIVE_HEADINGS = ("scope", "cosine", "relative L2", "time, % of full")


def live_scopes(problem: ScopeProblem, full: Gradient, parameters: ScopeParameters) -> list[list[Any]]:
    """Each deterministic scope against the full gradient, and one draw of each sampled one."""
    scopes: list[GradientScope] = ["response_only", *map(Tail, parameters.tails), *map(Sampled, parameters.fractions)]
    started = time.perf_counter()
    problem.gradient("full")
    full_seconds = time.perf_counter() - started
    table = []
    for scope in scopes:
        started = time.perf_counter()
        gradient = problem.gradient(scope)
        seconds = time.perf_counter() - started
        compared = compare_gradients(gradient, full)
        table.append([scope_name(scope), compared.cosine, compared.relative_l2, 100 * seconds / full_seconds])
    return table


SCOPE_HEADINGS = ("model", "scope", "adapter", "cosine, lowest", "mean", "highest", "relative L2, mean")


def scope_table(recording: Recording) -> list[list[Any]]:
    """Cosine and relative L2 of each scope against the full gradient over all settings and seeds, for each model."""
    whole = [row for row in recording.rows if row["layer"] is None and row["parameter_family"] == "all"]
    names = dict.fromkeys((row["model"], row["scope"], row["adapter_scope"]) for row in whole)
    table = []
    for model, scope, adapter_scope in names:
        rows = [r for r in whole if (r["model"], r["scope"], r["adapter_scope"]) == (model, scope, adapter_scope)]
        for lowest, mean, highest in means_by(rows, "scope", "cosine").values():
            _, distance, _ = means_by(rows, "scope", "relative_l2")[scope]
            table.append([model, scope, adapter_scope, lowest, mean, highest, distance])
    return table


# ---------------------------------------------------------------- the recording

COMMAND = "python -m workbench.scope_study"
FILE = "gradient_scope.json"
TITLE = "Each gradient scope against the full gradient"
NOTES = (
    "scope 'sampled:f xN' is the mean of N draws of Sampled(f)",
    "adapter_scope other than 'all': the gradient of that policy at the same weights, against the full one of 'all'",
    "learning_rate 0: a fresh adapter; else after num_updates full-scope updates",
)


def record(parameters: ScopeParameters, folder: Path = RUNS_FOLDER, *, command: str = COMMAND) -> Recording:
    """Measure and save; an interruption leaves the file with the rows so far, and a note that says so.

    Rows of other models that the file has already are kept, so that models can be recorded one by one.
    """
    settings_notes = [f"{name}: {value}" for name, value in parameters.model_dump(exclude={"models"}).items()]
    rows = rows_of_other_models(folder / FILE, parameters.models)
    finished = False
    try:
        rows.extend(scope_rows(parameters))
        finished = True
    finally:
        if rows:
            partial = [] if finished else ["interrupted: the rows end where the run did"]
            notes = [*NOTES, *settings_notes, *partial]
            saved = save_recording(folder / FILE, "gradient_scope", rows, title=TITLE, command=command, notes=notes)
    return saved


def recorded_or_measured(parameters: ScopeParameters, *, rerun: bool, folder: Path | None = None) -> Recording:
    """The shipped recording, or with rerun a new one, measured here and saved in `folder` (default: the run's own)."""
    if rerun:
        target = folder or run_folder() or Path("runs")
        return record(parameters, target, command="notebooks/55_gradient_scope.ipynb with rerun = True")
    return shipped_recording(RUNS_FOLDER / FILE, parameters.models, COMMAND)


def sampled_errors(problem: ScopeProblem, full: Gradient, fraction: float, num_draws: int) -> dict[int, float]:
    """Relative L2 of the mean of 1, 2, 4, ... draws of Sampled(fraction) against the full gradient."""
    means = enumerate(mean_of_draws(problem, fraction, num_draws), start=1)
    return {n: compare_gradients(mean, full).relative_l2 for n, mean in means if n & (n - 1) == 0}


def scope_results(
    parameters: ScopeParameters, recording: Recording, errors: Mapping[str, Mapping[int, float]]
) -> dict[str, Any]:
    """Everything that the notebook shows, as `workbench.records.save_results` takes it."""
    return {
        "seed": parameters.seeds[0],
        "evidence": {"level": 1, "checks": [{"level": 1, "what": "executed", "passed": True}]},
        "settings": parameters.model_dump(),
        "scopes": {"headings": SCOPE_HEADINGS, "rows": scope_table(recording)},
        "sampled_errors": errors,
        "sampled_exponents": {name: convergence_exponent(by_draws) for name, by_draws in errors.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS_FOLDER, help="folder of the recording")
    parser.add_argument("--model", action="append", help="one to record, may be repeated; others in the file are kept")
    given = parser.parse_args(argv)
    parameters = ScopeParameters(**({"models": given.model} if given.model else {}))
    print(f"{given.out / FILE}: {len(record(parameters, given.out).rows)} rows")


if __name__ == "__main__":
    main()
