"""When to capture a reused prompt again: every k steps, or when its log-prob drift comes near a threshold.

Drift itself can only be measured against a fresh capture, which is the cost that reuse is there to save. So it is
measured where a fresh capture is there anyway, at every refresh, on a few tokens; in between it is predicted:

    drift of the state  ~  slope x |weights now - weights at capture|,    slope = drift / distance at a refresh

The largest of the last `SLOPES_KEPT` slopes is used: one probe is a few dozen tokens, and a slope changes in training.

The first reuse is always a refresh (no slope is known yet), and no prediction reaches further than `MAX_EXTRAPOLATION`
times the distance at which a drift was measured. Cost: at a refresh, two scoring passes over the probe
(`probe_responses` x `probe_tokens` tokens); at every other step, one pass over the trainable parameters; in memory, a
copy of those parameters at the capture. How this predictor compares with others: docs/prefix_reuse.md.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.capture import capture_prompt
from workbench.comm import Mesh, digest, require_agreement
from workbench.errors import InvalidInputError, StaleStateError
from workbench.inputs import Ids, check_positive, check_prompt, check_ranks, check_responses, check_temperature
from workbench.policy import Policy
from workbench.replay import score_responses
from workbench.state.resident import ResidentState
from workbench.types import Response, is_number

SLOPES_KEPT = 3
MAX_EXTRAPOLATION = 2.0
"""A drift is predicted up to this many times the weight distance at which one was last measured."""


@dataclass(frozen=True)
class Decision:
    """Whether a step captured its prompt again, and why.

    state_age: optimizer steps since the capture, before this decision. predicted_drift: mean |log-prob drift| expected
    on the reused state, None without a prediction. measured_drift: of the replaced state on the probe; None without
    a refresh or a probe. weight_distance: |weights now - weights at capture| (L2), None if not looked at.
    """

    refresh: bool
    reason: str
    state_age: int
    predicted_drift: float | None = None
    weight_distance: float | None = None
    measured_drift: float | None = None


@dataclass(frozen=True)
class DriftSlope:
    """Drift per unit of weight distance, as measured at one refresh: mean |log-prob drift| at that distance."""

    drift: float
    distance: float

    def predict(self, distance: float) -> float:
        return self.drift * distance / self.distance


@dataclass(frozen=True)
class RefreshPolicy:
    """When a reused prompt is captured again; whichever of the two rules says so first.

    interval: at the latest when the state is this many optimizer steps old; 1 is no reuse.
    max_logprob_drift: before mean |log-prob drift| per token is expected to pass this, in nats.
    margin: the prediction is multiplied by this before it is compared: room for the noise of a small probe and for a
        slope that grows.
    probe_responses, probe_tokens: the first tokens of the first responses that the probe scores at a refresh.
    """

    interval: int | None = None
    max_logprob_drift: float | None = None
    margin: float = 1.5
    probe_responses: int = 4
    probe_tokens: int = 16

    def __post_init__(self) -> None:
        limit = self.max_logprob_drift
        if self.interval is None and limit is None:
            raise InvalidInputError("RefreshPolicy: give interval, max_logprob_drift or both")
        if self.interval is not None:
            check_positive("RefreshPolicy: interval", self.interval)
        if limit is not None and not (is_number(limit) and 0.0 < limit < math.inf):
            raise InvalidInputError(f"RefreshPolicy: max_logprob_drift={limit!r} must be a finite number > 0")
        if not (is_number(self.margin) and 1.0 <= self.margin < math.inf):
            raise InvalidInputError(f"RefreshPolicy: margin={self.margin!r} must be a finite number >= 1")
        check_positive("RefreshPolicy: probe_responses", self.probe_responses)
        check_positive("RefreshPolicy: probe_tokens", self.probe_tokens)

    def decide(self, state_age: int, *, weight_distance: float | None, slopes: Sequence[DriftSlope] = ()) -> Decision:
        """For a stale state. weight_distance: since its capture; slopes: the last ones measured, the newest last."""
        if self.interval is not None and state_age >= self.interval:
            return Decision(True, f"interval of {self.interval} steps", state_age, None, weight_distance)
        limit = self.max_logprob_drift
        if limit is None:
            return Decision(False, f"within the interval of {self.interval} steps", state_age)
        assert weight_distance is not None, "the drift rule needs the weight distance"
        if weight_distance == 0.0:
            return Decision(False, "the weights are those of the capture", state_age, 0.0, 0.0)
        if not slopes:
            reason = "no drift was measured yet: the first reuse is checked by a refresh"
            return Decision(True, reason, state_age, None, weight_distance)
        predicted = max(slope.predict(weight_distance) for slope in slopes)
        if self.margin * predicted > limit:
            reason = f"predicted drift {predicted:.4g} x margin {self.margin:g} > {limit:g}"
            return Decision(True, reason, state_age, predicted, weight_distance)
        if weight_distance > MAX_EXTRAPOLATION * max(slope.distance for slope in slopes):
            reason = f"weights moved over {MAX_EXTRAPOLATION:g} x as far as where drift was measured lately"
            return Decision(True, reason, state_age, predicted, weight_distance)
        reason = f"predicted drift {predicted:.4g} x margin {self.margin:g} <= {limit:g}"
        return Decision(False, reason, state_age, predicted, weight_distance)


@dataclass(frozen=True)
class ReuseReport:
    """What reuse of one prompt saved and what it cost.

    saved_seconds: wall time of the captures that were not made, at the mean time of those that were, less the probe's.
    measured_drifts: (state age, mean |log-prob drift| on the probe) at each refresh.
    """

    num_steps: int
    num_captures: int
    capture_seconds: float
    probe_seconds: float
    saved_seconds: float
    measured_drifts: tuple[tuple[int, float], ...]
    decisions: tuple[Decision, ...] = field(repr=False)


class PromptReuse:
    """One prompt's resident state over many optimizer steps, captured again when `refresh` says so.

        reuse = PromptReuse(policy, prompt_ids, refresh=RefreshPolicy(max_logprob_drift=0.02))
        for ...:
            state = reuse.state_for_step()
            responses = sample_responses(policy, state, ..., allow_stale=True)
            reuse.note_responses(responses)  # the probe's tokens; needed by max_logprob_drift
            update_step(policy, prompt_ids, responses, state=state, gradient_scope="response_only", allow_stale=True)

    One state is alive at a time, if the caller drops the old one before asking for the next: the old state is scored,
    then freed, then the prompt is captured.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_ids: Ids,
        *,
        refresh: RefreshPolicy,
        chunk_tokens: int = 1024,
        placement: str = "device",
        keep_boundaries: bool = False,
        temperature: float = 1.0,
        comm: Mesh | None = None,
    ) -> None:
        if not isinstance(refresh, RefreshPolicy):
            raise InvalidInputError(f"refresh={refresh!r} is not a RefreshPolicy, such as RefreshPolicy(interval=4)")
        check_temperature(temperature)
        self._policy, self._refresh, self._temperature = policy, refresh, temperature
        self._prompt = check_prompt(policy, prompt_ids)
        self._capture: dict[str, Any] = {
            "chunk_tokens": chunk_tokens,
            "placement": placement,
            "keep_boundaries": keep_boundaries,
            "comm": comm,
        }
        self._ranks = check_ranks(policy, comm)
        self._state: ResidentState | None = None
        self._captured_version = 0
        self._captured_weights: list[Tensor] = []
        self._probe: list[Tensor] = []
        self._slopes: deque[DriftSlope] = deque(maxlen=SLOPES_KEPT)
        self._decisions: list[Decision] = []
        self._capture_times: list[float] = []
        self._probe_seconds = 0.0

    @property
    def state_age(self) -> int:
        """Optimizer steps since the capture; 0 before the first one."""
        return 0 if self._state is None else self._policy.weight_version - self._captured_version

    @property
    def last_decision(self) -> Decision | None:
        return self._decisions[-1] if self._decisions else None

    def state_for_step(self) -> ResidentState:
        """The state to use at the current weights: the one in hand, or a fresh capture. Decides once a call.

        Ranks that share the prompt (comm=) call together, and must decide the same.
        """
        decision = self._decide()
        what = "whether the prompt is captured again"
        require_agreement(self._ranks, digest(decision.refresh), what, self._policy.device)
        if decision.refresh:
            decision = self._replace_state(decision)
        self._decisions.append(decision)
        assert self._state is not None
        return self._state

    def note_responses(self, responses: Sequence[Response | Ids]) -> None:
        """The responses that were sampled last: the first tokens of the first of them are the next probe."""
        checked = check_responses(self._policy, self._prompt.numel(), responses)
        probe = [ids[: self._refresh.probe_tokens].clone() for ids in checked if ids.numel()]
        if probe:
            self._probe = probe[: self._refresh.probe_responses]

    def report(self) -> ReuseReport:
        captures, steps = len(self._capture_times), len(self._decisions)
        mean_seconds = sum(self._capture_times) / captures if captures else 0.0
        drifts = [(d.state_age, d.measured_drift) for d in self._decisions if d.measured_drift is not None]
        return ReuseReport(
            num_steps=steps,
            num_captures=captures,
            capture_seconds=sum(self._capture_times),
            probe_seconds=self._probe_seconds,
            saved_seconds=mean_seconds * (steps - captures) - self._probe_seconds,
            measured_drifts=tuple(drifts),
            decisions=tuple(self._decisions),
        )

    def _decide(self) -> Decision:
        if self._state is None:
            return Decision(True, "first capture", 0)
        if self._is_current(self._state):
            return Decision(False, "the state is that of the current weights", self.state_age)
        distance = None
        if self._refresh.max_logprob_drift is not None:
            started = time.perf_counter()
            distance = self._weight_distance()
            self._probe_seconds += time.perf_counter() - started
            if not self._probe:
                raise InvalidInputError(
                    "max_logprob_drift needs tokens to measure drift on: call note_responses(responses) after sampling"
                )
        return self._refresh.decide(self.state_age, weight_distance=distance, slopes=self._slopes)

    def _is_current(self, state: ResidentState) -> bool:
        try:
            state.require_current(
                self._policy.state_key, self._policy.state_version, allow_stale=False, purpose="PromptReuse"
            )
        except StaleStateError:
            return False
        return True

    def _replace_state(self, decision: Decision) -> Decision:
        """Score the old state on the probe, free it, capture, score the new one: the drift that this refresh ends."""
        measures = self._refresh.max_logprob_drift is not None and self._state is not None
        before = self._score_probe() if measures else []
        self._state = None
        started = time.perf_counter()
        self._state = capture_prompt(self._policy, self._prompt, **self._capture)
        self._capture_times.append(time.perf_counter() - started)
        self._captured_version = self._policy.weight_version
        if self._refresh.max_logprob_drift is not None:
            self._captured_weights = [p.detach().clone() for _, p in self._policy.trainable_parameters()]
        if not measures:
            return decision
        measured = float((torch.cat(before) - torch.cat(self._score_probe())).abs().double().mean())
        assert decision.weight_distance is not None
        if decision.weight_distance > 0.0:
            self._slopes.append(DriftSlope(measured, decision.weight_distance))
        return replace(decision, measured_drift=measured)

    def _score_probe(self) -> list[Tensor]:
        assert self._state is not None
        started = time.perf_counter()
        scores = score_responses(
            self._policy, self._state, self._probe, temperature=self._temperature, allow_stale=True
        )
        self._probe_seconds += time.perf_counter() - started
        return scores

    @torch.no_grad()
    def _weight_distance(self) -> float:
        """L2 norm of what the trainable parameters moved since the capture; float64 sum, one parameter at a time."""
        total = 0.0
        for (_, now), then in zip(self._policy.trainable_parameters(), self._captured_weights, strict=True):
            total += float((now.detach() - then).double().square().sum())
        return math.sqrt(total)
