"""The words that tasks are made of, and the sentences around them.

Keys and values are common English words, one token each for most tokenizers, and do not overlap. Sentences have spaces
around punctuation, so that a word-level tokenizer and a byte-pair tokenizer see the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

KEYS = tuple(
    """apple bear bird boat bread bridge butter camera candle castle chair cloud coffee desert dragon eagle engine
    farm fish flower forest garden glass guitar hammer horse island kitchen ladder lemon lion mirror moon mountain
    piano planet rabbit river rocket school ship snow spoon storm tiger tower train winter""".split()  # noqa: SIM905
)
VALUES = tuple(
    """red blue green yellow purple orange white black brown pink silver gold copper iron steel wood
    paper stone water fire earth wind north south east west spring summer monday friday july march""".split()  # noqa: SIM905
)


def fact(key: str, value: str) -> str:
    """A needle: the sentence that gives a key its value."""
    return f"{lead(key)} {value} ."


def lead(key: str) -> str:
    """What stands before the value, in a needle as in an answer."""
    return f"the code of {key} is"


def same_as(key: str, other: str) -> str:
    """A link of variable tracking: one key has the value of another."""
    return f"the code of {key} is that of {other} ."


def next_page(page: str, following: str) -> str:
    """A link of a key chain."""
    return f"the page after {page} is {following} ."


def page_asks(page: str, key: str) -> str:
    """The last page of a chain: the true question."""
    return f"the page {page} asks for the code of {key} ."


def sighting(key: str) -> str:
    """What the counting task counts."""
    return f"here is one {key} ."


def ask(question: str) -> str:
    """The end of a prompt, up to where the answer begins."""
    return f"question : {question} ? answer :"


def ask_value(key: str) -> str:
    return f"what is the code of {key}"


def ask_values(key: str) -> str:
    return f"what are all the codes of {key} , in order"


def ask_count(key: str) -> str:
    return f"how many times is there one {key}"


def ask_chain(page: str) -> str:
    return f"go from page {page} to the last page ; what does it ask for"


def template_words() -> Sequence[str]:
    """Every word and mark of the sentences above, without keys and values: for vocabularies."""
    sentences = (
        fact("", ""), same_as("", ""), next_page("", ""), page_asks("", ""), sighting(""), ask(""), ask_value(""),
        ask_values(""), ask_count(""), ask_chain(""), "there are , .",
    )  # fmt: skip
    return tuple(dict.fromkeys(" ".join(sentences).split()))
