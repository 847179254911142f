"""Blocks by their module: the repeated unit that a residual site belongs to.

A unit is an element of a list of modules of one class (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`):

    blocks.3                adds itself, as a block of timm does
    encoder.layer.3         holds the module that adds, as in BERT
    transformer.layers.3    holds the branch alone: the loop around the list adds

A list of unlike layers, attention and MLP, that is an element of another list is one unit, not two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units(model: nn.Module, sites: Sequence[tuple[str, Sequence[str], str]]) -> list[str]:
    """The path of the unit of each site, from the module that adds, the modules of its branch and its kind."""
    inner = [_below(model, path, branch) for path, branch, _ in sites]
    # A unit that runs a list of its own beside other branches stays whole.
    mixed = {path for (path, _, _), below in zip(sites, inner, strict=True) if below is None}
    paths = []
    for (path, _, _), below in zip(sites, inner, strict=True):
        around = _element(model, path)
        paths.append(around if around and (path in mixed or not below) else below or path)
    return _joined(model, paths, [kind for _, _, kind in sites])


def _below(model: nn.Module, path: str, branch: Sequence[str]) -> str | None:
    """The element of a list below a module that holds the branch, where there is exactly one."""
    inside = [name for name in branch if holds(path, name)]
    elements = {_element(model, name, path) or _element(model, name, path, alike=False) for name in inside} - {None}
    return elements.pop() if len(elements) == 1 else None


def _element(model: nn.Module, path: str, above: str = "", alike: bool = True) -> str | None:
    """The nearest element of a list around a module, itself included, below another; if alike, the list is of one
    class.
    """
    parts = path.split(".") if path else []
    for end in range(len(parts), len(above.split(".")) if above else 0, -1):
        parent = model.get_submodule(".".join(parts[: end - 1]))
        classes = {type(child).__qualname__ for child in parent.children()}
        if isinstance(parent, _LISTS) and (len(classes) == 1 or not alike):
            return ".".join(parts[:end])
    return None


def _joined(model: nn.Module, paths: list[str], kinds: list[str]) -> list[str]:
    """Units whose list is itself an element of a list, and holds one site of another kind each, joined to one."""
    by_list: dict[str, list[int]] = {}
    for index, unit in enumerate(paths):
        by_list.setdefault(unit.rpartition(".")[0], []).append(index)
    for parent, indices in by_list.items():
        outer = _element(model, parent) if parent else None
        single = len({paths[i] for i in indices}) == len(indices)
        if outer is not None and single and not _repeats([kinds[i] for i in indices]):
            for i in indices:
                paths[i] = outer
    return paths


def _repeats(kinds: list[str]) -> bool:
    """Whether kinds are a shorter sequence several times over, or one kind alone."""
    size = len(kinds)
    return size == 1 or any(size % n == 0 and kinds == kinds[:n] * (size // n) for n in range(1, size // 2 + 1))


def holds(outer: str, inner: str) -> bool:
    """Whether a module, by its path, is another or lies in it."""
    return not outer or inner == outer or inner.startswith(outer + ".")
