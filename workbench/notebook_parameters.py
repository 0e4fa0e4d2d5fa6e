"""A notebook's parameters from texts on a command line: known names only, typed as their defaults suggest, sweeps."""

from __future__ import annotations

import ast
import difflib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import papermill

from workbench.errors import InvalidInputError

LARGEST_SWEEP = 256


def resolve_parameters(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """Typed values for the notebook's parameters. Raises InvalidInputError naming the nearest known names."""
    known = _known(notebook, texts)
    return {name: parse_value(text, _default(known[name])) for name, text in texts.items()}


def expand_sweep(
    notebook: Path, texts: Mapping[str, str], listed: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """One set of texts for every run: all combinations of the values of swept parameters; one set without any.

    A text such as 2,4,8 sweeps a parameter whose default is a number or a boolean. listed: parameters of any kind, each
    with its values between commas, as `--sweep` gives them.
    Raises InvalidInputError for unknown names, a name given twice, an empty value, and more than LARGEST_SWEEP runs.
    """
    listed = listed or {}
    known = _known(notebook, {**texts, **listed})
    if both := sorted(texts.keys() & listed.keys()):
        raise InvalidInputError(f"parameter '{both[0]}' is given with -p and with --sweep: give it once")
    choices = {name: _choices(text, _default(known[name])) for name, text in texts.items()}
    choices |= {name: [part.strip() for part in text.split(",")] for name, text in listed.items()}
    for name, values in choices.items():
        if len(values) > 1 and not all(values):
            raise InvalidInputError(f"parameter '{name}': an empty value among {', '.join(map(repr, values))}")
        if len(set(values)) < len(values):
            raise InvalidInputError(f"parameter '{name}': a value is listed twice in {', '.join(values)}")
    runs = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if len(runs) > LARGEST_SWEEP:
        raise InvalidInputError(f"the sweep would make {len(runs)} runs, more than {LARGEST_SWEEP}: split it")
    return runs


def _choices(text: str, default: Any) -> list[str]:
    """The parts of 2,4,8 where single numbers or booleans belong; else the text itself."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 or isinstance(default, str | list | tuple | dict):
        return [text]
    single = all(isinstance(parse_value(part), bool | int | float) for part in parts if part)
    return parts if single else [text]


def parse_value(text: str, default: Any = None) -> Any:
    """`text` as JSON (true, 1e-5, [1, 2], null), with Python's True, False and None; else as it stands.

    A parameter whose default is a string stays a string, so that `-p name 3` gives "3" where a name is expected.
    """
    if isinstance(default, str):
        return text
    python_words = {"True": True, "False": False, "None": None}
    if text in python_words:
        return python_words[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def literal_path(path: Path) -> str:
    """Papermill formats paths with the parameters; doubled braces survive that."""
    return str(path.resolve()).replace("{", "{{").replace("}", "}}")


def _known(notebook: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """What papermill knows of the notebook's parameters, once every name in `texts` is among them."""
    if not notebook.is_file():
        raise InvalidInputError(f"no notebook at {notebook}")
    try:
        known = papermill.inspect_notebook(literal_path(notebook))
    except Exception as error:
        raise InvalidInputError(f"{notebook}: not a readable notebook ({type(error).__name__}: {error})") from error
    for name in texts:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known) or 'none'}"
            raise InvalidInputError(f"{notebook.name} has no parameter '{name}': {hint}")
    return known


def _default(parameter: Mapping[str, Any]) -> Any:
    try:
        return ast.literal_eval(parameter["default"])
    except (ValueError, SyntaxError):  # an expression, such as 2**10
        return None
