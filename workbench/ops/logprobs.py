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


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature in the accumulation dtype; the given ones, which the caller must own, are overwritten."""
    scaled = logits.to(accumulation_dtype(logits.dtype))
    return scaled if temperature == 1.0 else scaled.div_(temperature)


@torch.no_grad()
def token_logprobs(head: Head, hidden: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each [n], of `targets` [n] given final hidden states [n, hidden]. No graph.

    Entropy is that of the full distribution at this temperature; tokens of probability 0 (logit -inf) count 0.
    """
    chosen, entropies = [], []
    for rows, wanted in zip(hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
        logprobs = torch.log_softmax(_scaled(head(rows), temperature), dim=-1)
        chosen.append(logprobs.gather(-1, wanted[:, None])[:, 0])
        probabilities = logprobs.exp_()
        entropies.append(-torch.xlogy(probabilities, probabilities).sum(dim=-1))
        del logprobs, probabilities  # a block's must be gone before the next block's logits are there
    if not chosen:
        empty = hidden.new_zeros(0, dtype=accumulation_dtype(hidden.dtype))
        return empty, empty
    return torch.cat(chosen), torch.cat(entropies)


@torch.no_grad()
def token_kl(head: Head, hidden: Tensor, other_hidden: Tensor, *, temperature: float) -> Tensor:
    """KL(p || q) at each position, [n], over the whole vocabulary: p follows from `hidden`, q from `other_hidden`.

    hidden, other_hidden: final hidden states [n, hidden]. Two times `ROWS_AT_ONCE` rows of logits live at a time.
    Ids to which p gives probability 0 count 0.
    """
    parts = []
    for rows, other_rows in zip(hidden.split(ROWS_AT_ONCE), other_hidden.split(ROWS_AT_ONCE), strict=True):
        logprobs, other = (torch.log_softmax(_scaled(head(x), temperature), dim=-1) for x in (rows, other_rows))
        probabilities = logprobs.exp()
        # 0 * (-inf) would be NaN where a mask excludes an id from both distributions.
        terms = torch.where(probabilities > 0.0, probabilities * (logprobs - other), 0.0)
        parts.append(terms.sum(dim=-1))
        del logprobs, other, probabilities, terms
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=accumulation_dtype(hidden.dtype))


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


def _logits_gradient(logits: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """d sum(weight * log-softmax(logits / temperature)[targets]) / d logits: weight / temperature * (onehot - softmax).

    [rows, V] in the accumulation dtype. Written out, because autograd would hold four tensors of this size.
    """
    gradient = torch.softmax(_scaled(logits, temperature), dim=-1)
    factor = weight.to(gradient.dtype)[:, None] / temperature
    return gradient.mul_(-factor).scatter_add_(-1, targets[:, None], factor)


def _through_module(head: Head, rows: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Any head: autograd through a few rows; serves LoRA, quantised and wrapped heads."""
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        logits = head(leaf)
    # autograd may have kept the logits, as a soft cap's own result: they stay as they are
    own = logits.detach() if temperature == 1.0 else logits.detach().clone()
    torch.autograd.backward(logits, _logits_gradient(own, targets, weight, temperature).to(logits.dtype))
    assert leaf.grad is not None
    return leaf.grad


@torch.no_grad()
def _through_linear(head: Head, rows: Tensor, targets: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """A plain linear head: its weight gradient is accumulated in place, without a vocabulary x hidden temporary."""
    linear: Any = head.module
    logits = linear(rows)
    if head.finish is None and head.vocab_size in (None, logits.shape[-1]):
        gradient = _logits_gradient(logits, targets, weight, temperature).to(rows.dtype)
    else:
        gradient = _through_module(
            Head(lambda x: x, head.finish, head.vocab_size), logits, targets, weight, temperature
        )
    del logits
    if linear.weight.requires_grad:
        if linear.weight.grad is None:
            linear.weight.grad = torch.zeros_like(linear.weight)
        linear.weight.grad.addmm_(gradient.T, rows)
    if linear.bias is not None and linear.bias.requires_grad:
        bias_gradient = gradient.sum(dim=0)
        linear.bias.grad = bias_gradient if linear.bias.grad is None else linear.bias.grad.add_(bias_gradient)
    return gradient @ linear.weight
