"""Complete runs: a recipe is a function that returns one frozen config; `train` carries it out."""

from unskip.recipes._dino import Dino, dino
from unskip.recipes._mae import Mae, mae
from unskip.recipes._registry import RECIPES, Recipe, from_dict
from unskip.recipes._run import resume, train
from unskip.recipes._sample import Samples, sample
from unskip.recipes._simclr import Simclr, simclr
from unskip.recipes._sit import Sit, sit
from unskip.recipes._supervised import Supervised, supervised
from unskip.recipes._uvit import Uvit, uvit

__all__ = [
    "RECIPES",
    "Dino",
    "Mae",
    "Recipe",
    "Samples",
    "Simclr",
    "Sit",
    "Supervised",
    "Uvit",
    "dino",
    "from_dict",
    "mae",
    "resume",
    "sample",
    "simclr",
    "sit",
    "supervised",
    "train",
    "uvit",
]
