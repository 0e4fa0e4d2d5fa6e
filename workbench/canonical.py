"""One text for one value, the same in every process: what digests that are kept or compared are made of.

`repr` is not that: sets print in the order of the process's hash seed, large arrays print in part, and an object
without a repr of its own prints its address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def canonical(value: Any) -> str:
    """Mappings and sets in order, tensors and arrays whole, with their dtype; anything else by its repr."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{canonical(key)}: {canonical(item)}' for key, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(canonical, value))}]"
    if isinstance(value, Tensor | np.ndarray):
        whole: Any = value.tolist()
        return f"{value.dtype}{canonical(whole) if value.dtype == object else whole}"
    kind: Any = type(value)
    if kind.__repr__ is object.__repr__:
        return kind.__qualname__
    return repr(value)
