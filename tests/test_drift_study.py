"""What the recorded rows of drift and refresh rules say, on rows with a known answer; and the runs behind them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workbench import InvalidInputError, Response
from workbench.drift_study import (
    DriftParameters,
    drift_rows,
    exact_cases,
    record,
    recorded_or_measured,
    refresh_rows,
    refresh_rules,
)
from workbench.drift_tables import falls, rank_correlation, rule_table, seed_bands, trigger_table
from workbench.recordings import COLUMNS, Recording, load_recording
from workbench.study_problems import open_policy, open_problem, require_models

SMALL: dict[str, Any] = {
    "models": ("random:qwen3",), "learning_rates": (0.01,), "seeds": (0,), "prompt_tokens": 600, "group_size": 6,
    "max_new_tokens": 8, "chunk_tokens": 200, "lora_rank": 2, "num_steps": 3, "refresh_steps": 4, "refresh_prompts": 1,
    "intervals": (2,),
}  # fmt: skip


def drift_row(**values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS["drift"]) | {"model": "m", "learning_rate": 0.1, "seed": 0} | values


def test_bands_over_seeds() -> None:
    rows = [drift_row(seed=s, state_age=1, kl=float(s)) for s in (1, 2, 6)] + [drift_row(state_age=2)]
    assert seed_bands(rows, "kl") == {1: (1.0, 3.0, 6.0)}


def test_falls_are_counted_within_a_run_only() -> None:
    values = [1.0, 3.0, 2.0, None, 5.0, 4.0]
    rows = [drift_row(step=i, kl=v) for i, v in enumerate(values)]
    rows += [drift_row(seed=1, step=i, kl=v) for i, v in enumerate([0.5, 0.6])]
    assert falls(rows, "kl") == (2, 4)  # 3 -> 2 and 5 -> 4; pairs with None do not count


def test_rank_correlation_looks_at_order_alone() -> None:
    rows = [drift_row(state_age=1, kl=k, loss_drift_pct=v) for k, v in [(1.0, 1.0), (2.0, 10.0), (3.0, 1000.0)]]
    assert rank_correlation(rows, "kl", "loss_drift_pct") == pytest.approx(1.0)
    assert rank_correlation([*rows, drift_row(state_age=0, kl=9.0, loss_drift_pct=0.0)], "kl", "loss_drift_pct") == 1.0


def test_tables_of_known_rows() -> None:
    rows = [
        drift_row(step=i, state_age=i, loss_drift_pct=v, mean_abs_logprob_drift=float(i), gradient_cosine=1 - 0.1 * i)
        for i, v in enumerate([0.0, 5.0, 1.0, 7.0])
    ]
    recording = Recording(kind="drift", origin="measured", title="t", command="c", rows=rows)
    ((model, loss_falls, logprob_falls, loss_rank, logprob_rank),) = trigger_table(recording)
    assert (model, loss_falls, logprob_falls) == ("m", "1 of 3", "0 of 3")
    assert (loss_rank, logprob_rank) == (pytest.approx(0.5), pytest.approx(1.0))
    common = dict.fromkeys(COLUMNS["refresh"]) | {"model": "m", "rule": "drift", "max_logprob_drift": 1.0}
    steps = [
        common | {"refreshed": i == 0, "mean_abs_logprob_drift": d, "capture_seconds": 1.0, "probe_seconds": 0.1}
        for i, d in enumerate([0.0, 0.5, 1.5, 1.0])
    ]
    table = rule_table(Recording(kind="refresh", origin="measured", title="t", command="c", rows=steps))
    assert table == [["m", "drift", 4, 1, 75.0, 1.5, pytest.approx(10.0)]]


def test_runs_make_whole_rows(tmp_path: Any) -> None:
    parameters = DriftParameters(**SMALL)
    drift = record("drift", parameters, tmp_path)
    assert [row["state_age"] for row in drift.rows] == [0, 1, 2]
    assert [row["mean_abs_logprob_drift"] > 0 for row in drift.rows] == [False, True, True]
    assert load_recording(tmp_path / "drift.json") == drift
    refresh = list(refresh_rows(parameters))
    assert [row["rule"] for row in refresh] == ["drift", "interval 2"] * 4
    assert [row["state_age"] for row in refresh[1::2]] == [0, 1, 0, 1]
    assert [row["mean_abs_logprob_drift"] > 0 for row in refresh[1::2]] == [False, True, False, True]
    assert list(refresh_rules(parameters)) == ["drift", "interval 2"]
    assert {row["seed"] for row in refresh} == {1000}


def test_exact_cases_are_exact() -> None:
    """No staleness, no learning, or a prompt that no adapter touches: drift is 0 to the last bit; reuse has some."""
    parameters = DriftParameters(**SMALL | {"frozen_adapter": "response"})
    cases = {case: (ages, drift) for case, ages, drift in exact_cases("random:qwen3", parameters, 0.01)}
    assert cases["captured at every step"] == ("0, 0, 0, 0, 0", 0.0)
    assert cases["adapter off at the prompt (prefix-frozen)"] == ("0, 1, 2, 3, 4", 0.0)
    assert cases["learning rate 0, never captured again"] == ("0, 1, 2, 3, 4", 0.0)
    ages, drift = cases["captured every 4 steps"]
    assert ages == "0, 1, 2, 3, 0"
    assert drift > 1e-3


def test_the_same_seed_gives_the_same_run() -> None:
    parameters = DriftParameters(**SMALL | {"num_steps": 2})
    a, b = (list(drift_rows(parameters)) for _ in range(2))
    timed = ("capture_seconds", "step_seconds")
    assert [{k: v for k, v in row.items() if k not in timed} for row in a] == [
        {k: v for k, v in row.items() if k not in timed} for row in b
    ]


def test_rewards_are_of_the_problem() -> None:
    policy = open_policy("random:qwen3", lora_rank=2, seed=0)
    for reward, wrong in (("exact_answer", 0.0), ("answer_similarity", pytest.approx(0.0, abs=0.5))):
        problem = open_problem(policy, prompt_tokens=600, answer_style="sentence", reward=reward, seed=3)
        texts = [problem.answer, "???"]
        responses = [
            Response(ids=_ids(policy, text), logprobs=_ids(policy, text).float(), finished=True) for text in texts
        ]
        assert problem.rewards(responses) == [1.0, wrong]
    with pytest.raises(InvalidInputError, match="reward='taste'"):
        open_problem(policy, prompt_tokens=600, answer_style="sentence", reward="taste", seed=3)


def _ids(policy: Any, text: str) -> Any:
    import torch

    return torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"answer_style": "song"}, "'token' or 'sentence'"),
        ({"learning_rate": 1.0}, "Extra inputs"),
        ({"max_logprob_drift": 0.0}, "greater than 0"),
    ],
)
def test_wrong_parameters_stop_the_notebook(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DriftParameters(**SMALL | change)


def test_models_that_are_not_recorded_are_named() -> None:
    recording = Recording(kind="drift", origin="measured", title="t", command="c", rows=[drift_row()])
    assert require_models(recording, ["m"]) is recording
    with pytest.raises(InvalidInputError, match=r"no rows of random:qwen3; set rerun = True"):
        require_models(recording, ["m", "random:qwen3"])


def test_a_missing_recording_says_how_to_get_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.drift_study.RUNS_FOLDER", tmp_path)
    with pytest.raises(InvalidInputError, match=r"drift.json is not there: python -m workbench.drift_study"):
        recorded_or_measured("drift", DriftParameters(**SMALL), rerun=False)
