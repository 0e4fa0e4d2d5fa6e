"""Top-k selection under one strict order, so that capture, scoring, replay and recompute select the same keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Bool mask of the k best visible keys of every query.

    scores: [..., N] float32 or float64; visible: bool, broadcastable to it. Higher score first; among equal scores the
    lower position first (scores after a ReLU tie at exactly 0 all the time, and `torch.topk` leaves ties undefined);
    -0.0 counts as 0.0. Fewer than k visible keys: all of them.
    """
    keyed = torch.where(scores == 0, torch.zeros_like(scores), scores).masked_fill(~visible, -math.inf)
    order = torch.sort(keyed, dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = torch.zeros(keyed.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, True)
    return chosen & visible
