"""Complete runs: a recipe returns a frozen config, and `train` runs it into a run folder."""

from unskip.recipes._build import build_task
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, cached_opener, evaluated_split, open_split, open_splits
from unskip.recipes._dino import Dino, dino
from unskip.recipes._evaluate import evaluate_model, evaluate_run, evaluate_samples, text_batch
from unskip.recipes._fields import field_groups
from unskip.recipes._lm import Lm, lm
from unskip.recipes._mae import Mae, mae
from unskip.recipes._objective import Facts, Objective, Progress
from unskip.recipes._online import Online
from unskip.recipes._open import Trained, is_run, open_run
from unskip.recipes._registry import RECIPES, Preset, Recipe, from_dict, recipe_of, register, resolve, to_dict
from unskip.recipes._run import absolute_paths, resume, train
from unskip.recipes._sample import Samples, sample
from unskip.recipes._sample_text import TextSamples, sample_text
from unskip.recipes._saved import load, save
from unskip.recipes._simclr import Simclr, simclr
from unskip.recipes._sit import Sit, sit
from unskip.recipes._supervised import Supervised, supervised
from unskip.recipes._uvit import Uvit, uvit

__all__ = [
    "RECIPES",
    "Config",
    "Dino",
    "Facts",
    "Lm",
    "Mae",
    "Objective",
    "Online",
    "Opener",
    "Preset",
    "Progress",
    "Recipe",
    "Samples",
    "Simclr",
    "Sit",
    "Supervised",
    "TextSamples",
    "Trained",
    "Uvit",
    "absolute_paths",
    "build_task",
    "cached_opener",
    "dino",
    "evaluate_model",
    "evaluate_run",
    "evaluate_samples",
    "evaluated_split",
    "field_groups",
    "from_dict",
    "is_run",
    "lm",
    "load",
    "mae",
    "open_run",
    "open_split",
    "open_splits",
    "recipe_of",
    "register",
    "resolve",
    "resume",
    "sample",
    "sample_text",
    "save",
    "simclr",
    "sit",
    "supervised",
    "text_batch",
    "to_dict",
    "train",
    "uvit",
]
