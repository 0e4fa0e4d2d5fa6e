"""One rank of a launched run: `python -m workbench.parallel.worker FOLDER`, started by `workbench.launch`.

FOLDER/launch.json says what to call. What the function returns goes to FOLDER/result-<rank>.json, an error to
FOLDER/error-<rank>.json. A rank does not outlive the process that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Ask the kernel (Linux) for SIGKILL when the parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def _told_to_end(*_: Any) -> None:
    """SIGTERM, from the launcher or torchrun, as an error like any other: what runs here may still write its record."""
    from workbench.errors import RankFailedError

    raise RankFailedError("this rank was told to end (SIGTERM): another one has failed, or the launcher ends")


def run_rank(folder: Path) -> int:
    """Call the launched function on this rank; returns the exit status."""
    rank = int(os.environ["RANK"])
    try:
        # imported here, so that a failing import is told like any other error
        from workbench.parallel.mesh import close_mesh, joined_ranks
        from workbench.records import write_record

        request = json.loads((folder / "launch.json").read_text(encoding="utf-8"))
        result = find_target(request["target"])(**request["arguments"])
        joined = joined_ranks()
        if joined != request["ranks"]:  # a launcher or a target that quietly runs one process each
            raise RuntimeError(f"{request['ranks']} ranks were asked for, but this one has met {joined}")
        write_record(folder / f"result-{rank}.json", {"launch": request["id"], "rank": rank, "value": result})
        close_mesh()
    except BaseException as error:
        traceback.print_exc()
        from workbench.errors import RankFailedError

        note = {
            "rank": rank,
            "time": time.time(),
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "secondary": isinstance(error, RankFailedError),  # a peer was gone: its own story is the one to tell
        }
        unfinished = folder / f".error-{rank}"
        unfinished.write_text(json.dumps(note), encoding="utf-8")
        unfinished.rename(folder / f"error-{rank}.json")  # at once: the launcher may read it at any moment
        return 1
    return 0


def find_target(target: str) -> Any:
    """The function that `module:function` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    if "LONGSTRAW_LAUNCHER_PID" in os.environ:
        _die_with_parent(int(os.environ["LONGSTRAW_LAUNCHER_PID"]))
    signal.signal(signal.SIGTERM, _told_to_end)
    status = run_rank(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a communicator that lost a peer may hang in its own teardown
