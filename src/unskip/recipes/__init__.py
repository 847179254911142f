"""Complete runs: a recipe is a function that returns one frozen config; `train` carries it out."""

from unskip.recipes._data import Opener, both, opened, opening_once
from unskip.recipes._dino import Dino, dino
from unskip.recipes._fields import field_groups
from unskip.recipes._judge import Trained, judge_run, open_run
from unskip.recipes._judge_dense import DENSE, judge_dense, picture_run
from unskip.recipes._judge_generation import judge_samples, judge_times
from unskip.recipes._mae import Mae, mae
from unskip.recipes._registry import RECIPES, Recipe, from_dict, recipe_of, resolve
from unskip.recipes._run import is_main, resume, train
from unskip.recipes._sample import Samples, sample
from unskip.recipes._simclr import Simclr, simclr
from unskip.recipes._sit import Sit, sit
from unskip.recipes._supervised import Supervised, supervised
from unskip.recipes._uvit import Uvit, uvit

__all__ = [
    "DENSE",
    "RECIPES",
    "Dino",
    "Mae",
    "Opener",
    "Recipe",
    "Samples",
    "Simclr",
    "Sit",
    "Supervised",
    "Trained",
    "Uvit",
    "both",
    "dino",
    "field_groups",
    "from_dict",
    "is_main",
    "judge_dense",
    "judge_run",
    "judge_samples",
    "judge_times",
    "mae",
    "open_run",
    "opened",
    "opening_once",
    "picture_run",
    "recipe_of",
    "resolve",
    "resume",
    "sample",
    "simclr",
    "sit",
    "supervised",
    "train",
    "uvit",
]
