"""Stochastic depth: the modules that drop whole branches in training, by the names that libraries give them."""

from __future__ import annotations

import re

from torch import nn

from unskip.anatomy._sites import Site

_DROP_PATH = re.compile(r"drop_?path|stochastic_?depth", re.IGNORECASE)


def drop_paths(model: nn.Module, site: Site) -> list[tuple[nn.Module, str]]:
    """The modules of a site that drop its branch now, each with the attribute that holds the rate.

    An inactive one may not have run when the site was found, so the module that adds is searched too.
    """
    prefix = site.path + "." if site.path else ""
    inside = [prefix + name for name, _ in model.get_submodule(site.path).named_children()]
    dropping: dict[int, tuple[nn.Module, str]] = {}
    for name in dict.fromkeys([*site.branch, *inside]):
        for module in model.get_submodule(name).modules():
            rate = "drop_prob" if hasattr(module, "drop_prob") else "p"
            if _DROP_PATH.search(type(module).__name__) and getattr(module, rate, None):
                dropping[id(module)] = (module, rate)
    return list(dropping.values())
