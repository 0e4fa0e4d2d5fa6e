"""Where rows live, and how one layer's rows at a time reach the device that computes.

`placement="device"` keeps rows where they were made. `placement="host"` keeps them (and their gradients) in host memory
and stages the pages of one layer when that layer runs; on CUDA they are pinned, and the next layer's pages are fetched
on a second stream meanwhile, so that at most two layers are on the device. Without a GPU both places are the CPU: the
same path runs, copies included, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.errors import InvalidInputError
from workbench.state.pages import NamedTensors, Page
from workbench.types import Tally

PLACEMENTS = ("device", "host")
HOST = torch.device("cpu")


class RowSource(Protocol):
    """Gives a layer's rows of a page on the computing device."""

    def rows(self, pages: Sequence[Page], page: Page, layer: int) -> NamedTensors: ...


def check_placement(placement: str) -> None:
    if placement not in PLACEMENTS:
        raise InvalidInputError(f"placement={placement!r} is not one of {', '.join(PLACEMENTS)}")


def to_host(rows: NamedTensors) -> dict[str, Tensor]:
    """Copies in host memory, pinned when they come from a GPU."""
    return {name: _host_copy(tensor) for name, tensor in rows.items()}


def _host_copy(tensor: Tensor) -> Tensor:
    if tensor.device == HOST:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
    return pinned.copy_(tensor)


class OnDevice:
    """Rows are where they are needed."""

    def rows(self, pages: Sequence[Page], page: Page, layer: int) -> NamedTensors:
        return page.layers[layer]


ON_DEVICE = OnDevice()


def row_source(placement: str, device: torch.device, tally: Tally | None = None) -> RowSource:
    """Where a pass over resident rows takes them from; staging is counted in `tally`."""
    return LayerStager(device, tally) if placement == "host" else ON_DEVICE


class LayerStager:
    """Copies one layer's rows from the host when that layer asks for them, and drops the layer before.

    device: where to. tally: gets "layers_staged" and "bytes_staged".
    """

    def __init__(self, device: torch.device, tally: Tally | None = None) -> None:
        self._device = device
        self._tally = Tally() if tally is None else tally
        self._layer: int | None = None
        self._staged: dict[Page, NamedTensors] = {}
        self._ahead: dict[Page, NamedTensors] = {}
        self._ahead_layer: int | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def rows(self, pages: Sequence[Page], page: Page, layer: int) -> NamedTensors:
        if layer != self._layer:
            self._turn_to(pages, layer)
        if page not in self._staged:
            self._staged[page] = self._copy(page, layer)
        return self._staged[page]

    def _turn_to(self, pages: Sequence[Page], layer: int) -> None:
        step = 1 if self._layer is None or layer > self._layer else -1  # forward pass or backward walk
        if self._ahead_layer == layer and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            for rows in self._ahead.values():
                for tensor in rows.values():
                    tensor.record_stream(torch.cuda.current_stream(self._device))
            self._staged = self._ahead
        else:
            self._staged = {}
        self._layer, self._ahead, self._ahead_layer = layer, {}, None
        self._tally["layers_staged"] += 1
        self._fetch_ahead(pages, layer + step)

    def _fetch_ahead(self, pages: Sequence[Page], layer: int) -> None:
        if self._stream is None or not pages or not 0 <= layer < len(pages[0].layers):
            return
        with torch.cuda.stream(self._stream):
            self._ahead = {page: self._copy(page, layer) for page in pages}
        self._ahead_layer = layer

    def _copy(self, page: Page, layer: int) -> NamedTensors:
        copies = {
            name: tensor.to(self._device, copy=True, non_blocking=True) for name, tensor in page.layers[layer].items()
        }
        self._tally["bytes_staged"] += sum(t.nbytes for t in copies.values())
        return copies
