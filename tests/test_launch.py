"""workbench.launch with real processes: what happens when a rank raises, dies or hangs, or the launcher ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench import InvalidInputError
from workbench.errors import RankFailedError, first_line
from workbench.launch import launch, main
from workbench.parallel.status import RankStatus, Status, read_status
from workbench.parallel.worker import run_rank

ROOT = Path(__file__).resolve().parents[1]
STALL = 6.0
launch_module = sys.modules["workbench.launch"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"rank 1 of 2 raised ValueError: boom \[stage replay: .*\]"),
        ("killed", r"rank 1 of 2 was ended by SIGKILL \[stage replay: .*\]"),
        ("hangs", r"rank 1 of 2 has stalled: .*\[stage replay: .*'meeting' .*rank 0 waits in stage replay: .*'work'"),
    ],
)  # fmt: skip
def test_a_failing_rank_ends_all(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        launch("tests.ranks_failures:fail", {"how": how}, ranks=2, folder=tmp_path, stall_seconds=STALL)
    last_seen = max(path.stat().st_mtime for path in tmp_path.glob("*/status-*"))
    assert time.time() - last_seen < STALL + 30, "from the last sign of life, not from the start"
    if how == "raises":
        assert "raise ValueError" in str(caught.value), "its own traceback"
    record = _record(tmp_path)
    assert record["status"] == "failed"
    assert record["error"] == str(caught.value).splitlines()[0]
    assert not list(tmp_path.glob("*/result-*.json")), "nothing partial can be taken for a result"
    assert _workers_of(tmp_path) == []


def test_one_rank_waits_for_nobody_and_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "START_SECONDS", 0.5)
    done = launch("tests.ranks_failures:alone", {"seconds": 3.0}, ranks=1, folder=tmp_path, stall_seconds=0.5)
    assert done.values == (1,)


def test_before_ranks_have_met_the_longer_limit_holds_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model comes before the first collective, and is no sign of life."""
    monkeypatch.setattr(launch_module, "START_SECONDS", 0.1)
    with pytest.raises(RankFailedError, match="no progress for 3 s"):
        launch("tests.ranks_failures:alone", {"seconds": 60.0}, ranks=2, folder=tmp_path, stall_seconds=3.0)


def test_an_error_without_a_text_has_its_name(tmp_path: Path) -> None:
    assert first_line(RuntimeError()) == "RuntimeError"
    assert first_line(ValueError("one\ntwo")) == "one"
    with pytest.raises(RankFailedError, match="raised RuntimeError"):
        launch("tests.ranks_failures:ends_without_a_word", ranks=1, folder=tmp_path)


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """As when a notebook's kernel is killed: SIGKILL leaves the launcher no time to do anything."""
    command = [sys.executable, "-m", "workbench.launch", "--nproc", "2", "--runs", str(tmp_path)]
    launcher = subprocess.Popen([*command, "tests.ranks_failures:fail", "how=hangs"], cwd=ROOT)
    try:
        _until(lambda: len(_met(tmp_path)) == 2 or launcher.poll() is not None)
    finally:
        launcher.kill()
        launcher.wait(timeout=20)
    assert len(_met(tmp_path)) == 2
    _until(lambda: _workers_of(tmp_path) == [])
    assert _record(tmp_path)["status"] == "running", "nobody was there to say more"


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        launch("tests.ranks_failures:fail", {"how": "hangs"}, ranks=2, folder=tmp_path)
    assert _record(tmp_path)["status"] == "interrupted"
    assert _workers_of(tmp_path) == []


@pytest.mark.parametrize(("ranks", "target"), [(0, "a:b"), (True, "a:b"), (2, "no_function")])
def test_wrong_arguments_start_nothing(tmp_path: Path, ranks: int, target: str) -> None:
    with pytest.raises(InvalidInputError):
        launch(target, ranks=ranks, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_status_is_read_as_written(tmp_path: Path) -> None:
    status = Status(tmp_path / "status")
    assert read_status(tmp_path / "status") == RankStatus()
    status.stage("capture")
    status.waiting("all_gather 'x' over 2")
    assert read_status(tmp_path / "status") == RankStatus(0, True, "stage capture: all_gather 'x' over 2", 1)
    status.running()
    running = read_status(tmp_path / "status")
    assert running == RankStatus(1, False, "stage capture: all_gather 'x' over 2", 1)
    status.stage("capture")
    assert read_status(tmp_path / "status") != running, "the same stage once more is progress: nothing has stalled"


def _record(folder: Path) -> dict[str, str]:
    (path,) = folder.glob("*/launch.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _met(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/status-*") if read_status(path).what.startswith("stage replay")]


def _workers_of(folder: Path) -> list[int]:
    """Process ids of this launch's ranks, from the kernel's table."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"workbench.parallel.worker" in words and str(folder).encode() in words:
                found.append(int(entry.name))
    return found


def _until(true: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


# ---------------------------------------------------------------- other launchers


@pytest.mark.parametrize(
    ("name", "more", "nodes", "node", "endpoint"),
    [
        ("one_node_8_gpus", [], "1:1", 0, ""),
        ("four_nodes_8_gpus", ["--machine_rank", "2", "--main_process_ip", "10.0.0.1"], "4", 2, "10.0.0.1:29500"),
    ],
)
def test_shipped_accelerate_configurations_start_the_worker(
    name: str, more: list[str], nodes: str, node: int, endpoint: str
) -> None:
    """A dry run: accelerate's own parser and checks, then what it would hand to torchrun's parser."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env
    from torch.distributed.run import get_args_parser

    config = ROOT / "data" / "accelerate" / f"{name}.yaml"
    command = ["--config_file", str(config), *more, "-m", "workbench.parallel.worker", "FOLDER"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert arguments.multi_gpu, "it would start ranks, not one process"
    assert arguments.mixed_precision == "no", "the engine refuses autocast"
    prepare_multi_gpu_env(arguments)
    started = _filter_args(arguments, get_args_parser(), ["--training_script", arguments.training_script])
    assert (started.nnodes, started.nproc_per_node, started.node_rank) == (nodes, "8", node)
    assert started.rdzv_endpoint == endpoint
    assert (started.module, started.training_script) == (True, "workbench.parallel.worker")
    assert started.training_script_args == ["FOLDER"]


def test_a_folder_can_be_prepared_for_another_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its worker sees that nobody else came: `accelerate launch --cpu` would start one process without a word."""
    arguments = ["--prepare", "--nproc", "2", "--runs", str(tmp_path), "tests.ranks_failures:alone"]
    assert main(arguments) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert json.loads((folder / "launch.json").read_text())["ranks"] == 2
    monkeypatch.setenv("RANK", "0")
    assert run_rank(folder) == 1
    note = json.loads((folder / "error-0.json").read_text())
    assert note["message"] == "2 ranks were asked for, but this one has met 1"
    assert not (folder / "result-0.json").exists()
