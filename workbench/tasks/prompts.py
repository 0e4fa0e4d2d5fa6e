"""From rows to prompts to token ids: existing data sets are accepted as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InvalidInputError


def read_tasks(source: Any, *, needs: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Tasks as a list of mappings with a column `prompt` (a text or chat messages) and any others.

    source: a `datasets.Dataset`, any iterable of mappings, or the path of a JSONL file. needs: columns that the rewards
    read, such as "answer", which then no row may lack.

    Raises InvalidInputError, naming the row, for a row that is no mapping, has no prompt or an empty one, or lacks a
    needed column.
    """
    rows = _read_jsonl(Path(source)) if isinstance(source, str | Path) else source
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        what = "a mapping; of a DatasetDict take one split" if isinstance(rows, Mapping) else type(rows).__name__
        raise InvalidInputError(f"tasks: give a Dataset, a list of mappings or the path of a JSONL file, not {what}")
    tasks = [_checked(row, index, needs) for index, row in enumerate(rows)]
    if not tasks:
        raise InvalidInputError("tasks: there is not one row")
    return tasks


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, list) and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def encode_prompt(tokenizer: Any, prompt: str | list[Mapping[str, Any]], **template_options: Any) -> Tensor:
    """The prompt's token ids, a 1-D int64 tensor.

    A text is encoded as it is, with the tokenizer's special tokens; messages go through its chat template, with the
    generation prompt (after an assistant's message, which is continued, without it): both as TRL's GRPOTrainer does.
    template_options: passed on to `apply_chat_template`.
    """
    if isinstance(prompt, str):
        if template_options:
            raise InvalidInputError(f"{', '.join(template_options)}: a prompt that is a text takes no chat template")
        return torch.tensor(tokenizer.encode(prompt), dtype=torch.int64)
    if not is_conversational(prompt) or not prompt:
        raise InvalidInputError(f"a prompt is a text or a list of chat messages, not {prompt!r:.80}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidInputError("the prompt is a list of messages, but the tokenizer has no chat template; give a text")
    continued = prompt[-1]["role"] == "assistant"
    ids = tokenizer.apply_chat_template(
        prompt,
        tokenize=True,
        return_dict=False,
        add_generation_prompt=not continued,
        continue_final_message=continued,
        **template_options,
    )
    return torch.tensor(ids, dtype=torch.int64)


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Refuse a tokenizer that can give an id which a model of `vocab_size` ids does not have.

    A larger vocabulary of the model is fine: many are padded.
    """
    if tokenizer is None:
        raise InvalidInputError("the policy has no tokenizer; give one: Policy(model, tokenizer)")
    largest = max(tokenizer.get_vocab().values()) if hasattr(tokenizer, "get_vocab") else len(tokenizer) - 1
    if largest >= vocab_size:
        raise InvalidInputError(
            f"the tokenizer has ids up to {largest}, the model only {vocab_size} ids: it is not this model's tokenizer"
        )


def _read_jsonl(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"tasks: {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InvalidInputError(f"tasks: {path}, line {number} is no JSON: {error}") from error
    return rows


def _checked(row: Any, index: int, needs: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise InvalidInputError(f"tasks, row {index}: a {type(row).__name__}, not a mapping with a `prompt`")
    prompt = row.get("prompt")
    if not (isinstance(prompt, str) or is_conversational(prompt)):
        raise InvalidInputError(
            f"tasks, row {index}: `prompt` must be a text or a list of messages, not {prompt!r:.80}"
        )
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise InvalidInputError(f"tasks, row {index}: the prompt is empty")
    for column in needs:
        value = row.get(column)
        if value is None or (isinstance(value, str) and not value):
            raise InvalidInputError(
                f"tasks, row {index}: the rewards need a column `{column}`, which is missing or empty"
            )
    return dict(row)
