"""unskip takes control of the skip connections in your transformer.

At every residual site l of a model you already have,

    x  <-  alpha_l * x  +  beta_l * f_l(x)

`audit` finds the sites, `rewire` sets the weights, and the wiring it returns undoes them. `parts` shows the weights of
every branch, `init` starts a model that has no skips, `measure` says in numbers what a shortcut does, and `train`
carries out a recipe.
"""

from unskip import absorption, data, evals, init, measures, models, optim, recipes, report
from unskip.absorption import absorb
from unskip.anatomy import Audit, Site, audit, features, parts
from unskip.measures import measure
from unskip.recipes import resume, sample, train
from unskip.wiring import Anneal, Cut, Decay, Keep, Learn, Scale, Wiring, load, rewire, rewired, save

__version__ = "0.1.0"
__all__ = [
    "Anneal",
    "Audit",
    "Cut",
    "Decay",
    "Keep",
    "Learn",
    "Scale",
    "Site",
    "Wiring",
    "absorb",
    "absorption",
    "audit",
    "data",
    "evals",
    "features",
    "init",
    "load",
    "measure",
    "measures",
    "models",
    "optim",
    "parts",
    "recipes",
    "report",
    "resume",
    "rewire",
    "rewired",
    "sample",
    "save",
    "train",
]
