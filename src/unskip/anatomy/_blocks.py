"""The blocks of a model and how to read their outputs; used by `features`, `measure` and the evaluations.

By default a block is the repeated unit around residual sites (`Site.block`), and its output is what its module returns
(in a post-norm block, the norm of its last sum). If the addition is in a loop over a list of modules, no module of the
list returns the stream. The output is then the sum of the unit's last site (post-norm: its norm), read as the input or
output of some module, or computed from the stream and the branch if those can be read.
"""

from __future__ import annotations

import itertools
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

# Indices select from the default blocks. Paths (* matches one name, ** several) or a predicate on Site, true for the
# last site of each block, define other blocks.
Blocks = int | Iterable[int] | str | Iterable[str] | Callable[[Site], bool]  # how blocks are chosen


@dataclass(frozen=True)
class Tap:
    """A tensor to read, one of the floating-point inputs or outputs of a module."""

    path: str
    side: Literal["input", "output"] = "output"
    place: int = 0  # index among the floating-point tensors of that side
    call: int | None = None  # index of the module's call; None is the last
    written: bool = False  # the model later writes into it in place, so it must be copied


@dataclass(frozen=True)
class Block:
    """One block: its path, the indices of its sites, and its output."""

    index: int  # in execution order
    path: str
    sites: tuple[int, ...]
    axis: int  # feature axis of the output
    node: int  # node of the output in the trace
    last: int  # index of its last site
    taps: tuple[Tap, ...]  # of the output; or of the stream and branch of its last site; empty if it cannot be read


def find_blocks(model: nn.Module, example: Example, blocks: object = "all") -> tuple[Block, ...]:
    """The blocks of a model in execution order, by default or as `blocks` defines them."""
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
        return _recorded(state.survey.sites)  # submodules were wrapped after rewiring
    return blocks_in(inside, trace, blocks)


def _recorded(sites: Sequence[Site]) -> tuple[Block, ...]:
    """Blocks from recorded sites without a trace, on the assumption that their modules return the stream."""
    last = {site.block: site for site in sites if site.regular}
    return tuple(
        Block(index, site.block, (site.index,), site.axis, 0, site.index, (Tap(site.block),))
        for index, site in enumerate(sorted(last.values(), key=lambda site: site.index))
    )


def blocks_in(model: nn.Module, trace: ModelTrace, blocks: object = "all") -> tuple[Block, ...]:
    """The blocks of a traced model in execution order."""
    sites = [site for site in trace.sites if site.regular]
    if not sites:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so no blocks")
    finder = _Finder(model, trace)
    all_blocks = []
    if callable(blocks):
        for group in _groups(sites, blocks):
            last = group[-1]
            ends_block = last is [site for site in sites if site.block == last.block][-1]
            name = f"{last.block or '(model)'} up to site {last.index}"
            all_blocks.append(finder.block(name, group, last.block if ends_block else None))
    elif is_declared(blocks):
        for path in _matching(model, [blocks] if isinstance(blocks, str) else blocks):  # type: ignore[arg-type]
            group = [s for s in sites if all(holds(path, name) for name in s.branch or [s.path])]
            if not group:
                raise BadInput(f"blocks: {path} of {type(model).__name__} contains no residual site")
            all_blocks.append(finder.block(path, group, path))
    else:
        for path in dict.fromkeys(site.block for site in sites):
            all_blocks.append(finder.block(path, [site for site in sites if site.block == path], path))
    all_blocks.sort(key=lambda block: block.sites[-1])
    return tuple(replace(block, index=index) for index, block in enumerate(all_blocks))


def is_declared(blocks: object) -> bool:
    """Whether `blocks` defines the blocks by paths or a predicate, rather than selecting default ones by index."""
    if isinstance(blocks, str):
        return blocks not in ("all", "middle")
    return callable(blocks) or (isinstance(blocks, list | tuple) and any(isinstance(path, str) for path in blocks))


def block_indices(blocks: object, count: int) -> list[int]:
    """The selected block indices, sorted, unique and non-negative; all if `blocks` defines the blocks."""
    if (isinstance(blocks, str) and blocks == "all") or is_declared(blocks):
        return list(range(count))
    try:
        selected = _integers(blocks)
    except TypeError:
        raise BadInput(
            f"blocks is {blocks!r}; it can be 'all', an index such as -1, several such as [0, {count - 1}], paths of "
            "modules such as 'encoder.layers.*', or a function of a Site that is true for the last site of each block"
        ) from None
    wrong = [index for index in selected if not -count <= index < count]
    if wrong:
        raise BadInput(f"blocks: {wrong} not among the model's {count} blocks, 0 to {count - 1}")
    return sorted({index % count for index in selected})


def _integers(blocks: Any) -> list[int]:
    """One index or several, including numpy and torch integers."""
    try:
        return [operator.index(blocks)]
    except TypeError:
        return [operator.index(index) for index in blocks]


def _groups(sites: Sequence[Site], last: Callable[[Site], bool]) -> Iterator[list[Site]]:
    """Consecutive groups of sites, each ending with a site for which `last` is true."""
    group: list[Site] = []
    for site in sites:
        group.append(site)
        if last(site):
            yield group
            group = []
    if len(group) == len(sites):
        raise BadInput(
            f"blocks: the function is false for all {len(sites)} sites; make it true for the last of a block"
        )


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """The paths of the modules that match any of the patterns."""
    names = [name for name, _ in model.named_modules() if name]
    paths: list[str] = []
    for pattern in patterns:
        regex = re.escape(str(pattern)).replace(r"\*\*", ".*").replace(r"\*", r"[^.]*")
        matches = [name for name in names if re.fullmatch(regex, name)]
        if not matches:
            raise BadInput(
                f"blocks: no module of {type(model).__name__} is called {pattern!r}{nearest(str(pattern), names)}; "
                "* matches one name, as in 'encoder.layers.*'"
            )
        paths += matches
    return list(dict.fromkeys(paths))


class _Finder:
    """Finds the outputs of blocks in one trace."""

    def __init__(self, model: nn.Module, trace: ModelTrace) -> None:
        self.model, self.trace, self.graph = model, trace, trace.graph
        self.names = {id(module): name for name, module in model.named_modules()}
        self.written = written(trace.graph)
        self.outputs: dict[int, dict[int, Crossing]] = {}  # by module id, the nodes that its last call returned
        self.calls: dict[int, int] = {}  # by module id, the last call
        for node, crossings in trace.graph.crossings.items():
            for crossing in crossings:
                key = id(crossing.module)
                if crossing.call > self.calls.get(key, -1):
                    self.calls[key], self.outputs[key] = crossing.call, {}
                if crossing.side == "output" and crossing.call == self.calls[key]:
                    self.outputs.setdefault(key, {})[node] = crossing

    def block(self, name: str, sites: Sequence[Site], path: str | None) -> Block:
        """The block of some sites; `path` is that of its module, None without one."""
        last = max(sites, key=lambda site: self.trace.runs[site.index][-1].add.index)
        node = self._returned(path, last) if path else None
        if node is None and path and holds(path, last.path) and last.norm != "post":
            node = self._returned(last.path, last)
        node = self._after(last) if node is None else node
        indices = tuple(site.index for site in sites)
        return Block(0, name, indices, self._axis(node, last), node, last.index, self._taps(node, path, last))

    def _axis(self, node: int, site: Site) -> int:
        """The feature axis of a block's output, which may have another layout than the sum of its last site."""
        shape = self.graph.nodes[node].shape
        axes = (site.axis, -1, 1) if len(shape) == site.rank else (-1, 1)
        return next((axis for axis in axes if shape[axis:][:1] == (site.features,)), site.axis)

    def _returned(self, path: str, last: Site) -> int | None:
        """The output of a module that was computed from the sum of its last site, if there is one."""
        add = self.trace.runs[last.index][-1].add
        nodes = self.outputs.get(id(self.model.get_submodule(path)), {})
        derived = [n for n in nodes if add.index in self.graph.nodes[n] and self._same_size(n, add.index)]
        return min(derived, key=lambda n: nodes[n].place) if derived else None

    def _same_size(self, one: int, other: int) -> bool:
        return prod(self.graph.nodes[one].shape) == prod(self.graph.nodes[other].shape)

    def _after(self, site: Site) -> int:
        """The sum of a site, or the norm of it in a post-norm block."""
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
        crossings = [c for c in self.graph.crossings.get(node, []) if id(c.module) in self.names]
        if not crossings:
            return None

        def rank(c: Crossing) -> tuple[bool, bool, bool]:
            return self.names[id(c.module)] != path, c.side != "output", c.call != self.calls[id(c.module)]

        best = min(crossings, key=rank)
        last = best.call == self.calls[id(best.module)]
        name = self.names[id(best.module)]
        return Tap(name, best.side, best.place, None if last else best.call, node in self.written)


@contextmanager
def keep_outputs(model: nn.Module, blocks: Sequence[Block], wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Hooks the model for one forward; after the context the mapping holds the wanted blocks' outputs, in order."""
    outputs: dict[int, Tensor] = {}
    kept: dict[Tap, Tensor] = {}
    inside = unwrapped(model)
    handles = []
    try:
        for block in (blocks[index] for index in wanted):
            if not block.taps:
                raise BadInput(
                    f"block {block.index} ({block.path}): no module takes or returns its output, or both the stream "
                    "and the branch that it adds, so it cannot be read. Define other blocks with blocks='...'"
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
            raise BadInput(f"block {block.index} ({block.path}) did not run as it did on the example")
        if len(tensors) == 1:
            outputs[block.index] = tensors[0]
        else:
            alpha, beta = weights.get(block.last, (1.0, 1.0))
            outputs[block.index] = scaled(tensors[0], alpha) + scaled(tensors[1], beta)


def _keep(kept: dict[Tap, Tensor], tap: Tap) -> Any:
    """A hook that keeps the tensor of a tap: that of the given call of the module, or the last."""
    calls = itertools.count()

    def hook(module: nn.Module, *trees: object) -> None:
        if tap.call is not None and next(calls) != tap.call:
            return
        tree = trees[-1] if tap.side == "output" else trees
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if tap.place >= len(tensors):
            raise BadInput(
                f"{tap.path} ({type(module).__name__}): its {tap.side} has fewer tensors than on the example"
            )
        kept[tap] = tensors[tap.place].clone() if tap.written else tensors[tap.place]

    return hook
