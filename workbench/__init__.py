"""Long-context GRPO under a fixed memory budget: capture once, replay serially, gradient through the prompt."""

from workbench.advantages import group_advantages
from workbench.capture import capture_prompt
from workbench.config import ObjectiveConfig
from workbench.drift import DriftReport, measure_drift
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
from workbench.evaluate import evaluate
from workbench.loading import load_policy
from workbench.objective import StepDenominators
from workbench.planner import Plan, plan
from workbench.policy import Policy
from workbench.refresh import Decision, PromptReuse, RefreshPolicy, ReuseReport
from workbench.replay import score_responses
from workbench.reuse import ReuseStep, reuse_run
from workbench.rollout import sample_responses
from workbench.state.pages import LayerState
from workbench.state.resident import ResidentState
from workbench.train import train
from workbench.train_config import TrainConfig
from workbench.types import Response, Sampled, StepReport, Tail
from workbench.update import update_step
from workbench.walk_checkpoint import WalkCheckpoint

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "DriftReport",
    "InvalidInputError",
    "LayerState",
    "NonDeterministicError",
    "NonFiniteError",
    "ObjectiveConfig",
    "Plan",
    "Policy",
    "PromptReuse",
    "RankFailedError",
    "RanksDisagreeError",
    "RefreshPolicy",
    "ResidentState",
    "Response",
    "ReuseReport",
    "ReuseStep",
    "Sampled",
    "StaleStateError",
    "StepDenominators",
    "StepReport",
    "Tail",
    "TrainConfig",
    "UnsupportedModelError",
    "WalkCheckpoint",
    "WorkbenchError",
    "capture_prompt",
    "evaluate",
    "group_advantages",
    "load_policy",
    "measure_drift",
    "plan",
    "reuse_run",
    "sample_responses",
    "score_responses",
    "train",
    "update_step",
]
