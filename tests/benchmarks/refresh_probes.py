"""Cheap predictors of a reused state's drift, compared: which one is a constant multiple of the drift itself?

    python -m tests.benchmarks.refresh_probes random:qwen3_5 random:glm_moe_dsa

One run per model with a capture at every step. At each step, states of several ages are compared with the fresh one
(the drift, on the whole group), and each candidate is computed on a probe of 2 responses:

    weights     |weights now - weights at capture|
    movement    change of the probe's log-probs on the reused state since its capture: no capture at all
    last chunk  log-prob difference after capturing the last prompt chunk again on the reused pages before it
    short       drift of a separate short prompt (the last chunk's tokens), captured again

A predictor is good if drift / predictor varies little: its coefficient of variation over steps and ages is printed,
with the share of a capture that the predictor costs. `workbench.refresh` uses the first.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench import Policy, ResidentState, capture_prompt, sample_responses, score_responses, update_step
from workbench.architectures import ChunkContext
from workbench.capture import forward_checked, keep_carry, keep_page
from workbench.drift_study import DriftParameters, open_run
from workbench.memory import NO_METER
from workbench.progress import progress

AGES = (1, 2, 4, 8)
NAMES = ("weights", "movement", "last chunk", "short")


@dataclass
class Kept:
    """A state with what the candidates remember of its capture."""

    step: int
    state: ResidentState
    short: ResidentState
    weights: Tensor
    probe: Sequence[Tensor]
    probe_logprobs: list[Tensor]


def weights_of(policy: Policy) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for _, p in policy.trainable_parameters()]).double()


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float((torch.cat(list(a)) - torch.cat(list(b))).abs().mean())


def with_fresh_last_chunk(policy: Policy, state: ResidentState) -> ResidentState:
    """The state with its last chunk captured under the current weights, all before it as it was."""
    *kept, last = state.pages
    carries = {last.start: state.carry_at(last.start)}
    with policy.active(), torch.no_grad():
        context = ChunkContext(last.start, tuple(kept), carries[last.start])
        ids = state.prompt_ids[last.start : last.stop][None]
        output = forward_checked(policy, ids, context, "last chunk", need_hidden=False)
        kept.append(keep_page(policy, output, last.start, last.stop, "device", NO_METER))
        carries[last.stop] = keep_carry(output, NO_METER)
    return ResidentState(
        policy_key=policy.state_key, weight_version=state.weight_version, prompt_ids=state.prompt_ids,
        pages=tuple(kept), carries=carries, chunk_tokens=state.chunk_tokens, boundaries=False,
    )  # fmt: skip


def study(model: str, parameters: DriftParameters, learning_rate: float, num_steps: int, seed: int) -> None:
    policy, problem = open_run(model, parameters, seed=seed)
    prompt, chunk = problem.prompt_ids, parameters.chunk_tokens
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    kept: list[Kept] = []
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    seconds = dict.fromkeys(("capture", *NAMES), 0.0)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds[name] += time.process_time() - started
        return result

    for step in progress(range(num_steps), model, unit="step"):
        state = timed("capture", lambda: capture_prompt(policy, prompt, chunk_tokens=chunk))
        short = capture_prompt(policy, prompt[-chunk:], chunk_tokens=chunk)
        group = sample_responses(
            policy, state, parameters.group_size, max_new_tokens=parameters.max_new_tokens, eos_token_ids=None,
            seed=1000 * seed + step,
        )  # fmt: skip
        for old in kept:
            if step - old.step in AGES:
                stale = score_responses(policy, old.state, group, allow_stale=True)
                drift = distance(stale, score_responses(policy, state, group))
                for name, value in candidates(policy, old, short, timed).items():
                    ratios[name].append(drift / value if value > 0.0 else math.inf)
        probe = [response.ids for response in group[:2]]
        kept.append(Kept(step, state, short, weights_of(policy), probe, score_responses(policy, state, probe)))
        kept = kept[-max(AGES) :]
        update_step(
            policy, prompt, group, rewards=problem.rewards(group), state=state, gradient_scope="response_only",
            optimizer=optimizer, measure_memory=False,
        )  # fmt: skip
        schedule.step()
    print(f"{model}, learning rate {learning_rate:g} falling to 0, {num_steps} steps, seed {seed}")
    capture, calls = seconds["capture"] / num_steps, len(ratios["weights"])
    for name, values in ratios.items():
        found = torch.tensor(values, dtype=torch.float64)
        spread = float(found.std() / found.mean())
        share = seconds[name] / calls / capture
        print(f"  {name:10}  drift / predictor {float(found.mean()):8.3f}, varies by {spread:6.1%}, costs {share:6.1%}")


def candidates(policy: Policy, old: Kept, short: ResidentState, timed: Callable[..., Any]) -> dict[str, float]:
    """Each candidate's value for one kept state under the current weights."""
    stale = score_responses(policy, old.state, old.probe, allow_stale=True)

    def last_chunk() -> float:
        return distance(
            stale, score_responses(policy, with_fresh_last_chunk(policy, old.state), old.probe, allow_stale=True)
        )

    def short_prompt() -> float:
        capture_prompt(policy, short.prompt_ids, chunk_tokens=short.chunk_tokens)  # what it costs
        now = score_responses(policy, short, old.probe)
        return distance(score_responses(policy, old.short, old.probe, allow_stale=True), now)

    return {
        "weights": timed("weights", lambda: float((weights_of(policy) - old.weights).norm())),
        "movement": timed(
            "movement",
            lambda: distance(score_responses(policy, old.state, old.probe, allow_stale=True), old.probe_logprobs),
        ),
        "last chunk": timed("last chunk", last_chunk),
        "short": timed("short", short_prompt),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    parameters = DriftParameters(prompt_tokens=given.prompt_tokens, chunk_tokens=64)
    for model in given.models:
        study(model, parameters, given.learning_rate, given.steps, given.seed)


if __name__ == "__main__":
    main()
