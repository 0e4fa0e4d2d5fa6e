"""Runs a notebook as a reproducible job: `python -m workbench.run notebooks/00_start.ipynb -p setting tiny`.

Each run gets a folder of its own, `runs/<notebook>-<UTC time>-<id>/`, with the executed notebook, a page that opens
with no network, and `run.json`. A run that fails or is interrupted leaves the same three, as far as it got. Built on
papermill's Python API, with its soft spots covered: unknown parameters are errors before anything starts, the kernel
is this interpreter, and success is what a marker written by the last cell says, not what papermill's metadata say.
"""

from __future__ import annotations

import argparse
import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import papermill
from ipykernel.kernelspec import get_kernel_dict
from traitlets.config import Config

from workbench.errors import InvalidInputError
from workbench.notebook_parameters import expand_sweep, literal_path, parse_value, resolve_parameters
from workbench.publish import detach_widgets, write_html
from workbench.records import RUN_FOLDER_VARIABLE, RunRecord, gather_results, provenance, write_record
from workbench.sweep import SweepRun, run_sweep, sweep_status

__all__ = ["main", "parse_value", "resolve_parameters", "run_notebook"]

_END_TAG = "longstraw-end"
_END_SOURCE = "from workbench.records import finish_notebook\n\nfinish_notebook()"
_END_RESULT = "_end"  # the results that finish_notebook leaves: their presence is the marker
_STATUS_TAG = "longstraw-status"
_ENDINGS = {"failed": "failed", "interrupted": "was interrupted"}
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
    with _terminate_as_interrupt():
        try:
            record = _run(notebook, folder, record, nproc)
        except KeyboardInterrupt:  # while the page was being written
            now = datetime.now(UTC).isoformat(timespec="seconds")
            words = "interrupted by the user before the page was written"
            record = replace(record, status="interrupted", error=words, finished_at=now)
    try:
        write_record(folder / "run.json", record)
    except OSError as error:  # a full disk: the caller still learns how the run ended
        record = replace(record, status="failed", error=f"{record.error or 'record not written'}; run.json: {error}")
    return record, folder


def _run(notebook: Path, folder: Path, record: RunRecord, nproc: int | None) -> RunRecord:
    """Executes the notebook of a record that says "running", and writes its page; returns how it ended."""
    executed = folder / notebook.name
    _prepare(notebook, executed)
    clock = time.monotonic()
    status, error = _execute(executed, record.parameters, folder)
    results: dict[str, dict[str, Any]] = {}
    try:
        results = gather_results(folder)
    except (ValueError, OSError) as problem:  # written by something else than save_results
        status, error = "failed", error or f"results not readable: {problem}"
    if status == "completed" and _END_RESULT not in results:
        status, error = "failed", "the kernel never reached the notebook's end, though no cell reported an error"
    if status == "completed" and nproc is not None and nproc not in _launched(folder):
        status, error = "failed", f"{nproc} ranks were asked for; launches that completed had {_launched(folder)}"
    own = {"total": time.monotonic() - clock}
    record = _finished(replace(record, status=status, error=error, seconds=own), results)
    return _publish(notebook, executed, record)


def _with_ranks(notebook: Path, texts: Mapping[str, str], nproc: int) -> dict[str, str]:
    if nproc < 1:
        raise InvalidInputError(f"--nproc {nproc} must be >= 1")
    if notebook.is_file() and "ranks" not in papermill.inspect_notebook(literal_path(notebook)):
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
    path = literal_path(executed)
    try:
        with _kernel_environment(folder):
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
    """The record with the notebook's results: fields that a record has of its own are lifted out of them.

    A stage that several results have, or that the runner measured, keeps the name of its result.
    """
    fields: dict[str, Any] = {"seconds": dict(record.seconds), "memory": dict(record.memory)}
    rest: dict[str, Any] = {}
    for name, result in results.items():
        for key in ("seconds", "memory"):
            for stage, value in result.get(key, {}).items():
                fields[key][f"{name}.{stage}" if stage in fields[key] else stage] = value
        fields |= {key: result[key] for key in ("seed", "device") if key in result}
        rest[name] = {key: value for key, value in result.items() if key not in _RECORD_FIELDS}
    evidence = [result["evidence"] for result in results.values() if "evidence" in result]
    if evidence:
        fields["evidence"] = _joined(evidence)
    rest.pop(_END_RESULT, None)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(record, finished_at=now, results=rest, **fields)


def _joined(evidence: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The checks of all results, and the highest level that one reached and below which none failed."""
    checks = [check for part in evidence for check in part.get("checks", ())]
    failed = [check["level"] for check in checks if not check.get("passed", True)]
    level = max(part.get("level", 0) for part in evidence)
    if len(evidence) > 1 and failed:
        level = min(level, min(failed) - 1)
    return {"level": level, "checks": checks}


def _publish(notebook: Path, executed: Path, record: RunRecord) -> RunRecord:
    """Cleans the executed notebook and writes its page; a page that cannot be written fails the run."""
    try:
        try:
            node = nbformat.read(executed, as_version=4)
        except Exception:  # cut off in the middle, by a full disk
            _prepare(notebook, executed)
            node = nbformat.read(executed, as_version=4)
        _clean(node, record)
        nbformat.write(node, executed)
        write_html(node, executed.with_suffix(".html"), title=record.name)
    except Exception as error:
        return replace(record, status="failed", error=record.error or f"page not written: {error}")
    return record


def _clean(node: Any, record: RunRecord) -> None:
    """Takes this machine's traces and dead widgets out, and says at the top if the run did not complete."""
    node.cells = [cell for cell in node.cells if _END_TAG not in cell.metadata.get("tags", [])]
    if record.status != "completed":
        words = f"**This run {_ENDINGS[record.status]}.** What follows is as far as it got.\n\n```\n{record.error}\n```"
        node.cells.insert(0, nbformat.v4.new_markdown_cell(words, metadata={"tags": [_STATUS_TAG]}))
    node.metadata["kernelspec"] = dict(_KERNELSPEC)
    node.metadata["longstraw"] = {"status": record.status, "provenance": dict(record.provenance)}
    for place in (node, *node.cells):
        # Papermill's own status says "completed" after an interruption, and its paths are this machine's.
        for key in ("status", "input_path", "output_path"):
            place.metadata.get("papermill", {}).pop(key, None)
    detach_widgets(node)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 completed, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m workbench.run", description="Run a notebook as a job.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="a parameter; 2,4,8 for a number runs the notebook once for each",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", nargs=2, action="append", default=[], metavar=("NAME", "VALUES"),
        help="the same for a parameter of any type, its values between commas",
    )  # fmt: skip
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for run folders (default: runs)")
    parser.add_argument("--nproc", type=int, help="how many ranks the notebook launches (its parameter 'ranks')")
    options = parser.parse_args(arguments)
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        combinations = expand_sweep(options.notebook, _once(options.parameter), _once(options.sweep))
        run_one = partial(run_notebook, nproc=options.nproc)
        if len(combinations) == 1:
            return _report(*run_one(options.notebook, combinations[0], runs=options.runs, argv=argv))
        for texts in combinations:  # all that can be refused is, before the first of them runs
            ranked = texts if options.nproc is None else _with_ranks(options.notebook, texts, options.nproc)
            resolve_parameters(options.notebook, ranked)
        done, folder = run_sweep(run_one, options.notebook, combinations, runs=options.runs, argv=argv)
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # no run folder could be made, or a sweep's page not be written
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _report_sweep(done, folder, len(combinations))


def _once(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Options by name; a name that comes twice says two things."""
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidInputError(f"parameter {twice[0]!r} is given twice; give it once")
    return dict(pairs)


def _report(record: RunRecord, folder: Path) -> int:
    print(f"{record.status} after {record.seconds['total']:.0f} s: {folder}")
    for path in sorted(folder.glob("*.*")):
        print(f"  {path}")
    if record.error:
        print(f"error: {record.error}", file=sys.stderr)
    return _EXIT_CODES[record.status]


def _report_sweep(done: Sequence[SweepRun], folder: Path, asked: int) -> int:
    status = sweep_status(done, asked)
    completed = sum(run.record.status == "completed" for run in done)
    print(f"{status}: {completed} of {asked} runs completed: {folder}\n  {folder / 'index.html'}")
    for run in done:
        if run.record.error:
            print(f"error: {run.folder.name}: {run.record.error}", file=sys.stderr)
    return _EXIT_CODES[status]


if __name__ == "__main__":
    sys.exit(main())
