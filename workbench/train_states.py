"""Resident states of a training run: which are held, where, and until when they serve."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.capture import capture_prompt
from workbench.errors import InvalidInputError
from workbench.policy import Policy
from workbench.prompt_gradient import needs_boundaries, scope_to_walk
from workbench.refresh import PromptReuse, RefreshPolicy
from workbench.state.resident import ResidentState
from workbench.train_config import TrainConfig
from workbench.types import Response


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
        self._held: dict[int, PromptReuse] = {}  # by task, least recently used first

    @property
    def holds(self) -> bool:
        return self._config.state_placement != "recapture"

    def age(self, state: ResidentState) -> int:
        return self._policy.state_version - state.weight_version

    def state_for(self, task: int, prompt: Tensor) -> ResidentState:
        """The state of a task's prompt: held if it still serves, else captured now."""
        if not self.holds:
            chunk_tokens = self._config.chunk_tokens
            return capture_prompt(self._policy, prompt, chunk_tokens=chunk_tokens, keep_boundaries=False)
        reuse = self._held.pop(task, None) or self._reuse(prompt)
        self._held[task] = reuse
        return reuse.state_for_step()

    def note_responses(self, task: int, responses: Sequence[Response]) -> None:
        """What was sampled from a task's state: a drift rule's probe of it."""
        if self.holds:
            self._held[task].note_responses(responses)

    def why(self, task: int) -> str:
        """The last decision about a task's state, in words."""
        decision = self._held[task].last_decision if self.holds else None
        return "no state is held" if decision is None else decision.reason

    def forget(self, num_kept: int) -> None:
        """Let go of states that cannot serve again, then of all but the `num_kept` used last."""
        if not self._config.reuses_states and not self._policy.frozen_prompt:
            self._held = {task: reuse for task, reuse in self._held.items() if reuse.state_age == 0}
        for task in list(self._held)[: max(0, len(self._held) - num_kept)]:
            del self._held[task]

    def _reuse(self, prompt: Tensor) -> PromptReuse:
        config = self._config
        interval = config.refresh
        return PromptReuse(
            self._policy,
            prompt,
            refresh=interval if isinstance(interval, RefreshPolicy) else RefreshPolicy(interval=interval),
            chunk_tokens=config.chunk_tokens,
            keep_boundaries=self._keep_boundaries,
            placement="host" if config.state_placement == "host" else "device",
            temperature=config.temperature,
        )
