"""Long-context GRPO under a fixed memory budget: capture once, replay serially, gradient through the prompt."""

from workbench.advantages import group_advantages
from workbench.capture import capture_prompt
from workbench.config import ObjectiveConfig
from workbench.errors import (
    InvalidInputError,
    NonDeterministicError,
    NonFiniteError,
    RankFailedError,
    RanksDisagreeError,
    StaleStateError,
    UnsupportedModelError,
    WorkbenchError,
)
from workbench.loading import load_policy
from workbench.planner import Plan, plan
from workbench.policy import Policy
from workbench.replay import score_responses
from workbench.rollout import sample_responses
from workbench.state.pages import LayerState
from workbench.state.resident import ResidentState
from workbench.types import Response, Sampled, StepReport, Tail
from workbench.update import update_step
from workbench.walk_checkpoint import WalkCheckpoint

__version__ = "0.1.0"

__all__ = [
    "InvalidInputError",
    "LayerState",
    "NonDeterministicError",
    "NonFiniteError",
    "ObjectiveConfig",
    "Plan",
    "Policy",
    "RankFailedError",
    "RanksDisagreeError",
    "ResidentState",
    "Response",
    "Sampled",
    "StaleStateError",
    "StepReport",
    "Tail",
    "UnsupportedModelError",
    "WalkCheckpoint",
    "WorkbenchError",
    "capture_prompt",
    "group_advantages",
    "load_policy",
    "plan",
    "sample_responses",
    "score_responses",
    "update_step",
]
