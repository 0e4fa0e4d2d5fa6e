"""Several runs of one notebook, and a page that compares them: what `-p G 2,4,8` makes.

The page is written anew after every run, so an interrupted sweep leaves a page of what is done.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.progress import progress
from workbench.records import RunRecord, write_record

RunOne = Callable[..., tuple[RunRecord, Path]]
MOST_RESULTS = 12  # columns of results on the page; sweep.json has all of them
_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; margin: 20px auto; max-width: 1200px;
padding: 0 12px; } .wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid color-mix(in srgb, currentColor 20%,
transparent); white-space: nowrap; } .bad { font-weight: 600; }
"""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, and its folder."""

    record: RunRecord
    folder: Path

    def numbers(self) -> dict[str, float]:
        """Every single number among the results and stage times, by dotted name."""
        found = dict(_numbers(self.record.results))
        return found | {f"seconds.{stage}": value for stage, value in self.record.seconds.items()}


def run_sweep(
    run_one: RunOne,
    notebook: Path,
    combinations: Sequence[Mapping[str, str]],
    *,
    runs: Path = Path("runs"),
    argv: Sequence[str] = (),
) -> tuple[list[SweepRun], Path]:
    """Runs every combination in turn, in a new folder with `index.html` and `sweep.json`; returns runs and folder.

    run_one: `workbench.run.run_notebook`. A failed run does not stop the sweep, an interrupted one does.
    """
    folder = runs / f"{notebook.stem}-sweep-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    done: list[SweepRun] = []
    for texts in progress(combinations, f"sweep of {notebook.stem}", unit="run"):
        record, place = run_one(notebook, texts, runs=folder, argv=argv)
        done.append(SweepRun(record, place))
        _write(folder, notebook.stem, combinations, done)
        if record.status == "interrupted":
            break
    return done, folder


def sweep_status(done: Sequence[SweepRun], asked: int) -> str:
    """ "completed" if every asked run did, "interrupted" if the last one was, else "failed"."""
    statuses = [run.record.status for run in done]
    if "interrupted" in statuses:
        return "interrupted"
    return "completed" if statuses == ["completed"] * asked else "failed"


def _write(folder: Path, name: str, combinations: Sequence[Mapping[str, str]], done: Sequence[SweepRun]) -> None:
    status = sweep_status(done, len(combinations)) if len(done) == len(combinations) else "running"
    if done[-1].record.status == "interrupted":
        status = "interrupted"
    runs = [
        {
            "folder": run.folder.name,
            "status": run.record.status,
            "parameters": run.record.parameters,
            "numbers": run.numbers(),
            "error": run.record.error,
        }
        for run in done
    ]
    write_record(folder / "sweep.json", {"name": name, "status": status, "asked": list(combinations), "runs": runs})
    (folder / "index.html").write_text(index_page(name, len(combinations), done), encoding="utf-8")


def index_page(name: str, asked: int, done: Sequence[SweepRun]) -> str:
    """A table with a row for each run: what was asked, how it ended, what it measured, and a link to its page."""
    swept = [key for key in done[0].record.parameters if _differs([run.record.parameters.get(key) for run in done])]
    swept = swept or list(done[0].record.parameters)
    numbers = [run.numbers() for run in done]
    names = [name for name in dict.fromkeys(name for one in numbers for name in one) if name != "seconds.total"]
    # What differs between the runs says something; without a difference, whatever there is.
    telling = [name for name in names if _differs([one.get(name) for one in numbers])] or names
    shown = sorted(telling, key=lambda name: name.startswith("seconds."))[:MOST_RESULTS]
    headings = ["run", *swept, "status", "seconds", *shown]
    rows = "".join(
        f"<tr>{''.join(_cells(run, one, swept, shown))}</tr>" for run, one in zip(done, numbers, strict=True)
    )
    errors = "".join(f"<li>{escape(r.folder.name)}: {escape(r.record.error)}</li>" for r in done if r.record.error)
    more = f"<p>{len(telling) - len(shown)} further numbers are in sweep.json.</p>" if len(telling) > len(shown) else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: sweep</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(name)}: {len(done)} of {asked} runs</h1><div class='wide'><table><thead><tr>"
        f"{''.join(f'<th scope=col>{escape(heading)}</th>' for heading in headings)}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{more}{f'<ul>{errors}</ul>' if errors else ''}</body></html>\n"
    )


def _cells(run: SweepRun, numbers: Mapping[str, float], swept: Sequence[str], shown: Sequence[str]) -> Iterator[str]:
    page = quote(f"{run.folder.name}/{run.record.name}.html")
    yield f'<td><a href="{escape(page)}">{escape(run.folder.name[-6:])}</a></td>'
    for name in swept:
        yield f"<td>{escape(str(run.record.parameters.get(name, '')))}</td>"
    mark = "" if run.record.status == "completed" else ' class="bad"'
    yield f"<td{mark}>{escape(run.record.status)}</td>"
    yield f"<td>{run.record.seconds.get('total', 0.0):,.1f}</td>"
    for name in shown:
        yield f"<td>{_number(numbers.get(name))}</td>"


def _numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{prefix}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{prefix}{name}", item


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _differs(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)
