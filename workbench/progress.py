"""One progress bar for everything that may take more than a few seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

Item = TypeVar("Item")
SHOW_AFTER_SECONDS = 3.0


def progress(items: Iterable[Item], description: str, *, total: int | None = None, unit: str = "it") -> Iterator[Item]:
    """Iterate with a bar that appears after a few seconds and leaves nothing behind.

    Silent inside a recorded notebook run (the runner sets LONGSTRAW_RUN_DIR), where a bar would only leave its first
    state in the executed notebook, and on every rank but the first.
    """
    return iter(
        tqdm(
            items,
            desc=description,
            total=total,
            unit=unit,
            leave=False,
            delay=SHOW_AFTER_SECONDS,
            disable="LONGSTRAW_RUN_DIR" in os.environ or os.environ.get("RANK", "0") != "0",
        )
    )
