"""The metrics of a run in accelerate's trackers: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError

FOLDER = "trackers"


class Trackers:
    """Every number of a metrics line, by its name, at the number of updates so far."""

    def __init__(self, names: Sequence[str], folder: Path | None, configuration: Mapping[str, Any]) -> None:
        self._trackers = [_started(name, folder, configuration) for name in names if folder is not None]

    def log(self, line: Mapping[str, Any], update: int, prefix: str) -> None:
        numbers = {f"{prefix}/{name}": value for name, value in _numbers(line).items()}
        for tracker in self._trackers:
            tracker.log(numbers, step=update)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker whose package is not there, before anything is written."""
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    for name in names:
        if not available[name]():
            raise InvalidInputError(f"trackers={name!r}: the package is not installed: pip install {name}")


def _started(name: str, folder: Path, configuration: Mapping[str, Any]) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    options = {"logging_dir": str(folder / FOLDER)} if name == "tensorboard" else {"dir": str(folder)}
    tracker = LOGGER_TYPE_TO_CLASS[name](run_name="train", **options)
    tracker.start()
    tracker.store_init_configuration(
        {key: value if _is_plain(value) else str(value) for key, value in configuration.items()}
    )
    return tracker


def _numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = value
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
