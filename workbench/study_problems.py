"""What the studies of prefix reuse and of gradient scopes work on: a policy by name, and a prompt with a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench import Policy, Response, load_policy
from workbench.documents import answer_similarity
from workbench.errors import InvalidInputError
from workbench.model_sources import TINY_FAMILIES, ByteTokenizer, quiet_loading, tiny_model
from workbench.recordings import Recording, load_recording
from workbench.rewards import exact_answer
from workbench.tasks import encode_prompt, make_tasks

RANDOM_PREFIX = "random:"
REWARDS: dict[str, Callable[..., list[float]]] = {"exact_answer": exact_answer, "answer_similarity": answer_similarity}
KEYS_IN_PROMPT = 4


def open_policy(model: str, *, lora_rank: int, seed: int, adapter_scope: str = "all") -> Policy:
    """A float32 policy with a fresh adapter and a tokenizer.

    model: any source of `load_policy`, or "random:<family>" for a random tiny model that reads bytes.
    """
    if not model.startswith(RANDOM_PREFIX):
        with quiet_loading():
            return load_policy(model, lora=lora_rank, dtype=torch.float32, seed=seed, adapter_scope=adapter_scope)
    family = model.removeprefix(RANDOM_PREFIX)
    if family not in TINY_FAMILIES:
        raise InvalidInputError(f"model={model!r}: random families are {', '.join(TINY_FAMILIES)}")
    tiny = tiny_model(family, seed, vocab_size=ByteTokenizer.vocab_size, eos_token_id=ByteTokenizer.eos_token_id)
    policy = load_policy(tiny, lora=lora_rank, seed=seed, adapter_scope=adapter_scope)
    policy.tokenizer = ByteTokenizer()
    return policy


def family_of(policy: Policy) -> str:
    """The architecture's name, as transformers has it."""
    return str(policy.adapter.config.model_type)


@dataclass(frozen=True)
class Problem:
    """A long prompt whose answer code can check."""

    prompt_ids: Tensor
    answer: str
    tokenizer: Any
    reward_name: str

    def rewards(self, responses: Sequence[Response]) -> list[float]:
        texts = [self.tokenizer.decode(response.ids.tolist(), skip_special_tokens=True) for response in responses]
        answers, prompts = [self.answer] * len(texts), [""] * len(texts)  # neither reward reads the prompt
        return list(REWARDS[self.reward_name](prompts=prompts, completions=texts, answer=answers))


def open_problem(policy: Policy, *, prompt_tokens: int, answer_style: str, reward: str, seed: int) -> Problem:
    """One of four facts in real text is asked for (`workbench.tasks`, kind "multi_key")."""
    if reward not in REWARDS:
        raise InvalidInputError(f"reward={reward!r} is not one of {', '.join(REWARDS)}")
    (task,) = make_tasks(
        "multi_key",
        1,
        tokenizer=policy.tokenizer,
        prompt_tokens=prompt_tokens,
        seed=seed,
        answer_style=answer_style,
        num_needles=KEYS_IN_PROMPT,
    )
    return Problem(encode_prompt(policy.tokenizer, task["prompt"]), task["answer"], policy.tokenizer, reward)


def shipped_recording(path: Path, models: Sequence[str], command: str) -> Recording:
    """The recording at `path`, made by `command`, with rows of every one of `models`; else one clear error."""
    if not path.is_file():
        raise InvalidInputError(f"the recording {path.name} is not there: {command} makes it, or set rerun = True")
    return require_models(load_recording(path), models)


def require_models(recording: Recording, models: Sequence[str]) -> Recording:
    """The recording, if it holds rows of every one of `models`; else one clear error."""
    missing = [model for model in models if model not in recording.values("model")]
    if missing:
        raise InvalidInputError(
            f"the recording {recording.title!r} has no rows of {', '.join(missing)}; set rerun = True to measure"
        )
    return recording


def rows_of_other_models(path: Path, models: Sequence[str]) -> list[Mapping[str, Any]]:
    """What a recording holds of models that are not about to be measured; nothing where there is no file yet."""
    return [row for row in load_recording(path).rows if row["model"] not in models] if path.is_file() else []
