"""`python -m workbench.tiny_models NAME`: train a bundled model again, measure it and save it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.tiny_models.make import make_model
from workbench.tiny_models.recipes import RECIPES, find_recipe


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workbench.tiny_models", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("--folder", type=Path, help="where to save; must not exist (default: runs/models/NAME)")
    parser.add_argument("--seed", type=int, help="another seed than the recipe's")
    given = parser.parse_args(arguments)
    folder = given.folder or Path("runs", "models", given.name)
    try:
        recipe = find_recipe(given.name)
        made = make_model(recipe if given.seed is None else replace(recipe, seed=given.seed), folder)
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for found in made.accuracies:
        sampled = "" if found.sampled is None else f", sampled {found.sampled:.2f} ({found.varied_groups:.0%} varied)"
        print(
            f"{found.kind} ({found.num_needles}), {found.answer_style}, {found.prompt_tokens:,} tokens: "
            f"greedy {found.greedy:.2f}{sampled}"
        )
    print(f"saved in {folder}" + (" (training was interrupted)" if made.interrupted else ""))
    return 130 if made.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
