"""One dependency list: environment.yml, constraints.txt, README and CI all follow pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())


def _all_requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for lines in (PROJECT["dependencies"], *extras) for line in lines]


def _constraints() -> dict[str, Requirement]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _readme_command(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, f"README.md has no command after '<!-- {marker} -->'"
    return found[1]


def test_conda_and_pip_install_the_same_thing():
    assert ENVIRONMENT["name"] == PROJECT["name"]
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]
    python, pip, by_pip = ENVIRONMENT["dependencies"]
    assert python == f"python{PROJECT['requires-python']}"
    assert pip == "pip"
    constraint, project = by_pip["pip"]
    assert constraint == "-c constraints.txt"
    editable = re.fullmatch(r"-e \.\[([\w,]+)\]", project)
    assert editable, f"{project!r} must be this project in place, with extras"
    extras = set(editable[1].split(","))
    # What README's two commands install, together.
    readme = {
        extra
        for marker in ("main command", "test command")
        for extra in re.search(r"-e '\.\[([\w,]+)\]'", _readme_command(marker))[1].split(",")
    }
    assert extras == readme
    assert extras <= set(PROJECT["optional-dependencies"])


def test_every_constraint_is_one_version_inside_the_range_asked_for():
    ranges = {requirement.name: requirement.specifier for requirement in _all_requirements()}
    for name, requirement in _constraints().items():
        (pin,) = requirement.specifier
        assert pin.operator == "==", f"{name}: constraints.txt names tested versions, not ranges"
        asked_for = ranges.get(name, SpecifierSet())
        assert asked_for.contains(pin.version), f"{name}=={pin.version} is outside {asked_for} of pyproject.toml"


@pytest.mark.parametrize("extra", [None, "demo", "dev"])
def test_every_direct_dependency_has_a_tested_version(extra):
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    pinned_here = {r.name for r in map(Requirement, lines) if any(s.operator == "==" for s in r.specifier)}
    missing = {Requirement(line).name for line in lines} - pinned_here - set(_constraints())
    assert not missing, f"add to constraints.txt: {sorted(missing)}"


@pytest.mark.parametrize("marker", ["main command", "test command"])
def test_readme_commands_use_the_constraints_and_one_line(marker):
    command = _readme_command(marker)
    assert "\n" not in command
    assert "-c constraints.txt" in command


def test_ci_runs_the_readme_test_command(tmp_path):
    # A stub `bash` records what .ci/run would execute instead of executing it.
    stub = tmp_path / "bash"
    stub.write_text('#!/bin/sh\nprintf "%s" "$4" > "$RECORDED"\n')
    stub.chmod(0o755)
    recorded = tmp_path / "command"
    env = {"PATH": f"{tmp_path}:{os.defpath}", "RECORDED": str(recorded)}
    subprocess.run(["/bin/bash", str(ROOT / ".ci" / "run")], env=env, check=True, capture_output=True)
    assert recorded.read_text() == _readme_command("test command")
