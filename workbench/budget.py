"""From a byte budget to a schedule: the fastest chunk, block, checkpointing and placement whose planned peak fits.

The planned peak is the largest, over capture, replay, prompt walk and optimizer call, of

    rows + carry + boundary carries + gradient pages     exact from the configuration (planner/sizes.py)
    + gradients of the trained parameters                exact from the policy
    + upper band of graph, workspace and logits          planner/graph.py, planner/transients.py
    + ids, tables, log-probs and other small things      SMALL_BYTES, BYTES_PER_POSITION

and it is compared with the budget, so it has to be an upper bound: the peak that a step measures was 0.42 to 0.97 of it
over eight families, two scopes, with and without LoRA, five schedules each (tests/test_budget.py measures some of them
again); a budget is therefore never used up. Among the schedules that fit, the one with the least modelled time is
taken: operations (planner/flops.py) at a nominal rate, and a fixed time for every layer of every segment.

The optimizer call counts as torch's Adam and AdamW (two moments at the first call, one temporary), or as one
temporary. A reference model is taken to be no larger than the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.errors import InvalidInputError
from workbench.planner import Gpu, Plan, Request, plan_request, sizes
from workbench.planner.families import model_shape
from workbench.planner.flops import work_by_phase
from workbench.policy import Policy
from workbench.state.resident import ResidentState
from workbench.types import GradientScope

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)

# What the terms do not know: ids, positions, rotary tables, masks of one sub-chunk, log-probs. Measured on tiny models,
# where nothing hides it.
SMALL_BYTES = 256 * 1024
BYTES_PER_POSITION = 8  # the prompt's ids

# Only ratios between schedules matter: 25 GFLOP/s within a step, 0.5 ms a layer and segment [one CPU thread].
NOMINAL_FLOPS_PER_SECOND, NOMINAL_SEGMENT_SECONDS, NOMINAL_LINK_BYTES_PER_SECOND = 25e9, 0.5e-3, 25e9
_MACHINE = Gpu("this step", 2**62, 1.0, 1.0, outside_bytes=0)


@dataclass(frozen=True)
class Schedule:
    """How a step cuts and holds its work. planned_bytes: upper bound of its peak; None where nothing was planned."""

    chunk_tokens: int
    block_tokens: int
    checkpoint_layers: bool
    placement: str
    planned_bytes: int | None = None

    def __str__(self) -> str:
        checkpoints = "with" if self.checkpoint_layers else "without"
        return (
            f"chunk_tokens={self.chunk_tokens}, block_tokens={self.block_tokens}, {checkpoints} layer checkpoints, "
            f"rows on the {self.placement}"
        )


def parse_bytes(budget: int | str) -> int:
    """A count of bytes, or text such as "40GB" (powers of 1000) or "512MiB" (powers of 1024)."""
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return budget
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)?\s*", budget, re.IGNORECASE)
        if isinstance(budget, str)
        else None
    )
    if match is None or not float(match[1]):
        raise InvalidInputError(f"memory_budget={budget!r} is neither a number of bytes > 0 nor text such as '40GB'")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def fit_schedule(
    policy: Policy,
    memory_budget: int | str,
    *,
    prompt_tokens: int,
    response_tokens: int,
    group_size: int,
    gradient_scope: GradientScope,
    optimizer: torch.optim.Optimizer | None = None,
    state: ResidentState | None = None,
    reference_captures: bool = False,
) -> Schedule:
    """The fastest schedule whose planned peak above the step's start is at most `memory_budget`.

    response_tokens: of the longest response. state: one that is there before the step starts, so that its bytes are
    not the step's and its chunks and placement are given. reference_captures: the KL term's reference captures the
    prompt for itself, whether or not the policy's state is there.
    Raises InvalidInputError with the smallest budget that would do.
    """
    budget = parse_bytes(memory_budget)
    questions = _Questions(
        policy, prompt_tokens, response_tokens, group_size, gradient_scope, optimizer, state, reference_captures
    )
    planned = [questions.with_bytes(schedule) for schedule in questions.candidates()]
    fitting = [schedule for schedule in planned if _bytes(schedule) <= budget]
    if not fitting:
        least = min(planned, key=_bytes)
        raise InvalidInputError(
            f"memory_budget={budget:,} bytes is not enough for {prompt_tokens:,} prompt tokens with "
            f"gradient_scope={gradient_scope!r}: the smallest that would do is {_bytes(least):,} bytes ({least}); "
            "raise the budget, shorten the prompt or name a cheaper scope"
        )
    return min(fitting, key=questions.seconds)


def _bytes(schedule: Schedule) -> int:
    assert schedule.planned_bytes is not None
    return schedule.planned_bytes


class _Questions:
    """What the planner says about one step under different schedules."""

    def __init__(
        self,
        policy: Policy,
        prompt_tokens: int,
        response_tokens: int,
        group_size: int,
        gradient_scope: GradientScope,
        optimizer: torch.optim.Optimizer | None,
        state: ResidentState | None,
        reference_captures: bool,
    ) -> None:
        self.reference_captures = reference_captures
        self.shape = model_shape(policy.adapter.config, type(policy.adapter.config).__name__)
        self.state, self.cuda = state, policy.device.type == "cuda"
        trained = [parameter for _, parameter in policy.trainable_parameters()]
        self.gradient_bytes = sum(p.nbytes for p in trained)
        self.optimizer_bytes = _optimizer_bytes(optimizer, self.gradient_bytes)
        lora_rank = _lora_rank(policy)
        self.request = Request(
            positions=prompt_tokens + max(1, response_tokens),
            group_size=group_size,
            response_tokens=max(1, response_tokens),
            gradient_scope=gradient_scope,
            weights="fp32" if policy.dtype.itemsize >= 4 else "bf16",
            training="full" if lora_rank is None else "lora",
            lora_rank=lora_rank or 1,
            optimizer="none",
        )
        self.width = policy.dtype.itemsize / self.request.compute_bytes  # float64 models take twice the bytes

    def candidates(self) -> Iterator[Schedule]:
        chunks = _up_to(self.request.resident_tokens) if self.state is None else [self.state.chunk_tokens]
        placements = ["device", "host"] if self.cuda else ["device"]  # on a CPU both are the same memory
        if self.state is not None:
            placements = [self.state.placement]
        for placement in placements:
            for checkpoint_layers in (False, True) if placement == "device" else (True,):
                for chunk in chunks:
                    for block in _up_to(self.request.response_tokens):
                        yield Schedule(chunk, block, checkpoint_layers, placement)

    def with_bytes(self, schedule: Schedule) -> Schedule:
        """The schedule with its upper bound."""
        return replace(
            schedule, planned_bytes=self._upper_bound(plan_request(self.shape, _MACHINE, self._ask(schedule)))
        )

    def seconds(self, schedule: Schedule) -> tuple[float, int, int]:
        """Modelled time, then the larger chunk and block between equals."""
        total = 0.0
        for work in work_by_phase(self.shape, self._ask(schedule)).values():
            fixed = work.segments * len(self.shape.layers) * NOMINAL_SEGMENT_SECONDS
            total += max(work.flops / NOMINAL_FLOPS_PER_SECOND + fixed, work.link_bytes / NOMINAL_LINK_BYTES_PER_SECOND)
        return total, -schedule.chunk_tokens, -schedule.block_tokens

    def _ask(self, schedule: Schedule) -> Request:
        return replace(
            self.request,
            chunk_tokens=schedule.chunk_tokens,
            block_tokens=schedule.block_tokens,
            checkpoint_layers=schedule.checkpoint_layers,
            placement=schedule.placement,
        )

    def _upper_bound(self, plan: Plan) -> int:
        own = {"capture": 0, "replay": self.gradient_bytes, "prompt_gradient": self.gradient_bytes}
        left_out = ("weights", "adapter", "optimizer", "outside")
        on_host = 0 if self.cuda else plan.host_bytes  # on a CPU the host's memory is the one that is measured
        terms = [term for term in plan.first_step_details if term.term not in left_out]
        planned = {
            phase: self.width * (on_host + sum(term.high for term in terms if term.phase == phase)) for phase in own
        }
        small = SMALL_BYTES + BYTES_PER_POSITION * self.request.positions
        peak = max(planned[phase] + extra for phase, extra in own.items()) - self._there(plan.request)
        if self.reference_captures:  # a state of its own, and scores without a graph: less than a replay
            peak = max(peak, planned["capture"], planned["replay"])
        return int(max(peak, self.gradient_bytes + self.optimizer_bytes) + small)

    def _there(self, request: Request) -> float:
        """Bytes of the given state that the plan counts as the step's: not a boundary that only another scope needs."""
        if self.state is None or (self.cuda and request.placement == "host"):
            return 0
        captured = replace(request, positions=max(2, request.resident_tokens), response_tokens=1)
        rows = sizes.rows_bytes(self.shape, captured) + sizes.rank_carry_bytes(self.shape, captured)
        return min(self.state.nbytes, self.width * (rows + sizes.boundary_carries_bytes(self.shape, captured)))


def _optimizer_bytes(optimizer: torch.optim.Optimizer | None, gradient_bytes: int) -> int:
    """What an optimizer call allocates: one temporary per parameter, and Adam's two moments at its first call."""
    if optimizer is None:
        return 0
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    return gradient_bytes * (3 if adam and not optimizer.state else 1)


def _lora_rank(policy: Policy) -> int | None:
    """The largest rank of the model's LoRA adapters; None without any."""
    configs: Any = getattr(policy.model, "peft_config", None) or {}
    return max((int(config.r) for config in configs.values()), default=None)


def _up_to(tokens: int) -> list[int]:
    """Sizes worth trying for so many tokens: no more than one that holds them all."""
    return [size for size in SIZES if size == SIZES[0] or size < 2 * tokens]
