"""Frozen configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.errors import InvalidInputError
from workbench.types import is_number

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "luspo")
KL_ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The policy-gradient objective of one step (formulas: `workbench.objective`).

    loss: one of "grpo", "dapo", "dr_grpo", "gspo", "cispo", "luspo".
    clip_low, clip_high: ratio is clipped to [1 - clip_low, 1 + clip_high]; "cispo" uses 1 + clip_high as its cap.
    beta: weight of the KL term to the reference policy; 0 needs no reference.
    kl_estimator: "k1", "k2" or "k3" (Schulman), per token, same token weights as the policy term.
    advantage_scale: "group" (divide by the group's sample standard deviation, as TRL does), "batch" or "none".
    advantage_eps: added to the standard deviation; a standard deviation of 0 gives advantages of exactly 0 anyway.
    max_response_tokens: the constant L of "dr_grpo"; required by it, refused by the others.
    drop_zero_variance_groups: drop members of groups whose rewards are all equal, their KL term included.
    temperature: logits are divided by it in scoring and replay; use the sampling temperature.
    max_grad_norm: clip the global gradient norm before the optimizer call; None leaves it.
    """

    loss: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    kl_estimator: str = "k3"
    advantage_scale: str = "group"
    advantage_eps: float = 0.0
    max_response_tokens: int | None = None
    drop_zero_variance_groups: bool = False
    temperature: float = 1.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, message: str) -> None:
            if not ok:
                raise InvalidInputError(f"ObjectiveConfig: {message}")

        for name in ("clip_low", "clip_high", "beta", "advantage_eps", "temperature"):
            value = getattr(self, name)
            need(is_number(value), f"{name}={value!r} must be a number")
            need(name == "clip_high" or value < math.inf, f"{name}={value!r} must be finite")
        norm, length = self.max_grad_norm, self.max_response_tokens
        need(norm is None or is_number(norm), f"max_grad_norm={norm!r} must be a number > 0")
        whole = isinstance(length, int) and not isinstance(length, bool)
        need(length is None or whole, f"max_response_tokens={length!r} must be an integer")
        drop = self.drop_zero_variance_groups
        need(isinstance(drop, bool), f"drop_zero_variance_groups={drop!r} must be True or False")
        need(self.loss in LOSSES, f"loss={self.loss!r} is not one of {', '.join(LOSSES)}")
        need(
            self.kl_estimator in KL_ESTIMATORS,
            f"kl_estimator={self.kl_estimator!r} is not one of {', '.join(KL_ESTIMATORS)}",
        )
        need(
            self.advantage_scale in ("group", "batch", "none"),
            f"advantage_scale={self.advantage_scale!r} is not one of group, batch, none",
        )
        need(0.0 <= self.clip_low < 1.0, f"clip_low={self.clip_low!r} must be in [0, 1)")
        need(self.clip_high >= 0.0, f"clip_high={self.clip_high!r} must be >= 0")
        need(self.beta >= 0.0, f"beta={self.beta!r} must be >= 0")
        need(self.advantage_eps >= 0.0, f"advantage_eps={self.advantage_eps!r} must be >= 0")
        need(self.temperature > 0.0, f"temperature={self.temperature!r} must be > 0")
        if self.loss == "dr_grpo":
            need(
                self.max_response_tokens is not None and self.max_response_tokens > 0,
                "loss='dr_grpo' divides by a constant length: give max_response_tokens > 0",
            )
        else:
            need(
                self.max_response_tokens is None,
                f"max_response_tokens reaches nothing with loss={self.loss!r}; it belongs to 'dr_grpo'",
            )
        need(
            self.max_grad_norm is None or self.max_grad_norm > 0.0, f"max_grad_norm={self.max_grad_norm!r} must be > 0"
        )
