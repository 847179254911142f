"""unskip takes control of the skip connections in your transformer.

At every residual site l of a model you already have,

    x  <-  alpha_l * x  +  beta_l * f_l(x)

`audit` finds the sites, `rewire` sets the weights, and the returned wiring undoes it. `parts` shows the weights of
every branch, `init` initialises models without skips, `measure` measures the effect of a shortcut, and `train` runs a
recipe.

Names are imported on first use: torch takes seconds to import, and `unskip --help` does not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unskip import (
        absorption,
        anatomy,
        data,
        errors,
        evals,
        init,
        measures,
        models,
        optim,
        recipes,
        report,
        spec,
        training,
        wiring,
    )
    from unskip.absorption import absorb
    from unskip.anatomy import Audit, Site, audit, features, parts
    from unskip.measures import measure
    from unskip.recipes import load, resume, sample, save, train
    from unskip.wiring import Anneal, Cut, Decay, Keep, Learn, Scale, Shortcut, Wiring, rewire, rewired

__version__ = "0.2.0"
__all__ = [
    "Anneal",
    "Audit",
    "Cut",
    "Decay",
    "Keep",
    "Learn",
    "Scale",
    "Shortcut",
    "Site",
    "Wiring",
    "absorb",
    "absorption",
    "anatomy",
    "audit",
    "data",
    "errors",
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
    "spec",
    "train",
    "training",
    "wiring",
]

_PACKAGES = {
    "absorption": ["absorb"],
    "anatomy": ["Audit", "Site", "audit", "features", "parts"],
    "measures": ["measure"],
    "recipes": ["load", "resume", "sample", "save", "train"],
    "wiring": "Anneal Cut Decay Keep Learn Scale Shortcut Wiring rewire rewired".split(),
}
_HOME = {name: package for package, names in _PACKAGES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"unskip.{_HOME[name]}"), name)
    if name in __all__:
        return import_module(f"unskip.{name}")
    raise AttributeError(f"module 'unskip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
