"""The optimizer of a training run, its learning rate, and one update: sum over ranks, clip, step."""

from __future__ import annotations

import torch
from transformers import get_scheduler

from workbench.comm import Mesh
from workbench.errors import InvalidInputError
from workbench.finalize import apply_gradients, sum_gradients
from workbench.policy import Policy
from workbench.train_config import TrainConfig


class RunOptimizer:
    """AdamW over all trainable parameters, and its schedule. torch_optimizer, scheduler: what checkpoints hold.

    mesh: the ranks of the run; accelerate prepares the optimizer that steps (parallel/accelerator.py).
    """

    def __init__(self, policy: Policy, config: TrainConfig, mesh: Mesh | None = None) -> None:
        self._policy, self._mesh, self._max_grad_norm = policy, mesh, config.max_grad_norm
        parameters = [p for _, p in policy.trainable_parameters()]
        if not parameters:
            raise InvalidInputError("the policy has no trainable parameter: nothing would learn")
        if any(p.grad is not None for p in parameters):
            raise InvalidInputError("the policy has gradients from earlier work; optimizer.zero_grad() before train()")
        self.torch_optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
        )
        try:
            self.scheduler = get_scheduler(
                config.lr_scheduler_type,
                self.torch_optimizer,
                num_warmup_steps=config.warmup_steps,
                num_training_steps=config.num_steps * config.updates_per_batch,
                scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs) or None,
            )
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"lr_scheduler_kwargs={dict(config.lr_scheduler_kwargs)!r} do not fit lr_scheduler_type="
                f"{config.lr_scheduler_type!r}: {error}"
            ) from error
        self._prepared = self.torch_optimizer if mesh is None else mesh.prepare_optimizer(self.torch_optimizer)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.scheduler.get_last_lr()[0]

    def sum_over_ranks(self) -> None:
        """Every rank's part of the gradient becomes the whole one; once per update."""
        if self._mesh is not None:
            sum_gradients(self._policy, self._mesh)

    def apply(self) -> float:
        """Clip, step, drop the gradients; returns their norm before clipping. Ranks must end with the same weights."""
        norm = apply_gradients(self._policy, self._prepared, max_grad_norm=self._max_grad_norm, comm=self._mesh)
        self.scheduler.step()
        return norm
