"""The dependency direction: a part of `workbench` imports only parts to its left. Read from the sources, by AST."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Left to right, as docs/architecture.md draws it. `workbench` is the package's own
# front door (`from workbench import update_step`), which only what stands to its right may use.
LAYERS = (
    "errors types config",
    "canonical comm seeds progress ops advantages objective memory planner records recordings rewards documents tasks",
    "state architectures parallel",
    "lora quantization adapter_files policy inputs model_sources loading",
    "replicas gradients capture walk replay prompt_gradient rollout step budget walk_checkpoint",
    "finalize update",
    "drift refresh reuse",
    "train_config train_batch train_metrics train_ranks evaluate train_states train_optimizer checkpoint train_output "
    "train_trackers train calibration",
    "validation",
    "workbench",
    "pictures publish figures tiny_models studies plan_study plan_figures architecture_study architecture_figures "
    "performance_study performance_figures group_study study_problems drift_tables drift_study drift_figures "
    "scope_problems scope_study scope_figures report_study training_curves training_study training_figures "
    "live_training launch ranks_study ranks_figures notebook_parameters "
    "sweep run gallery",
)
ORDER = [part for layer in LAYERS for part in layer.split()]
RANK = {part: rank for rank, part in enumerate(ORDER)}
WIDGETS_MAY_IMPORT = {"types", "config", "errors", "planner", "records", "recordings"}
# Modules of workbench/architectures that know no family. Every other module there is one; only __init__ knows several.
SHARED_ARCHITECTURE_MODULES = {"base", "config_check", "stock_attention"}


def _imported_modules(source: Path, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import in `source`, also inside functions and TYPE_CHECKING blocks.

    `from a import b` yields both `a` and `a.b`: whether b is a module cannot be seen from here.
    """
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            if module != "workbench":  # `from workbench import x` is judged by x alone if x is a part
                yield node.lineno, module
            for alias in node.names:
                is_part = module != "workbench" or alias.name in RANK
                yield node.lineno, f"{module}.{alias.name}" if is_part else module


def _part(dotted: str) -> str | None:
    """The part of `workbench` that a dotted name lies in; None if it lies elsewhere."""
    names = dotted.split(".")
    if names[0] != "workbench":
        return None
    return names[1] if len(names) > 1 else "workbench"


def _family(dotted: str) -> str | None:
    names = dotted.split(".")
    return names[2] if names[:2] == ["workbench", "architectures"] and len(names) > 2 else None


def _violations_of_file(root: Path, source: Path) -> Iterator[str]:
    relative = source.relative_to(root)
    package = list(relative.parts[:-1])
    own = ".".join([*package, *([] if source.stem == "__init__" else [source.stem])])
    where, own_part = str(relative), _part(own)
    if own_part is not None and own_part not in RANK:
        yield f"{where}: part '{own_part}' is not in the order; add it to ORDER"
        return
    for line, imported in dict.fromkeys(_imported_modules(source, package)):
        part = _part(imported)
        if imported.startswith("torch.distributed") and own_part != "parallel":
            yield f"{where}:{line}: torch.distributed belongs to workbench/parallel"
        if part is None:
            if imported.split(".")[0] == "widgets" and own_part is not None:
                yield f"{where}:{line}: the engine imports a widget"
        elif own_part is None:
            if part not in WIDGETS_MAY_IMPORT:
                yield f"{where}:{line}: a widget imports workbench.{part}"
        elif part not in RANK:
            yield f"{where}:{line}: imports workbench.{part}, which is not in the order"
        elif RANK[part] > RANK[own_part] and own != "workbench":
            yield f"{where}:{line}: {own_part} imports {part}, which stands to its right"
        yield from _family_violation(where, line, own, imported)


def _family_violation(where: str, line: int, own: str, imported: str) -> Iterator[str]:
    """A module of workbench/architectures may import itself and the shared modules, never (another) family."""
    mine, theirs = _family(own), _family(imported)
    if mine and theirs and theirs != mine and theirs not in SHARED_ARCHITECTURE_MODULES:
        yield f"{where}:{line}: family '{mine}' imports family '{theirs}'"


def find_violations(root: Path) -> list[str]:
    """Every import under root/workbench and root/widgets that points the wrong way, as `file:line: reason`."""
    sources = sorted([*(root / "workbench").rglob("*.py"), *(root / "widgets").rglob("*.py")])
    return list(dict.fromkeys(violation for source in sources for violation in _violations_of_file(root, source)))


def test_imports_point_left():
    assert find_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("workbench/state/pages.py", "from workbench.policy import Policy", "state imports policy"),
        ("workbench/state/pages.py", "from workbench import policy", "state imports policy"),
        ("workbench/state/pages.py", "from workbench import update_step", "state imports workbench"),
        ("workbench/state/pages.py", "from ..capture import capture_prompt", "state imports capture"),
        ("workbench/errors.py", "from workbench import types", "errors imports types"),
        ("workbench/errors.py", "def f():\n    import workbench.update", "errors imports update"),
        ("workbench/replay.py", "import torch.distributed as dist", "torch.distributed belongs"),
        ("workbench/replay.py", "from torch import distributed", "torch.distributed belongs"),
        ("workbench/policy.py", "from widgets import meter", "the engine imports a widget"),
        ("workbench/surprise.py", "", "'surprise' is not in the order"),
        ("widgets/meter.py", "from workbench.update import update_step", "a widget imports workbench.update"),
        ("widgets/meter.py", "from workbench import capture_prompt", "a widget imports workbench.workbench"),
        ("workbench/architectures/llama.py", "from workbench.architectures.gemma3 import x", "family 'llama'"),
        ("workbench/architectures/llama.py", "from . import gemma3", "family 'llama'"),
        ("workbench/architectures/base.py", "from .gemma3 import x", "family 'base'"),
    ],
)
def test_the_check_can_fail(tmp_path, file, line, reason):
    source = tmp_path / file
    source.parent.mkdir(parents=True)
    source.write_text(f'"""A part."""\n\n{line}\n')
    violations = find_violations(tmp_path)
    assert len(violations) >= 1
    assert all(violation.startswith(file) for violation in violations)
    assert any(reason in violation for violation in violations), violations


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("workbench/__init__.py", "from workbench.update import update_step"),
        ("workbench/policy.py", "from workbench.architectures import find_adapter\nfrom torch import nn"),
        ("workbench/architectures/__init__.py", "from workbench.architectures import gemma3, llama"),
        (
            "workbench/architectures/llama.py",
            "from workbench.architectures import base\nfrom .config_check import check",
        ),
        ("workbench/parallel/mesh.py", "import torch.distributed as dist"),
        ("workbench/studies.py", "from workbench import update_step"),
        ("widgets/meter.py", "from workbench.records import RunRecord\nfrom widgets import base"),
    ],
)
def test_the_check_lets_right_imports_pass(tmp_path, file, line):
    source = tmp_path / file
    source.parent.mkdir(parents=True)
    source.write_text(f"{line}\n")
    assert find_violations(tmp_path) == []
