"""A run that is killed at any moment ends, once resumed, bitwise as one that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks its runs")
def test_ten_kills_ten_bitwise_equal_ends(tmp_path: Path) -> None:
    """In a process of its own: it forks, and pytest's process may hold threads."""
    command = [sys.executable, "-m", "tests.kill_train", "--folder", str(tmp_path), "--kills", "10"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600, check=False
    )
    kills = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [kill["bitwise_equal"] for kill in kills] == [True] * 10
    assert len({kill["resumed_from"] for kill in kills}) >= 3  # they came at different stages of the run
