"""Supervised training of the bundled models: ordinary batched autograd through transformers, seeded, on one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.documents import library_text
from workbench.policy import Policy
from workbench.tasks.words import KEYS, VALUES
from workbench.tiny_models.indexer import dense_selection, teach_index
from workbench.tiny_models.practice import Practice
from workbench.tiny_models.recipes import Recipe
from workbench.tiny_models.vocabulary import build_tokenizer

_BETA1, _WEIGHT_DECAY, _MAX_GRAD_NORM = 0.9, 0.01, 1.0
_LEAST_SEQUENCES = 4  # of a batch
_SPARSE_RATE = 0.1  # of the learning rate, once the selection is in use
_WINDOW_STEPS = 10  # accuracy is judged over this many steps

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and where the loss counts, each [sequences, tokens]."""


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step.

    accuracy: over the keys and values asked for, 0..1; in the stage "copying" over all ids, in "index" instead
        the share of the attention that falls on selected keys.
    """

    stage: str
    step: int
    tokens: int
    loss: float
    accuracy: float
    cpu_seconds: float


@dataclass
class Training:
    """A model while it is trained. `steps()` trains; what it has yielded so far is in the weights."""

    recipe: Recipe

    def __post_init__(self) -> None:
        text = library_text()
        self.tokenizer = build_tokenizer(text)
        self.model = self.recipe.build()
        self._practice = Practice(self.tokenizer, text, self.recipe)
        self._rng = Random(self.recipe.seed)
        self._kernels = Policy(self.model).adapter.kernels
        self._is_retrieved = torch.zeros(self.recipe.fields["vocab_size"], dtype=torch.bool)
        self._is_retrieved[self.tokenizer.convert_tokens_to_ids([*KEYS, *VALUES])] = True
        self._started = time.process_time()

    def steps(self) -> Iterator[TrainingStep]:
        """Copying, curriculum, cooldown; then, for sparse attention, its index and some steps with its selection."""
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=(_BETA1, recipe.adam_beta2),
            weight_decay=_WEIGHT_DECAY,
        )
        yield from self._copying_steps(optimizer)
        lengths = [recipe.start_tokens]
        while lengths[-1] < recipe.final_tokens:
            lengths.append(2 * lengths[-1])
        yield from self._until_passed(
            optimizer, "curriculum", recipe.max_steps, [(tokens, partial(self._batch, tokens)) for tokens in lengths]
        )
        for step in range(recipe.cooldown_steps):
            rate = recipe.learning_rate * (1 - step / recipe.cooldown_steps)
            with dense_selection(self.model):
                yield self._practised(optimizer, rate, "cooldown", step)
        yield from self._index_steps()
        for step in range(recipe.sparse_steps):
            rate = _SPARSE_RATE * recipe.learning_rate * (1 - step / recipe.sparse_steps)
            yield self._practised(optimizer, rate, "sparse", step)

    def _copying_steps(self, optimizer: Any) -> Iterator[TrainingStep]:
        parts = [(tokens, partial(self._copying_batch, ids, tokens)) for ids, tokens in self.recipe.copying]
        yield from self._until_passed(optimizer, "copying", self.recipe.copying_steps, parts)

    def _until_passed(
        self, optimizer: Any, stage: str, max_steps: int, parts: Sequence[tuple[int, Callable[[], Batch]]]
    ) -> Iterator[TrainingStep]:
        """Each part until it is learned: (sequence length, where its batches come from)."""
        recipe, remaining, window = self.recipe, deque(parts), deque[float](maxlen=_WINDOW_STEPS)
        for step in range(max_steps):
            tokens, draw = remaining[0]
            rate = recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup_steps)
            with dense_selection(self.model):
                done = self._step(optimizer, rate, stage, step, tokens, draw())
            yield done
            window.append(done.accuracy)
            if len(window) == _WINDOW_STEPS and sum(window) > _WINDOW_STEPS * recipe.pass_accuracy:
                remaining.popleft()
                window.clear()
                if not remaining:
                    break

    def _practised(self, optimizer: Any, rate: float, stage: str, step: int) -> TrainingStep:
        tokens = self.recipe.cooldown_tokens
        return self._step(optimizer, rate, stage, step, tokens, self._batch(tokens))

    def _batch(self, tokens: int) -> Batch:
        return self._practice.batch(self._rng, max(_LEAST_SEQUENCES, self.recipe.batch_tokens // tokens), tokens)

    def _copying_batch(self, ids: int, tokens: int) -> Batch:
        return self._practice.copying_batch(self._rng, self.recipe.copying_batch_tokens // tokens, ids, tokens)

    def _step(self, optimizer: Any, rate: float, stage: str, step: int, tokens: int, batch: Batch) -> TrainingStep:
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets, counted = batch
        with self._kernels(decoding=False):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits, right = self.model.lm_head(hidden[counted]), targets[counted]
            loss = F.cross_entropy(logits, right)
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        retrieved = self._is_retrieved[right] if stage != "copying" else torch.ones_like(right, dtype=torch.bool)
        accuracy = (logits.argmax(-1) == right)[retrieved].float().mean()
        return TrainingStep(stage, step, tokens, loss.item(), accuracy.item(), self._cpu_seconds())

    def _index_steps(self) -> Iterator[TrainingStep]:
        if not self.recipe.index_steps:
            return
        tokens = self.recipe.cooldown_tokens
        batches = (self._practice.batch(self._rng, _LEAST_SEQUENCES, tokens) for _ in range(self.recipe.index_steps))
        for step, (loss, mass) in enumerate(teach_index(self.model, batches)):
            yield TrainingStep("index", step, tokens, loss, mass, self._cpu_seconds())

    def _cpu_seconds(self) -> float:
        return round(time.process_time() - self._started, 1)
