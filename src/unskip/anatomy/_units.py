"""The block of each residual site: the repeated unit of modules that it belongs to.

A unit is an element of a list of modules of one class (`nn.ModuleList`, `nn.Sequential`, `nn.ModuleDict`):

    blocks.3                the element adds, as in timm
    encoder.layer.3         a submodule of the element adds, as in BERT
    transformer.layers.3    the element contains the branch only; the loop over the list adds

A list of different layers (attention, MLP) that is itself an element of a list is one unit, not two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units(model: nn.Module, sites: Sequence[tuple[str, Sequence[str], str]]) -> list[str]:
    """The path of the unit of each site, given as (path of the module that adds, paths of its branch, kind)."""
    inner = [_below(model, path, branch) for path, branch, _ in sites]
    # A unit with some branches outside of its inner list is not split.
    mixed = {path for (path, _, _), below in zip(sites, inner, strict=True) if below is None}
    paths = []
    for (path, _, _), below in zip(sites, inner, strict=True):
        around = _element(model, path)
        paths.append(around if around and (path in mixed or not below) else below or path)
    return _joined(model, paths, [kind for _, _, kind in sites])


def _below(model: nn.Module, path: str, branch: Sequence[str]) -> str | None:
    """The element of a list inside a module that contains the branch, if there is exactly one."""
    inside = [name for name in branch if holds(path, name)]
    elements = {_element(model, name, path) or _element(model, name, path, alike=False) for name in inside} - {None}
    return elements.pop() if len(elements) == 1 else None


def _element(model: nn.Module, path: str, above: str = "", alike: bool = True) -> str | None:
    """The innermost list element that is or contains a module, inside the module at `above`; with `alike`, the list's
    elements must have one class.
    """
    parts = path.split(".") if path else []
    for end in range(len(parts), len(above.split(".")) if above else 0, -1):
        parent = model.get_submodule(".".join(parts[: end - 1]))
        classes = {type(child).__qualname__ for child in parent.children()}
        if isinstance(parent, _LISTS) and (len(classes) == 1 or not alike):
            return ".".join(parts[:end])
    return None


def _joined(model: nn.Module, paths: list[str], kinds: list[str]) -> list[str]:
    """Joins the units of a list that is itself an element of a list, if each has one site and their kinds differ."""
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
    """Whether a sequence of kinds is a repetition of a shorter one, or a single kind."""
    size = len(kinds)
    return size == 1 or any(size % n == 0 and kinds == kinds[:n] * (size // n) for n in range(1, size // 2 + 1))


def holds(outer: str, inner: str) -> bool:
    """Whether the module at the path `inner` is the one at `outer` or a submodule of it."""
    return not outer or inner == outer or inner.startswith(outer + ".")
