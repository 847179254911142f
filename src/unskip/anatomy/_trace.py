"""One forward pass as a graph: which operator made each tensor, from what, in which module and at which line.

The graph is recorded below autograd by a dispatch mode, so it sees what really ran: control flow, keyword arguments,
functions of other libraries. Nothing is hooked or changed; the model's tensors stay alive while the trace does, because
tensors are known by identity.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from unskip._modes import quiet
from unskip.anatomy import _ops
from unskip.anatomy._example import Example
from unskip.anatomy._graph import Call, Crossing, Graph, Node, Ref, Step

MODULE_CALL = nn.Module._call_impl.__code__  # the frame around every forward
# Frames of the machinery between a Python expression and its dispatch.
_MACHINERY = (
    "torch/_compile.py",
    "torch/_dynamo/",
    "torch/utils/_python_dispatch.py",
    "torch/_ops.py",
    "unskip/anatomy/_trace.py",
)


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and nested tensors have none
        return None


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _rms(tensor: Tensor) -> float | None:
    if tensor.device.type == "meta" or not tensor.numel():
        return None
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    norm = float(torch.linalg.vector_norm(values.detach(), dtype=torch.float64))
    return norm / math.sqrt(tensor.numel())


# Sums to compute otherwise, by the node they would be: left and right operand -> result.
Weigh = Mapping[int, Callable[[Tensor, Tensor], Tensor]]


class Recorder(TorchDispatchMode):
    """Records every operator that runs while it is active into `graph`.

    With `keep` the graph can be computed again: it holds every tensor and how it was made. `weigh` names additions that
    are computed as weighted sums, as in a rewired model.
    """

    supports_higher_order_operators = True  # such as flex attention: one opaque node each

    def __init__(self, model: nn.Module, example: object, keep: bool = False, weigh: Weigh | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._keep = keep
        self._weigh = weigh or {}
        self._node: dict[int, int] = {}  # id of a tensor -> its node
        self._alive: list[Tensor] = []  # so that no id is used twice
        self._written: dict[int, int] = {}  # storage -> node of the last in-place write to it
        self._calls: Counter[int] = Counter()  # of each module, by its id
        self._views: dict[object, int] = {}  # rearrangement of a node -> its node, so that taking it twice is one node
        for tensor in [*model.parameters(), *model.buffers()]:
            self._leaf(tensor, "weight", fixed=True)
        for tensor in _tensors(example):
            self._leaf(tensor, "input", fixed=False)

    def _leaf(self, tensor: Tensor, op: str, fixed: bool) -> int:
        if id(tensor) not in self._node:
            node = self.graph.add(op, fixed=fixed, shape=tuple(tensor.shape), floating=_floating(tensor))
            self._remember(tensor, node)
        return self._node[id(tensor)]

    def cross(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """A forward hook of the modules: notes which nodes went in and came out."""
        call = self._calls[id(module)]
        self._calls[id(module)] += 1
        for side, tree in (("input", (args, kwargs)), ("output", output)):
            for place, tensor in enumerate(t for t in _tensors(tree) if t.is_floating_point()):
                if id(tensor) in self._node:
                    self.graph.crossings.setdefault(self._node[id(tensor)], []).append(
                        Crossing(module, side, place, call)  # type: ignore[arg-type]
                    )

    def _remember(self, tensor: Tensor, node: Node) -> None:
        self._node[id(tensor)] = node.index
        self._alive.append(tensor)
        if self._keep:
            self.graph.values.setdefault(node.index, tensor)

    def _lookup(self, tensor: Tensor) -> int:
        """The node that holds the tensor's present value, in-place writes through other views included."""
        index = self._leaf(tensor, "constant", fixed=True)
        storage = _storage(tensor) if self._written else None
        written = self._written.get(storage, -1) if storage is not None else -1
        if written <= index:
            return index
        whole = self.graph.nodes[written].shape
        same = torch.Size(whole).numel() == tensor.numel()  # a write through another view of the same elements
        parents = (written, index) if same else (index, written)
        fixed = all(self.graph.nodes[p].fixed for p in parents)
        node = self.graph.add(
            "alias" if same else "overwrite",
            parents,
            fixed=fixed,
            shape=tuple(tensor.shape),
            floating=_floating(tensor),
        )
        self._remember(tensor, node)
        return node.index

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("out"), Tensor):
            return self._into(func, args, **kwargs)
        name = _name(func, args)
        parents = tuple(self._lookup(tensor) for tensor in _tensors((args, kwargs)))
        ratio = self._ratio(name, args)
        written = [
            tensor
            for argument, value in zip(_arguments(func), args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        if self._keep:
            self._save(written)
        weigh = self._weigh.get(len(self.graph.nodes))
        if weigh is None:
            out = func(*args, **kwargs)
        else:
            out = weigh(args[0], args[1])
            out = args[0].copy_(out) if written else out
        facts: dict[str, Any] = {"owners": self._owners()}
        if self._keep:
            facts["step"] = self._step(weigh or func, args, {} if weigh else kwargs)
        if len(parents) >= 2 and (name in _ops.ADD or name in _ops.FUSED or name in _ops.STACK):
            facts.update(calls=tuple(calls(names=True)), plain=kwargs.get("alpha", 1) == 1, ratio=ratio)
        elif name in _ops.SCALE:
            facts["factor"] = self._factor(name, args, parents)
        for position, tensor in enumerate([*written, *(t for t in _tensors(out) if not any(t is w for w in written))]):
            if self._keep:
                facts["step"] = replace(facts["step"], output=position)
            before = self._node.get(id(tensor)) if any(tensor is w for w in written) else None
            self._record(tensor, name, parents, {**facts, "wrote": before}, view=_view_key(name, args, kwargs))
            storage = _storage(tensor)
            if before is not None and storage is not None:
                self._written[storage] = self._node[id(tensor)]
        return out

    def _into(self, func: Any, args: tuple[Any, ...], out: Tensor, **kwargs: Any) -> Tensor:
        """torch.add(x, y, out=z) as what it comes to: a sum, and a copy of it into z."""
        with self:
            made = func._overloadpacket(*args, **kwargs)
            if made.shape != out.shape:
                out.resize_(made.shape)
            return out.copy_(made)

    def _record(
        self, tensor: Tensor, name: str, parents: tuple[int, ...], facts: dict[str, Any], view: str | None
    ) -> None:
        nodes = self.graph.nodes
        key = (view, parents, tuple(tensor.shape), tensor.storage_offset()) if view is not None else None
        if key is not None and key in self._views:
            self._remember(tensor, nodes[self._views[key]])
            return
        floating = _floating(tensor)
        parents = parents[1:] if name == "copy" else parents  # nothing is left of what it writes over
        fixed = all(nodes[p].fixed for p in parents)
        if name in _ops.FRESH:
            parents, fixed = (), True
        elif not floating:
            parents = ()  # nothing differentiable passes an integer: indices and masks are not streams
        node = self.graph.add(name, parents, fixed=fixed, shape=tuple(tensor.shape), floating=floating, **facts)
        self._remember(tensor, node)
        if key is not None:
            self._views[key] = node.index

    def _save(self, written: list[Tensor]) -> None:
        """What an in-place operator is about to write over, in every view of it."""
        storages = {_storage(tensor) for tensor in written}
        for index, value in self.graph.values.items() if storages else ():
            if _storage(value) in storages:
                self.graph.values[index] = value.clone()

    def _step(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        def refer(value: Any) -> Any:
            return Ref(self._lookup(value)) if isinstance(value, Tensor) else value

        args, kwargs = tree_map(refer, (args, kwargs))
        refs = tuple(leaf.index for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Ref))
        return Step(func, args, kwargs, 0, refs)

    def _factor(self, name: str, args: tuple[Any, ...], parents: tuple[int, ...]) -> float | None:
        """What a product multiplies its moving operand by, where that does not depend on the input."""
        fixed = [value for value in args[:2] if not isinstance(value, Tensor)]
        moving = [index for index in parents if not self.graph.nodes[index].fixed]
        if not fixed and len(moving) == 1:
            fixed = [t for t, index in zip(_tensors(args), parents, strict=False) if index not in moving]
        if len(fixed) != 1 or len(moving) != 1 or (name == "div" and fixed[0] is args[0]):
            return None
        value = fixed[0]
        if isinstance(value, Tensor):
            known = value.is_floating_point() and value.numel() and value.device.type != "meta"
            number = float(value.detach().double().mean()) if known else math.nan
        else:
            number = float(value) if isinstance(value, int | float) else math.nan
        number = 1 / number if name == "div" and number else number
        return number if math.isfinite(number) else None

    @staticmethod
    def _ratio(name: str, args: tuple[Any, ...]) -> float | None:
        if name not in _ops.ADD or len(args) < 2 or not all(isinstance(a, Tensor) for a in args[:2]):
            return None
        if args[0].shape != args[1].shape or not (_floating(args[0]) and _floating(args[1])):
            return None
        left, right = _rms(args[0]), _rms(args[1])
        if left is None or right is None:
            return None
        return right / left if left else float("inf")

    @staticmethod
    def _owners() -> tuple[nn.Module, ...]:
        owners = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is MODULE_CALL:
                owners.append(frame.f_locals["self"])
            frame = frame.f_back
        return tuple(owners)


def _arguments(func: Any) -> list[Any]:
    """What an operator's schema says of its arguments. An attention that takes functions has none, and writes into
    nothing; what others of its kind do inside cannot be seen.
    """
    if hasattr(func, "_schema"):
        return list(func._schema.arguments)
    if _ops.is_attention(func.name()):
        return []
    raise NotImplementedError(f"torch's {func.name()} runs functions that cannot be looked into")


def _name(func: Any, args: tuple[Any, ...]) -> str:
    """The operator's base name. Adding the number 0, with which `sum` begins, is the identity; index_put may add; a
    power is told by its exponent.
    """
    name = _ops.base_name(func)
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor):
        return _ops.POWERS.get(args[1], name)
    if name == "index_put" and len(args) > 3 and args[3]:
        return "index_add"
    return "alias" if name in _ops.ADD and len(args) > 1 and isinstance(args[1], int) and args[1] == 0 else name


def _view_key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name not in _ops.VIEW:
        return None
    return f"{name} {[a for a in (*args, *kwargs.items()) if not isinstance(a, Tensor)]}"


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def calls(names: bool = False) -> Iterator[Call]:
    """The Python frames around the operator that is being dispatched, innermost first.

    With `names`, those of the innermost module's call hold the modules and whole numbers among their variables.
    """
    caller = sys._getframe(1)
    machinery = (*_MACHINERY, caller.f_code.co_filename.replace("\\", "/"))
    frame: FrameType | None = caller
    inside = True
    while frame is not None:
        filename = frame.f_code.co_filename.replace("\\", "/")
        inside = inside and any(part in filename for part in machinery)
        names = names and frame.f_code is not MODULE_CALL
        if not inside:
            held = frame.f_locals.items() if names else ()
            yield Call(frame, frame.f_lasti, {name: v for name, v in held if isinstance(v, nn.Module | int)})
        frame = frame.f_back


def record(model: nn.Module, example: Example, training: bool, keep: bool = False, weigh: Weigh | None = None) -> Graph:
    """Runs the model on the example once and returns the graph of what happened."""
    example = example.copy()
    recorder = Recorder(model, example.values, keep, weigh)
    with contextlib.ExitStack() as hooks, quiet(model, training), recorder:
        for module in model.modules() if keep else ():
            hooks.enter_context(module.register_forward_hook(recorder.cross, with_kwargs=True))
        example.run(model)
    return recorder.graph
