"""What a run writes down: parameters, results, evidence and provenance, as one JSON file per run.

A notebook and its runner meet in a folder: the runner names it in the environment (RUN_FOLDER_VARIABLE), the notebook
leaves JSON results there with `save_results`, the runner gathers them into a `RunRecord`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.errors import InvalidInputError

RUN_FOLDER_VARIABLE = "LONGSTRAW_RUN_DIR"
RESULTS_FOLDER = "results"
STATUSES = ("running", "completed", "failed", "interrupted")
_RECORDED_PACKAGES = (
    "longstraw-workbench", "torch", "transformers", "accelerate", "peft", "numpy", "papermill", "plotly", "jupyterlab",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as `run.json` holds it.

    name: what ran (a notebook's stem, "train", ...). status: one of STATUSES. error: why it is not "completed".
    seconds, memory: by stage; memory in bytes. results: what the run itself reported, by name.
    evidence: {"level": highest level whose checks all passed, "checks": the checks that ran, each with its measured
        figure and bound}; the levels are 1 executed, 2 forward fidelity, 3 ranks agree, 4 full-gradient parity.
    provenance: see `provenance`.
    """

    name: str
    status: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    seed: int | None = None
    device: str | None = None
    started_at: str = ""
    finished_at: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=lambda: {"level": 0, "checks": []})
    results: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InvalidInputError(f"RunRecord(status={self.status!r}): not one of {', '.join(STATUSES)}")


def write_record(path: Path, record: Any) -> None:
    """Writes a dataclass or mapping as JSON, at once: a reader sees the old file or the new one, never half of it.

    Tensors become lists, infinities and NaN become null (JSON has none), paths and scopes become text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(record), indent=2, allow_nan=False) + "\n"
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would hide a shared run from others
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object that `write_record` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def plain(value: Any) -> Any:
    """`value` as what JSON knows."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def run_folder() -> Path | None:
    """The folder of the run that this process belongs to; None outside the runner, as in an interactive session."""
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def save_results(name: str, results: Mapping[str, Any]) -> None:
    """Leaves results for the run record under `name`; does nothing outside a run.

    The keys "seconds" (seconds by stage), "memory", "evidence", "seed" and "device" become the record's own fields, the
    rest its results. Raises InvalidInputError, also outside a run, for what would not come back from there.
    """
    _check_results(name, results)
    folder = run_folder()
    if folder is not None:
        write_record(folder / RESULTS_FOLDER / f"{name}.json", results)


def _check_results(name: str, results: Mapping[str, Any]) -> None:
    if not name or name != Path(name).name:
        raise InvalidInputError(f"save_results({name!r}): the name must be a file's, without folders")
    if not isinstance(results, Mapping):
        raise InvalidInputError(f"save_results({name!r}): results are a {type(results).__name__}; give a mapping")
    for key in ("seconds", "memory", "evidence"):
        if not isinstance(results.get(key, {}), Mapping):
            raise InvalidInputError(
                f"save_results({name!r}): {key!r} belongs to the record and must be a mapping, such as by stage, not "
                f"{results[key]!r:.80}; another key may hold anything"
            )
    for stage, value in results.get("seconds", {}).items():
        if not isinstance(plain(value), int | float | None):
            raise InvalidInputError(f"save_results({name!r}): seconds[{stage!r}]={value!r:.80} is no number")


def gather_results(folder: Path) -> dict[str, dict[str, Any]]:
    """All results that a run left in its folder, by name."""
    return {path.stem: read_record(path) for path in sorted((folder / RESULTS_FOLDER).glob("*.json"))}


def provenance(*, written_to: Path | None = None) -> dict[str, Any]:
    """What a reader needs to run this again: versions, source revision, machine. No user names, no host names.

    written_to: the file that this goes into; its own change does not make the checkout dirty.
    """
    return {
        "python": platform.python_version(),
        # torch's own word also tells the build: +cpu, +cu130.
        "versions": {name: _version(name) for name in _RECORDED_PACKAGES} | {"torch": str(torch.__version__)},
        "git": git_state(leave_out=written_to),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "devices": device_names(),
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(*, leave_out: Path | None = None) -> dict[str, Any]:
    """Revision of this package's checkout and whether files differ from it; nulls outside a checkout.

    leave_out: a file that may differ.
    """
    root = Path(__file__).resolve().parents[1]
    revision = _git(root, "rev-parse", "HEAD")
    inside = leave_out is not None and leave_out.resolve().is_relative_to(root)
    others = [f":(exclude,literal){leave_out.resolve().relative_to(root)}"] if leave_out is not None and inside else []
    status = _git(root, "status", "--porcelain", "--", ".", *others)
    return {"revision": revision, "dirty": None if status is None else bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def device_names() -> list[str]:
    """The accelerators that torch can use here, or ["cpu"]."""
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ["cpu"]


def peak_resident_bytes() -> int | None:
    """Highest resident memory of this process so far, in bytes; None where the system does not say (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def finish_notebook() -> None:
    """The runner's own last cell: leaves the marker that the end was reached, and what only the kernel knows."""
    save_results("_end", {"memory": {"peak_resident_bytes": peak_resident_bytes()}, "device": device_names()[0]})
