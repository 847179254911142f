"""Complete runs: a recipe is a function that returns one frozen config; `train` carries it out."""

from unskip.recipes._mae import Mae, mae
from unskip.recipes._registry import RECIPES, Recipe, from_dict
from unskip.recipes._run import resume, train
from unskip.recipes._supervised import Supervised, supervised

__all__ = ["RECIPES", "Mae", "Recipe", "Supervised", "from_dict", "mae", "resume", "supervised", "train"]
