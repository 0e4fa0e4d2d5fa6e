"""A long document that every Python has, its own library's reference, and a question about it that code can check.

The text comes from signatures and docstrings, so it needs no network and no data file; it is the same for the same
Python version and platform. The question is put in completion style, since the demo model is not instruction tuned.
"""

from __future__ import annotations

import difflib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InvalidInputError

# Public, importable everywhere without side effects; about 475,000 characters of reference in all.
LIBRARY_MODULES = """
    subprocess argparse logging json shutil textwrap statistics difflib tempfile heapq collections csv pathlib random
    calendar configparser contextlib copy dataclasses decimal email enum fileinput fractions functools gettext glob gzip
    http.client http.cookiejar http.server imaplib inspect ipaddress locale mailbox multiprocessing optparse os pickle
    platform plistlib pprint queue sched selectors shelve shlex smtplib socket socketserver ssl string tarfile threading
    timeit tokenize traceback types typing unittest urllib.parse urllib.request uuid warnings wave weakref xmlrpc.client
    zipfile asyncio doctest pdb pydoc ast dis cmd codecs concurrent.futures
""".split()  # noqa: SIM905
_SUBJECT = subprocess.Popen
_NUM_GIVEN, _NUM_ASKED = 2, 5  # parameters that the question gives away, parameters that the answer must name


@dataclass(frozen=True)
class DocumentTask:
    """A long prompt that ends in a question, and the answer.

    prompt_ids: 1-D int64 tensor of exactly the length asked for: document, then question.
    question: the prompt's last part, as text. answer: the text that a perfect response starts with.
    document_tokens: how many of the prompt's tokens are document (and the beginning-of-sequence token).
    """

    prompt_ids: Tensor
    question: str
    answer: str
    document_tokens: int


def library_task(tokenizer: Any, prompt_tokens: int) -> DocumentTask:
    """The library's reference cut to length, and a question about its first entry, so about the far end of the prompt.

    tokenizer: has `encode(text, add_special_tokens=)`, as transformers' tokenizers and ByteTokenizer have.
    Raises InvalidInputError if the prompt is too short to hold that entry and the question, or longer than the library.
    """
    if not _entry(_SUBJECT):
        raise InvalidInputError("library_task: this Python runs without docstrings (-OO), so there is no document")
    question = _question()
    question_ids = tokenizer.encode(question, add_special_tokens=False)
    entry_tokens = len(tokenizer.encode(_entry(_SUBJECT).split("\n")[0]))
    document_tokens = prompt_tokens - len(question_ids)
    if document_tokens < entry_tokens:
        needed = entry_tokens + len(question_ids)
        raise InvalidInputError(f"library_task: prompt_tokens={prompt_tokens} is too short, give at least {needed}")
    document_ids = _encode_at_least(tokenizer, document_tokens)
    if len(document_ids) < document_tokens:
        most = len(document_ids) + len(question_ids)
        raise InvalidInputError(
            f"library_task: prompt_tokens={prompt_tokens} is longer than the library, at most {most}"
        )
    prompt_ids = torch.tensor([*document_ids[:document_tokens], *question_ids])
    return DocumentTask(prompt_ids, question, _answer(), document_tokens)


@cache
def library_text() -> str:
    """The whole reference: signatures and docstrings, the same throughout a process.

    Between processes one entry can differ: the default of `logging.shutdown` lists the handlers that exist by then.
    """
    return "".join(_library_entries())


def answer_similarity(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **kwargs: Any
) -> list[float]:
    """How much of the answer each completion's first line reproduces, 0..1; 1 if and only if it starts with all of it.

    TRL's reward-function signature: `answer` is a column of the task, one text per completion. The figure is
    difflib's ratio of matching characters, so a wrong answer still says how wrong it is, and a group of samples from a
    weak model seldom has equal rewards.
    """
    if not len(prompts) == len(completions) == len(answer):
        raise InvalidInputError(
            f"answer_similarity: {len(prompts)} prompts, {len(completions)} completions and {len(answer)} answers"
        )
    return [_similarity(completion, right) for completion, right in zip(completions, answer, strict=True)]


def _similarity(completion: str, answer: str) -> float:
    first_line = completion.strip().split("\n")[0][: len(answer)]
    return difflib.SequenceMatcher(None, answer, first_line, autojunk=False).ratio()


def _question() -> str:
    example = subprocess.CalledProcessError
    given = ", ".join(_parameters(_SUBJECT)[:_NUM_GIVEN])
    return (
        "\n\n# Exercises\n\n"
        f"Question: Which parameters does {_name(example)} take, in order?\n"
        f"Answer: {', '.join(_parameters(example))}\n\n"
        f"Question: Which parameters does {_name(_SUBJECT)} take, in order?\nAnswer: {given},"
    )


def _answer() -> str:
    return ", ".join(_parameters(_SUBJECT)[_NUM_GIVEN : _NUM_GIVEN + _NUM_ASKED])


def _parameters(function: Any) -> list[str]:
    return [str(parameter) for parameter in inspect.signature(function).parameters.values()]


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _encode_at_least(tokenizer: Any, num_tokens: int) -> list[int]:
    """Ids of the library's first entries, at least `num_tokens` of them if the library has that many.

    Encoded in one piece, as a tokenizer may merge across entries; taken in doubling pieces, as tokenizing all of the
    library takes seconds.
    """
    ids: list[int] = []
    entries, text = _library_entries(), ""
    while len(ids) < num_tokens:
        target = max(2 * len(text), 4 * num_tokens)
        before = len(text)
        while len(text) < target and (entry := next(entries, None)):
            text += entry
        if len(text) == before:
            break
        ids = tokenizer.encode(text)
    return ids


def _library_entries() -> Iterator[str]:
    """The reference, entry by entry: the question's subject first, then every module in turn."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    yield f"Reference of the Python {version} standard library\n\n{_entry(_SUBJECT)}"
    for name in LIBRARY_MODULES:
        module = import_module(name)
        yield f"# {name}\n\n{inspect.getdoc(module) or ''}\n\n"
        for member in _public_members(module):
            if member is not _SUBJECT and (entry := _entry(member)):
                yield entry


def _public_members(module: ModuleType) -> list[Any]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    members = [getattr(module, name, None) for name in sorted(names)]
    own = module.__name__.split(".")[0]
    return [m for m in members if callable(m) and (getattr(m, "__module__", None) or "").split(".")[0] == own]


def _entry(member: Any) -> str:
    """Signature and docstring, or nothing if either is missing."""
    try:
        signature = str(inspect.signature(member))
    except (ValueError, TypeError):  # builtins without a text signature
        return ""
    doc = inspect.getdoc(member)
    # Default values may show the address of an object, which differs from run to run.
    return re.sub(r" at 0x[0-9a-f]+", "", f"## {_name(member)}{signature}\n\n{doc}\n\n") if doc else ""
