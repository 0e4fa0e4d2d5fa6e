"""Real text to hide needles in: the standard library's documentation or sources, or the user's own files."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.documents import LIBRARY_MODULES, library_text
from workbench.errors import InvalidInputError
from workbench.tasks.words import KEYS, VALUES

TEXT_FIELD = "text"
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+$|\n\s*$")


@dataclass(frozen=True)
class Haystack:
    """Text as words, each with the white space behind it, and the positions of words that begin a sentence."""

    words: tuple[str, ...]
    starts: tuple[int, ...]

    def window(self, start: int, num_words: int) -> list[str]:
        """`num_words` words from the given one on; at its end the text begins again."""
        return [self.words[(start + at) % len(self.words)] for at in range(num_words)]

    def breaks(self, start: int, num_words: int) -> list[int]:
        """Places in that window where a sentence begins or the window ends: there a needle can stand."""
        total = len(self.words)
        rounds = range(0, start + num_words, total)
        places = [turn + first - start for turn in rounds for first in self.starts]
        return [*(place for place in places if 0 <= place < num_words), num_words]


def read_haystack(source: str | Path | Sequence[str | Path], tokenizer: Any) -> Haystack:
    """Filler text, without the words that needles are made of and without words that the tokenizer does not know.

    source: "library" (signatures and docstrings of the standard library), "sources" (its source code), or the path of
    a text or JSONL file (its `text` field), or several paths.
    """
    text = _without_unknown(_read(source), tokenizer)
    needles = re.compile(rf"\b({'|'.join((*KEYS, *VALUES))})\b", re.IGNORECASE)
    pieces = [piece for piece in re.findall(r"\S+\s*", text) if not needles.search(piece)]
    if not pieces:
        raise InvalidInputError(f"haystack={source!r} has no words that this tokenizer knows")
    starts = [0, *(at + 1 for at, piece in enumerate(pieces[:-1]) if _SENTENCE_END.search(piece))]
    return Haystack(tuple(pieces), tuple(starts))


def _read(source: str | Path | Sequence[str | Path]) -> str:
    if source == "library":
        return library_text()
    if source == "sources":
        return "\n\n".join(_library_sources())
    paths = [source] if isinstance(source, str | Path) else list(source)
    if not paths or not all(isinstance(path, str | Path) for path in paths):
        raise InvalidInputError(f"haystack={source!r}: give 'library', 'sources', a path or a list of paths")
    return "\n\n".join(_read_file(Path(path)) for path in paths)


def _library_sources() -> Iterator[str]:
    for name in LIBRARY_MODULES:
        yield inspect.getsource(import_module(name))


def _read_file(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"haystack: {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        return content
    texts = [_text_of(line, f"haystack: {path}, line {number}") for number, line in _lines(content)]
    return "\n\n".join(texts)


def _lines(content: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip())


def _text_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get(TEXT_FIELD), str):
        raise InvalidInputError(f"{where} has no text in a field `{TEXT_FIELD}`")
    return str(row[TEXT_FIELD])


def _without_unknown(text: str, tokenizer: Any) -> str:
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return text
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if unknown not in ids else tokenizer.decode([token for token in ids if token != unknown])
