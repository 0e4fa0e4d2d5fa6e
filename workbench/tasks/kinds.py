"""What each kind of task hides, asks and expects. Text only; `generate.py` hides it in a haystack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from workbench.errors import InvalidInputError
from workbench.tasks import words
from workbench.tasks.words import KEYS


@dataclass(frozen=True)
class Puzzle:
    """needles: sentences to hide, of which the one at `asked` holds the answer (the last step to it, in a chain).

    ordered: the needles keep their order in the text. question: what is asked, without the words around it. lead: how
    the answer's sentence begins; answer: what follows it. lead_shown: the prompt may give the lead away.
    """

    needles: tuple[str, ...]
    asked: int
    question: str
    lead: str
    answer: str
    ordered: bool = False
    lead_shown: bool = True

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.answer} ."


def needle(rng: Random, values: tuple[str, ...], num_needles: int) -> Puzzle:
    """`num_needles` keys with a value each, distinct; one key is asked for."""
    keys, given = rng.sample(KEYS, num_needles), rng.sample(values, num_needles)
    asked = rng.randrange(num_needles)
    needles = tuple(words.fact(key, value) for key, value in zip(keys, given, strict=True))
    return Puzzle(needles, asked, words.ask_value(keys[asked]), words.lead(keys[asked]), given[asked])


def multi_value(rng: Random, values: tuple[str, ...], num_needles: int) -> Puzzle:
    """Two keys with several values each, `num_needles` in all; all values of one are asked for, in order."""
    key, other = rng.sample(KEYS, 2)
    given = rng.sample(values, num_needles)
    mine = set(rng.sample(range(num_needles), (num_needles + 1) // 2))
    needles = tuple(words.fact(key if i in mine else other, value) for i, value in enumerate(given))
    answer = " , ".join(given[i] for i in sorted(mine))
    return Puzzle(needles, max(mine), words.ask_values(key), words.lead(key), answer, ordered=True)


def variable_tracking(rng: Random, values: tuple[str, ...], num_needles: int) -> Puzzle:
    """Two interleaved chains of `num_needles` assignments in all; the value at the end of one is asked for."""
    keys, starts = rng.sample(KEYS, num_needles), rng.sample(values, 2)
    chains = [list(range(first, num_needles, 2)) for first in (0, 1)]
    needles = [""] * num_needles
    for chain, value in zip(chains, starts, strict=True):
        for step, at in enumerate(chain):
            needles[at] = words.fact(keys[at], value) if step == 0 else words.same_as(keys[at], keys[chain[step - 1]])
    which = rng.randrange(2)
    last = chains[which][-1]
    return Puzzle(
        tuple(needles), last, words.ask_value(keys[last]), words.lead(keys[last]), starts[which], ordered=True
    )


def key_chain(rng: Random, values: tuple[str, ...], num_needles: int) -> Puzzle:
    """A chain of pages leads to the true question; a second chain leads to another one. `num_needles` in all.

    Each chain has its links, its last page and the needle that answers it.
    """
    length = num_needles // 2 - 2  # links of a chain
    keys, given = rng.sample(KEYS, 2), rng.sample(values, 2)
    pages = rng.sample([key for key in KEYS if key not in keys], 2 * (length + 1))
    needles = []
    for chain, key, value in ((pages[: length + 1], keys[0], given[0]), (pages[length + 1 :], keys[1], given[1])):
        needles += [words.next_page(page, after) for page, after in pairwise(chain)]
        needles += [words.page_asks(chain[-1], key), words.fact(key, value)]
    asked = num_needles // 2 - 1
    return Puzzle(tuple(needles), asked, words.ask_chain(pages[0]), words.lead(keys[0]), given[0], lead_shown=False)


def count(rng: Random, values: tuple[str, ...], num_needles: int) -> Puzzle:
    """One key is seen between 1 and `num_needles` - 1 times, another one the remaining times; the first is counted."""
    key, other = rng.sample(KEYS, 2)
    times = rng.randint(1, num_needles - 1)
    needles = [words.sighting(key)] * times + [words.sighting(other)] * (num_needles - times)
    rng.shuffle(needles)
    last = max(at for at, text in enumerate(needles) if text == words.sighting(key))
    return Puzzle(tuple(needles), last, words.ask_count(key), "there are", str(times), ordered=True)


@dataclass(frozen=True)
class Kind:
    """How a kind's puzzle is made, how many needles it has by default, and the numbers of needles it can have."""

    make: Callable[[Random, tuple[str, ...], int], Puzzle]
    default_needles: int
    least: int
    most: int
    num_values: Callable[[int], int]  # how many distinct values it draws
    even: bool = False

    def check(self, name: str, num_needles: int) -> None:
        odd = self.even and num_needles % 2
        if isinstance(num_needles, bool) or not isinstance(num_needles, int) or odd:
            raise InvalidInputError(
                f"num_needles={num_needles!r} must be {'an even' if self.even else 'a whole'} number"
            )
        if not self.least <= num_needles <= self.most:
            raise InvalidInputError(
                f"num_needles={num_needles}: a task of kind {name!r} has {self.least} to {self.most} needles"
            )


KINDS = {
    "needle": Kind(needle, 1, 1, 1, lambda n: n),
    "multi_key": Kind(needle, 8, 2, 32, lambda n: n),
    "multi_value": Kind(multi_value, 6, 3, 32, lambda n: n),
    "variable_tracking": Kind(variable_tracking, 8, 4, 48, lambda n: 2),
    "key_chain": Kind(key_chain, 8, 6, 40, lambda n: 2, even=True),
    "count": Kind(count, 8, 2, 32, lambda n: 0),
}
