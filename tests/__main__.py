"""`python -m tests [pytest arguments]`: lint, format, types, tests. All of them run; any failure fails the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    # Last: CI reads the closing line of what ran. Tiny models gain nothing from threads: one worker per core instead.
    ("pytest", "-n", "auto", "--dist", "worksteal"),
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def main(arguments: list[str]) -> int:
    """Runs every step with this interpreter and returns 0 only if all of them passed."""
    failed = []
    for tool, *options in STEPS:
        extra = arguments if tool == "pytest" else []
        print(f"== {tool} {' '.join([*options, *extra])}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", tool, *options, *extra], cwd=ROOT, env=ENVIRONMENT, check=False
        ).returncode:
            failed.append(tool)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
