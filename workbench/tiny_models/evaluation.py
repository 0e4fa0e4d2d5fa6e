"""How well a policy answers held-out tasks: greedily, and over groups of samples as GRPO sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pvariance
from typing import Any

from workbench.capture import capture_prompt
from workbench.policy import Policy
from workbench.progress import progress
from workbench.rewards import exact_answer
from workbench.rollout import sample_responses
from workbench.tasks import ANSWER_STYLES, encode_prompt, make_tasks

HELD_OUT_SEED = 1_000_003  # no training uses it
GREEDY = 1e-9  # as top_p: only the first id is kept
_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Accuracy:
    """Held-out result on one kind of task: shares of exactly right answers, 0..1.

    sampled: mean reward of groups of `group` samples at temperature 1, and the share of groups whose rewards are not
    all equal, those that GRPO learns from; None where nothing was sampled.
    """

    kind: str
    num_needles: int
    answer_style: str
    prompt_tokens: int
    num_tasks: int
    greedy: float
    sampled: float | None = None
    group: int | None = None
    varied_groups: float | None = None


def measure(
    policy: Policy,
    *,
    kind: str = "multi_key",
    prompt_tokens: Iterable[int] = (512, 1024, 2048, 4096),
    answer_styles: Sequence[str] = ANSWER_STYLES,
    num_tasks: int = 40,
    num_needles: int | None = None,
    sampled_tokens: int | None = None,
    group: int = 8,
    seed: int = HELD_OUT_SEED,
) -> list[Accuracy]:
    """Accuracy for every length and answer style; groups are sampled at the one length `sampled_tokens`."""
    cases = [(length, style) for length in prompt_tokens for style in answer_styles]
    found = []
    for length, style in progress(cases, "measuring", unit="case"):
        tasks = make_tasks(
            kind, num_tasks, tokenizer=policy.tokenizer, prompt_tokens=length, answer_style=style,
            num_needles=num_needles, seed=seed,
        )  # fmt: skip
        greedy = fmean(rewards_of(policy, task, top_p=GREEDY)[0] for task in tasks)
        result = Accuracy(kind, tasks[0]["num_needles"], style, length, num_tasks, greedy)
        if length == sampled_tokens:
            groups = [rewards_of(policy, task, group=group, seed=index) for index, task in enumerate(tasks)]
            mean, varied = fmean(map(fmean, groups)), fmean(pvariance(rewards) > 0 for rewards in groups)
            result = Accuracy(**asdict(result) | {"sampled": mean, "group": group, "varied_groups": varied})
        found.append(result)
    return found


def rewards_of(
    policy: Policy, task: dict[str, Any], *, group: int = 1, top_p: float = 1.0, seed: int = 0
) -> list[float]:
    """`exact_answer` of each of `group` samples, as long as the task's answer and its end mark."""
    tokenizer = policy.tokenizer
    ids = encode_prompt(tokenizer, task["prompt"])
    state = capture_prompt(policy, ids, chunk_tokens=_CHUNK_TOKENS)
    longest = len(tokenizer.encode(task["answer"], add_special_tokens=False))
    responses = sample_responses(
        policy, state, group, max_new_tokens=longest, top_p=top_p, seed=seed, eos_token_ids=policy.eos_token_ids()
    )
    texts = [tokenizer.decode(response.ids, skip_special_tokens=True) for response in responses]
    return exact_answer(texts, answer=[task["answer"]] * group)
