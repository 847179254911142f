"""What the blocks of a model are, and where their outputs can be read. `features`, `measure` and evaluations ask here.

Without a declaration a block is the repeated unit around residual sites (`Site.block`). Its output is what its module
returns, in a post-norm block the norm of its last sum. Where the loop around a list of modules adds, no module of the
list returns the stream: the output is then the sum of the unit's last site (its norm in a post-norm model), read where
it enters or leaves a module, or computed from its stream and branch where those do.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip._words import nearest
from unskip.anatomy._example import Example
from unskip.anatomy._graph import Crossing
from unskip.anatomy._guard import unwrapped
from unskip.anatomy._model_trace import ModelTrace, scaled, trace_model
from unskip.anatomy._norms import norm_at
from unskip.anatomy._rewired import rewired_state
from unskip.anatomy._sites import Site
from unskip.anatomy._units import holds
from unskip.anatomy._walk import in_norm, written
from unskip.errors import BadInput, ForwardError, NoResidualError, WrappedError

# Indices select among the model's own blocks. Paths (with * for one name, ** for several) and a predicate on Site, true
# for the last site of each block, declare what the blocks are.
Blocks = int | Iterable[int] | str | Iterable[str] | Callable[[Site], bool]  # how blocks are chosen


@dataclass(frozen=True)
class Tap:
    """Where a tensor is read: among the floating tensors that a module gets or returns."""

    path: str
    side: Literal["input", "output"] = "output"
    place: int = 0
    call: int | None = None  # of the module, from 0 on; None is the last
    written: bool = False  # the model writes into it later, so that it has to be copied


@dataclass(frozen=True)
class Block:
    """One block: its name, its sites by their indices, and its output."""

    index: int  # in execution order
    path: str
    sites: tuple[int, ...]
    axis: int  # of the output that holds the features
    node: int  # of the output in the trace that it was found in
    last: int  # index of its last site
    taps: tuple[Tap, ...]  # of the output; or of the stream and the branch of its last site; or none


def find_blocks(model: nn.Module, example: Example, blocks: object = "all") -> tuple[Block, ...]:
    """The blocks of a model in execution order: its own, or those that are declared."""
    inside = unwrapped(model)
    try:
        try:
            trace = trace_model(inside, example.rows(0, 1))  # one row is enough
        except ForwardError:  # an argument without a row for each image, such as a mask
            trace = trace_model(inside, example)
    except WrappedError:
        state = rewired_state(inside)
        if state is None or is_declared(blocks):
            raise
        return _recorded(state.survey.sites)  # its parts were wrapped after it was rewired
    return blocks_in(inside, trace, blocks)


def _recorded(sites: Sequence[Site]) -> tuple[Block, ...]:
    """Blocks whose modules return the stream, from the sites alone."""
    last = {site.block: site for site in sites if site.regular}
    return tuple(
        Block(index, path, (site.index,), site.axis, 0, site.index, (Tap(path),))
        for index, (path, site) in enumerate(last.items())
    )


def blocks_in(model: nn.Module, trace: ModelTrace, blocks: object = "all") -> tuple[Block, ...]:
    """The blocks of a traced model in execution order."""
    sites = [site for site in trace.sites if site.regular]
    if not sites:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so no blocks")
    finder = _Finder(model, trace)
    all_blocks = []
    if callable(blocks):
        for group in _ending(sites, blocks):
            last = group[-1]
            whole = last is [site for site in sites if site.block == last.block][-1]
            name = f"{last.block or '(model)'} up to site {last.index}"
            all_blocks.append(finder.block(name, group, last.block if whole else None))
    elif is_declared(blocks):
        for path in _matching(model, [blocks] if isinstance(blocks, str) else blocks):  # type: ignore[arg-type]
            group = [s for s in sites if all(holds(path, name) for name in s.branch or [s.path])]
            if not group:
                raise BadInput(f"blocks: no residual site of {type(model).__name__} lies in {path}")
            all_blocks.append(finder.block(path, group, path))
    else:
        for path in dict.fromkeys(site.block for site in sites):
            all_blocks.append(finder.block(path, [site for site in sites if site.block == path], path))
    all_blocks.sort(key=lambda block: block.node)
    return tuple(replace(block, index=index) for index, block in enumerate(all_blocks))


def is_declared(blocks: object) -> bool:
    """Whether blocks are declared, and not selected by index."""
    if isinstance(blocks, str):
        return blocks not in ("all", "middle")
    return callable(blocks) or (isinstance(blocks, list | tuple) and any(isinstance(each, str) for each in blocks))


def block_indices(blocks: object, count: int) -> list[int]:
    """Indices of the blocks that are asked for, sorted, each once, counted from the front; all where declared."""
    if (isinstance(blocks, str) and blocks == "all") or is_declared(blocks):
        return list(range(count))
    try:
        asked = _whole(blocks)
    except TypeError:
        raise BadInput(
            f"blocks is {blocks!r}; it can be 'all', an index such as -1, several such as [0, {count - 1}], paths of "
            "modules such as 'encoder.layers.*', or a function of a Site that is true for the last of each block"
        ) from None
    wrong = [index for index in asked if not -count <= index < count]
    if wrong:
        raise BadInput(f"blocks: {wrong} not among the model's {count} blocks, 0 to {count - 1}")
    return sorted({index % count for index in asked})


def _whole(blocks: Any) -> list[int]:
    """One index or several, also of numpy or torch."""
    try:
        return [operator.index(blocks)]
    except TypeError:
        return [operator.index(each) for each in blocks]


def _ending(sites: Sequence[Site], last: Callable[[Site], bool]) -> Iterator[list[Site]]:
    """Sites in groups, each up to one that is picked."""
    group: list[Site] = []
    for site in sites:
        group.append(site)
        if last(site):
            yield group
            group = []
    if len(group) == len(sites):
        raise BadInput(f"blocks: the function picks none of the {len(sites)} sites as the last of a block")


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The paths of modules that any of the patterns fits."""
    names = [name for name, _ in model.named_modules() if name]
    paths: list[str] = []
    for pattern in patterns:
        form = re.escape(str(pattern)).replace(r"\*\*", ".*").replace(r"\*", r"[^.]*")
        mine = [name for name in names if re.fullmatch(form, name)]
        if not mine:
            raise BadInput(
                f"blocks: no module of {type(model).__name__} is called {pattern!r}{nearest(str(pattern), names)}; "
                "* stands for one name, as in 'encoder.layers.*'"
            )
        paths += mine
    return list(dict.fromkeys(paths))


class _Finder:
    """Finds outputs of blocks in one trace."""

    def __init__(self, model: nn.Module, trace: ModelTrace) -> None:
        self.model, self.trace, self.graph = model, trace, trace.graph
        self.names = {id(module): name for name, module in model.named_modules()}
        self.written = written(trace.graph)
        self.outputs: dict[int, dict[int, Crossing]] = {}  # by module, the nodes that its last call returned
        self.calls: dict[int, int] = {}  # by module, the last call
        for node, crossings in trace.graph.crossings.items():
            for each in crossings:
                key = id(each.module)
                if each.call > self.calls.get(key, -1):
                    self.calls[key], self.outputs[key] = each.call, {}
                if each.side == "output" and each.call == self.calls[key]:
                    self.outputs.setdefault(key, {})[node] = each

    def block(self, name: str, sites: Sequence[Site], path: str | None) -> Block:
        """A block of sites, and of a module where it has one."""
        last = max(sites, key=lambda site: self.trace.runs[site.index][-1].add.index)
        node = self._returned(path, last) if path else None
        if node is None and path and holds(path, last.path) and last.norm != "post":
            node = self._returned(last.path, last)
        node = self._after(last) if node is None else node
        indices = tuple(site.index for site in sites)
        return Block(0, name, indices, last.axis, node, last.index, self._taps(node, path, last))

    def _returned(self, path: str, last: Site) -> int | None:
        """What a module returns, where that was computed from the sum of its last site."""
        add = self.trace.runs[last.index][-1].add
        nodes = self.outputs.get(id(self.model.get_submodule(path)), {})
        derived = [n for n in nodes if add.index in self.graph.nodes[n] and self._as_large(n, add.index)]
        return min(derived, key=lambda n: nodes[n].place) if derived else None

    def _as_large(self, one: int, other: int) -> bool:
        return prod(self.graph.nodes[one].shape) == prod(self.graph.nodes[other].shape)

    def _after(self, site: Site) -> int:
        """The sum of a site, or its norm where that comes after it."""
        add = self.trace.runs[site.index][-1].add
        if site.norm == "post":
            later = (n for n in self.graph.nodes[add.index + 1 :] if in_norm(n) and add.index in n)
            norm = next((norm_at(self.graph, self.trace.readers, n) for n in later), None)
            if norm is not None:
                return norm.result
        return add.index

    def _taps(self, node: int, path: str | None, last: Site) -> tuple[Tap, ...]:
        taps = [self._tap(node, path)]
        finding = self.trace.runs[last.index][-1].findings[-1]
        if taps == [None] and finding.add.index == node and finding.role == "mix":
            taps = [self._tap(finding.stream, path), self._tap(finding.branch, path)]
        return tuple(tap for tap in taps if tap is not None) if all(taps) else ()

    def _tap(self, node: int, path: str | None) -> Tap | None:
        known = [each for each in self.graph.crossings.get(node, []) if id(each.module) in self.names]
        if not known:
            return None

        def rank(each: Crossing) -> tuple[bool, bool, bool]:
            return self.names[id(each.module)] != path, each.side != "output", each.call != self.calls[id(each.module)]

        best = min(known, key=rank)
        last = best.call == self.calls[id(best.module)]
        name = self.names[id(best.module)]
        return Tap(name, best.side, best.place, None if last else best.call, node in self.written)


@contextmanager
def keep_outputs(model: nn.Module, blocks: Sequence[Block], wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While it lasts, a forward of the model leaves the outputs of the wanted blocks in the mapping, in this order."""
    outputs: dict[int, Tensor] = {}
    kept: dict[Tap, Tensor] = {}
    inside = unwrapped(model)
    handles = []
    try:
        for block in (blocks[index] for index in wanted):
            if not block.taps:
                raise BadInput(
                    f"block {block.index} ({block.path}): neither its output nor what it is the sum of enters or "
                    "leaves a module, so it cannot be read. Declare other blocks, blocks='...'"
                )
            for tap in block.taps:
                module, hook = inside.get_submodule(tap.path), _keep(kept, tap)
                if tap.side == "output":
                    handles.append(module.register_forward_hook(hook))
                else:
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
    state = rewired_state(inside)
    weights = state.weights() if state is not None else {}
    for block in (blocks[index] for index in wanted):
        tensors = [kept[tap] for tap in block.taps if tap in kept]
        if len(tensors) < len(block.taps):
            raise BadInput(f"block {block.index} ({block.path}) did not run as on the example that it was found with")
        if len(tensors) == 1:
            outputs[block.index] = tensors[0]
        else:
            alpha, beta = weights.get(block.last, (1.0, 1.0))
            outputs[block.index] = scaled(tensors[0], alpha) + scaled(tensors[1], beta)


def _keep(kept: dict[Tap, Tensor], tap: Tap) -> Any:
    """A hook that keeps one tensor; of a module that runs several times the last, unless the tap names a call."""
    calls = iter(range(1_000_000))

    def hook(module: nn.Module, *trees: object) -> None:
        if tap.call is not None and next(calls) != tap.call:
            return
        tree = trees[-1] if tap.side == "output" else trees
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tap.place >= len(tensors):
            raise BadInput(f"{tap.path} ({type(module).__name__}): its {tap.side} has {len(tensors)} floating tensors")
        kept[tap] = tensors[tap.place].clone() if tap.written else tensors[tap.place]

    return hook
