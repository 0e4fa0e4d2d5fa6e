"""Worlds of real ranks that several test files ask for: each is started once, and runs every case (ranks_cases.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from workbench.launch import launch


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, list[dict[str, Any]]]:
    """{ranks: every rank's results}, each world started when first asked for."""
    return _Worlds(tmp_path_factory)


class _Worlds(dict[int, list[dict[str, Any]]]):
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, size: int) -> list[dict[str, Any]]:
        folder = self._factory.mktemp(f"ranks-{size}")
        # in the small world every collective is compared between ranks before it runs
        done = launch("tests.ranks_cases:run", {"debug": size == 2}, ranks=size, folder=folder)
        assert f"mesh: dp 1 x cp {size} = {size} ranks" in (done.folder / "rank-0.log").read_text()
        self[size] = list(done.values)
        return self[size]


@pytest.fixture(autouse=True)
def _subnormals_kept() -> Iterator[None]:
    """A step flushes subnormal numbers while it runs; a test that left them flushed would change every later one."""
    yield
    flushed = sys.float_info.min * 0.5 == 0
    torch.set_flush_denormal(False)
    assert not flushed, "this test left subnormal numbers flushed to zero"
