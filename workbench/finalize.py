"""What follows a step's last backward: gradients summed over ranks, their norm, clipping, one optimizer call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from workbench.comm import Mesh, Traffic, digest, every_rank, require_agreement
from workbench.config import ObjectiveConfig
from workbench.policy import Policy
from workbench.replicas import global_norm, reduce_gradients, require_same_parameters
from workbench.step import GradientsOrNothing, Step
from workbench.types import StepReport, accumulation_dtype


def sum_over_ranks(policy: Policy, step: Step, comm: Mesh) -> None:
    """Gradients and loss summed over ranks, and compared: what a rank reports is what every rank has."""
    if not comm.sums_gradients:  # a group of several: `sum_gradients` follows the last one
        return
    step.reduction = sum_gradients(policy, comm)
    step.loss = sum(every_rank(comm.data, step.loss, policy.device, tag="loss"))
    require_agreement(comm.world, digest(step.loss), "the loss", policy.device)


def sum_gradients(policy: Policy, comm: Mesh) -> dict[str, dict[str, Any]]:
    """Sum what every rank has in `.grad`, once, in rank order; then all have the same bits, or it is an error.

    Every rank calls it once per update: also one whose groups had nothing to learn from and that has no gradient.
    Returns the audit of `reduce_gradients`.
    """
    named = policy.trainable_parameters()
    audit = reduce_gradients(named, comm)
    require_same_parameters(named, comm, "gradients", gradients=True)
    return audit


def finalize(
    policy: Policy,
    gradients: GradientsOrNothing,
    optimizer: torch.optim.Optimizer | None,
    objective: ObjectiveConfig,
    comm: Mesh | None,
) -> float:
    """Check and merge gradients, clip, call the optimizer; returns the norm of this step's own gradient.

    A rank's own part of a gradient has no norm to speak of (NaN): it is the sum that must be finite.
    """
    norm = gradient_norm(policy, comm) if comm is None or comm.sums_gradients else math.nan
    gradients.merge()
    if optimizer is not None:
        apply_gradients(policy, optimizer, max_grad_norm=objective.max_grad_norm, comm=comm)
    return norm


def gradient_norm(policy: Policy, comm: Mesh | None = None) -> float:
    """L2 norm of the gradients of all trainable parameters; NonFiniteError names the first that is not finite."""
    return global_norm(policy.trainable_parameters(), comm)


def apply_gradients(
    policy: Policy, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None, comm: Mesh | None = None
) -> float:
    """Clip the accumulated gradients, call the optimizer once, drop them; returns their norm before clipping.

    Without any gradient nothing changes. NonFiniteError names the first that is not finite, and nothing is updated.
    comm: the ranks that hold the same weights, which must still be bitwise the same afterwards.
    """
    named = policy.trainable_parameters()
    norm = gradient_norm(policy, comm)
    if max_grad_norm is not None:
        total = torch.tensor(norm, dtype=accumulation_dtype(policy.dtype), device=policy.device)
        torch.nn.utils.clip_grads_with_norm_([p for _, p in named], max_grad_norm, total)
    changes = any(p.grad is not None for _, p in named)
    version = policy.weight_version
    optimizer.step()
    if changes and policy.weight_version == version:  # it wrote through `.data`, which shows nowhere
        policy.note_weight_change(trainable_only=True)
    for _, parameter in named:  # also those that this optimizer does not hold
        parameter.grad = None
    if comm is not None:
        require_same_parameters(named, comm, "weights after the update")
        comm.verified[policy] = policy.weight_version
    return norm


def report_over_ranks(report: StepReport, step: Step, comm: Mesh, before: Traffic) -> StepReport:
    """What ranks did together: the audit of the reduction, and what this rank sent, by purpose."""
    by_purpose = comm.traffic().since(before)
    counters = {
        **report.counters,
        "ranks": comm.world.size,
        "communication_calls": sum(entry["calls"] for entry in by_purpose.values()),
        "communication_bytes": sum(entry["bytes"] for entry in by_purpose.values()),
        "communication": by_purpose,
        "gradient_reduction": step.reduction,
    }
    agreed = comm.world.size > 1 and comm.sums_gradients
    return replace(report, counters=counters, level=3 if agreed else 1)
