"""Keys, queries and values of any attention, from what it reads and from views on its weights (`unskip.parts`).

Heads are side by side, so the layout of the attention does not matter; a norm of queries and keys is not applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from unskip.anatomy import AttentionParts, Block, ParallelParts, parts
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """How one attention is read: the modules whose input it takes, nearest to its weights first, and its weights."""

    modules: tuple[nn.Module, ...]
    attention: AttentionParts

    @contextmanager
    def kept(self) -> Iterator[dict[int, Tensor]]:
        """While it is open, what the attention reads is kept by the place of the module that was called with it."""
        inputs: dict[int, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(_keep(inputs, place), with_kwargs=True)
            for place, module in enumerate(self.modules)
        ]
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()

    def read(self, inputs: dict[int, Tensor]) -> Tensor:
        """(images, tokens, dim): what was kept nearest to the weights."""
        if not inputs:
            raise BadInput(f"{self.attention.site.name}: what its keys are made of is not seen; take what='tokens'")
        return inputs[min(inputs)]


def project(attention: AttentionParts, what: str, x: Tensor) -> Tensor:
    """(images, tokens, heads, head_dim): queries, keys or values of what an attention reads (images, tokens, dim)."""
    weight, bias = {
        "queries": (attention.q, attention.q_bias),
        "keys": (attention.k, attention.k_bias),
        "values": (attention.v, attention.v_bias),
    }[what]
    out: Tensor = F.linear(x.to(weight.dtype), weight.flatten(0, 1), None if bias is None else bias.flatten())
    split: Tensor = out.unflatten(2, weight.shape[:2])
    return split


def attention_inputs(
    model: nn.Module, example: Tensor, blocks: Sequence[Block], wanted: Sequence[int]
) -> dict[int, AttentionInput]:
    """For each wanted block its attention. Raises BadInput where a block has none that can be viewed."""
    every = parts(model, example)
    inputs: dict[int, AttentionInput] = {}
    for index in wanted:
        reason = "no attention in it"
        for place in blocks[index].sites:
            part = every[place]
            attention = part.attention if isinstance(part, ParallelParts) else part
            if isinstance(attention, AttentionParts) and not attention.cross:
                inputs[index] = AttentionInput(_owners(model, attention), attention)
            elif place in every.reasons:
                reason = every.reasons[place]
        if index not in inputs:
            raise BadInput(f"{blocks[index].path}: it has no keys ({reason}); take what='tokens'")
    return inputs


def _owners(model: nn.Module, attention: AttentionParts) -> tuple[nn.Module, ...]:
    """The module that holds the weights of the keys, whose input is what the attention reads, and the one around it.

    Some take a layer's weight and never call the layer (timm's BEiT and EVA); what is around it is called.
    """
    storage = attention.k.untyped_storage().data_ptr()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.untyped_storage().data_ptr() == storage and parameter.ndim > 1:
                around = model.get_submodule(name.rpartition(".")[0])
                return (module, around) if isinstance(module, nn.Linear) else (module,)
    raise BadInput(f"{attention.site.name}: the weights of its keys belong to no module of the model")


def _keep(inputs: dict[int, Tensor], place: int) -> Any:
    """A hook that keeps what an attention reads."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        if not values:
            return
        inputs[place] = values[min(1, len(values) - 1)] if isinstance(module, nn.MultiheadAttention) else values[0]

    return hook
