"""Stochastic depth: modules that drop whole branches in training, recognised by their class names."""

from __future__ import annotations

import re

from torch import nn

from unskip.anatomy._sites import Site

_DROP_PATH = re.compile(r"drop_?path|stochastic_?depth", re.IGNORECASE)


def drop_paths(model: nn.Module, site: Site) -> list[tuple[nn.Module, str]]:
    """The modules of a site that drop its branch at a non-zero rate, each with the name of its rate attribute.

    A module with rate zero may not have run when the site was found, so the children of the adding module are searched
    as well.
    """
    prefix = site.path + "." if site.path else ""
    children = [prefix + name for name, _ in model.get_submodule(site.path).named_children()]
    modules: dict[int, tuple[nn.Module, str]] = {}
    for name in dict.fromkeys([*site.branch, *children]):
        for module in model.get_submodule(name).modules():
            rate = "drop_prob" if hasattr(module, "drop_prob") else "p"
            if _DROP_PATH.search(type(module).__name__) and getattr(module, rate, None):
                modules[id(module)] = (module, rate)
    return list(modules.values())
