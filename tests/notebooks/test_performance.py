"""notebooks/70_performance.ipynb: it draws the recorded runs, says which targets they meet, and measures a little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workbench import InvalidInputError
from workbench.performance_figures import peak_figure, reach_figure, time_figure
from workbench.performance_study import (
    FULL,
    OURS,
    RESPONSE,
    PerformanceParameters,
    limit_share,
    mode_rows,
    reach_rows,
    targets,
)
from workbench.publish import find_external_addresses
from workbench.recordings import COLUMNS, Recording
from workbench.records import read_record
from workbench.run import run_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "70_performance.ipynb"
PARAMETERS: dict[str, Any] = {"measure_prompt_tokens": [96], "measure_group_size": 2, "seed": 0}


def test_it_runs_and_keeps_what_it_shows(tmp_path: Path) -> None:
    texts = {name: str(value) for name, value in PARAMETERS.items()}
    record, folder = run_notebook(NOTEBOOK, texts, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "70_performance.html").read_text(encoding="utf-8")) == []
    results = read_record(folder / "run.json")["results"]["performance"]
    assert results["targets"]["gradient error of the exact modes"]["met"] is True
    assert [r["scope"] for r in results["measured_again"]] == ["full", "response_only"]
    assert all(r["peak_bytes"] > 0 and r["cpu_seconds"] > 0 for r in results["measured_again"])


# ---------------------------------------------------------------- what the recorded runs say


@pytest.fixture(scope="module")
def recorded() -> Recording:
    return PerformanceParameters(**PARAMETERS).recording("performance")


def test_the_recorded_runs_are_of_the_same_gradient(recorded: Recording) -> None:
    for row in recorded.rows:
        exact = not row["mode"].startswith("response_only")
        assert (row["gradient_error"] <= 5e-6) is exact, "and response_only is another one, on random weights"


def test_no_step_beats_the_limit_and_no_exact_one_the_floor(recorded: Recording) -> None:
    for row in recorded.rows:
        assert 0.0 < limit_share(row) < 1.0, row
        assert row["peak_bytes"] > row["floor_bytes"], row
        assert row["cpu_seconds_min"] <= row["cpu_seconds"] <= row["cpu_seconds_max"]


def test_the_recorded_reach_is_close_to_the_floor() -> None:
    """The distance is a chunk's graph, which does not grow, and the carries at chunk starts: small at length."""
    reach = PerformanceParameters(**PARAMETERS).reach()
    if reach is None:
        pytest.skip("no reach run is recorded yet: python -m tests.benchmarks.reach 131072")
    ratios = {row[0]: row[5] for row in reach_rows(reach)}
    assert max(ratios) >= 16_384
    assert all(1.0 < ratio <= (1.3 if tokens >= 65_536 else 1.6) for tokens, ratio in ratios.items())


def test_missed_targets_have_a_reason_and_the_page_says_the_same(recorded: Recording) -> None:
    page = (NOTEBOOK.parents[1] / "docs" / "performance.md").read_text(encoding="utf-8")
    for target in targets(recorded):
        name, asked, measured, met, reason = target.cells()
        assert met is not False or reason, name
        assert f"| {name} | {asked} | {measured} | {'yes' if met else 'no'} |" in page


# ---------------------------------------------------------------- the table and the figures, on invented rows


def invented(mode: str, group: int, seconds: float, peak: float, **change: Any) -> dict[str, Any]:
    row = dict.fromkeys(COLUMNS["performance"], 1.0) | {
        "family": "hybrid",
        "mode": mode,
        "prompt_tokens": 4096,
        "group_size": group,
        "response_tokens": 128,
        "cpu_seconds": seconds,
        "peak_bytes": peak,
        "limit_flops": 4e11,
        "matmul_flops_per_second": 1e11,
        "floor_bytes": 1e7,
        "gradient_error": 1e-6,
    }
    return row | change


ROWS = [
    invented(FULL, 2, 6.0, 5e7),
    invented(FULL, 8, 10.0, 5.5e7),
    invented("TRL + checkpointing", 8, 80.0, 1.1e9),
    invented(RESPONSE, 8, 5.0, 2e7, gradient_error=0.1),
]


def table(rows: list[dict[str, Any]]) -> Recording:
    return Recording(kind="performance", origin="measured", title="invented", command="-", rows=rows)


def test_targets_are_ratios_of_rows() -> None:
    found = {target.name: target for target in targets(table(ROWS))}
    time = found["full / TRL + checkpointing, 4k G8, time"]
    assert (time.value, time.met) == (0.125, True)
    memory = found["full / TRL + checkpointing, 4k G8, memory"]
    assert memory.value == pytest.approx(0.05)
    assert memory.met is False
    growth = found["full: peak growth from G 2 to 8, 4k, %"]
    assert growth.value == pytest.approx(10.0)
    share = found["full, % of the limit at 55.0 MB, 4k G8 (60 MB asked)"]
    assert share.value == pytest.approx(40.0)
    assert share.cells()[3] is False
    assert "matrix products" in share.cells()[4], "a target that is missed says why"
    absent = found["full / shared prefix, 4k G2, time"]
    assert (absent.met, absent.cells()[2]) == (None, "not recorded")


def test_figures_show_every_mode_and_what_is_modelled() -> None:
    names = [
        line.name for line in time_figure(table(ROWS), family="hybrid", over="group_size", prompt_tokens=4096).data
    ]
    assert names == [
        f"{FULL} (measured)", f"{RESPONSE} (measured)", "TRL + checkpointing (measured)", "limit (modelled)"
    ]  # fmt: skip
    peaks = peak_figure(table(ROWS), family="hybrid", over="prompt_tokens", group_size=8)
    assert peaks.data[-1].name.endswith("(modelled)")
    assert list(peaks.data[0].y) == [55.0]
    row = dict.fromkeys(COLUMNS["reach"], 7)
    reach = Recording(kind="reach", origin="measured", title="x", command="-", rows=[row])
    assert len(reach_figure(reach).data) == 2
    assert reach_figure(None).layout.annotations[0].text == "no run is recorded yet"
    assert reach_rows(None) == []
    assert len(mode_rows(table(ROWS), "hybrid")) == len(ROWS)
    assert set(OURS) & {row["mode"] for row in ROWS} == {FULL, RESPONSE}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"measure_group_size": 0}, "greater than or equal to 1"), ({"seeed": 1}, "Extra")],
)
def test_wrong_parameters_stop_the_notebook(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PerformanceParameters(**PARAMETERS | change)


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"performance\.json: not a readable recording"):
        PerformanceParameters(**PARAMETERS | {"folder": str(tmp_path)}).recording("performance")
