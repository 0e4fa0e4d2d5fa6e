"""What a rank is doing, in one small file that the launcher's watchdog reads: `calls.stages state stage: what`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_WIDTH = 160


@dataclass(frozen=True)
class RankStatus:
    """calls: collectives finished. waiting: inside one now. what: stage, and the last collective begun. stages: begun
    so far, the same one again counted: work between collectives is progress too.
    """

    calls: int = 0
    waiting: bool = False
    what: str = "starting"
    stages: int = 0


class Status:
    """Written before and after every collective: one write of a fixed width, no file is ever half new."""

    def __init__(self, path: Path | None) -> None:
        self._calls, self._what, self._stage, self._stages = 0, "no collective yet", "start", 0
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def stage(self, name: str) -> None:
        self._stage = name
        self._stages += 1
        self._write("running")

    @property
    def where(self) -> str:
        """Stage and last collective, for messages."""
        return f"stage {self._stage}: {self._what}"

    def waiting(self, what: str) -> None:
        self._what = what
        self._write("waiting")

    def running(self) -> None:
        self._calls += 1
        self._write("running")

    def _write(self, state: str) -> None:
        if self._file is not None:
            line = f"{self._calls}.{self._stages} {state} {self.where}"[: _WIDTH - 1].ljust(_WIDTH - 1) + "\n"
            os.pwrite(self._file, line.encode(), 0)


def read_status(path: Path) -> RankStatus:
    try:
        counts, state, what = path.read_text(encoding="utf-8").split(" ", 2)
        calls, stages = counts.split(".")
        return RankStatus(int(calls), state == "waiting", what.strip(), int(stages))
    except (OSError, ValueError):
        return RankStatus()
