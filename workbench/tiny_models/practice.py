"""Training sequences: keys and values in filler, then one question after another, so that one sequence teaches much.

With one question per sequence such models only learn to name some value that they have seen.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from workbench.tasks import words
from workbench.tiny_models.recipes import Recipe

# The first sequences are the easiest: few keys and values, each value right behind its key. Retrieval is learned there
# in about 80 steps. From all keys and values, or from the needle's sentence, the model still named just any value that
# it had seen after 220 steps twice as large.
_EASY_TOKENS, _EASY_KEYS, _EASY_VALUES = 64, words.KEYS[:24], words.VALUES[:12]
_EASY_FORM = "{key} {value}"
_FIRST_WORD = 3  # after padding, end and unknown
_FORMS = (_EASY_FORM, "{key} is {value}", "")  # "": the sentence


class Practice:
    """Draws sequences of any length; the same generator state gives the same sequences."""

    def __init__(self, tokenizer: Any, text: str, recipe: Recipe) -> None:
        self.recipe = recipe
        self.eos = tokenizer.eos_token_id
        left_out = {tokenizer.unk_token_id, *tokenizer.convert_tokens_to_ids([*words.KEYS, *words.VALUES])}
        self.filler = [token for token in tokenizer.encode(text) if token not in left_out]
        self.ids = cache(tokenizer.encode)

    def batch(self, rng: Random, num_sequences: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and where the loss counts, each [num_sequences, tokens]."""
        rows = [self._sequence(rng, tokens) for _ in range(num_sequences)]
        ids = torch.tensor([row for row, _ in rows])
        counts = torch.tensor([counted for _, counted in rows])
        return ids[:, :-1], ids[:, 1:], counts[:, 1:]

    def copying_batch(self, rng: Random, num_sequences: int, ids: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same for a run of distinct ids below `ids`, repeated; the loss counts what has been seen to follow."""
        rows, counted = [], []
        for _ in range(num_sequences):
            run = rng.sample(range(_FIRST_WORD, ids), rng.randint(tokens // 4, min(tokens // 2, ids - _FIRST_WORD)))
            rows.append((run * (tokens // len(run) + 2))[: tokens + 1])
            counted.append([at > len(run) for at in range(1, tokens + 1)])
        drawn = torch.tensor(rows)
        return drawn[:, :-1], drawn[:, 1:], torch.tensor(counted)

    def _sequence(self, rng: Random, tokens: int) -> tuple[list[int], list[bool]]:
        form = self._form(rng, tokens)
        context = int(tokens * rng.uniform(0.35, 0.75))
        fact_tokens = len(self.ids(_filled(form, "bird", "red")))
        pairs = rng.randint(2, max(2, min(self.recipe.max_pairs, 2 + tokens // 16, context // (fact_tokens + 2))))
        easy = tokens <= _EASY_TOKENS
        keys = rng.sample(_EASY_KEYS if easy else words.KEYS, pairs)
        values = rng.sample(_EASY_VALUES if easy else words.VALUES, pairs)
        facts = [self.ids(_filled(form, key, value)) for key, value in zip(keys, values, strict=True)]
        ids = self._hidden(rng, facts, context)
        counted = [False] * len(ids)
        dialogue = not form and rng.random() < self.recipe.dialogue_share
        while len(ids) < tokens + 1:
            at = rng.randrange(pairs)
            if dialogue:  # the form of the task itself, and its answer with the end mark
                asked, answer = self.ids(words.ask(words.ask_value(keys[at]))), [*facts[at], self.eos]
                ids += asked + answer
                counted += [False] * len(asked) + [True] * len(answer)
            else:
                ids += facts[at]
                at_value = len(facts[at]) - (1 if form else 2)
                counted += [place == at_value for place in range(len(facts[at]))]
        return ids[: tokens + 1], counted[: tokens + 1]

    def _form(self, rng: Random, tokens: int) -> str:
        """One of the short forms, or "" for the sentence."""
        if tokens <= _EASY_TOKENS:
            return _EASY_FORM
        return rng.choice(_FORMS) if tokens <= self.recipe.mixed_tokens else ""

    def _hidden(self, rng: Random, facts: list[list[int]], context: int) -> list[int]:
        noise = max(0, context - sum(map(len, facts)))
        start = rng.randrange(len(self.filler) - noise)
        cuts = sorted(rng.randint(0, noise) for _ in facts)
        ids: list[int] = []
        for cut, after, fact in zip(cuts, [0, *cuts], facts, strict=False):
            ids += self.filler[start + after : start + cut] + fact
        return ids + self.filler[start + cuts[-1] : start + noise]


def _filled(form: str, key: str, value: str) -> str:
    return form.format(key=key, value=value) if form else words.fact(key, value)
