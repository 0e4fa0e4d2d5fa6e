"""Pages of rows, and the gradients that flow into them.

Two kinds of state: *rows* are appended per token (keys and values, latents, index keys) and never change once written;
a *carry* is replaced as a whole by every chunk (recurrent state, convolution tail). Nothing here knows an architecture:
rows and carries are named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.types import accumulation_dtype

NamedTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class LayerState:
    """What one layer of one chunk leaves behind.

    rows: {name: [batch, heads, tokens, width]}, token axis -2.
    carry: {name: tensor}, the state after the chunk's last token; empty for layers without one.
    """

    rows: NamedTensors = field(default_factory=dict)
    carry: NamedTensors = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Page:
    """The rows of one chunk or block, positions start .. stop - 1, by layer.

    A layer with a sliding window keeps only the last rows that a later token can see, so the rows of a layer end at
    `stop` but may begin after `start`. Where the chunk's tokens are spread over ranks, they end at `last`.
    """

    start: int
    stop: int
    layers: tuple[NamedTensors, ...]
    last: int | None = None

    def rows_start(self, layer: int) -> int:
        """Position of the first kept row of `layer`."""
        rows = next(iter(self.layers[layer].values()), None)
        return (self.stop if self.last is None else self.last) - (0 if rows is None else rows.shape[-2])

    def tensors(self) -> Iterator[Tensor]:
        for rows in self.layers:
            yield from rows.values()


class GradientPages:
    """Gradients of resident rows, one fp32 tensor per touched row tensor, allocated at the first touch.

    wanted: which pages take a gradient, by their start position; a gradient for any other page is dropped, which is
        what detaches the prompt in the cheaper gradient scopes.
    allocating: context entered around each allocation (the memory meter books it there).
    device: where gradients are kept; None: where they arise.
    """

    def __init__(
        self,
        wanted: Callable[[int], bool],
        allocating: Callable[[], AbstractContextManager[object]] = nullcontext,
        device: torch.device | None = None,
    ) -> None:
        self._wanted = wanted
        self._device = device
        self._allocating = allocating
        self._pages: dict[int, dict[tuple[int, str], Tensor]] = {}
        self.num_allocated = 0

    def wants(self, page: Page) -> bool:
        return self._wanted(page.start)

    def add(self, page: Page, layer: int, name: str, gradient: Tensor) -> None:
        """Add `gradient` (the row tensor's shape) in place, in float32 (float64 for float64 rows)."""
        slots = self._pages.setdefault(page.start, {})
        present = slots.get((layer, name))
        if present is not None:
            present += gradient.to(present.device)
            return
        dtype = accumulation_dtype(gradient.dtype)
        with self._allocating():
            slots[layer, name] = gradient.to(
                self._device or gradient.device, dtype, copy=True, memory_format=torch.contiguous_format
            )
        self.num_allocated += 1

    def add_rows(self, page: Page, layer: int, name: str, index: Tensor, gradient: Tensor) -> None:
        """Add `gradient` [M, width] to the rows `index` [M] (repeats allowed) of a single-head row tensor."""
        slots = self._pages.setdefault(page.start, {})
        if (layer, name) not in slots:
            rows = page.layers[layer][name]
            with self._allocating():
                slots[layer, name] = torch.zeros_like(rows, dtype=accumulation_dtype(rows.dtype))
            self.num_allocated += 1
        kept = slots[layer, name]
        kept[0, 0].index_add_(0, index.to(kept.device), gradient.to(kept.device, kept.dtype))

    def items(self) -> Iterator[tuple[int, int, str, Tensor]]:
        """(page start, layer, name, gradient) of everything that is held."""
        for start, slots in self._pages.items():
            yield from ((start, layer, name, gradient) for (layer, name), gradient in slots.items())

    def put(self, start: int, layer: int, name: str, gradient: Tensor) -> None:
        """Put back a gradient that `items` gave."""
        with self._allocating():
            self._pages.setdefault(start, {})[layer, name] = gradient.to(self._device or gradient.device, copy=True)

    def take(self, start: int) -> dict[tuple[int, str], Tensor]:
        """Remove and return the gradients of the page that begins at `start`: {(layer, name): gradient}."""
        return self._pages.pop(start, {})


def exact_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached contiguous copies whose storage holds exactly their elements (a view would keep its whole base)."""
    return {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def last_rows(rows: NamedTensors, count: int) -> dict[str, Tensor]:
    """The last `count` rows (none if it is negative)."""
    count = max(0, count)
    return {name: t[..., max(0, t.shape[-2] - count) :, :] for name, t in rows.items()}


def total_nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
