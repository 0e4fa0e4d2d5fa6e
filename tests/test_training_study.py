"""The training study end to end at toy size, and what its rows say about learning."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from workbench import InvalidInputError, load_policy, training_study
from workbench.recordings import COLUMNS, Recording, load_recording
from workbench.tasks import generate
from workbench.tasks.haystack import read_haystack
from workbench.train_config import TrainConfig
from workbench.training_curves import TUNING_SEED, arm_results, curve_rows, result_rows, says, seed_band
from workbench.training_figures import learning_figure, reward_figure
from workbench.training_study import ARMS, Run, StudyConfig, main

TOY: dict[str, Any] = {
    "prompt_tokens": 200, "num_needles": 4, "num_steps": 2, "tuning_steps": 2, "prompts_per_step": 2,
    "group_size": 2, "num_tasks": 4, "num_held_out": 2, "held_out_samples": 2, "eval_every": 1, "lora": 2,
    "chunk_tokens": 100,
}  # fmt: skip


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The study with two arms, two learning rates, one seed; its recordings go to the folder that is returned."""
    changes = {
        "SCOPES": StudyConfig(**TOY), "IMPROVE": StudyConfig(**TOY), "ARMS": (ARMS[0], ARMS[3]), "SEEDS": (0,),
        "LEARNING_RATES": (1e-4, 1e-2), "RUNS_FOLDER": tmp_path / "recordings",
    }  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setattr(training_study, name, value)
    # Every run reads the same text with the same tokenizer: most of a toy run's time
    read = cache(lambda source: read_haystack(source, load_policy("tiny-hybrid-half").tokenizer))
    monkeypatch.setattr(generate, "read_haystack", lambda source, _: read(source))
    return tmp_path / "recordings"


def test_a_missing_tuning_run_is_one_clear_error(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"full-token-0.0001-seed100-2: no complete run; .* tune"):
        main(["run", "--folder", str(tmp_path / "runs")])
    with pytest.raises(
        InvalidInputError, match=r"none of 1 runs is complete; python -m workbench.training_study impro"
    ):
        main(["collect", "--folder", str(tmp_path / "runs")])
    assert not toy.exists()


def test_tune_run_collect(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, options = tmp_path / "runs", ["--folder", str(tmp_path / "runs"), "--answers", "sentence"]
    main(["tune", *options, "--worker", "0/2"])
    main(["tune", *options, "--worker", "1/2"])
    main(["run", *options])
    assert len(list(folder.iterdir())) == 2 * 2 + 2  # arms x learning rates, then an arm at its best

    performed: list[Run] = []
    monkeypatch.setattr(training_study, "perform", lambda run, *_: performed.append(run))
    interrupted = folder / "prefix_frozen-sentence-0.01-seed100-2" / "run.json"
    interrupted.write_text(interrupted.read_text().replace('"completed"', '"interrupted"'))
    main(["tune", *options])
    assert [run.name for run in performed] == [interrupted.parent.name], "complete runs are skipped, others are not"
    interrupted.write_text(interrupted.read_text().replace('"interrupted"', '"completed"'))

    with pytest.raises(InvalidInputError, match="improve: none of 1 runs"):
        main(["collect", *options])
    recording = load_recording(toy / "training_scopes.json")  # saved, although the other one could not be
    assert {row["scope"] for row in recording.rows} == {"full", "prefix_frozen"}
    assert [row["step"] for row in recording.select(scope="full", seed=0)] == [0, 1, 2]
    assert all(row["held_out_reward"] is not None for row in recording.rows), "eval_every=1"
    final = {arm.scope: arm for arm in arm_results(recording)}
    for scope, arm in final.items():
        tuned = recording.select(scope=scope, seed=TUNING_SEED, step=2)
        best = max(row["held_out_reward"] for row in tuned)
        assert arm.learning_rate in [row["learning_rate"] for row in tuned if row["held_out_reward"] == best]
        assert arm.step_seconds > 0.0
    assert len(learning_figure(recording).data) == 6  # a band, a curve and a cost for each arm


# ---------------------------------------------------------------- rows, on invented runs


def row(seed: int, step: int, held_out: float | None, **change: Any) -> dict[str, Any]:
    columns = dict.fromkeys(COLUMNS["training"], "x") | {
        "answer": "token", "scope": "full", "learning_rate": 1e-3, "seed": seed, "step": step,
        "reward_mean": None, "held_out_reward": held_out, "step_seconds": None if step == 0 else 2.0 + seed,
    }  # fmt: skip
    return columns | change


def recording_of(rows: list[dict[str, Any]]) -> Recording:
    return Recording(kind="training", origin="measured", title="toy", command="make", rows=rows, notes=["not run: b"])


INVENTED = [
    *(row(0, step, value) for step, value in enumerate((0.2, None, 0.8))),
    *(row(1, step, value) for step, value in enumerate((0.4, None, 0.3))),
    row(2, 0, 0.1),  # has not got far enough to say anything
    *(row(TUNING_SEED, step, 1.0) for step in range(3)),
]


def test_runs_without_a_time_still_say_what_they_learned() -> None:
    (arm,) = arm_results(recording_of([line | {"step_seconds": None} for line in INVENTED]))
    assert arm.gains == pytest.approx([0.6, -0.1])
    assert arm.step_seconds is None


def test_gains_bands_and_cost() -> None:
    (arm,) = arm_results(recording_of(INVENTED))
    assert arm.gains == pytest.approx([0.6, -0.1])
    assert arm.step_seconds == 2.5
    assert seed_band(arm.rows, "held_out_reward") == {
        0: pytest.approx((0.2, 0.3, 0.4)), 2: pytest.approx((0.3, 0.55, 0.8)),
    }  # fmt: skip
    line = result_rows(recording_of(INVENTED))[0]
    assert line[:4] == ["token", "full", "0.001", 2]
    assert line[4:] == pytest.approx([0.3, 0.55, 0.25, -0.1, 2.5])


def test_a_step_that_not_every_seed_reached_has_no_band() -> None:
    assert list(seed_band([row(0, 0, 0.1), row(0, 2, 0.5), row(1, 0, 0.3)], "held_out_reward")) == [0]


def test_what_is_not_recorded_is_said_and_not_drawn(tmp_path: Path) -> None:
    assert says(None, "training.json", "make") == "training.json: not recorded yet. make makes it."
    assert says(recording_of(INVENTED), "training.json", "make").endswith("not run: b")
    for figure in (learning_figure(None), learning_figure(recording_of([row(2, 0, 0.1)])), reward_figure([])):
        assert len(figure.data) == 0
        assert figure.layout.annotations[0].text == "no run is recorded yet"
    assert list(curve_rows(tmp_path)) == []


def test_figures_name_their_origin() -> None:
    names = [trace.name for trace in learning_figure(recording_of(INVENTED)).data if trace.name]
    assert names == ["measured: full, mean and range of 2 seeds", "measured: full"]
    bands = learning_figure(recording_of(INVENTED)).select_traces({"type": "scatter", "fill": "toself"})
    assert [trace.mode for trace in bands] == ["lines"], "a band has no points of its own"
    drawn = reward_figure(INVENTED[:3])
    assert [trace.name for trace in drawn.data] == ["measured: responses that it trained on", "measured: held out"]
    assert list(drawn.data[1].x) == [0, 2]


def test_what_a_step_of_gemma_costs_is_the_only_length_to_choose(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--num-steps belongs to gemma"):
        main(["improve", "--num-steps", "1", "--folder", str(tmp_path)])


def test_the_study_asks_train_for_what_its_arms_name() -> None:
    for arm in ARMS:
        TrainConfig(num_steps=1, gradient_scope=arm.gradient_scope)
    assert len({arm.name for arm in ARMS}) == len(ARMS)
