"""Long prompts of an exact number of tokens, with needles hidden in real text and an answer that code can check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from workbench.errors import InvalidInputError
from workbench.tasks import words
from workbench.tasks.haystack import Haystack, read_haystack
from workbench.tasks.kinds import KINDS, Puzzle
from workbench.tasks.prompts import encode_prompt

ANSWER_STYLES = ("token", "sentence")


def make_tasks(
    kind: str,
    num_tasks: int,
    *,
    tokenizer: Any,
    prompt_tokens: int,
    seed: int = 0,
    haystack: str | Path | Sequence[str | Path] = "library",
    answer_style: str = "token",
    num_needles: int | None = None,
    depth: float | None = None,
    chat: bool = False,
) -> list[dict[str, Any]]:
    """Tasks as rows with the columns `prompt`, `answer`, `kind`, `num_needles`, `depth` and `prompt_tokens`.

    kind: "needle" (one fact is hidden, and asked for), "multi_key" (several facts, one is asked for), "multi_value"
        (several values of one key, in order), "variable_tracking" (keys that take over each other's value),
        "key_chain" (a chain of pages leads to the true question) or "count" (how often something is seen).
    prompt_tokens: no prompt is longer, as `encode_prompt(tokenizer, prompt)` counts, nor shorter by more than the
        tokens of one word of the haystack.
    seed: task i depends on the seed and i only; training and held-out tasks come from different seeds.
    haystack: "library" (the standard library's reference, the same for the same Python version and platform),
        "sources" (its code), or the path of a text or JSONL file (field `text`), or several. It begins again where it
        ends. Words that are keys or values, or that the tokenizer does not know, are left out.
    answer_style: "token": the answer is the bare value, one token of this tokenizer, and the prompt ends with the
        words before it. "sentence": the answer is the whole sentence.
    num_needles: sentences hidden in all; by default what KINDS says. Their places are random.
    depth: place of the needle with the answer, 0 (start) to 1 (end), for "needle" and "multi_key"; random by default.
    chat: prompts are a list with one user message, for tokenizers with a chat template.

    Raises InvalidInputError for an unknown kind or option, and for a prompt too short for needles and question.
    """
    _check(kind, num_tasks, prompt_tokens, seed, answer_style, depth)
    needles = KINDS[kind].default_needles if num_needles is None else num_needles
    KINDS[kind].check(kind, needles)
    values = _values(tokenizer, answer_style, KINDS[kind].num_values(needles))
    hay = read_haystack(haystack, tokenizer)
    tasks = []
    for index in range(num_tasks):
        rng = Random(f"{kind}/{seed}/{index}")
        puzzle = KINDS[kind].make(rng, values, needles)
        depths = _depths(rng, puzzle, depth)
        layout = _Layout(puzzle, depths, hay, rng.choice(hay.starts), answer_style, chat)
        num_words = _longest(layout, tokenizer, prompt_tokens)
        tasks.append(layout.task(num_words) | {"kind": kind, "num_needles": needles, "prompt_tokens": prompt_tokens})
    return tasks


class _Layout:
    """One task with any number of words of filler."""

    def __init__(
        self, puzzle: Puzzle, depths: list[float], hay: Haystack, start: int, answer_style: str, chat: bool
    ) -> None:
        self.puzzle, self.depths, self.hay, self.start, self.chat = puzzle, depths, hay, start, chat
        self.bare = answer_style == "token"

    def prompt(self, num_words: int) -> Any:
        pieces = self.hay.window(self.start, num_words)
        breaks = self.hay.breaks(self.start, num_words)
        by_place: dict[int, list[str]] = {}
        for needle, depth in sorted(zip(self.puzzle.needles, self.depths, strict=True), key=lambda pair: pair[1]):
            place = min(breaks, key=lambda at: abs(at - depth * num_words))
            by_place.setdefault(place, []).append(f"{needle} ")
        text = "".join("".join(by_place.get(at, [])) + piece for at, piece in enumerate([*pieces, ""]))
        question = f"{text.rstrip()}\n\n{words.ask(self.puzzle.question)}"
        if self.chat:
            style = "only the value" if self.bare else "a sentence of the text"
            return [{"role": "user", "content": f"{question} {style}"}]
        return f"{question} {self.puzzle.lead}" if self.bare and self.puzzle.lead_shown else question

    def task(self, num_words: int) -> dict[str, Any]:
        answer = self.puzzle.answer if self.bare else self.puzzle.sentence
        return {"prompt": self.prompt(num_words), "answer": answer, "depth": round(self.depths[self.puzzle.asked], 4)}


def _longest(layout: _Layout, tokenizer: Any, prompt_tokens: int) -> int:
    """The largest number of filler words whose prompt has at most `prompt_tokens` tokens.

    Tokens are nearly proportional to words: the guess is interpolated and seldom takes more than a few encodings.
    """

    def tokens(num_words: int) -> int:
        return len(encode_prompt(tokenizer, layout.prompt(num_words)))

    low, low_tokens = 0, tokens(0)
    if low_tokens > prompt_tokens:
        raise InvalidInputError(
            f"prompt_tokens={prompt_tokens} is too short: needles and question alone have {low_tokens} tokens"
        )
    high = prompt_tokens + 1  # a word has at least about one token; checked below
    while (high_tokens := tokens(high)) <= prompt_tokens:
        low, low_tokens, high = high, high_tokens, 2 * high
    while high - low > 1:
        share = (prompt_tokens + 0.5 - low_tokens) / (high_tokens - low_tokens)
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        found = tokens(middle)
        if found <= prompt_tokens:
            low, low_tokens = middle, found
        else:
            high, high_tokens = middle, found
    return low


def _depths(rng: Random, puzzle: Puzzle, depth: float | None) -> list[float]:
    depths = [rng.random() for _ in puzzle.needles]
    if puzzle.ordered:
        depths.sort()
    if depth is not None:
        depths[puzzle.asked] = float(depth)
    return depths


def _values(tokenizer: Any, answer_style: str, needed: int) -> tuple[str, ...]:
    """Values to draw from; for answers of one token those that are one token of this tokenizer."""
    if answer_style == "sentence":
        return words.VALUES
    before = len(tokenizer.encode("is", add_special_tokens=False))
    unknown = getattr(tokenizer, "unk_token_id", None)
    fitting = []
    for value in words.VALUES:
        ids = tokenizer.encode(f"is {value}", add_special_tokens=False)
        if len(ids) == before + 1 and ids[-1] != unknown:
            fitting.append(value)
    if len(fitting) < needed:
        raise InvalidInputError(
            f"answer_style='token': {len(fitting)} of {len(words.VALUES)} values are one token of this tokenizer, "
            f"{needed} are needed; take fewer needles or answer_style='sentence'"
        )
    return tuple(fitting)


def _check(kind: str, num_tasks: int, prompt_tokens: int, seed: int, answer_style: str, depth: float | None) -> None:
    if kind not in KINDS:
        raise InvalidInputError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    if answer_style not in ANSWER_STYLES:
        raise InvalidInputError(f"answer_style={answer_style!r} is not one of {', '.join(ANSWER_STYLES)}")
    for name, value, least in (("num_tasks", num_tasks, 1), ("prompt_tokens", prompt_tokens, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInputError(f"{name}={value!r} must be a whole number, at least {least}")
    if depth is None:
        return
    if kind not in ("needle", "multi_key"):
        raise InvalidInputError(f"depth={depth!r}: the answer of kind {kind!r} does not stand in one place")
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
        raise InvalidInputError(f"depth={depth!r} must be a number from 0 to 1")
