"""Running models and comparing their outputs, gradients and attributes."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tests.zoo.families import Family, Inputs, Poison
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from unskip.errors import UnskipWarning


def call(model: nn.Module, inputs: Inputs, **more: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs, **more)
    return model(*inputs, **more) if isinstance(inputs, tuple) else model(inputs, **more)


def floats(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def run(model: nn.Module, inputs: Inputs, seed: int = 3, **more: Any) -> list[Tensor]:
    """The outputs of a model with seeded randomness. Inputs are copied, because a model may overwrite them."""
    torch.manual_seed(seed)
    return floats(call(model, tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, inputs), **more))


def gradients(model: nn.Module, inputs: Inputs, seed: int = 3, **more: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs, and the gradients of all parameters that have one, for a loss that depends on all outputs."""
    model.zero_grad(set_to_none=True)
    outputs = run(model, inputs, seed, **more)
    sum((out * torch.linspace(-1, 2, out.numel()).view(out.shape).cos()).sum() for out in outputs).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return [out.detach() for out in outputs], found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    return len(a) == len(b) > 0 and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative difference of a tensor in norm."""
    assert len(got) == len(wanted) > 0
    pairs = [(g.detach().double(), w.detach().double()) for g, w in zip(got, wanted, strict=True)]
    assert all(torch.isfinite(w).all() and w.norm() > 0 for _, w in pairs)
    return max(float((g - w).norm() / w.norm()) for g, w in pairs)


def gradient_difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest RMS difference of a parameter's gradient, relative to the RMS of all gradient elements.

    A missing gradient is zero: a projection on a cut stream has none, while 0 * stream would give zeros.
    """
    assert got.keys() <= wanted.keys()
    scale = torch.cat([w.flatten() for w in wanted.values()]).square().mean().sqrt()
    assert scale > 0
    return max(float((got.get(n, 0.0) - wanted[n]).square().mean().sqrt() / scale) for n in wanted)


@contextlib.contextmanager
def expected_warnings(family: Family) -> Iterator[None]:
    """Allows the warnings for cuts with drop path and of projected shortcuts; other warnings are errors."""
    with warnings.catch_warnings():
        if family.drop_path:
            warnings.filterwarnings("ignore", ".*drop path is on", UnskipWarning)
        if any(site.projected for site in family.sites):
            warnings.filterwarnings("ignore", ".*cutting a projected shortcut", UnskipWarning)
        yield


Snapshot = dict[str, tuple[type, dict[str, object]]]


def snapshot(model: nn.Module) -> Snapshot:
    """The class and attributes of each module, with the entries of its containers."""
    return {path: (type(module), _flat(vars(module))) for path, module in model.named_modules(remove_duplicate=False)}


def _flat(attributes: dict[str, object]) -> dict[str, object]:
    flat = dict(attributes)
    for name, value in attributes.items():
        if isinstance(value, dict):
            flat |= {f"{name}[{key!r}]": item for key, item in value.items()}
        elif isinstance(value, set):
            flat[f"{name}: elements"] = tuple(sorted(map(str, value)))
    return flat


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """The differences of two snapshots: attributes must be the same objects."""
    found = [f"module {path}" for path in before.keys() ^ after.keys()]
    for path in before.keys() & after.keys():
        (old, was), (new, now) = before[path], after[path]
        found += [f"{path}: class"] if old is not new else []
        found += [f"{path}.{name}" for name in was.keys() ^ now.keys()]
        shared = was.keys() & now.keys()
        found += [f"{path}.{n}" for n in shared if was[n] is not now[n] and not _equal(was[n], now[n])]
    return sorted(found)


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and isinstance(a, bool | int | float | str | tuple) and a == b


class Additions(TorchDispatchMode):
    """Counts operators that add two tensors of equal shape, and fused operators that may contain such an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        tensors = [a for a in args[:2] if isinstance(a, Tensor) and a.is_floating_point()]
        if name == "add" and len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
            self.count["add"] += 1
        elif name in ("addcmul", "lerp", "sub", "baddbmm", "cat", "stack"):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def additions(model: nn.Module, inputs: Inputs) -> Counter[str]:
    with Additions() as counter:
        run(model, inputs)
    return counter.count


@contextlib.contextmanager
def poisoned(model: nn.Module, poison: Poison) -> Iterator[None]:
    """Writes NaN into the stream at one place, and replaces NaN by numbers at the inputs of branches."""
    handles = []

    def write_nan(tree: Any) -> Any:
        """Replaces the first tensor, the stream; masks, positions and memories are kept."""
        first = floats(tree)[0]
        return tree_map(lambda v: torch.full_like(v, torch.nan) if v is first else v, tree)

    def replace_nan(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(_without_nan, (args, kwargs))

    module = model.get_submodule(poison.path)
    if poison.at == "input":
        handles.append(
            module.register_forward_pre_hook(lambda module, args, kwargs: write_nan((args, kwargs)), with_kwargs=True)
        )
    else:
        handles.append(module.register_forward_hook(lambda module, args, output: write_nan(output)))
    readers = [
        m for path, m in model.named_modules() if any(f".{path}".endswith(f".{name}") for name in poison.readers)
    ]
    assert readers
    handles += [reader.register_forward_pre_hook(replace_nan, with_kwargs=True) for reader in readers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_nan(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.where(value.isnan(), torch.linspace(-1, 1, value.numel()).view(value.shape).sin(), value)


@contextlib.contextmanager
def checkpointed(model: nn.Module, family: Family) -> Iterator[None]:
    """Turns on gradient checkpointing in the blocks."""
    if isinstance(family.checkpoint, str):
        getattr(model, family.checkpoint)()
        yield
        return
    modules = [model.get_submodule(path) for path in family.checkpoint]
    for module in modules:
        vars(module)["forward"] = _recomputed(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return wrapper


@contextlib.contextmanager
def recorded_outputs(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Records path and output dtypes of each module, in execution order."""
    seen: list[tuple[str, str]] = []

    def watch(path: str) -> Callable[..., None]:
        return lambda module, args, output: seen.append((path, ", ".join(str(t.dtype) for t in floats(output))))

    handles = [module.register_forward_hook(watch(path)) for path, module in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
