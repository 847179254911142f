"""The role, learning rate and weight decay of every parameter, as a table.

A role depends on the module of a parameter and on the position of that module, never on a list of names:

    hidden     a weight matrix of a Linear, convolution or attention between the input and the head
    input      such a weight before the blocks: a patch embedding
    head       such a weight after the blocks: a classifier
    embedding  the weight of an nn.Embedding
    token      parameters of the model itself outside the blocks: position embeddings, class and mask tokens
    vector     biases, norms, scales, learned shortcut weights: everything with one axis

The blocks are the repeated units of the model: the children of a list of modules of one class. Only hidden, input and
head weights decay; or, with decays="blocks", only the weights and biases of the blocks, not norms, patch embedding and
head. A bias that cancels the mean of a layer's output (`unskip.init.skipless_` with `centre`) has to decay with its
weight, or the rest is added to every token. With layer-wise decay a parameter at depth i of D has the learning rate
lr * decay^(D - i).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from unskip._checks import choice
from unskip._extras import need
from unskip._table import table
from unskip.anatomy import unwrapped
from unskip.errors import BadInput

Role = Literal["hidden", "input", "head", "embedding", "token", "vector"]
Decays = Literal["matrices", "blocks"]  # all weight matrices, or only weights and biases of the blocks
MATRICES = ("hidden", "input", "head")  # the roles that decay
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Assigned:
    """One parameter: its role and its settings. `lr` multiplies the optimizer's learning rate."""

    name: str
    param: Tensor
    role: Role
    decays: bool
    depth: int
    lr: float = 1.0
    blocks: int = 1  # separate matrices in its rows: 3 for a split qkv, one for each expert of a mixture
    tied: tuple[str, ...] = ()  # other names of the same parameter


class Groups(Sequence[Assigned]):
    """Every trainable parameter of a model, once. Prints as a table."""

    def __init__(self, rows: Sequence[Assigned], frozen: Sequence[str]) -> None:
        self._rows, self.frozen = tuple(rows), tuple(frozen)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Assigned]:
        return iter(self._rows)

    def __str__(self) -> str:
        header = ["parameter", "shape", "role", "decay", "lr", "note"]
        rows = []
        for row in self:
            notes = [f"{row.blocks} matrices"] if row.blocks > 1 else []
            notes += [f"also {', '.join(row.tied)}"] if row.tied else []
            shape = "x".join(map(str, row.param.shape)) or "scalar"
            rows.append([row.name, shape, row.role, "yes" if row.decays else "no", row.lr, "; ".join(notes)])
        lines = [table(header, rows)]
        if self.frozen:
            lines.append(f"frozen, excluded: {', '.join(self.frozen)}")
        return "\n".join(lines)


def groups(
    model: nn.Module, *, layer_decay: float | None = None, split_qkv: bool = False, decays: Decays = "matrices"
) -> Groups:
    """The role, decay and learning-rate factor of every trainable parameter; tied ones count once."""
    choice("groups", "decays", decays, get_args(Decays))
    model = unwrapped(model)
    names: dict[Tensor, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor, []).append(name)
    first, last = _span(model)
    head = _head_paths(model)
    undecayed = _undecayed(model)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    rows, frozen = [], []
    depths = _depths(model, [aliases[0] for aliases in names.values()])
    deepest = max(depths.values(), default=0)
    if layer_decay not in (None, 1) and len(set(depths.values())) == 1:
        raise BadInput(
            f"{type(model).__name__}: layer_decay is {layer_decay}, but no repeated blocks were found (a list of "
            "modules of one class), so every parameter would have the same rate; drop layer_decay"
        )
    if decays == "blocks" and first < 0:
        raise BadInput(f"{type(model).__name__}: decays is 'blocks', but no repeated blocks were found; drop it")
    for param, (name, *others) in names.items():
        if not param.requires_grad:
            frozen.append(name)
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        role = _role(module, leaf, param, path, order[path], (first, last), head)
        if any(isinstance(model.get_submodule(other.rpartition(".")[0]), EMBEDDINGS) for other in others):
            role = "embedding"  # tied to an embedding, whichever comes first
        if name in undecayed and role not in ("vector", "embedding"):
            role = "token"
        depth = depths[name]
        factor = 1.0 if layer_decay is None else layer_decay ** (deepest - depth)
        decay = role in MATRICES
        if decays == "blocks":
            inside = first <= order[path] <= last
            decay = inside and (role == "hidden" or (role == "vector" and _is_bias(module, leaf)))
        row = Assigned(name, param, role, decay, depth, factor, tied=tuple(others))
        if split_qkv and role == "hidden" and _is_qkv(model, path, leaf, param):
            row = replace(row, blocks=3)
        elif role == "hidden" and param.ndim == 3 and min(param.shape) > 1 and not _is_weight(module, leaf):
            row = replace(row, blocks=param.shape[0])  # for example the experts of a mixture
        rows.append(row)
    if not rows:
        raise BadInput(f"{type(model).__name__}: no parameter requires a gradient, so there is nothing to optimize")
    return Groups(rows, frozen)


def _role(
    module: nn.Module, leaf: str, param: Tensor, path: str, position: int, span: tuple[int, int], head: set[str]
) -> Role:
    if sum(size > 1 for size in param.shape) < 2 and not _is_weight(module, leaf):
        return "token" if param.ndim > 1 and not span[0] <= position <= span[1] else "vector"
    if param.ndim < 2:
        return "vector"
    if isinstance(module, EMBEDDINGS):
        return "embedding"
    inside = span[0] <= position <= span[1]
    if not _is_weight(module, leaf) and (not inside or (param.ndim > 2 and param.shape[0] == 1)):
        return "token"
    if path in head:
        return "head"
    if inside or span[1] < 0:
        return "hidden"
    return "input" if position < span[0] else "head"


def _is_weight(module: nn.Module, leaf: str) -> bool:
    """Whether a parameter is the weight matrix of a linear, convolution or attention layer."""
    layers = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
    attention = isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj_weight")
    conv1d = type(module).__name__ == "Conv1D" and leaf == "weight"  # of transformers, a linear layer
    return (isinstance(module, layers) and leaf == "weight") or attention or conv1d


def _is_bias(module: nn.Module, leaf: str) -> bool:
    """Whether a vector is the bias of a layer other than a norm, whose weight is a vector."""
    weight = getattr(module, "weight", None)
    return leaf.endswith("bias") and not (isinstance(weight, Tensor) and weight.ndim < 2)


def _span(model: nn.Module) -> tuple[int, int]:
    """Indices, in module order, of the first and last module inside repeated units; (-1, -1) without any."""
    order = list(model.named_modules())
    inside = set()
    for path, module in order:
        children = list(module.children())
        listed = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        # Units of one class with submodules; a list of plain layers is not a list of blocks.
        if listed and len(children) > 1 and len({type(c) for c in children}) == 1 and any(children[0].children()):
            prefix = f"{path}." if path else ""
            inside |= {i for i, (other, _) in enumerate(order) if other == path or other.startswith(prefix)} - {0}
    return (min(inside), max(inside)) if inside else (-1, -1)


def _head_paths(model: nn.Module) -> set[str]:
    """Paths of the classifier, if the model has a method that returns it."""
    heads: set[int] = set()
    for method in ("get_classifier", "get_output_embeddings"):
        getter = getattr(model, method, None)
        result = getter() if callable(getter) else None
        for module in result if isinstance(result, tuple | list) else [result]:
            if isinstance(module, nn.Module):
                heads |= {id(inner) for inner in module.modules()}
    return {path for path, module in model.named_modules() if id(module) in heads}


def _undecayed(model: nn.Module) -> set[str]:
    """Parameters that the model excludes from weight decay (timm's convention)."""
    method = getattr(model, "no_weight_decay", None)
    keywords = getattr(model, "no_weight_decay_keywords", None)
    names = set(method()) if callable(method) else set()
    keys = tuple(keywords()) if callable(keywords) else ()
    return {name for name, _ in model.named_parameters() if name in names or any(key in name for key in keys)}


def _depths(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """The depth of each parameter: 0 for the input, then one more per block, and the head last."""
    matcher = getattr(model, "group_matcher", None)
    if callable(matcher):
        layers = need("timm.models").group_parameters(model, matcher(coarse=False), reverse=True)
        if len(set(layers.values())) > 1:  # some matchers match no module of the model (levit)
            return {name: int(layers.get(name, 0)) for name in names}
    first, last = _span(model)
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    numbers = {name: _number(name) for name in names}
    inside = {name for name in names if first <= order[name.rpartition(".")[0]] <= last and numbers[name] is not None}
    deepest = max((numbers[name] or 0 for name in inside), default=-1)

    def depth(name: str) -> int:
        if name in inside:
            return (numbers[name] or 0) + 1
        before = first < 0 or order[name.rpartition(".")[0]] < first
        return 0 if before else deepest + 2

    return {name: depth(name) for name in names}


def _number(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _is_qkv(model: nn.Module, path: str, leaf: str, param: Tensor) -> bool:
    """Whether a parameter is a fused qkv: three square blocks, next to or in an attention module."""
    if param.ndim != 2 or param.shape[0] != 3 * param.shape[1]:
        return False
    module = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(module, nn.MultiheadAttention):
        return leaf == "in_proj_weight"
    siblings = [child for child in parent.children() if isinstance(child, nn.Linear)]
    # Its sibling is the output projection, d x d; in an MLP of ratio 3 the sibling of 3d x d is d x 3d.
    return any(tuple(other.weight.shape) == (param.shape[1], param.shape[1]) for other in siblings)
