"""Plain records that every part of the package exchanges. No behaviour beyond validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InvalidInputError


@dataclass(frozen=True)
class Response:
    """One sampled response.

    ids: 1-D int64 tensor of the sampled token ids, the end-of-sequence id included when it was sampled.
    logprobs: 1-D float32 tensor, log-probability of each id under the sampling policy at the sampling
        temperature (before top-p), the quantity `score_responses` gives at the same temperature.
    finished: True if an end-of-sequence id ended it, False if `max_new_tokens` cut it.
    """

    ids: Tensor
    logprobs: Tensor
    finished: bool

    def __len__(self) -> int:
        return int(self.ids.numel())


@dataclass(frozen=True)
class Tail:
    """Gradient scope: the reverse walk goes through the last `chunks` prompt chunks only."""

    chunks: int

    def __post_init__(self) -> None:
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 0:
            raise InvalidInputError(f"Tail(chunks={self.chunks!r}): chunks must be an integer >= 0")


@dataclass(frozen=True)
class Sampled:
    """Gradient scope: each prompt chunk is walked with probability `fraction` and scaled by 1 / fraction.

    Chunks are drawn independently, so the expectation over seeds is the full gradient exactly, also along paths
    through several chunks (a fixed-size subset would be biased there).
    """

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not (number and 0.0 < self.fraction <= 1.0):
            raise InvalidInputError(f"Sampled(fraction={self.fraction!r}): fraction must be in (0, 1]")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInputError(f"Sampled(seed={self.seed!r}): seed must be an integer")


GradientScope = str | Tail | Sampled

Tally = Counter[str]
"""What ran, counted by name, across the stages of one step."""


@dataclass(frozen=True)
class StepReport:
    """What one `update_step` did and what it cost.

    loss: objective value of the whole step, in the units of `ObjectiveConfig.loss`. On-policy every ratio is 1 and
        advantages sum to 0, so it is near 0 by construction: watch rewards and the gradient norm instead.
    gradient_scope: the scope that ran.
    weight_version: the policy's weight version after the step.
    seconds: wall time by stage.
    memory: bytes; "peak_bytes" is the peak of live tensor bytes above those live at the start of the step,
        a state handed in is alive at the start, one captured by the step is not; then each ledger's own peak ("rows",
        "carry", "gradient_pages", "graph", "logits", ...), and "stage_peak_bytes": {stage: peak above the start}.
    metrics: statistics of ratios, advantages, entropy and KL; "notes" holds remarks in words.
    counters: what ran (chunks captured, blocks replayed, prompt chunks walked, graphs alive at most, ...).
        choices_verified: selections of keys or experts that were made again and found the same; rows_on_host_bytes:
        of the prompt with placement="host"; layers_staged, bytes_staged: copies of rows to the device;
        kernel_calls: {kernel: calls} in this process, where there is a choice (the Gated DeltaNet rule). Over ranks:
        communication_calls, communication_bytes and both by purpose, as this rank sent them; gradient_reduction, by
        family of parameters.
    level: highest evidence level this call itself checked: 1 executed (all a step can say), 2 its forward equals the
        model's, 3 ranks agree, 4 its gradient is the full one. A run's record says which checks ran and what they
        measured.
    """

    loss: float
    gradient_scope: GradientScope
    weight_version: int
    seconds: Mapping[str, float]
    memory: Mapping[str, Any]
    metrics: Mapping[str, Any]
    counters: Mapping[str, Any]
    level: int = 1
    logprobs: tuple[Tensor, ...] = field(default=(), repr=False)


def is_number(value: object) -> bool:
    """A real number that is not NaN; no bool, text or tensor."""
    return not isinstance(value, bool) and isinstance(value, Real) and value == value


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
