"""Log-probabilities of chosen tokens and their gradient, a few rows of logits at a time.

No response x vocabulary tensor exists: `ROWS_AT_ONCE` rows of logits live at a time, forward and backward.
Log-sum-exp, log-probabilities and entropy are float32 (float64 for float64 models).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.types import accumulation_dtype

ROWS_AT_ONCE = 64
Head = Callable[[Tensor], Tensor]


def _row_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Chosen log-probabilities [rows] and the whole log-softmax [rows, V], accumulation dtype."""
    scaled = logits.to(accumulation_dtype(logits.dtype))
    if temperature != 1.0:
        scaled = scaled / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], logprobs


@torch.no_grad()
def token_logprobs(head: Head, hidden: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each [n], of `targets` [n] given final hidden states [n, hidden]. No graph.

    Entropy is that of the full distribution at this temperature; tokens of probability 0 (logit -inf) count 0.
    """
    chosen, entropies = [], []
    for rows, wanted in zip(hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        picked, logprobs = _row_logprobs(head(rows), wanted, temperature)
        probabilities = logprobs.exp_()
        chosen.append(picked)
        entropies.append(-torch.xlogy(probabilities, probabilities).sum(dim=-1))
    if not chosen:
        empty = hidden.new_zeros(0, dtype=accumulation_dtype(hidden.dtype))
        return empty, empty
    return torch.cat(chosen), torch.cat(entropies)


def backward_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, coefficients: Tensor, *, temperature: float
) -> Tensor:
    """Gradient [n, hidden] of sum(coefficients * logprobs) with respect to `hidden`.

    Gradients of the head's own trainable parameters (full, LoRA or tied) are added to their `.grad` on the way; each
    block of rows builds and frees its own small graph, so nothing of it outlives this call.
    """
    gradient = torch.empty_like(hidden)
    blocks = (x.split(ROWS_AT_ONCE) for x in (hidden.detach(), targets, coefficients, gradient))
    for rows, wanted, weight, out in zip(*blocks, strict=True):
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            picked, _ = _row_logprobs(head(leaf), wanted, temperature)
            torch.autograd.backward(picked, weight.to(picked.dtype))
        out.copy_(leaf.grad)
    return gradient
