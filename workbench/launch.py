"""Starts several ranks of one function, watches them, and returns what each returned: from a notebook, a run, a shell.

Each rank is a process of its own (`workbench.parallel.worker`): a notebook's kernel may have touched CUDA, and a fork
of it could not. Their output goes to `rank-<r>.log` in a folder of the launch; rank 0's progress is one line of the
notebook that updates in place. The first rank that fails ends all, and its own traceback is the error. A rank that dies
is noticed at once; a rank that makes no progress, and keeps the others waiting, after `stall_seconds`. Whatever happens
here (an error, Ctrl-C, a killed kernel), no rank stays behind; after an error or Ctrl-C each has a moment to write down
how it ended.

For several machines use `accelerate launch` or torchrun with the same function; docs/many_ranks.md says how.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from workbench.errors import InvalidInputError, RankFailedError, first_line
from workbench.parallel.mesh import LISTENER_VARIABLE, STATUS_VARIABLE
from workbench.parallel.status import RankStatus, read_status
from workbench.records import RUN_FOLDER_VARIABLE, write_record

STALL_SECONDS = 300.0
START_SECONDS = 300.0  # importing torch and loading a model come before the first collective
_POLL_SECONDS = 0.05
_SHOW_SECONDS = 0.5
_GRACE_SECONDS = 1.0  # for the other ranks to say what they saw
_END_SECONDS = 3.0  # for a rank that is told to end to write its record


@dataclass(frozen=True)
class Launch:
    """A launch that every rank completed. values: what the function returned, by rank, as JSON. seconds: wall time."""

    values: tuple[Any, ...]
    folder: Path
    seconds: float


def launch(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    folder: Path | None = None,
    stall_seconds: float = STALL_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """Call `target` ("module:function") with `arguments` (JSON) on `ranks` new processes; returns what all returned.

    The function joins the others with `workbench.parallel.open_mesh`; a launch whose ranks did not meet is an error.
    folder: where the launch makes its own folder; default: the run's folder, or runs/. stall_seconds: how long no rank
    may finish or begin a collective; until each has finished one it is START_SECONDS if that is longer, and a single
    rank, which waits for nobody, may take its time. environment: added to this process's own.
    Raises InvalidInputError before anything starts, RankFailedError naming rank and stage when a rank fails.
    """
    place, request = prepare(target, arguments, ranks=ranks, folder=folder)
    run = _Run(place, request, stall_seconds)
    status, error = "failed", None
    try:
        run.start(environment or {})
        values = run.wait()
        status = "completed"
        return Launch(values, place, time.monotonic() - run.began)
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException as found:
        error = first_line(found)
        raise
    finally:
        run.end(signal.SIGINT if status == "interrupted" else signal.SIGTERM)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        write_record(place / "launch.json", {**request, "status": status, "error": error, "finished_at": finished})


def prepare(
    target: str, arguments: Mapping[str, Any] | None = None, *, ranks: int, folder: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Make a launch's folder and write the request that its ranks read; for `accelerate launch` and torchrun too."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidInputError(f"ranks={ranks!r} must be an integer >= 1")
    if ":" not in target:
        raise InvalidInputError(f"target={target!r} must read 'module:function'")
    started = datetime.now(UTC)
    parent = folder or Path(os.environ.get(RUN_FOLDER_VARIABLE, "runs"))
    place = parent / f"ranks-{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    place.mkdir(parents=True)
    request = {
        "id": place.name,
        "target": target,
        "arguments": dict(arguments or {}),
        "ranks": ranks,
        "status": "running",
        "started_at": started.isoformat(timespec="seconds"),
    }
    write_record(place / "launch.json", request)
    return place, request


@dataclass
class _Run:
    """The processes of one launch."""

    folder: Path
    request: Mapping[str, Any]
    stall_seconds: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def ranks(self) -> int:
        return int(self.request["ranks"])

    def start(self, environment: Mapping[str, str]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(self.ranks)
            for rank in range(self.ranks):
                with (self.folder / f"rank-{rank}.log").open("wb") as log:
                    self.processes.append(
                        subprocess.Popen(
                            [sys.executable, "-u", "-m", "workbench.parallel.worker", str(self.folder.resolve())],
                            env=self._environment(rank, listener) | dict(environment),
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL,
                            pass_fds=(listener.fileno(),) if rank == 0 else (),
                            start_new_session=True,  # Ctrl-C reaches this process only, which then ends them all
                        )
                    )

    def _environment(self, rank: int, listener: socket.socket) -> dict[str, str]:
        root = str(Path(__file__).resolve().parents[1])
        threads = max(1, (os.cpu_count() or 1) // self.ranks)
        return {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            LISTENER_VARIABLE: str(listener.fileno()),
            STATUS_VARIABLE: str(self.folder.resolve() / f"status-{rank}"),
            "LONGSTRAW_LAUNCHER_PID": str(os.getpid()),
        }

    def wait(self) -> tuple[Any, ...]:
        """Until every rank has ended well; raises RankFailedError at the first that has not, or at a stall."""
        shown, moved, before = 0.0, time.monotonic(), self._statuses()
        line = _UpdatingLine()
        while True:
            codes = [process.poll() for process in self.processes]
            if any(code not in (None, 0) for code in codes):
                self._fail(codes)
            if all(code == 0 for code in codes):
                line.show(f"{self.ranks} ranks done after {time.monotonic() - self.began:.0f} s", last=True)
                return tuple(self._result(rank) for rank in range(self.ranks))
            now, statuses = time.monotonic(), self._statuses()
            if statuses != before:
                moved, before = now, statuses
            elif now - moved > (limit := self._patience(statuses)):
                self._stalled(statuses, codes, limit)
            if now - shown > _SHOW_SECONDS:
                shown = now
                line.show(f"{self.ranks} ranks, {now - self.began:.0f} s; rank 0: {statuses[0].what}")
            time.sleep(_POLL_SECONDS)

    def end(self, how: signal.Signals) -> None:
        """Tell what still runs to end, as it would be told alone; then kill it, with whatever it started."""
        running = [process for process in self.processes if process.poll() is None]
        deadline = time.monotonic() + _END_SECONDS
        try:
            for process in running:
                process.send_signal(how)
            while time.monotonic() < deadline and any(process.poll() is None for process in running):
                time.sleep(_POLL_SECONDS)
        finally:  # a second Ctrl-C does not wait
            for process in running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in self.processes:
                process.wait()

    def _patience(self, statuses: Sequence[RankStatus]) -> float:
        """Seconds without a sign of life after which ranks count as stalled."""
        if self.ranks == 1:  # no collective that could hang, and so no sign of life either
            return math.inf
        have_met = all(status.calls for status in statuses)
        return self.stall_seconds if have_met else max(START_SECONDS, self.stall_seconds)

    def _statuses(self) -> list[RankStatus]:
        return [read_status(self.folder / f"status-{rank}") for rank in range(self.ranks)]

    def _result(self, rank: int) -> Any:
        path = self.folder / f"result-{rank}.json"
        if not path.is_file():
            raise RankFailedError(f"rank {rank} ended without an error and without a result: {self._log(rank)}")
        return json.loads(path.read_text(encoding="utf-8"))["value"]

    def _fail(self, codes: Sequence[int | None]) -> NoReturn:
        """The first failure of its own: not that of a rank that only lost a peer."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_SECONDS)
        codes = [process.poll() for process in self.processes]
        killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("error-*.json")]
        notes.sort(key=lambda note: (note["secondary"], note["time"]))
        if notes and not notes[0]["secondary"]:
            note = notes[0]
            where = self._statuses()[note["rank"]].what
            raise RankFailedError(
                f"rank {note['rank']} of {self.ranks} raised {note['type']}: {note['message']} [{where}]; its log: "
                f"{self._log(note['rank'])}\n{note['traceback']}"
            )
        if killed:
            name = signal.Signals(-codes[killed[0]]).name  # type: ignore[operator]
            where = self._statuses()[killed[0]].what
            raise RankFailedError(
                f"rank {killed[0]} of {self.ranks} was ended by {name} [{where}]; its log: {self._log(killed[0])} "
                "(SIGKILL from outside is often the system running out of memory)"
            )
        rank = notes[0]["rank"] if notes else next(r for r, code in enumerate(codes) if code)
        text = f": {notes[0]['message']}\n{notes[0]['traceback']}" if notes else f" with status {codes[rank]}"
        raise RankFailedError(f"rank {rank} of {self.ranks} ended{text}; its log: {self._log(rank)}")

    def _stalled(self, statuses: Sequence[RankStatus], codes: Sequence[int | None], limit: float) -> NoReturn:
        """Whoever the others wait for: a rank outside a collective, or else the one that has finished the fewest."""
        live = [rank for rank, code in enumerate(codes) if code is None]
        busy = [rank for rank in live if not statuses[rank].waiting]
        suspects = busy or [rank for rank in live if statuses[rank].calls == min(statuses[r].calls for r in live)]
        rank = min(suspects, key=lambda r: statuses[r].calls)
        told = "; ".join(
            f"rank {r} {'waits in' if s.waiting else 'is after'} {s.what} ({s.calls} collectives)"
            for r, s in enumerate(statuses)
        )
        raise RankFailedError(
            f"rank {rank} of {self.ranks} has stalled: no progress for {limit:.0f} s "
            f"[{statuses[rank].what}]. {told}. Its log: {self._log(rank)}"
        )

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"


class _UpdatingLine:
    """One line that changes in place: a single display of a notebook, the last line of a terminal, else silence."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._notebook = _in_notebook()

    def show(self, text: str, *, last: bool = False) -> None:
        if self._notebook:
            from IPython.display import display

            bundle = {"text/plain": text}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        elif sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=sys.stderr, flush=True)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return found is not None and hasattr(found, "kernel")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m workbench.launch --nproc N module:function name=value ...`; prints rank 0's value as JSON."""
    parser = argparse.ArgumentParser(prog="python -m workbench.launch", description="Run a function on several ranks.")
    parser.add_argument("target", help="module:function")
    parser.add_argument("arguments", nargs="*", metavar="name=value", help="values are JSON, else text")
    parser.add_argument("--nproc", type=int, required=True, help="how many ranks")
    parser.add_argument("--runs", type=Path, default=None, help="folder for launch folders (default: runs)")
    parser.add_argument("--stall-seconds", type=float, default=STALL_SECONDS)
    parser.add_argument("--prepare", action="store_true", help="only make the folder, for another launcher; print it")
    options = parser.parse_args(argv)
    values = {}
    for pair in options.arguments:
        name, equals, text = pair.partition("=")
        if not equals:
            parser.error(f"'{pair}' is not name=value")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    try:
        if options.prepare:
            print(prepare(options.target, values, ranks=options.nproc, folder=options.runs)[0])
            return 0
        done = launch(
            options.target, values, ranks=options.nproc, folder=options.runs, stall_seconds=options.stall_seconds
        )
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(done.values[0], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
