"""The Python half of the widgets: records, controls, hosts. What a browser makes of them is in tests/browser."""

from __future__ import annotations

import base64
import json
import time
from html import escape
from pathlib import Path

import pytest

import widgets
from tests.widgets.examples import example_widgets, random_states, synthetic, write_run
from widgets import context_frontier, gradient_scope, prefix_reuse_drift, replay_timeline, sources
from widgets.base import Control
from widgets.group_serialization import MODES, PAPER_CASE, GroupRecord, modelled_points
from widgets.plan import PlanRecord, binding_term, phase_seconds, plan_record
from widgets.plan_cells import ALLOCATED, GPUS, cards, plan_cells, verdict
from widgets.prefix_reuse_drift import DriftCurve, recommended_interval
from widgets.run_monitor import read_run
from widgets.view import Series, View, exact, number
from workbench.errors import InvalidInputError
from workbench.planner import plan
from workbench.recordings import ORIGINS

NAMES = (
    "group_serialization",
    "prefix_reuse_drift",
    "context_frontier",
    "replay_timeline",
    "gradient_scope",
    "plan",
    "run_monitor",
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return example_widgets(tmp_path_factory.mktemp("widgets"))


# --- hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_one_bundle_serves_every_host(examples, name):
    widget = examples[name]
    data, _ = widget._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/html", "image/png", "text/plain"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert widget.title in data["text/plain"]
    assert widget.view().says in data["text/plain"]
    for cell in (cell for row in widget.view().table.rows for cell in row):
        assert cell in data["text/plain"]
    assert "http://" not in data["text/html"].replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in data["text/html"]


@pytest.mark.parametrize("name", NAMES)
def test_where_no_script_runs_picture_and_table_stay(examples, name):
    widget = examples[name]
    static, _, script = widget.html().partition("<script")
    assert script.endswith("</script>")
    assert static.count("<table>") == static.count("<img ") == 1
    assert "data:image/png;base64," in static
    for cell in (cell for row in widget.view().table.rows for cell in row):
        assert f">{escape(cell)}<" in static


def test_a_page_says_nothing_that_ends_its_script_early(examples, tmp_path):
    widget = examples["run_monitor"]
    record = json.loads((widget.folder / "run.json").read_text()) | {"error": "</script><b>", "name": "<!--"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    html = widgets.RunMonitor(tmp_path).html()
    assert html.count("</script>") == 1
    assert "<!--" not in html.partition("<script")[2]


def test_saving_needs_a_folder(examples, tmp_path):
    path = examples["plan"].save_html(tmp_path / "plan.html")
    assert path.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(InvalidInputError, match="no folder"):
        examples["plan"].save_html(tmp_path / "nowhere" / "plan.html")


# --- controls ----------------------------------------------------------------------------------------------------


def test_traits_are_typed_observed_and_checked(examples):
    widget = widgets.GroupSerialization(examples["group_serialization"].record, group_size=2)
    seen = []
    widget.observe(lambda change: seen.append((change["old"], change["new"])), "group_size")
    widget.group_size = 16
    assert seen == [(2, 16)]
    with pytest.raises(InvalidInputError, match="group_size=5 is not one of 1, 2"):
        widget.group_size = 5
    with pytest.raises(InvalidInputError, match=r"no control 'groupsize': did you mean group_size\?"):
        widgets.GroupSerialization(widget.record, groupsize=2)
    with pytest.raises(InvalidInputError, match="record is dict; give a GroupRecord"):
        widgets.GroupSerialization({"points": []})
    with pytest.raises(InvalidInputError, match="needs values"):
        Control(name="empty", label="Empty", values=())


@pytest.mark.parametrize("name", NAMES)
def test_every_view_marks_its_origins_and_units(examples, name):
    widget = examples[name]
    for state in random_states(widget, 12):
        view = widget.view_of(widget.record, state)
        assert isinstance(view, View)
        assert view.says
        assert "origin" in view.table.headings
        at = view.table.headings.index("origin")
        assert all(row[at] in (*ORIGINS, "–") for row in view.table.rows)
        assert all(len(row) == len(view.table.headings) for row in view.table.rows)
        for panel in view.panels:
            assert panel.x.label
            assert panel.y.label
            for series in panel.series:
                assert len(series.x) == len(series.y) > 0


def test_a_series_without_an_origin_is_refused():
    with pytest.raises(InvalidInputError, match="origin='guessed'"):
        Series(name="s", origin="guessed", color="blue", x=[1], y=[1])
    with pytest.raises(InvalidInputError, match="color='red'"):
        Series(name="s", origin="measured", color="red", x=[1], y=[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0, "0"),
        (8192, "8,192"),
        (5198.78, "5,199"),
        (97.503, "97.50"),
        (0.0137, "0.01370"),
        (1.5e-7, "1.500e-7"),
        (-12345.6, "-12,346"),
        (2.0625, "2.063"),
        (0.99999, "1.0000"),
    ],
)
def test_numbers_have_four_digits_and_separators(value, text):
    assert number(value) == text


def test_published_numbers_keep_their_digits():
    assert [exact(v) for v in (97.503, 82.96, 59, 4456448)] == ["97.503", "82.96", "59", "4,456,448"]


# --- the planner's answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Qwen3.6-27B", {"checkpoint_layers": True, "chunk_tokens": 8192}),
        ("GLM-5.2", {}),
        ("Qwen3-8B", {"weights": "bf16"}),
    ],
)
def test_looked_up_answers_are_those_of_plan(model, options):
    found = cards(GPUS)
    cells = list(
        plan_cells(
            model, context_parallel=(1, 8), scopes=("full", "prefix_frozen"), positions=(2**18, 2**21), **options
        )
    )
    assert len(cells) == 8
    verdicts = set()
    for cell in cells:
        for card in found:
            planned = plan(
                model,
                card.name,
                positions=cell.positions,
                group_size=5,
                response_tokens=8192,
                context_parallel=cell.context_parallel,
                expert_parallel=cell.context_parallel if model == "GLM-5.2" else 1,
                gradient_scope=cell.scope,
                **options,
            )
            verdicts.add(planned.verdict)
            assert verdict(cell, card) == planned.verdict
            assert (cell.peak_bytes, cell.peak_phase) == (planned.peak_bytes, planned.peak_phase)
            assert (cell.peak_low, cell.peak_high) == planned.peak_band
            assert binding_term(cell, cell.peak_phase) == planned.binding
            for phase, terms in planned.terms.items():
                assert cell.terms[phase] == tuple(terms[term] for term in ALLOCATED)
            # Linear in the group's size: exact up to the rounding of float64.
            assert phase_seconds(cell, card, 5) == pytest.approx(dict(planned.seconds_lines["half of peak"]), rel=1e-9)
    assert "no" in verdicts


def test_the_group_widget_plans_what_plan_says():
    for point in modelled_points():
        if point.mode == "serial_replay" and point.group_size in (1, 64):
            planned = plan(
                "Qwen3.6-27B",
                "H20-3e-141",
                positions=2097152,
                group_size=point.group_size,
                response_tokens=point.response_tokens,
                context_parallel=8,
                gradient_scope=point.scope,
                checkpoint_layers=True,
            )
            assert (point.peak_bytes, point.step_seconds) == (planned.peak_bytes, sum(planned.seconds.values()))


def test_a_grid_needs_entries():
    with pytest.raises(InvalidInputError, match="at least one entry each"):
        plan_record("Qwen3-8B", positions=())


def test_published_points_are_the_published_ones():
    shown = widgets.GroupSerialization()
    assert isinstance(shown.record, GroupRecord)
    row = next(row for row in shown.view().table.rows if row[1] == "published")
    assert row[:3] == [MODES["serial_replay"][0], "published", "97.711"]
    assert row[5] == "0.213 % from G = 2 to 8"
    assert shown.case == PAPER_CASE
    shown.group_size = 2
    assert next(row for row in shown.view().table.rows if row[1] == "published")[2] == "97.503"


# --- drift -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tolerance", "interval"), [(0.01, 1), (0.0137, 2), (0.02, 2), (0.05, 3), (3.5, 5), (10.0, 9)])
def test_the_recommended_interval_uses_no_age_beyond_the_tolerance(tolerance, interval):
    curve = next(c for c in prefix_reuse_drift.published_curves() if c.metric == "mean_abs_logprob_drift")
    assert recommended_interval(curve, tolerance) == interval


def test_the_worst_run_decides():
    curve = DriftCurve(
        case="c", origin="measured", metric="m", ages=(0, 1), mean=(0.0, 0.1), low=(0.0, 0.0), high=(0.0, 0.3), runs=3
    )
    assert recommended_interval(curve, 0.2) == 1


# --- what is missing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("drift", prefix_reuse_drift),
        ("gradient_scope", gradient_scope),
        ("reach", context_frontier),
        ("timeline", replay_timeline),
    ],
)
def test_a_missing_recording_is_said_in_words(kind, module, monkeypatch):
    monkeypatch.setattr(module, "recordings_of", lambda kind: [])
    record = module.shipped_record.__wrapped__()
    classes = {
        "drift": widgets.PrefixReuseDrift,
        "gradient_scope": widgets.GradientScope,
        "reach": widgets.ContextFrontier,
        "timeline": widgets.ReplayTimeline,
    }
    widget = classes[kind](record)
    assert f"No recording of kind {kind}" in repr(widget)
    origins = {series.origin for panel in widget.view().panels for series in panel.series}
    assert "measured" not in origins
    assert widget._repr_mimebundle_()[0]["image/png"]


def test_recordings_are_found_by_kind(tmp_path):
    assert sources.recordings_of("reach", tmp_path) == []
    assert [r.kind for r in sources.recordings_of("group_memory")] == ["group_memory"]
    with pytest.raises(InvalidInputError, match="kind 'reech'"):
        sources.recordings_of("reech")
    assert synthetic("reach", [{"model": "m"}]).rows[0]["scope"] is None


# --- a run folder ------------------------------------------------------------------------------------------------


def test_a_running_folder_is_read_and_followed(tmp_path):
    monitor = widgets.RunMonitor(write_run(tmp_path / "run", updates=5))
    assert monitor.record.metrics["reward_mean"][0] == (0, 1, 2, 3, 4), "the half-written line waits"
    assert monitor.record.metrics["seconds.replay"][1] == (0.1,) * 5
    assert monitor.record.metrics["grad_norm"][1][3] is None
    assert "train is running; update 4 was the last recorded." in monitor.view().says
    monitor.metric = "seconds.replay"
    monitor.follow(0.05)
    write_run(tmp_path / "run", updates=9, status="completed")
    deadline = time.monotonic() + 20
    while monitor.record.status == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    monitor.stop()
    assert "train is completed; update 8 was the last recorded." in monitor.view().says
    assert monitor.metric == "seconds.replay", "a choice survives new data"


def test_a_run_without_metrics_shows_what_it_has(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"name": "plan", "status": "failed", "error": "cell 3: no"}))
    monitor = widgets.RunMonitor(tmp_path)
    assert "plan is failed; no update recorded. Error: cell 3: no" in repr(monitor)
    assert "The run has no metrics.jsonl." in repr(monitor)
    write_run(tmp_path)
    monitor.refresh()
    assert monitor.metric == "reward_mean"


def test_damaged_run_folders_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="no run folder at"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="it is no run folder"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(InvalidInputError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)
    with pytest.raises(InvalidInputError, match="must be > 0"):
        widgets.RunMonitor(write_run(tmp_path / "run")).follow(0)


def test_long_runs_are_thinned_and_say_so(tmp_path):
    folder = write_run(tmp_path / "run", updates=2500)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]]  # one is unfinished
    lines[1]["reward_mean"], lines[-1]["reward_mean"] = -5.0, 99.0  # the second of three, and the last
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(folder)
    assert len(record.metrics["reward_mean"][0]) <= 1000
    assert record.notes == ("One of every 3 of 2500 updates is shown, and means are of those; the table is of all.",)
    assert record.metrics["reward_mean"][0][-1] == lines[-1]["step"], "the last one is always there"
    assert record.summaries["reward_mean"] == (99.0, -5.0, 99.0, 2500)
    view = widgets.RunMonitor.view_of(record, widgets.RunMonitor.defaults(record))
    assert view.table.rows[0] == ["reward_mean", "measured", "99", "-5", "99", "2,500"]


def test_javascript_is_part_of_the_package():
    import tomllib

    root = Path(widgets.__file__).resolve().parents[1]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["widgets"] == ["*.js"]
    assert isinstance(widgets.Plan().record, PlanRecord)
