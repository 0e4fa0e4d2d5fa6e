"""Log-probabilities of chosen tokens and their gradient, a few rows of logits at a time.

No response x vocabulary tensor exists: `ROWS_AT_ONCE` rows of logits live at a time, forward and backward.
Log-sum-exp, log-probabilities and entropy are float32 (float64 for float64 models).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.types import accumulation_dtype

ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Head:
    """A language-model head: a module from hidden states to logits, and what follows it.

    finish: applied to the module's logits, such as a soft cap. vocab_size: keep the first columns only; None: all.
    """

    module: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor] | None = None
    vocab_size: int | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] of hidden states [rows, hidden]."""
        return self.finished(self.module(hidden))

    def finished(self, logits: Tensor) -> Tensor:
        logits = logits if self.finish is None else self.finish(logits)
        return logits if self.vocab_size in (None, logits.shape[-1]) else logits[..., : self.vocab_size]


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
        del logprobs, probabilities  # a block's must be gone before the next block's logits are there
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
    plain = type(head.module) is nn.Linear and is_plain(head.module)
    walk_rows = _through_linear if plain else _through_module
    blocks = (x.split(ROWS_AT_ONCE) for x in (hidden.detach(), targets, coefficients, gradient))
    for rows, wanted, weight, out in zip(*blocks, strict=True):
        out.copy_(walk_rows(head, rows, wanted, weight, temperature))
    return gradient


def is_plain(module: nn.Module) -> bool:
    """Whether a module of one weight does what its class says: no hook on it or its weight, nothing reparametrised."""
    weight = module._parameters.get("weight")
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        getattr(weight, "_backward_hooks", None),
    )
    return weight is not None and not any(hooks) and "forward" not in vars(module)


def _through_module(head: Head, rows: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Any head: autograd through a few rows; serves LoRA, quantised and wrapped heads."""
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        picked, _ = _row_logprobs(head(leaf), targets, temperature)
        torch.autograd.backward(picked, weight.to(picked.dtype))
    assert leaf.grad is not None
    return leaf.grad


@torch.no_grad()
def _through_linear(head: Head, rows: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """A plain linear head: its weight gradient is accumulated in place, without a vocabulary x hidden temporary."""
    linear: Any = head.module
    leaf = linear(rows).requires_grad_()
    with torch.enable_grad():
        picked, _ = _row_logprobs(head.finished(leaf), targets, temperature)
        torch.autograd.backward(picked, weight.to(picked.dtype))
    del picked
    assert leaf.grad is not None
    if linear.weight.requires_grad:
        if linear.weight.grad is None:
            linear.weight.grad = torch.zeros_like(linear.weight)
        linear.weight.grad.addmm_(leaf.grad.T, rows)
    if linear.bias is not None and linear.bias.requires_grad:
        bias_gradient = leaf.grad.sum(dim=0)
        linear.bias.grad = bias_gradient if linear.bias.grad is None else linear.bias.grad.add_(bias_gradient)
    return leaf.grad @ linear.weight
