"""The largest tensor that a piece of work ever makes: what a guard against quadratic memory looks at."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestStorage(TorchDispatchMode):
    """The largest storage, in bytes, behind any tensor that an operation returned; shape: of that tensor.

    A kernel's own scratch is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.nbytes:
                self.nbytes, self.shape = tensor.untyped_storage().nbytes(), tuple(tensor.shape)
        return result
