"""What the README shows must run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_python_in_the_readme_runs(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "three steps, one line each"
    assert all(float(value) == float(value) for line in lines for value in line.split())


def test_no_todo_is_left():
    assert "TODO" not in README
