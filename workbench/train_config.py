"""The frozen configuration of a training run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError
from workbench.refresh import RefreshPolicy
from workbench.types import GradientScope, Sampled, Tail, is_number

STATE_PLACEMENTS = ("device", "host", "recapture")
SCHEDULES_WITHOUT_METRICS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
TRACKERS = ("tensorboard", "wandb")
# What a resumed run may change: where it writes and what it shows, none of what it computes.
NOT_IDENTITY = ("output_dir", "resume", "keep_checkpoints", "trackers", "measure_memory")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What `train` does. A *step* samples one batch; it makes `updates_per_batch` optimizer updates of it.

    num_steps: steps of the run. prompts_per_step: prompts of a batch; group_size: responses sampled for each.
    updates_per_batch: optimizer updates on one batch, with the log-probs of the first as the old ones of the others.
    max_new_tokens, temperature, top_p, eos_token_ids: of sampling (`sample_responses`). The objective's log-probs are
        taken at the same temperature.
    learning_rate, weight_decay, adam_betas, adam_epsilon: of torch.optim.AdamW, over all trainable parameters.
    lr_scheduler_type, warmup_steps, lr_scheduler_kwargs: `transformers.get_scheduler`, over updates.
    max_grad_norm: of the whole batch's gradient; None leaves it.
    objective: the loss; its denominators and advantage_scale="batch" are over the whole batch.
    gradient_scope, chunk_tokens, block_tokens, checkpoint_layers: as in `update_step`; `Sampled` draws other chunks for
        every group and update, from its seed and this one.
    state_placement: "device" or "host" hold the prompts' resident states between sampling and updates;
        "recapture" holds none, and captures each prompt once more for every update.
    refresh: a state serves until it is this many updates old, or until a `RefreshPolicy` says so. Above 1 it serves
        stale states, which only response_only does.
    kept_states: states that outlive their step, for when their prompts come again; default: prompts_per_step.
    reward_weights: one per reward function.
    eval_every: evaluate held-out tasks before the first step, after every so many steps, and at the end.
    eval_samples, eval_temperature: responses per held-out task, and their temperature.
    seed: of the order of tasks, of sampling and of evaluation.
    output_dir: metrics.jsonl, evaluations.jsonl, run.json and checkpoints/; None writes nothing.
    checkpoint_every: steps between checkpoints (there is one before the first step and one at the end); None: only
        those two. keep_checkpoints: the latest so many stay.
    resume: go on from the last checkpoint in output_dir, if there is one.
    trackers: "tensorboard", "wandb": the metrics go to accelerate's trackers as well.
    measure_memory: peak bytes of every update, at a few microseconds per operation.
    """

    num_steps: int
    prompts_per_step: int = 4
    group_size: int = 8
    updates_per_batch: int = 1
    max_new_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    eos_token_ids: tuple[int, ...] | None = ()
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    gradient_scope: GradientScope = "full"
    chunk_tokens: int = 1024
    block_tokens: int = 2048
    checkpoint_layers: bool = False
    state_placement: str = "device"
    refresh: int | RefreshPolicy = 1
    kept_states: int | None = None
    reward_weights: tuple[float, ...] | None = None
    eval_every: int | None = None
    eval_samples: int = 1
    eval_temperature: float = 1.0
    seed: int = 0
    output_dir: str | Path | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    trackers: tuple[str, ...] = ()
    measure_memory: bool = True

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_numbers(self)
        _check_choices(self)
        if self.objective.temperature not in (1.0, self.temperature):
            _refuse(
                f"objective.temperature={self.objective.temperature} is not the sampling temperature "
                f"{self.temperature}; leave it out, train sets it"
            )
        if self.objective.max_grad_norm is not None:
            _refuse("objective.max_grad_norm clips one group's gradient; give max_grad_norm to TrainConfig")

    @property
    def step_objective(self) -> ObjectiveConfig:
        """The objective of one group of a batch: advantages and dropped groups are decided over the whole batch."""
        return replace(self.objective, temperature=self.temperature, drop_zero_variance_groups=False)

    @property
    def reuses_states(self) -> bool:
        """May a state serve after the update that made it stale?"""
        refresh = self.refresh
        return (refresh.interval if isinstance(refresh, RefreshPolicy) else refresh) != 1

    def identity(self) -> dict[str, Any]:
        """All that the results depend on, as JSON."""
        values = {name: value for name, value in asdict(self).items() if name not in NOT_IDENTITY}
        # scopes and refresh policies are objects: asdict takes apart those that are dataclasses, and loses their names
        values |= {name: repr(getattr(self, name)) for name in ("gradient_scope", "refresh")}
        # what JSON has no number for, such as clip_high=inf, is text: it must come back as it went
        return json.loads(json.dumps(values, default=str), parse_constant=str)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def _refuse(message: str) -> None:
    raise InvalidInputError(f"TrainConfig: {message}")


def _check_counts(config: TrainConfig) -> None:
    counts = ("num_steps", "prompts_per_step", "group_size", "updates_per_batch", "max_new_tokens", "eval_samples")
    optional = ("eval_every", "checkpoint_every")
    at_least = dict.fromkeys((*counts, *optional, "chunk_tokens", "block_tokens", "keep_checkpoints"), 1)
    at_least |= {"warmup_steps": 0, "kept_states": 0}
    for name, least in at_least.items():
        value = getattr(config, name)
        if value is None and name in (*optional, "kept_states"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            _refuse(f"{name}={value!r} must be an integer >= {least}")
    if isinstance(config.seed, bool) or not isinstance(config.seed, int):
        _refuse(f"seed={config.seed!r} must be an integer")


def _check_numbers(config: TrainConfig) -> None:
    for name in ("temperature", "top_p", "learning_rate", "weight_decay", "adam_epsilon", "eval_temperature"):
        value = getattr(config, name)
        if not is_number(value) or not 0.0 <= value < math.inf:
            _refuse(f"{name}={value!r} must be a finite number >= 0")
    for name in ("temperature", "top_p", "eval_temperature"):
        if getattr(config, name) == 0.0:
            _refuse(f"{name}=0 is not supported; give a small number for nearly greedy sampling")
    norm = config.max_grad_norm
    if norm is not None and (not is_number(norm) or norm <= 0.0):
        _refuse(f"max_grad_norm={norm!r} must be a number > 0, or None")
    if config.top_p > 1.0:
        _refuse(f"top_p={config.top_p!r} must be in (0, 1]")
    betas: Any = config.adam_betas
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(b) and 0.0 <= b < 1.0 for b in betas):
        _refuse(f"adam_betas={betas!r} must be two numbers in [0, 1)")


def _check_choices(config: TrainConfig) -> None:
    objective: Any = config.objective
    if not isinstance(objective, ObjectiveConfig):
        _refuse(f"objective={objective!r} is not an ObjectiveConfig")
    if not isinstance(config.gradient_scope, Tail | Sampled) and config.gradient_scope not in ("full", "response_only"):
        _refuse(f"gradient_scope={config.gradient_scope!r} is not one of full, response_only, Tail(...), Sampled(...)")
    if config.state_placement not in STATE_PLACEMENTS:
        _refuse(f"state_placement={config.state_placement!r} is not one of {', '.join(STATE_PLACEMENTS)}")
    if config.lr_scheduler_type not in SCHEDULES_WITHOUT_METRICS:
        _refuse(f"lr_scheduler_type={config.lr_scheduler_type!r} is not one of {', '.join(SCHEDULES_WITHOUT_METRICS)}")
    if config.warmup_steps and config.lr_scheduler_type == "constant":
        _refuse("warmup_steps reaches nothing with lr_scheduler_type='constant'; use 'constant_with_warmup'")
    kwargs: Any = config.lr_scheduler_kwargs
    if not isinstance(kwargs, Mapping):
        _refuse(f"lr_scheduler_kwargs={kwargs!r} must be a mapping")
    if kwargs and config.lr_scheduler_type in ("constant", "constant_with_warmup"):
        _refuse(f"lr_scheduler_kwargs={dict(kwargs)!r} reaches nothing with {config.lr_scheduler_type!r}")
    trackers: Any = config.trackers
    if not isinstance(trackers, tuple | list) or any(name not in TRACKERS for name in trackers):
        _refuse(f"trackers={trackers!r}: a tuple of {', '.join(TRACKERS)}")
    interval = config.refresh
    is_interval = isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1
    if not is_interval and not isinstance(interval, RefreshPolicy):
        _refuse(f"refresh={interval!r} must be an integer >= 1 or a RefreshPolicy")
    _check_reach(config)


def _check_reach(config: TrainConfig) -> None:
    """An option that reaches nothing is an error."""
    if config.output_dir is None:
        for name in ("checkpoint_every", "resume", "trackers"):
            if getattr(config, name):
                _refuse(f"{name}={getattr(config, name)!r} reaches nothing without output_dir")
    if config.state_placement == "recapture":
        for name, reaches in (("refresh", config.reuses_states), ("kept_states", config.kept_states is not None)):
            if reaches:
                _refuse(f"{name} reaches nothing with state_placement='recapture', which holds no state")
    if config.eval_every is None:
        for name, default in (("eval_samples", 1), ("eval_temperature", 1.0)):
            if getattr(config, name) != default:
                _refuse(f"{name}={getattr(config, name)!r} reaches nothing without eval_every")
