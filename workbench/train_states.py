"""Resident states of a training run: which are held, where, and until when they serve."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.capture import capture_prompt
from workbench.comm import Mesh
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
    comm: the ranks that share each prompt. What other data ranks hold takes its place in the order of use, so that a
    state is let go when one process would let it go.
    """

    def __init__(self, policy: Policy, config: TrainConfig, comm: Mesh | None = None) -> None:
        self._policy, self._config, self._comm = policy, config, comm
        walked = scope_to_walk(policy, config.gradient_scope)
        self._keep_boundaries = needs_boundaries(walked)
        if config.reuses_states and walked != "response_only":
            raise InvalidInputError(
                f"refresh={config.refresh!r} reuses states of older weights, through which gradient_scope="
                f"{config.gradient_scope!r} would walk another model's prompt; use gradient_scope='response_only', "
                "refresh=1, or an adapter_scope that leaves the prompt to the base model"
            )
        if config.kept_states is not None and not self.outlive_updates:
            raise InvalidInputError(
                f"kept_states={config.kept_states} reaches nothing: with refresh={config.refresh!r} no state outlives "
                "its update"
            )
        self._held: dict[int, PromptReuse | None] = {}  # by task, least recently used first; None: elsewhere

    @property
    def outlive_updates(self) -> bool:
        """May a state serve again in a later step, after updates?"""
        return self._config.reuses_states or self._policy.frozen_prompt

    @property
    def holds(self) -> bool:
        return self._config.state_placement != "recapture"

    def age(self, state: ResidentState) -> int:
        return self._policy.state_version - state.weight_version

    def state_for(self, task: int, prompt: Tensor) -> ResidentState:
        """The state of a task's prompt: held if it still serves, else captured now."""
        if not self.holds:
            chunk_tokens = self._config.chunk_tokens
            return capture_prompt(
                self._policy, prompt, chunk_tokens=chunk_tokens, keep_boundaries=False, comm=self._comm
            )
        reuse = self._held.pop(task, None) or self._reuse(prompt)
        self._held[task] = reuse
        return reuse.state_for_step()

    def used_elsewhere(self, task: int) -> None:
        """Another data rank uses the task's state now."""
        if self.holds:
            self._held[task] = self._held.pop(task, None)

    def note_responses(self, task: int, responses: Sequence[Response]) -> None:
        """What was sampled from a task's state: a drift rule's probe of it."""
        reuse = self._held.get(task)
        if reuse is not None:
            reuse.note_responses(responses)

    def why(self, task: int) -> str:
        """The last decision about a task's state, in words."""
        reuse = self._held.get(task)
        decision = None if reuse is None else reuse.last_decision
        return "no state is held" if decision is None else decision.reason

    def forget(self, num_kept: int) -> None:
        """Let go of states that cannot serve again, then of all but the `num_kept` used last."""
        if not self.outlive_updates:
            self._held = {task: reuse for task, reuse in self._held.items() if reuse is None or reuse.state_age == 0}
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
            comm=self._comm,
        )
