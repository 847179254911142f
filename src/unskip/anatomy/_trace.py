"""Records one forward pass as a graph: the operator, inputs, module and source line of each tensor.

A dispatch mode records below autograd, so the graph contains the operators that ran, whatever the control flow, keyword
arguments and libraries. The model is not changed. The recorder keeps all tensors alive, because it identifies them by
id.
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
# Source files of the frames between a Python expression and its dispatch.
_DISPATCH_FILES = (
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


# Replacements for additions, by the index of their node: (left, right) -> result.
Weigh = Mapping[int, Callable[[Tensor, Tensor], Tensor]]


class Recorder(TorchDispatchMode):
    """Records every operator that runs while it is active into `graph`.

    With `keep` the graph can be replayed: it stores every tensor and the step that computed it. `weigh` replaces
    additions by weighted sums, as in a rewired model.
    """

    supports_higher_order_operators = True  # such as flex attention, recorded as one opaque node

    def __init__(self, model: nn.Module, example: object, keep: bool = False, weigh: Weigh | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = Graph()
        self._keep = keep
        self._weigh = weigh or {}
        self._node: dict[int, int] = {}  # id of a tensor -> its node
        self._alive: list[Tensor] = []  # keeps ids unique
        self._written: dict[int, int] = {}  # storage -> node of the last in-place write to it
        self._calls: Counter[int] = Counter()  # id of a module -> number of calls
        self._views: dict[object, int] = {}  # view of a node -> its node, so that the same view taken twice is one node
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
        """A forward hook for all modules: records the nodes of their inputs and outputs."""
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
        """The node of the tensor's current value, including in-place writes through other views."""
        index = self._leaf(tensor, "constant", fixed=True)
        storage = _storage(tensor) if self._written else None
        written = self._written.get(storage, -1) if storage is not None else -1
        if written <= index:
            return index
        same = torch.Size(self.graph.nodes[written].shape).numel() == tensor.numel()  # another view of all elements
        op, parents = ("alias", (written, index)) if same else ("overwrite", (index, written))
        fixed = all(self.graph.nodes[p].fixed for p in parents)
        node = self.graph.add(op, parents, fixed=fixed, shape=tuple(tensor.shape), floating=_floating(tensor))
        self._remember(tensor, node)
        return node.index

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("out"), Tensor):
            return self._into(func, args, **kwargs)
        name = _ops.op_name(func, args)
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
        """Records torch.add(x, y, out=z) as a sum and a copy of it into z."""
        with self:
            result = func._overloadpacket(*args, **kwargs)
            if result.shape != out.shape:
                out.resize_(result.shape)
            return out.copy_(result)

    def _record(
        self, tensor: Tensor, name: str, parents: tuple[int, ...], facts: dict[str, Any], view: str | None
    ) -> None:
        nodes = self.graph.nodes
        key = (view, parents, tuple(tensor.shape), tensor.storage_offset()) if view is not None else None
        if key is not None and key in self._views:
            self._remember(tensor, nodes[self._views[key]])
            return
        floating = _floating(tensor)
        parents = parents[1:] if name == "copy" else parents  # copy overwrites its first argument entirely
        fixed = all(nodes[p].fixed for p in parents)
        if name in _ops.FRESH:
            parents, fixed = (), True
        elif not floating:
            parents = ()  # integers, such as indices and masks, are not differentiable, so not streams
        node = self.graph.add(name, parents, fixed=fixed, shape=tuple(tensor.shape), floating=floating, **facts)
        self._remember(tensor, node)
        if key is not None:
            self._views[key] = node.index

    def _save(self, written: list[Tensor]) -> None:
        """Clones recorded values that an in-place operator is about to overwrite, through whatever view."""
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
        """The factor of a product with one operand that depends on the input and one that does not, as a number."""
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
    """The arguments in an operator's schema. Higher-order operators have no schema; flex attention writes in place to
    none of its arguments, the others cannot be traced.
    """
    if hasattr(func, "_schema"):
        return list(func._schema.arguments)
    if _ops.is_attention(func.name()):
        return []
    raise NotImplementedError(f"torch's {func.name()} runs functions that cannot be traced")


def _view_key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name not in _ops.VIEW:
        return None
    return f"{name} {[a for a in (*args, *kwargs.items()) if not isinstance(a, Tensor)]}"


def _floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def calls(names: bool = False) -> Iterator[Call]:
    """The Python frames around the operator that is being dispatched, innermost first.

    With `names`, the frames of the innermost module's call get their variables that are modules or integers.
    """
    caller = sys._getframe(1)
    dispatch_files = (*_DISPATCH_FILES, caller.f_code.co_filename.replace("\\", "/"))
    frame: FrameType | None = caller
    in_dispatch = True
    while frame is not None:
        filename = frame.f_code.co_filename.replace("\\", "/")
        in_dispatch = in_dispatch and any(part in filename for part in dispatch_files)
        names = names and frame.f_code is not MODULE_CALL
        if not in_dispatch:
            variables = frame.f_locals.items() if names else ()
            yield Call(frame, frame.f_lasti, {name: v for name, v in variables if isinstance(v, nn.Module | int)})
        frame = frame.f_back


def record(model: nn.Module, example: Example, training: bool, keep: bool = False, weigh: Weigh | None = None) -> Graph:
    """Runs the model on the example once and returns the graph of its forward."""
    example = example.copy()
    recorder = Recorder(model, example.values, keep, weigh)
    with contextlib.ExitStack() as hooks, quiet(model, training), recorder:
        for module in model.modules() if keep else ():
            hooks.enter_context(module.register_forward_hook(recorder.cross, with_kwargs=True))
        example.run(model)
    return recorder.graph
