"""The runner, on toy notebooks: every outcome leaves a folder that says what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

import workbench.run as run_module
from workbench.errors import InvalidInputError
from workbench.publish import find_external_addresses
from workbench.records import RunRecord, read_record
from workbench.run import main, parse_value, resolve_parameters, run_notebook

ROOT = Path(__file__).resolve().parents[1]
PARAMETERS = 'size = 2\nrate = 1e-3\nname = "a"\nflag = False\nitems = [1]\nderived = 2**3'


def make_notebook(folder: Path, *cells: str, stem: str = "toy") -> Path:
    """A notebook with a parameters cell, then `cells`."""
    node = nbformat.v4.new_notebook()
    node.cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, *cells)]
    node.cells[0].metadata["tags"] = ["parameters"]
    # A foreign kernel name, as notebooks from other machines have: the runner must not look for it.
    node.metadata["kernelspec"] = {"name": "somebodys-env", "display_name": "x", "language": "python"}
    path = folder / f"{stem}.ipynb"
    nbformat.write(node, path)
    return path


def output_text(folder: Path) -> str:
    node = nbformat.read(next(folder.glob("*.ipynb")), as_version=4)
    return "".join(
        output.get("text", "") or "\n".join(output.get("traceback", []))
        for cell in node.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


def test_a_run_leaves_notebook_page_and_record(tmp_path):
    notebook = make_notebook(
        tmp_path,
        "import sys\nprint(sys.executable)\nprint(size, rate, repr(name), flag, items)",
        "from workbench.records import save_results\n"
        "save_results('toy', {'answer': 42, 'seconds': {'think': 0.5}, 'memory': {'rows': 7}, 'seed': 3})",
    )
    # Braces in a path are literal, though papermill formats paths.
    runs = tmp_path / "runs {size}"
    asked = {"size": "3", "rate": "1e-5", "name": "3", "flag": "true", "items": "[1, 2]"}
    record, folder = run_notebook(notebook, asked, runs=runs, argv=["toy.ipynb"])

    assert record.status == "completed", record.error
    assert output_text(folder) == f"{sys.executable}\n3 1e-05 '3' True [1, 2]\n"
    written = read_record(folder / "run.json")
    assert written["status"] == "completed"
    assert written["parameters"] == {"size": 3, "rate": 1e-5, "name": "3", "flag": True, "items": [1, 2]}
    assert written["results"] == {"toy": {"answer": 42}}
    assert written["seed"] == 3
    assert set(written["seconds"]) == {"think", "total"}
    assert written["memory"]["rows"] == 7
    assert written["memory"]["peak_resident_bytes"] > 2**20
    assert written["provenance"]["versions"]["torch"]
    assert set(written["provenance"]["git"]) == {"revision", "dirty"}
    assert written["argv"] == ["toy.ipynb"]

    page = (folder / "toy.html").read_text()
    assert "1e-05" in page
    assert find_external_addresses(page) == []
    saved = (folder / "toy.ipynb").read_text()
    assert "finish_notebook" not in saved
    assert "somebodys-env" not in saved
    assert str(tmp_path) not in saved


def test_a_failing_cell_leaves_everything_up_to_it(tmp_path, capsys):
    notebook = make_notebook(tmp_path, "print('before')", "raise ValueError('of this')", "print('after')")
    assert main([str(notebook), "--runs", str(tmp_path / "runs")]) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    written = read_record(folder / "run.json")
    assert written["status"] == "failed"
    assert "ValueError: of this" in written["error"]
    assert "ValueError: of this" in capsys.readouterr().err
    assert "before" in output_text(folder)
    assert "after" not in output_text(folder)
    page = (folder / "toy.html").read_text()
    assert "of this" in page
    assert "<strong>This run failed.</strong>" in page


def test_a_dead_kernel_is_a_failure(tmp_path):
    notebook = make_notebook(tmp_path, "import os\nos._exit(7)")
    record, folder = run_notebook(notebook, runs=tmp_path / "runs")
    assert record.status == "failed"
    assert "DeadKernelError" in record.error
    assert (folder / "toy.html").exists()


def test_a_notebook_that_ends_early_without_an_error_is_a_failure(tmp_path):
    notebook = make_notebook(tmp_path, "import sys\nsys.exit(0)", "print('after')")
    record, _ = run_notebook(notebook, runs=tmp_path / "runs")
    assert record.status == "failed"
    assert "never reached" in record.error


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_what_was_done(tmp_path, signum):
    notebook = make_notebook(
        tmp_path,
        "import os\nprint('first')",
        "from pathlib import Path\nPath(os.environ['LONGSTRAW_RUN_DIR'], 'pid').write_text(str(os.getpid()))\n"
        "import time\ntime.sleep(600)",
    )
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "workbench.run", str(notebook), "--runs", str(runs)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (found := [p for p in runs.glob("*/pid") if p.read_text()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    folder = found[0].parent
    assert read_record(folder / "run.json")["status"] == "interrupted"
    assert "first" in output_text(folder)
    assert "first" in (folder / "toy.html").read_text()
    with pytest.raises(ProcessLookupError):  # the kernel is gone too
        os.kill(int(found[0].read_text()), 0)


def test_an_unknown_parameter_is_an_error_before_anything_starts(tmp_path, capsys):
    notebook = make_notebook(tmp_path)
    assert main([str(notebook), "-p", "sise", "3", "--runs", str(tmp_path / "runs")]) == 2
    assert "no parameter 'sise': did you mean size?" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="it has size, rate, name, flag, items, derived"):
        run_notebook(notebook, {"zzzzzz": "1"}, runs=tmp_path / "runs")
    with pytest.raises(InvalidInputError, match="no notebook at"):
        run_notebook(tmp_path / "missing.ipynb", runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("true", False, True),
        ("False", True, False),
        ("1e-5", 0.1, 1e-5),
        ("3", 2, 3),
        ("3", "a", "3"),
        ("true", "a", "true"),
        ("[1, 2]", None, [1, 2]),
        ('{"r": 8}', None, {"r": 8}),
        ("null", 1, None),
        ("None", 1, None),
        ("full", None, "full"),
        ("no", False, "no"),  # not YAML 1.1: the notebook's validation refuses it
    ],
)
def test_values_are_read_as_json_unless_the_default_is_text(text, default, value):
    parsed = parse_value(text, default)
    assert parsed == value
    assert type(parsed) is type(value)


def test_a_default_that_is_an_expression_does_not_stop_the_run(tmp_path):
    assert resolve_parameters(make_notebook(tmp_path), {"derived": "5"}) == {"derived": 5}


# --- what goes wrong with the disk -------------------------------------------------------------------------------


def test_a_full_disk_leaves_a_record_and_a_notebook_marked_failed(tmp_path, monkeypatch):
    """Simulated: the executed notebook is cut off in the middle of being written, and its page finds no room."""
    notebook = make_notebook(tmp_path, "print('first')")

    def cut_off(executed, *_):
        executed.write_text(executed.read_text()[:100])
        raise OSError(28, "No space left on device")

    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module.papermill, "execute_notebook", lambda path, *_, **__: cut_off(Path(path)))
    monkeypatch.setattr(run_module, "write_html", no_room)
    record, folder = run_notebook(notebook, runs=tmp_path / "runs")
    assert record.status == "failed"
    written = read_record(folder / "run.json")
    assert written["status"] == "failed"
    assert written["error"] == "OSError: [Errno 28] No space left on device"
    node = nbformat.read(folder / "toy.ipynb", as_version=4)
    assert node.metadata["longstraw"]["status"] == "failed"
    assert "This run failed" in node.cells[0].source
    assert "print('first')" in node.cells[-1].source


def test_a_record_that_cannot_be_written_fails_the_run(tmp_path, monkeypatch):
    notebook = make_notebook(tmp_path)
    write, calls = run_module.write_record, []

    def full(path, record):
        calls.append(record.status)
        if record.status != "running":
            raise OSError(28, "No space left on device")
        write(path, record)

    monkeypatch.setattr(run_module, "write_record", full)
    monkeypatch.setattr(run_module, "_execute", lambda *_: ("completed", None))
    record, folder = run_notebook(notebook, runs=tmp_path / "runs")
    assert record.status == "failed"
    assert "No space left on device" in record.error
    assert read_record(folder / "run.json")["status"] == "running", "what was there stays readable"


def test_no_room_for_a_run_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "runs").write_text("a file in the way")
    assert main([str(make_notebook(tmp_path)), "--runs", str(tmp_path / "runs")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_results_do_not_overwrite_each_other_or_the_runner() -> None:
    parity = {"level": 4, "what": "parity", "passed": True}
    executed = {"level": 1, "what": "executed", "passed": True}
    results = {
        "a": {"seconds": {"total": 0.001, "capture": 5.0}, "evidence": {"level": 4, "checks": [parity]}},
        "b": {"seconds": {"capture": 7.0}, "evidence": {"level": 1, "checks": [executed]}},
    }
    record = run_module._finished(RunRecord(name="x", status="completed", seconds={"total": 100.0}), results)
    assert record.seconds == {"total": 100.0, "a.total": 0.001, "capture": 5.0, "b.capture": 7.0}
    assert record.evidence == {"level": 4, "checks": [parity, executed]}
    failed = {"b": {"evidence": {"level": 0, "checks": [executed | {"passed": False}]}}}
    record = run_module._finished(RunRecord(name="x", status="completed"), {"a": results["a"], **failed})
    assert record.evidence["level"] == 0


def test_an_option_that_comes_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ROOT / "notebooks" / "10_plan.ipynb"), "--runs", str(tmp_path)]
    assert main([*arguments, "-p", "num_gpus", "2", "-p", "num_gpus", "8"]) == 2
    assert "'num_gpus' is given twice" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_swept_ranks_that_contradict_nproc_start_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ROOT / "notebooks" / "60_many_ranks.ipynb"), "--runs", str(tmp_path)]
    assert main([*arguments, "-p", "ranks", "1,2", "--nproc", "1"]) == 2
    assert "--nproc 1 and -p ranks 2 say different things" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_page_is_written_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "_execute", lambda *_: ("completed", None))
    monkeypatch.setattr(run_module, "write_html", interrupted)
    record, folder = run_notebook(ROOT / "notebooks" / "10_plan.ipynb", runs=tmp_path)
    assert record.status == json.loads((folder / "run.json").read_text())["status"] == "interrupted"
