"""What the README shows must run as it stands there."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_python_in_the_readme_runs(capsys):
    snippets = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    printed = []
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})
        printed.append(capsys.readouterr().out.splitlines())
    steps, (rewards,) = printed
    assert len(steps) == 3, "three steps, one line each"
    assert all(math.isfinite(float(value)) for line in steps for value in line.split())
    assert len(json.loads(rewards)) == 2


def test_no_todo_is_left():
    assert "TODO" not in README
