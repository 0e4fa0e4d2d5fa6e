"""What notebooks/00_start.ipynb does between its prose: the parts with a loop in them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from torch import Tensor

from workbench import Policy, ResidentState, Response, capture_prompt, group_advantages, load_policy, score_responses
from workbench import update_step as run_step
from workbench.documents import DocumentTask, answer_similarity
from workbench.gradients import Gradient, GradientComparison, compare_gradients, take_gradient
from workbench.model_sources import ByteTokenizer, quiet_loading, tiny_model
from workbench.types import StepReport

SCOPES = ("response_only", "full")


class StartParameters(BaseModel):
    """The parameters of notebooks/00_start.ipynb; an unknown name, or a value that does not fit, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    setting: Literal["gemma3-270m", "tiny"]
    prompt_tokens: PositiveInt
    group_size: int = Field(ge=2)  # a group of one has no advantage
    max_new_tokens: PositiveInt
    chunk_tokens: PositiveInt
    lora_rank: PositiveInt
    learning_rate: PositiveFloat
    temperature: PositiveFloat
    check_tokens: PositiveInt
    seed: int = Field(ge=0)

    def group_sizes(self) -> list[int]:
        """1, 2, 4, ... up to the group itself."""
        sizes = [1]
        while 2 * sizes[-1] < self.group_size:
            sizes.append(2 * sizes[-1])
        return [*sizes, self.group_size]


class Stopwatch:
    """Wall time by stage: `with clock("capture"): ...` adds to `clock.seconds["capture"]`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


def open_policy(parameters: StartParameters) -> Policy:
    """The policy of the setting with a fresh LoRA adapter, in float32, with its tokenizer."""
    lora = {"r": parameters.lora_rank}
    # Transformers and PEFT warn of each other and of kernels that only a GPU has: noise on a page that people share.
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")
    if parameters.setting == "tiny":
        # Rows and a carry: three Gated DeltaNet layers and one of full attention.
        model = tiny_model("qwen3_5", parameters.seed, vocab_size=ByteTokenizer.vocab_size, eos_token_id=257)
        policy = load_policy(model, lora=lora, seed=parameters.seed)
        policy.tokenizer = ByteTokenizer()
        return policy
    with quiet_loading():
        return load_policy(parameters.setting, lora=lora, dtype=torch.float32, seed=parameters.seed)


def reward_responses(
    policy: Policy, task: DocumentTask, responses: Sequence[Response]
) -> tuple[list[str], list[float]]:
    """The responses as text, and how well each answers the task."""
    texts = [policy.tokenizer.decode(response.ids, skip_special_tokens=True) for response in responses]
    rewards = answer_similarity([task.question] * len(texts), texts, answer=[task.answer] * len(texts))
    return texts, rewards


# --- memory against group size, and the gradient of each scope ---------------------------------------------------


@dataclass(frozen=True)
class ScopeRun:
    """One step without an optimizer: its report, and the gradient that it left, by parameter name."""

    gradient_scope: str
    group_size: int
    report: StepReport
    gradient: Gradient = field(repr=False)


def run_scopes(
    policy: Policy,
    state: ResidentState,
    task: DocumentTask,
    responses: Sequence[Response],
    rewards: Sequence[float],
    parameters: StartParameters,
) -> list[ScopeRun]:
    """One step for each scope and each group size; the weights do not change."""
    runs = []
    for scope in SCOPES:
        for size in parameters.group_sizes():
            policy.model.zero_grad(set_to_none=True)
            report = run_step(
                policy,
                task.prompt_ids,
                responses[:size],
                # Advantages of the whole group, so that a group of one does the same work for its member.
                advantages=group_advantages(rewards)[:size],
                gradient_scope=scope,
                chunk_tokens=parameters.chunk_tokens,
                state=state,
            )
            runs.append(ScopeRun(scope, size, report, take_gradient(policy)))
    return runs


def find_run(runs: Sequence[ScopeRun], scope: str, size: int) -> ScopeRun:
    """The run of this scope and group size."""
    return next(run for run in runs if (run.gradient_scope, run.group_size) == (scope, size))


# --- the step ----------------------------------------------------------------------------------------------------


def step_and_score(
    policy: Policy, gradient: Gradient, task: DocumentTask, responses: Sequence[Response], parameters: StartParameters
) -> list[Tensor]:
    """One AdamW call with this gradient, then the responses' log-probs under the policy, which stays updated."""
    named = policy.trainable_parameters()
    for name, parameter in named:
        parameter.grad = gradient[name].clone()
    torch.optim.AdamW([p for _, p in named], lr=parameters.learning_rate, weight_decay=0.0).step()
    policy.model.zero_grad(set_to_none=True)
    state = capture_prompt(policy, task.prompt_ids, chunk_tokens=parameters.chunk_tokens, keep_boundaries=False)
    return score_responses(policy, state, responses, temperature=parameters.temperature)


def updated_logprobs(
    policy: Policy,
    runs: Sequence[ScopeRun],
    task: DocumentTask,
    responses: Sequence[Response],
    parameters: StartParameters,
) -> dict[str, list[Tensor]]:
    """Log-probs of the responses after one step of each scope from the same weights; the full step is kept."""
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable_parameters()}
    after = {}
    for scope in SCOPES:
        with torch.no_grad():
            for name, parameter in policy.trainable_parameters():
                parameter.copy_(before[name])
        gradient = find_run(runs, scope, parameters.group_size).gradient
        after[scope] = step_and_score(policy, gradient, task, responses, parameters)
    return after


# --- evidence ----------------------------------------------------------------------------------------------------

# Measured in float32 on x86-64 at 1,024 tokens, two 32-token responses: 2.2e-5 and 4.6e-6 (Gemma 3 270M), 5.2e-6 and
# 4.6e-6 (tiny). The bounds leave a factor of six to nine for other machines; a lost chunk or row is orders above them.
LOGPROB_BOUND = 2e-4
GRADIENT_BOUND = 3e-5


def check_against_autograd(
    policy: Policy, task: DocumentTask, responses: Sequence[Response], parameters: StartParameters
) -> dict[str, Any]:
    """Scores and full gradient of two responses against transformers' own forward and autograd over whole sequences.

    task: of a length that a whole-sequence graph still fits; the advantages are +1 and -1. Returns the record's
    "evidence": the checks, each with its measured figure and bound, and the level that they reach.
    """
    pair, advantages = responses[:2], [1.0, -1.0]
    policy.model.zero_grad(set_to_none=True)
    report = run_step(
        policy,
        task.prompt_ids,
        pair,
        advantages=advantages,
        gradient_scope="full",
        chunk_tokens=parameters.chunk_tokens,
    )
    found = take_gradient(policy)
    conventional = [
        _conventional_backward(policy, task, r, a / len(pair)) for r, a in zip(pair, advantages, strict=True)
    ]
    right = take_gradient(policy)
    logprob_error = max(float((a - b).abs().max()) for a, b in zip(report.logprobs, conventional, strict=True))
    gradient_error = compare_gradients(found, right).relative_l2
    checks = [
        {"level": 1, "what": "executed", "passed": True},
        _check(2, "largest log-prob difference from transformers' own forward", logprob_error, LOGPROB_BOUND),
        _check(4, "relative L2 of the full gradient from whole-sequence autograd", gradient_error, GRADIENT_BOUND),
    ]
    # Level 3 is agreement of ranks; with one process there is nothing to agree.
    level = max(check["level"] for check in checks if all(c["passed"] for c in checks if c["level"] <= check["level"]))
    return {"level": level, "checks": checks, "prompt_tokens": len(task.prompt_ids)}


def _check(level: int, what: str, measured: float, bound: float) -> dict[str, Any]:
    return {"level": level, "what": what, "measured": measured, "bound": bound, "passed": measured <= bound}


def _conventional_backward(policy: Policy, task: DocumentTask, response: Response, weight: float) -> Tensor:
    """Backward of -weight x (mean log-prob) in one graph over prompt and response; returns the log-probs, detached."""
    sequence = torch.cat([task.prompt_ids, response.ids])[None].to(policy.device)
    num = len(response)
    logits = policy.model(input_ids=sequence, use_cache=False, logits_to_keep=num + 1).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, sequence[0, -num:, None])[:, 0]
    (-weight * logprobs.mean()).backward()
    return logprobs.detach().cpu()


# --- numbers for figures and for the record ----------------------------------------------------------------------


def memory_by_size(runs: Sequence[ScopeRun]) -> dict[str, dict[int, int]]:
    """Peak bytes above those alive at the step's start: scope -> group size -> bytes."""
    return {
        scope: {run.group_size: run.report.memory["peak_bytes"] for run in runs if run.gradient_scope == scope}
        for scope in SCOPES
    }


def mean_changes(before: Sequence[Tensor], after: Mapping[str, Sequence[Tensor]]) -> dict[str, list[float]]:
    """Change of each response's mean log-prob, by scope."""
    return {
        scope: [float((new - old).mean()) for old, new in zip(before, values, strict=True)]
        for scope, values in after.items()
    }


def start_results(
    parameters: StartParameters,
    state: ResidentState,
    rewards: Sequence[float],
    memory: Mapping[str, Mapping[int, int]],
    runs: Sequence[ScopeRun],
    omitted: GradientComparison,
    changes: Mapping[str, Sequence[float]],
    evidence: Mapping[str, Any],
    clock: Stopwatch,
) -> dict[str, Any]:
    """Everything that the notebook measured, as `workbench.records.save_results` takes it."""
    largest = {scope: find_run(runs, scope, parameters.group_size).report for scope in SCOPES}
    return {
        "seed": parameters.seed,
        "seconds": clock.seconds,
        "memory": {"resident_state": state.inventory(), "peak_bytes_by_scope_and_group_size": memory}
        | {f"step_{scope}": report.memory for scope, report in largest.items()},
        "evidence": evidence,
        "settings": parameters.model_dump(),
        "rewards": rewards,
        "omitted_prompt_term": omitted,
        "logprob_changes": changes,
        "steps": {
            scope: {"seconds": r.seconds, "counters": r.counters, "loss": r.loss} for scope, r in largest.items()
        },
    }
