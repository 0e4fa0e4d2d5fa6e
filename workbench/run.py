"""Runs a notebook as a reproducible job: `python -m workbench.run notebooks/00_start.ipynb -p setting tiny`.

Each run gets a folder of its own, `runs/<notebook>-<UTC time>-<id>/`, with the executed notebook, a page that opens
with no network, and `run.json`. A run that fails or is interrupted leaves the same three, as far as it got. Built on
papermill's Python API, with its soft spots covered: unknown parameters are errors before anything starts, the kernel
is this interpreter, and success is what a marker written by the last cell says, not what papermill's metadata say.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from traitlets.config import Config

from workbench.errors import InvalidInputError
from workbench.publish import write_html
from workbench.records import RUN_FOLDER_VARIABLE, RunRecord, gather_results, provenance, write_record

_END_TAG = "longstraw-end"
_END_SOURCE = "from workbench.records import finish_notebook\n\nfinish_notebook()"
_END_RESULT = "_end"  # the results that finish_notebook leaves: their presence is the marker
_RECORD_FIELDS = ("seconds", "memory", "evidence", "seed", "device")
_EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130}
_KERNELSPEC = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def run_notebook(
    notebook: Path,
    parameters: Mapping[str, str] | None = None,
    *,
    runs: Path = Path("runs"),
    argv: Sequence[str] = (),
    nproc: int | None = None,
) -> tuple[RunRecord, Path]:
    """Executes `notebook` in a new folder under `runs`; returns the record and the folder.

    parameters: values as text, as on a command line; each is read as its default in the notebook suggests.
    nproc: how many ranks the notebook is to launch: its parameter `ranks`. A run that has not launched that many is
        failed: a launcher that quietly starts one process is a known trap.
    A failing cell, a dead kernel or Ctrl-C do not raise: `record.status` and `record.error` tell.
    Raises InvalidInputError for a missing notebook or an unknown parameter, before anything starts.
    """
    if nproc is not None:
        parameters = _with_ranks(notebook, parameters or {}, nproc)
    values = resolve_parameters(notebook, parameters or {})
    started = datetime.now(UTC)
    folder = runs / f"{notebook.stem}-{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder.mkdir(parents=True)
    record = RunRecord(
        name=notebook.stem,
        status="running",
        parameters=values,
        argv=tuple(argv),
        started_at=started.isoformat(timespec="seconds"),
        provenance=provenance(),
    )
    write_record(folder / "run.json", record)
    executed = folder / notebook.name
    _prepare(notebook, executed)

    clock = time.monotonic()
    status, error = _execute(executed, values, folder)
    results = gather_results(folder)
    if status == "completed" and _END_RESULT not in results:
        status, error = "failed", "the kernel never reached the notebook's end, though no cell reported an error"
    if status == "completed" and nproc is not None and nproc not in _launched(folder):
        status, error = "failed", f"{nproc} ranks were asked for; launches that completed had {_launched(folder)}"
    own = {"total": time.monotonic() - clock}
    record = _finished(replace(record, status=status, error=error, seconds=own), results)
    record = _publish(executed, record)
    write_record(folder / "run.json", record)
    return record, folder


# --- parameters --------------------------------------------------------------------------------------------------


def resolve_parameters(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Typed values for the notebook's parameters. Raises InvalidInputError naming the nearest known names."""
    if not notebook.is_file():
        raise InvalidInputError(f"no notebook at {notebook}")
    known = papermill.inspect_notebook(_literal_path(notebook))
    for name in texts:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known) or 'none'}"
            raise InvalidInputError(f"{notebook.name} has no parameter '{name}': {hint}")
    return {name: parse_value(text, _default(known[name])) for name, text in texts.items()}


def parse_value(text: str, default: Any = None) -> Any:
    """`text` as JSON (true, 1e-5, [1, 2], null), with Python's True, False and None; else as it stands.

    A parameter whose default is a string stays a string, so that `-p name 3` gives "3" where a name is expected.
    """
    if isinstance(default, str):
        return text
    python_words = {"True": True, "False": False, "None": None}
    if text in python_words:
        return python_words[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _default(parameter: Mapping[str, Any]) -> Any:
    try:
        return ast.literal_eval(parameter["default"])
    except (ValueError, SyntaxError):  # an expression, such as 2**10
        return None


def _with_ranks(notebook: Path, texts: Mapping[str, str], nproc: int) -> dict[str, str]:
    if nproc < 1:
        raise InvalidInputError(f"--nproc {nproc} must be >= 1")
    if notebook.is_file() and "ranks" not in papermill.inspect_notebook(_literal_path(notebook)):
        raise InvalidInputError(f"--nproc: {notebook.name} has no parameter 'ranks', so it runs as one process")
    if texts.get("ranks", str(nproc)) != str(nproc):
        raise InvalidInputError(f"--nproc {nproc} and -p ranks {texts['ranks']} say different things; give one")
    return {**texts, "ranks": str(nproc)}


def _launched(folder: Path) -> list[int]:
    """Sizes of the launches (workbench.launch) that completed in this run's folder."""
    launches = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("ranks-*/launch.json")]
    return [launch["ranks"] for launch in launches if launch["status"] == "completed"]


# --- execution ---------------------------------------------------------------------------------------------------


def _prepare(notebook: Path, target: Path) -> None:
    """Copies the notebook, without outputs, with one more cell that tells the runner that the end was reached."""
    node = nbformat.read(notebook, as_version=4)
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    end = nbformat.v4.new_code_cell(_END_SOURCE, metadata={"tags": [_END_TAG]})
    node.cells.append(end)
    node.metadata["kernelspec"] = dict(_KERNELSPEC)
    nbformat.write(node, target)


def _execute(executed: Path, values: Mapping[str, Any], folder: Path) -> tuple[str, str | None]:
    """Executes the prepared copy in place; returns status and error."""
    path = _literal_path(executed)
    try:
        with _kernel_environment(folder), _terminate_as_interrupt():
            papermill.execute_notebook(
                path,
                path,
                parameters=dict(values),
                kernel_name="python3",
                progress_bar=sys.stderr.isatty(),
                # Passed on to nbclient: neither half a megabyte of widget state nor one output per progress line, and
                # no other user of this machine reads along on the kernel's ports.
                store_widget_state=False,
                coalesce_streams=True,
                config=Config({"KernelManager": {"transport_encryption": "auto"}}),
            )
    except KeyboardInterrupt:
        return "interrupted", "interrupted by the user"
    except papermill.PapermillExecutionError as error:
        return "failed", f"cell {error.cell_index + 1}: {error.ename}: {error.evalue}"
    except Exception as error:  # a dead kernel, a full disk: the run's record must still be written
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    return "completed", None


def _literal_path(path: Path) -> str:
    """Papermill formats paths with the parameters; doubled braces survive that."""
    return str(path.resolve()).replace("{", "{{").replace("}", "}}")


@contextlib.contextmanager
def _kernel_environment(folder: Path) -> Iterator[None]:
    """Makes the kernel "python3" this interpreter, and tells the notebook where its run lives.

    A kernel specification of that name in the user's folders may start any other Python: ours is found first.
    """
    package_root = Path(__file__).resolve().parents[1]
    python_path = os.pathsep.join(filter(None, [str(package_root), os.environ.get("PYTHONPATH")]))
    # ipykernel's own description starts sys.executable.
    kernel = get_kernel_dict() | {"env": {"PYTHONPATH": python_path, RUN_FOLDER_VARIABLE: str(folder.resolve())}}
    with tempfile.TemporaryDirectory(prefix="longstraw-kernel-") as place:
        specification = Path(place, "kernels", "python3", "kernel.json")
        specification.parent.mkdir(parents=True)
        specification.write_text(json.dumps(kernel), encoding="utf-8")
        before = os.environ.get("JUPYTER_PATH")
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [place, before]))
        try:
            yield
        finally:
            if before is None:
                del os.environ["JUPYTER_PATH"]
            else:
                os.environ["JUPYTER_PATH"] = before


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """A polite kill (a batch system's time limit) leaves the same record as Ctrl-C."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what is left behind -----------------------------------------------------------------------------------------


def _finished(record: RunRecord, results: Mapping[str, dict[str, Any]]) -> RunRecord:
    """The record with the notebook's results: fields that a record has of its own are lifted out of them."""
    fields: dict[str, Any] = {"seconds": dict(record.seconds), "memory": dict(record.memory)}
    rest: dict[str, Any] = {}
    for name, result in results.items():
        for key in _RECORD_FIELDS:
            if key in ("seconds", "memory"):
                fields[key] |= result.get(key, {})
            elif key in result:
                fields[key] = result[key]
        rest[name] = {key: value for key, value in result.items() if key not in _RECORD_FIELDS}
    rest.pop(_END_RESULT, None)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(record, finished_at=now, results=rest, **fields)


def _publish(executed: Path, record: RunRecord) -> RunRecord:
    """Cleans the executed notebook and writes its page; a page that would need a network fails the run."""
    node = nbformat.read(executed, as_version=4)
    node.cells = [cell for cell in node.cells if _END_TAG not in cell.metadata.get("tags", [])]
    node.metadata["kernelspec"] = dict(_KERNELSPEC)
    node.metadata["longstraw"] = {"status": record.status, "provenance": dict(record.provenance)}
    for place in (node, *node.cells):
        # Papermill's own status says "completed" after an interruption, and its paths are this machine's.
        for key in ("status", "input_path", "output_path"):
            place.metadata.get("papermill", {}).pop(key, None)
    nbformat.write(node, executed)
    try:
        write_html(node, executed.with_suffix(".html"), title=record.name)
    except Exception as error:
        return replace(record, status="failed", error=record.error or f"page not written: {error}")
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 completed, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m workbench.run", description="Run a notebook as a job.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for run folders (default: runs)")
    parser.add_argument("--nproc", type=int, help="how many ranks the notebook launches (its parameter 'ranks')")
    options = parser.parse_args(arguments)
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        record, folder = run_notebook(
            options.notebook, dict(options.parameter), runs=options.runs, argv=argv, nproc=options.nproc
        )
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{record.status} after {record.seconds['total']:.0f} s: {folder}")
    for path in sorted(folder.glob("*.*")):
        print(f"  {path}")
    if record.error:
        print(f"error: {record.error}", file=sys.stderr)
    return _EXIT_CODES[record.status]


if __name__ == "__main__":
    sys.exit(main())
