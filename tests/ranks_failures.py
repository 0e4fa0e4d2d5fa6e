"""Ranks that go wrong on purpose, for tests/test_launch.py: run as launched functions."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from workbench.comm import every_rank
from workbench.parallel import open_mesh


def fail(how: str, rank: int = 1) -> dict[str, Any]:
    """Meet, work together once, then rank `rank` raises, is killed, hangs, or leaves early; the others go on."""
    mesh = open_mesh(timeout_seconds=60)
    met = every_rank(mesh.world, os.getpid(), tag="meeting")
    mesh.on_stage("replay")
    if mesh.world.rank == rank:
        if how == "raises":
            raise ValueError("boom")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
    mesh.world.all_gather(torch.zeros(1), [1] * mesh.world.size, "work")
    return {"pids": met}


def alone(seconds: float = 0.0) -> int:
    """Never meets the others, and takes its time."""
    time.sleep(seconds)
    return 1


def ends_without_a_word() -> None:
    raise RuntimeError
