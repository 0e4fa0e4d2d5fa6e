"""Resident states of a training run: which are held, where, and until when they serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.capture import capture_prompt
from workbench.errors import InvalidInputError
from workbench.policy import Policy
from workbench.prompt_gradient import needs_boundaries, scope_to_walk
from workbench.state.resident import ResidentState
from workbench.train_config import TrainConfig
from workbench.types import Response


@dataclass(frozen=True)
class StateProbe:
    """What a refresh policy may look at before it decides whether a state still serves."""

    policy: Policy
    state: ResidentState
    prompt_ids: Tensor
    responses: Sequence[Response]


class StateStore:
    """Holds at most one state per task. A state's age is the number of updates since its capture.

    Under a frozen prompt (`Policy.frozen_prompt`) no update makes a state older.
    """

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self._policy, self._config = policy, config
        walked = scope_to_walk(policy, config.gradient_scope)
        self._keep_boundaries = needs_boundaries(walked)
        if config.reuses_states and walked != "response_only":
            raise InvalidInputError(
                f"refresh={config.refresh!r} reuses states of older weights, through which gradient_scope="
                f"{config.gradient_scope!r} would walk another model's prompt; use gradient_scope='response_only', "
                "refresh=1, or an adapter_scope that leaves the prompt to the base model"
            )
        self._held: dict[int, ResidentState] = {}  # by task, least recently used first
        self.num_captures = 0

    @property
    def holds(self) -> bool:
        return self._config.state_placement != "recapture"

    def age(self, state: ResidentState) -> int:
        return self._policy.state_version - state.weight_version

    def state_for(self, task: int, prompt: Tensor, responses: Sequence[Response] = ()) -> ResidentState:
        """The state of a task's prompt: held if it still serves, else captured now."""
        state = self._held.pop(task, None)
        if state is not None and not self._serves(state, prompt, responses):
            state = None  # its memory is free before the new one is captured
        if state is None:
            state = self._capture(prompt)
        if self.holds:
            self._held[task] = state
        return state

    def forget(self, num_kept: int) -> None:
        """Let go of states that cannot serve again, then of all but the `num_kept` used last."""
        if not self._config.reuses_states:
            self._held = {task: state for task, state in self._held.items() if self.age(state) == 0}
        for task in list(self._held)[: max(0, len(self._held) - num_kept)]:
            del self._held[task]

    def _serves(self, state: ResidentState, prompt: Tensor, responses: Sequence[Response]) -> bool:
        age, refresh = self.age(state), self._config.refresh
        if age == 0:
            return True
        if isinstance(refresh, int):
            return age < refresh
        decision: Any = refresh.decide(age, StateProbe(self._policy, state, prompt, responses))
        return not getattr(decision, "refresh", decision)

    def _capture(self, prompt: Tensor) -> ResidentState:
        self.num_captures += 1
        return capture_prompt(
            self._policy,
            prompt,
            chunk_tokens=self._config.chunk_tokens,
            keep_boundaries=self._keep_boundaries and self.holds,
            placement="host" if self._config.state_placement == "host" else "device",
        )
