"""The published peaks with our formulas, and what was chosen after seeing them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.planner import PublishedRun, post_hoc_choices, published_runs, published_table
from workbench.planner.sources import read_data

RUNS = published_runs()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_published_peaks(run: PublishedRun) -> None:
    """Within 2 %, as asked; measured 0.11 to 0.38 %. A fit, not a prediction: three choices are post hoc."""
    assert abs(run.error_pct) < 2.0
    assert abs(run.error_pct) < 0.4
    assert run.planned_gb == pytest.approx(sum(run.terms().values()) / 1e9)


def test_all_seven_are_there() -> None:
    assert [run.peak_gb for run in RUNS] == [97.503, 97.711, 82.960, 83.894, 136.717, 143.163, 145.176]


def test_choices_made_after_seeing_the_data_are_named() -> None:
    assert set(post_hoc_choices()) == {"vision_tower", "whole_response_logits", "proxy_block_4096"}


@pytest.mark.parametrize("choice", ["vision_tower", "whole_response_logits", "prompt_row_gradients"])
def test_each_choice_matters(choice: str) -> None:
    """Turned over, the error grows: for the vision tower from at most 0.4 to 0.6 to 1.3 %, else by tens of per cent."""
    for run in RUNS:
        other = replace(run, choices=replace(run.choices, **{choice: not getattr(run.choices, choice)}))
        assert abs(other.error_pct) > abs(run.error_pct) + 0.1


def test_the_proxies_grow_by_three_times_the_rows() -> None:
    """Bytes and gradients of a row: 3.000 x 65,536 / 8 per position."""
    proxies = [run for run in RUNS if "proxy" in run.name]
    reported = (proxies[-1].peak_gb - proxies[0].peak_gb) * 1e9 / (proxies[-1].positions - proxies[0].positions)
    assert reported / (65_536 / 8) == pytest.approx(3.0, abs=0.005)
    planned = (proxies[-1].planned_gb - proxies[0].planned_gb) * 1e9 / (proxies[-1].positions - proxies[0].positions)
    assert planned == pytest.approx(3 * 65_536 / 8)


def test_the_table_names_paper_and_engine() -> None:
    for row in published_table():
        assert row["paper"]
        assert 0 < row["this engine GB"] < row["published GB"]


def test_every_published_number_has_its_marks() -> None:
    data = read_data("published.json")
    for entry in [*data["runs"], *data["other"]]:
        assert entry["mark"], entry
        assert entry["paper_version"], entry
        assert entry["confidence"], entry
