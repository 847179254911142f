"""Reads the arguments of timm.create_model from a model that it built.

Each reader returns the value of an argument, or None if the model does not show it. An argument is recorded if it
differs from that of the model built by the name alone. The caller checks that name and arguments build the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def arguments(model: nn.Module, default: nn.Module) -> dict[str, Any]:
    """The arguments in which a model differs from `default`, the one built by its name alone."""
    differing = {}
    for name, read in _READERS.items():
        values = []
        for built in (model, default):
            try:
                values.append(read(built))
            except (AttributeError, IndexError, KeyError, StopIteration, TypeError):
                values.append(None)  # a model without this attribute
        if values[0] != values[1] and values[0] is not None:
            differing[name] = values[0]
    return differing


def _side(value: Any) -> Any:
    """A pair of equal sizes as one number."""
    pair = list(value)
    return pair[0] if len(set(pair)) == 1 else pair


def _drops(model: nn.Module) -> Iterator[float]:
    yield 0.0
    for module in model.modules():
        rate = getattr(module, "drop_prob", None)
        if isinstance(rate, float):
            yield rate


def _pooling(model: Any) -> Any:
    pool = getattr(model, "global_pool", None)
    pool = model.head.global_pool if pool is None else pool  # "" is no pooling
    return pool if isinstance(pool, str) else getattr(pool, "pool_type", None)


def _first_block(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "attn") and hasattr(module, "mlp"))


def _layer_scale(model: Any) -> Any:
    scale = _first_block(model).ls1
    return None if isinstance(scale, nn.Identity) else getattr(scale, "init_values", 1e-5)


_READERS: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda model: model.num_classes,
    "in_chans": lambda model: next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels,
    "img_size": lambda model: _side(model.patch_embed.img_size),
    "patch_size": lambda model: _side(model.patch_embed.patch_size),
    "global_pool": _pooling,
    "drop_rate": lambda model: model.head_drop.p if hasattr(model, "head_drop") else model.drop_rate,
    "drop_path_rate": lambda model: float(f"{max(_drops(model)):.6g}"),  # of the last block, without float32 rounding
    "pos_drop_rate": lambda model: model.pos_drop.p,
    "proj_drop_rate": lambda model: _first_block(model).attn.proj_drop.p,
    "attn_drop_rate": lambda model: _first_block(model).attn.attn_drop.p,
    "class_token": lambda model: model.has_class_token,
    "reg_tokens": lambda model: model.num_reg_tokens,
    "dynamic_img_size": lambda model: model.dynamic_img_size,
    "embed_dim": lambda model: model.embed_dim,
    "depth": lambda model: len(model.blocks),
    "num_heads": lambda model: _first_block(model).attn.num_heads,
    "mlp_ratio": lambda model: _first_block(model).mlp.fc1.out_features / _first_block(model).mlp.fc1.in_features,
    "qkv_bias": lambda model: _first_block(model).attn.qkv.bias is not None,
    "qk_norm": lambda model: not isinstance(_first_block(model).attn.q_norm, nn.Identity),
    "proj_bias": lambda model: _first_block(model).attn.proj.bias is not None,
    "no_embed_class": lambda model: model.no_embed_class,
    "patch_drop_rate": lambda model: getattr(model.patch_drop, "prob", 0.0),
    "init_values": _layer_scale,
}
