"""Keys, queries and values of any attention, computed from its input and views on its weights (`unskip.parts`).

This does not depend on the layout of the attention. A norm of queries and keys is not applied.
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
    """The weights of one attention, and the modules whose input is the attention's input, innermost first."""

    modules: tuple[nn.Module, ...]
    attention: AttentionParts

    @contextmanager
    def kept(self) -> Iterator[dict[int, Tensor]]:
        """Within this context, the attention's input is kept by the index of the module that was called with it."""
        inputs: dict[int, Tensor] = {}
        handles = [
            module.register_forward_pre_hook(_keep(inputs, index), with_kwargs=True)
            for index, module in enumerate(self.modules)
        ]
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()

    def read(self, inputs: dict[int, Tensor]) -> Tensor:
        """(images, tokens, dim): the input kept for the innermost module."""
        if not inputs:
            raise BadInput(f"{self.attention.site.name}: cannot observe its attention's input; use what='tokens'")
        return inputs[min(inputs)]


def project(attention: AttentionParts, what: str, x: Tensor) -> Tensor:
    """Queries, keys or values (images, tokens, heads, head_dim) of an attention's input (images, tokens, dim)."""
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
    """The attention of each wanted block. Raises BadInput if a block has no attention with viewable weights."""
    every = parts(model, example)
    inputs: dict[int, AttentionInput] = {}
    for index in wanted:
        reason = "no attention"
        for site in blocks[index].sites:
            part = every[site]
            attention = part.attention if isinstance(part, ParallelParts) else part
            if isinstance(attention, AttentionParts) and not attention.cross:
                inputs[index] = AttentionInput(_owners(model, attention), attention)
            elif site in every.reasons:
                reason = every.reasons[site]
        if index not in inputs:
            raise BadInput(f"{blocks[index].path}: cannot compute its keys ({reason}); use what='tokens'")
    return inputs


def _owners(model: nn.Module, attention: AttentionParts) -> tuple[nn.Module, ...]:
    """The module with the key weights, and for a linear layer its parent too.

    timm's BEiT and EVA use the layer's weight without calling the layer; then only the parent is called.
    """
    storage = attention.k.untyped_storage().data_ptr()
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if parameter.untyped_storage().data_ptr() == storage and parameter.ndim > 1:
                parent = model.get_submodule(name.rpartition(".")[0])
                return (module, parent) if isinstance(module, nn.Linear) else (module,)
    raise BadInput(f"{attention.site.name}: no module of the model has its key weights")


def _keep(inputs: dict[int, Tensor], index: int) -> Any:
    """A hook that keeps the input of an attention."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        values = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        if not values:
            return
        # nn.MultiheadAttention is called with (query, key, value).
        inputs[index] = values[min(1, len(values) - 1)] if isinstance(module, nn.MultiheadAttention) else values[0]

    return hook
