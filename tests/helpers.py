"""What several test files need: token ids, policies over tiny models, snapshots, and exact float64 arithmetic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import deterministic_index, lifted_float32_casts
from workbench import Policy, load_policy
from workbench.model_sources import tiny_model

VOCAB = 101  # of tiny models


def token_ids(count: int, seed: int = 0) -> Tensor:
    """[count] ids of a tiny model's vocabulary, none of them special."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def device() -> torch.device:
    """The CPU, or this rank's GPU (tests/gpu/check_ranks.py)."""
    kind = os.environ.get("RANKS_DEVICE", "cpu")
    return torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count() if kind == "cuda" else None)


def tiny_policy(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Policy:
    return Policy(tiny_model(family, **overrides).to(dtype))


def lora_policy(family: str, *, rank: int = 2, trained: bool = False, dtype: torch.dtype = torch.float32) -> Policy:
    """A tiny model with a LoRA adapter. trained: B is not zero, so that the adapter changes the model."""
    policy = load_policy(tiny_model(family), lora=rank, dtype=dtype)
    if trained:
        train_adapter(policy.model)
    return policy


@torch.no_grad()
def train_adapter(model: nn.Module, name: str = "default", seed: int = 5) -> None:
    """Give the adapter's B the size that training might give it."""
    draw = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if f"lora_B.{name}." in key:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.05)


@contextmanager
def float64_arithmetic() -> Iterator[None]:
    """transformers' casts to float32 and undefined ties out of the way: bounds of float64 rounding hold."""
    with lifted_float32_casts(), deterministic_index():
        yield


class Snapshot:
    """Weights, gradients, buffers and flags of a model, to show that something left all of them alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken = self._take()

    def _take(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, parameter in self.model.named_parameters():
            grad = None if parameter.grad is None else parameter.grad.clone()
            found[name] = (parameter.detach().clone(), grad, parameter.requires_grad)
        for name, buffer in self.model.named_buffers():
            found[name] = (buffer.clone(), None, False)
        for name, module in self.model.named_modules():
            found[f"{name}.training"] = module.training
        found["implementations"] = (
            self.model.config._attn_implementation,
            getattr(self.model.config, "_experts_implementation", None),
        )
        return found

    def differences(self) -> list[str]:
        """Names of whatever is not bitwise as it was."""
        now = self._take()
        return [name for name in self.taken.keys() | now.keys() if not _same(self.taken.get(name), now.get(name))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and not isinstance(a, Tensor) and a == b
