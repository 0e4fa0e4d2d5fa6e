"""Renders every notebook into `data/gallery/`: `python -m workbench.gallery`.

Each notebook runs through the runner at its default parameters and leaves two files: a page that opens with no network
and stays interactive, and a copy of the notebook that GitHub shows, with pictures and text only. `README.md` there
lists them. A notebook that fails leaves the files of the last time alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat

from workbench.errors import InvalidInputError
from workbench.progress import progress
from workbench.publish import write_github
from workbench.records import read_record, write_record
from workbench.run import run_notebook

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
GALLERY = ROOT / "data" / "gallery"
COMMAND = "python -m workbench.gallery"
# A report needs a run: the gallery's is of this notebook, which runs before it.
REPORTED = "30_group_serialization"
REPORT = "90_report"


def render(notebook: Path, folder: Path, runs: Path, parameters: Mapping[str, str]) -> dict[str, object]:
    """Runs one notebook and writes its page and its copy for GitHub; returns its line of the list."""
    record, place = run_notebook(notebook, parameters, runs=runs)
    line: dict[str, object] = {
        "title": nbformat.read(notebook, as_version=4).metadata.get("title", notebook.stem),
        "status": record.status,
        "seconds": round(record.seconds["total"]),
        "evidence_level": record.evidence.get("level", 0),
        "error": record.error,
        "run_folder": str(place),
    }
    if record.status == "completed":
        folder.mkdir(parents=True, exist_ok=True)
        write_github(nbformat.read(place / notebook.name, as_version=4), folder / notebook.name)
        (folder / f"{notebook.stem}.html").write_bytes((place / f"{notebook.stem}.html").read_bytes())
    return line


def index(lines: Mapping[str, Mapping[str, object]], folder: Path) -> str:
    """The list of what is there, as Markdown."""
    rows = [
        f"| {line['title']} | [notebook]({stem}.ipynb) | [page]({stem}.html), {_megabytes(folder, stem)} | "
        f"{line['seconds']} s | {line['evidence_level']} |"
        for stem, line in sorted(lines.items())
    ]
    return "\n".join(
        [
            "# Rendered notebooks",
            "",
            f"Written by `{COMMAND}`. GitHub shows the notebooks, with pictures in place of widgets. The pages are",
            "interactive: download one and open it, no network is needed. The last column is the level of",
            "evidence that the run's own checks reached (docs/architecture.md).",
            "",
            "| notebook | on GitHub | interactive | took | evidence |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _megabytes(folder: Path, stem: str) -> str:
    path = folder / f"{stem}.html"
    return f"{path.stat().st_size / 1e6:.1f} MB" if path.is_file() else "missing"


def main(arguments: Sequence[str] | None = None) -> int:
    """Renders the named notebooks, or all; returns 1 if one did not complete."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--folder", type=Path, default=GALLERY)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for run folders (default: runs)")
    options = parser.parse_args(arguments)
    listed = options.folder / "gallery.json"
    lines = read_record(listed) if listed.is_file() else {}
    failed = []
    for notebook in progress(sorted(options.notebooks or NOTEBOOKS.glob("*.ipynb")), "gallery", unit="notebook"):
        try:
            line = render(notebook, options.folder, options.runs, _parameters(notebook, options.runs))
        except InvalidInputError as error:
            line = {"status": "failed", "error": str(error)}
        if line["status"] == "completed":
            kept = ("title", "seconds", "evidence_level")
            lines[notebook.stem] = {name: line[name] for name in kept}
            write_record(listed, lines)
            (options.folder / "README.md").write_text(index(lines, options.folder), encoding="utf-8")
        else:
            failed.append(notebook.stem)
            print(f"error: {notebook.stem}: {line['error']}", file=sys.stderr)
        if line["status"] == "interrupted":
            break
    return 1 if failed else 0


def _parameters(notebook: Path, runs: Path) -> dict[str, str]:
    if notebook.stem != REPORT:
        return {}
    found = sorted(runs.glob(f"{REPORTED}-2*"))
    if not found:
        raise InvalidInputError(f"{REPORT} reports a run of {REPORTED}, and {runs} holds none: render that one first")
    return {"run_folder": str(found[-1])}


if __name__ == "__main__":
    sys.exit(main())
