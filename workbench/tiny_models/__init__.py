"""Small models that retrieve from long prompts, trained here: `python -m workbench.tiny_models NAME`."""

from workbench.tiny_models.evaluation import Accuracy, measure
from workbench.tiny_models.make import MadeModel, curve, make_model, measure_standard
from workbench.tiny_models.recipes import RECIPES, Recipe, find_recipe

__all__ = [
    "RECIPES",
    "Accuracy",
    "MadeModel",
    "Recipe",
    "curve",
    "find_recipe",
    "make_model",
    "measure",
    "measure_standard",
]
