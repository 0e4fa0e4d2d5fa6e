"""Advantages and the policy-gradient losses, from per-token log-probabilities; every path of the package uses these.

One member (response) i of a step has R_i unmasked tokens, an advantage A and, per token t, log-probs logp, old, ref:

    log-ratio   x_t = logp_t - old_t; "gspo" and "luspo" use its mean over the response for every t
    ratio       r_t = exp(min(x_t, LOG_RATIO_CAP))
    policy      p_t = -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)
                p_t = -stop_gradient(min(r_t, 1 + clip_high)) A logp_t                                   "cispo"
    KL          k1 = -d,  k2 = d**2 / 2,  k3 = exp(d) - d - 1  with d_t = ref_t - logp_t (d capped in k3)
    loss        L  = sum over members and unmasked tokens of w_i (p_t + beta k_t)

    weight w_i  1 / (G R_i)      "grpo", "gspo"    G: members of the step, also those that are empty or without a reward
                1 / T            "dapo", "cispo"   T: unmasked tokens of the step
                1 / (G L)        "dr_grpo"         L: max_response_tokens, a constant
                1 / G            "luspo"

G and T are those of the whole step (`StepDenominators`), known before the first backward. So a member's contribution
does not depend on the others, and the sum not on replay order, ranks, micro-batches or blocks.

dL/dlogp is a plain vector (`loss_and_coefficients`). With it, backward through the model needs only
sum_t coefficient_t logp_t, which is linear in logp: a response can be replayed block by block for every loss, the
sequence-level ones included, although their ratio needs the whole response.

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, GSPO 2507.18071, CISPO 2506.13585,
LUSPO 2602.05261; KL estimators: Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import torch
from torch import Tensor

from workbench.advantages import GroupIds, Rewards, reward_notes, valid_rewards, zero_variance_members
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError, NonFiniteError
from workbench.types import accumulation_dtype

LOG_RATIO_CAP = 20.0
"""Upper bound of a log-ratio inside exp (a ratio of 4.9e8; verl's bound). Beyond it the gradient through exp is zero.
There is no lower bound: exp and its gradient underflow to 0, their true limit."""

_SEQUENCE_LEVEL = ("gspo", "luspo")

# ---------------------------------------------------------------- denominators of a step


@dataclass(frozen=True)
class StepDenominators:
    """What the losses divide by, over the whole step: all groups, micro-batches and ranks. Parts add up with `+`.

    num_members: members that take part, empty ones included.
    total_tokens: their unmasked response tokens.
    """

    num_members: int = 0
    total_tokens: int = 0

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> StepDenominators:
        """From the number of unmasked tokens of each member that takes part."""
        counts = [int(length) for length in lengths]
        if any(count < 0 for count in counts):
            raise InvalidInputError(f"response lengths must be >= 0; got {counts}")
        return cls(len(counts), sum(counts))

    def __add__(self, other: StepDenominators) -> StepDenominators:
        return StepDenominators(self.num_members + other.num_members, self.total_tokens + other.total_tokens)

    def token_weight(self, config: ObjectiveConfig, num_tokens: int) -> float:
        """Weight w_i of each unmasked token of a member that has `num_tokens` of them; 0 for an empty member."""
        if num_tokens == 0:
            return 0.0
        if self.num_members < 1 or self.total_tokens < num_tokens:
            raise InvalidInputError(
                f"denominators of {self.num_members} members and {self.total_tokens} tokens cannot include a member of "
                f"{num_tokens} tokens: build them from all members of the step"
            )
        if config.loss in ("dapo", "cispo"):
            return 1.0 / self.total_tokens
        if config.loss == "luspo":
            return 1.0 / self.num_members
        if config.loss == "dr_grpo":
            assert config.max_response_tokens is not None  # ObjectiveConfig requires it
            return 1.0 / (self.num_members * config.max_response_tokens)
        return 1.0 / (self.num_members * num_tokens)


# ---------------------------------------------------------------- loss of one member


@dataclass(frozen=True)
class TokenSums:
    """Statistics over unmasked tokens, as sums that add up with `+` over members and ranks; float64.

    Ratios are per token and raw: neither capped nor clipped, nor averaged over the response ("gspo", "luspo").
    num_clipped_low, num_clipped_high: tokens whose ratio, at the level the loss clips, left the range on the side where
        clipping takes their gradient away ("cispo": where the cap lowers their weight).
    kl_sum: of k3, whatever estimator the loss uses; num_kl_tokens: tokens for which a reference was given.
    """

    num_tokens: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = -math.inf
    ratio_min: float = math.inf
    abs_log_ratio_sum: float = 0.0
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    kl_sum: float = 0.0
    num_kl_tokens: int = 0

    def __add__(self, other: TokenSums) -> TokenSums:
        combine = {"ratio_max": max, "ratio_min": min}
        names = [field.name for field in fields(self)]
        return TokenSums(*(combine.get(name, add)(getattr(self, name), getattr(other, name)) for name in names))


@dataclass(frozen=True)
class MemberLoss:
    """A member's contribution to the step's loss, 0-dim and differentiable, and its statistics."""

    loss: Tensor
    sums: TokenSums


def member_loss(
    logprobs: Tensor,
    *,
    advantage: float | Tensor,
    config: ObjectiveConfig,
    denominators: StepDenominators,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    mask: Tensor | None = None,
    member: int = 0,
) -> MemberLoss:
    """One member's term of the step's loss (formulas: this module's docstring).

    logprobs, old_logprobs, ref_logprobs: [R], of the whole response. old_logprobs None: those of the current policy,
        ratio exactly 1. ref_logprobs: required if beta > 0; with beta = 0 only reported.
    mask: [R], nonzero where a token counts; None: all do. What stands in masked slots, NaN included, reaches nothing.
    member: index of the response in the step, for messages.

    Accumulates in float32, or in float64 if `logprobs` is float64. Raises InvalidInputError for wrong shapes or a
    missing reference, NonFiniteError for a non-finite log-prob in an unmasked slot.
    """
    if logprobs.dim() != 1:
        raise InvalidInputError(f"log-probs of response {member} must be 1-D; got shape {tuple(logprobs.shape)}")
    advantage = float(advantage)
    if not math.isfinite(advantage):
        raise InvalidInputError(f"advantage of response {member} is {advantage}; it must be finite")
    if config.beta > 0.0 and ref_logprobs is None:
        raise InvalidInputError(f"beta={config.beta} needs reference log-probs; none given for response {member}")

    def unmasked(name: str, values: Tensor) -> Tensor:
        return _unmasked(f"{name} log-prob", values, logprobs, mask, member)

    new = unmasked("new", logprobs)
    old = new.detach() if old_logprobs is None else unmasked("old", old_logprobs.detach())
    ref = None if ref_logprobs is None else unmasked("reference", ref_logprobs.detach())

    log_ratio = new - old
    terms, ratio = _policy_terms(new, log_ratio, advantage, config)
    if ref is not None and config.beta > 0.0:
        terms = terms + config.beta * kl_terms(new, ref, config.kl_estimator)
    loss = denominators.token_weight(config, terms.numel()) * terms.sum()
    return MemberLoss(loss, _token_sums(new.detach(), log_ratio.detach(), ratio.detach(), advantage, ref, config))


def loss_and_coefficients(logprobs: Tensor, **arguments: Any) -> tuple[float, Tensor, TokenSums]:
    """`member_loss` as a number, and its derivative by each log-prob: the coefficients of the linear backward.

    logprobs: [R], needs no graph; arguments: those of `member_loss`.
    Returns the loss, dloss/dlogprob [R] (0 in masked slots; float32, or float64 if `logprobs` is) and the statistics.
    Works under `torch.no_grad` and `torch.inference_mode` too.
    """
    with torch.inference_mode(False), torch.enable_grad():
        leaf = logprobs.detach().to(accumulation_dtype(logprobs.dtype), copy=True).requires_grad_()
        result = member_loss(leaf, **arguments)
        (coefficients,) = torch.autograd.grad(result.loss, leaf)
    return float(result.loss.detach()), coefficients, result.sums


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens sampled from the policy; "k3" is never negative."""
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2.0
    log_ratio = log_ratio.clamp(max=LOG_RATIO_CAP)
    return torch.expm1(log_ratio) - log_ratio  # expm1: exp(d) - 1 would cancel where the policies nearly agree


def _unmasked(name: str, values: Tensor, like: Tensor, mask: Tensor | None, member: int) -> Tensor:
    """The values in unmasked slots, in the accumulation dtype and on the device of `like`, checked to be finite."""
    for label, other in ((name, values), ("mask", mask)):
        if other is not None and other.shape != like.shape:
            raise InvalidInputError(
                f"response {member}: {label} has shape {tuple(other.shape)}, its log-probs {tuple(like.shape)}"
            )
    values = values.to(like.device, accumulation_dtype(like.dtype))
    keep = None if mask is None else mask.to(like.device) != 0
    bad = ~values.detach().isfinite() if keep is None else ~values.detach().isfinite() & keep
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        raise NonFiniteError(
            f"{name} of response {member} at position {position} is {float(values.detach()[position])}; "
            "mask the token if it is not part of the objective"
        )
    # Dropping masked slots, instead of multiplying by 0, is what keeps their NaN and infinity out of the gradient.
    return values if keep is None else values[keep]


def _policy_terms(
    logprobs: Tensor, log_ratio: Tensor, advantage: float, config: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """Policy term of each token, and the (capped) ratio it was clipped by."""
    if config.loss in _SEQUENCE_LEVEL:
        log_ratio = (log_ratio.sum() / max(1, log_ratio.numel())).expand_as(log_ratio)
    ratio = log_ratio.clamp(max=LOG_RATIO_CAP).exp()
    if config.loss == "cispo":
        return -advantage * ratio.detach().clamp(max=1.0 + config.clip_high) * logprobs, ratio
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio


def _token_sums(
    logprobs: Tensor, log_ratio: Tensor, ratio: Tensor, advantage: float, ref: Tensor | None, config: ObjectiveConfig
) -> TokenSums:
    """Statistics of one member; one transfer from the device."""
    if log_ratio.numel() == 0:
        return TokenSums()
    raw = log_ratio.double().exp()
    bites_high = advantage > 0.0 or (config.loss == "cispo" and advantage < 0.0)
    bites_low = advantage < 0.0 and config.loss != "cispo"
    kl_sum = raw.new_zeros(()) if ref is None else kl_terms(logprobs.double(), ref.double(), "k3").sum()
    sums = [
        raw.sum(),
        raw.max(),
        raw.min(),
        log_ratio.double().abs().sum(),
        (ratio < 1.0 - config.clip_low).sum() * bites_low,
        (ratio > 1.0 + config.clip_high).sum() * bites_high,
        kl_sum,
    ]
    ratio_sum, ratio_max, ratio_min, abs_sum, low, high, kl = torch.stack([s.double() for s in sums]).tolist()
    num_tokens = raw.numel()
    num_kl_tokens = 0 if ref is None else num_tokens
    return TokenSums(num_tokens, ratio_sum, ratio_max, ratio_min, abs_sum, int(low), int(high), kl, num_kl_tokens)


# ---------------------------------------------------------------- report of a step


def aggregate_metrics(
    sums: Iterable[TokenSums],
    *,
    rewards: Rewards | None = None,
    group_ids: GroupIds = None,
    finished: Iterable[bool] | None = None,
    config: ObjectiveConfig | None = None,
) -> dict[str, Any]:
    """The step's metrics from its members' statistics; means are over unmasked tokens.

    rewards, group_ids: as given to `group_advantages`, for the remarks in "notes" and the counts of members.
    finished: one flag per response; the others were cut at their maximum length.
    config: to say whether groups without variance were dropped.

    With no token at all, ratios read 1 and everything else 0. A raw ratio beyond float64 (log-ratio > 709) reads inf.
    """
    total = sum(sums, TokenSums())
    tokens = max(1, total.num_tokens)
    empty = total.num_tokens == 0
    metrics: dict[str, Any] = {
        "num_tokens": total.num_tokens,
        "ratio_mean": 1.0 if empty else total.ratio_sum / tokens,
        "ratio_max": 1.0 if empty else total.ratio_max,
        "ratio_min": 1.0 if empty else total.ratio_min,
        "abs_log_ratio_mean": total.abs_log_ratio_sum / tokens,
        "clip_fraction_low": total.num_clipped_low / tokens,
        "clip_fraction_high": total.num_clipped_high / tokens,
    }
    if total.num_kl_tokens:
        metrics["kl_mean"] = total.kl_sum / total.num_kl_tokens
    if finished is not None:
        metrics["num_truncated_members"] = sum(not flag for flag in finished)
    notes: list[str] = []
    if rewards is not None:
        valid = valid_rewards(rewards)
        metrics["reward_mean"] = float(valid.mean()) if len(valid) else 0.0
        metrics["num_excluded_members"] = len(rewards) - len(valid)
        notes = reward_notes(rewards, group_ids=group_ids)
        if config is not None and config.drop_zero_variance_groups:
            num_dropped = sum(zero_variance_members(rewards, group_ids=group_ids))
            metrics["num_dropped_members"] = num_dropped
            if num_dropped:
                notes.append(f"{num_dropped} members of such groups were dropped (drop_zero_variance_groups)")
    metrics["notes"] = notes
    return metrics
