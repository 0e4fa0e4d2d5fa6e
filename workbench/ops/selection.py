"""Top-k selection under one strict order, so that capture, scoring, replay and recompute select the same keys.

The order: higher float32 score first (float64 for float64 models), among equal scores the lower position. Scores after
a ReLU tie at exactly 0 all the time, and `torch.topk` leaves ties undefined; -0.0 counts as 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.errors import InvalidInputError

UNSELECTED = -1


@torch.no_grad()
def stream_topk(parts: Iterable[tuple[int, Tensor, Tensor | None]], k: int) -> Tensor:
    """Positions of the k best visible keys of every query, int32 [..., k], in the strict order.

    parts: (position of the first key, scores [..., N], visible bool broadcastable to it or None for all), one page at a
        time in order of position; they may come from a generator, and only k running bests are kept between pages, so
        no tensor of the size of the prefix exists.
    Fewer than k visible keys: the rest is UNSELECTED.
    """
    best_scores, best_positions = stream_best(parts, k)
    if best_scores is None or best_positions is None:
        raise InvalidInputError("stream_topk needs at least one part")
    chosen = best_positions.masked_fill(best_scores == -math.inf, UNSELECTED)
    missing = k - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=UNSELECTED) if missing > 0 else chosen


@torch.no_grad()
def stream_best(parts: Iterable[tuple[int, Tensor, Tensor | None]], k: int) -> tuple[Tensor | None, Tensor | None]:
    """Scores and positions, each [..., at most k], of the best keys in the strict order; None without any part.

    A key that is not visible has score -inf.
    """
    best_scores: Tensor | None = None
    best_positions: Tensor | None = None
    for start, scores, visible in parts:
        scores = torch.where(scores == 0, torch.zeros_like(scores), scores)
        positions = torch.arange(start, start + scores.shape[-1], dtype=torch.int32, device=scores.device)
        positions = positions.expand(scores.shape)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        if best_scores is not None and best_positions is not None:
            # earlier keys first: a stable sort then breaks ties by position
            scores = torch.cat([best_scores, scores], dim=-1)
            positions = torch.cat([best_positions, positions], dim=-1)
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
        best_scores, best_positions = scores.gather(-1, order), positions.gather(-1, order)
    return best_scores, best_positions


@torch.no_grad()
def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The slow twin of `stream_topk`, all keys at once: bool mask [..., N] of the selected keys 0 .. N - 1."""
    keyed = torch.where(scores == 0, torch.zeros_like(scores), scores).masked_fill(~visible, -math.inf)
    order = torch.sort(keyed, dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros(keyed.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, True)
    return chosen & visible


@torch.no_grad()
def fingerprint(ids: Tensor) -> Tensor:
    """A 64-bit hash of integer ids and their order, as a 0-dim int64 tensor on their device (no synchronisation)."""
    # each (position, id) is mixed on its own (the finaliser of splitmix64), so that the sum has no linear collisions
    flat = ids.flatten().to(torch.int64)
    mixed = flat + torch.arange(flat.numel(), dtype=torch.int64, device=flat.device) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)).sum()  # products and sum wrap around, as intended
