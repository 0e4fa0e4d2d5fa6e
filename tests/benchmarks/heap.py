"""Exact peak heap bytes of a child process through a preloaded C meter; resident set size without a compiler."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("heap_meter.c")


def compiled_meter() -> Path | None:
    """Path of the compiled meter, or None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    target = Path(tempfile.mkdtemp(prefix="heap-meter-")) / "heap_meter.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE)], check=True)
    return target


class Heap:
    """Peak bytes above a mark, in the current process. source: "malloc" (exact) or "rss" (repeats to about 5 %)."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None) if "HEAP_METER" in os.environ else None
        self.source = "malloc" if self._library is not None else "rss"
        self._start = 0
        if self._library is not None:
            for name in ("heap_live", "heap_peak"):
                getattr(self._library, name).restype = ctypes.c_long

    def mark(self) -> None:
        if self._library is not None:
            self._library.heap_mark()
            self._start = self._library.heap_live()
        else:
            self._start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def peak_bytes(self) -> int:
        if self._library is not None:
            return self._library.heap_peak() - self._start
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self._start


def child_environment(meter: Path | None) -> dict[str, str]:
    """One thread, no hub, and the meter loaded if there is one."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LONGSTRAW_RUN_DIR": "benchmark"}
    if meter is not None:
        environment |= {"LD_PRELOAD": str(meter), "HEAP_METER": "1"}
    return environment
