"""A word-level tokenizer small enough for a model of a million parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

from workbench.documents import library_text
from workbench.tasks import words

VOCAB_SIZE = 512
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_LARGEST_NUMBER = 32


def library_tokenizer() -> Any:
    """The tokenizer of the bundled models, built from the standard library's reference."""
    return build_tokenizer(library_text())


def build_tokenizer(text: str) -> Any:
    """Every word and mark that tasks use, then the most frequent ones of `text`, lower case: 512 in all.

    Equally frequent words go by spelling, so the same text gives the same vocabulary.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lower = normalizers.Lowercase()
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    pieces = (piece for piece, _ in splitter.pre_tokenize_str(lower.normalize_str(text)))
    counts = Counter(piece for piece in pieces if piece.isascii())
    numbers = map(str, range(_LARGEST_NUMBER + 1))
    fixed = dict.fromkeys([PAD, EOS, UNKNOWN, *words.template_words(), *words.KEYS, *words.VALUES, *numbers])
    frequent = [word for word, _ in sorted(counts.items(), key=lambda c: (-c[1], c[0])) if word not in fixed]
    vocabulary = {word: position for position, word in enumerate([*fixed, *frequent][:VOCAB_SIZE])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.normalizer, core.pre_tokenizer = lower, splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
