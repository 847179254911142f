"""Reference implementation of rewired models.

For each class with a residual addition there is a handwritten copy of its forward in which the addition is a * x + b *
f. `weighted` runs a model with these forwards in place of the original ones. Nothing here uses unskip, neither its
detection nor its arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from tests.zoo import handmade
from tests.zoo.families import Family
from torch import Tensor, nn
from torch.nn import functional

Weights = Sequence[tuple[float, float]]  # (alpha, beta) of each site

REFERENCES: dict[str, Callable[..., Tensor]] = {}  # qualified name of a class -> its weighted forward


@contextlib.contextmanager
def weighted(model: nn.Module, family: Family, weights: Weights) -> Iterator[None]:
    """A context in which the model has weighted residuals. `weights` are in the order of `family.sites`."""
    assert len(weights) == len(family.sites)
    each: dict[str, list[tuple[float, float]]] = {}
    for site, weight in zip(family.sites, weights, strict=True):
        each.setdefault(site.path, []).append(weight)
    modules = [model.get_submodule(path) for path in each]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # torch.nn's fused inference kernels would not call the forwards
        for module, mine in zip(modules, each.values(), strict=True):
            vars(module)["forward"] = MethodType(_with(REFERENCES[_name(module)], mine), module)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in modules:
            vars(module).pop("forward", None)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _with(reference: Callable[..., Tensor], weights: Weights) -> Callable[..., Tensor]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return reference(self, weights, *args, **kwargs)

    return forward


def reference(*names: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        REFERENCES.update(dict.fromkeys(names, function))
        return function

    return register


# --- timm -------------------------------------------------------------------------------------------------------------


@reference("timm.models.vision_transformer.Block")
def block(self: Any, weights: Weights, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
    return a2 * x + b2 * self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@reference("timm.models.eva.EvaBlock")
def eva_block(
    self: Any, weights: Weights, x: Tensor, rope: Any = None, attn_mask: Any = None, is_causal: bool = False
) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f = self.attn(self.norm1(x), rope=rope, attn_mask=attn_mask, is_causal=is_causal)
    if self.gamma_1 is not None:
        f = self.gamma_1 * f
    x = a1 * x + b1 * self.drop_path1(f)
    f = self.mlp(self.norm2(x))
    if self.gamma_2 is not None:
        f = self.gamma_2 * f
    return a2 * x + b2 * self.drop_path2(f)


@reference("timm.models.vision_transformer.ParallelScalingBlock")
def parallel_scaling_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    batch, count, width = x.shape
    hidden, q, k, v = torch.split(self.in_proj(self.in_norm(x)), self.in_split, dim=-1)
    if self.mlp_bias is not None:
        hidden = hidden + self.mlp_bias
    q, k, v = (y.view(batch, count, self.num_heads, self.head_dim).transpose(1, 2) for y in (q, k, v))
    dropout = self.attn_drop.p if self.training else 0.0
    attended = functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, dropout_p=dropout)
    attended = attended.transpose(1, 2).reshape(batch, count, width)
    hidden = self.mlp_drop(self.mlp_act(hidden))
    f = self.attn_out_proj(attended) + self.mlp_out_proj(hidden)
    return a * x + b * self.drop_path(self.ls(f))


@reference("timm.models.vision_transformer.ParallelThingsBlock")
def parallel_things_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * torch.stack([branch(x) for branch in self.attns]).sum(dim=0)
    return a2 * x + b2 * torch.stack([branch(x) for branch in self.ffns]).sum(dim=0)


# --- torch.nn ---------------------------------------------------------------------------------------------------------


@reference("torch.nn.modules.transformer.TransformerEncoderLayer")
def encoder_layer(
    self: Any,
    weights: Weights,
    x: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    (a1, b1), (a2, b2) = weights

    def attend(y: Tensor) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        return self.dropout1(self.self_attn(y, y, y, need_weights=False, **masks)[0])

    def feed(y: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(y)))))

    if self.norm_first:
        x = a1 * x + b1 * attend(self.norm1(x))
        return a2 * x + b2 * feed(self.norm2(x))
    x = self.norm1(a1 * x + b1 * attend(x))
    return self.norm2(a2 * x + b2 * feed(x))


@reference("torch.nn.modules.transformer.TransformerDecoderLayer")
def decoder_layer(self: Any, weights: Weights, x: Tensor, memory: Tensor, **masks: Any) -> Tensor:
    assert not any(value is not None and value is not False for value in masks.values())
    (a1, b1), (a2, b2), (a3, b3) = weights

    def attend(y: Tensor) -> Tensor:
        return self.dropout1(self.self_attn(y, y, y, need_weights=False)[0])

    def cross(y: Tensor) -> Tensor:
        return self.dropout2(self.multihead_attn(y, memory, memory, need_weights=False)[0])

    def feed(y: Tensor) -> Tensor:
        return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(y)))))

    if self.norm_first:
        x = a1 * x + b1 * attend(self.norm1(x))
        x = a2 * x + b2 * cross(self.norm2(x))
        return a3 * x + b3 * feed(self.norm3(x))
    x = self.norm1(a1 * x + b1 * attend(x))
    x = self.norm2(a2 * x + b2 * cross(x))
    return self.norm3(a3 * x + b3 * feed(x))


# --- transformers and torchvision -------------------------------------------------------------------------------------


@reference("transformers.models.vit.modeling_vit.ViTLayer")
def vit_layer(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.attention(self.layernorm_before(x), attention_mask, **kwargs)
    x = a1 * x + b1 * self.dropout(f)
    return a2 * x + b2 * self.dropout(self.mlp(self.layernorm_after(x)))


@reference("transformers.models.bert.modeling_bert.BertSelfOutput", "transformers.models.bert.modeling_bert.BertOutput")
def bert_output(self: Any, weights: Weights, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    [(a, b)] = weights
    return self.LayerNorm(a * input_tensor + b * self.dropout(self.dense(hidden_states)))


@reference("transformers.models.gpt2.modeling_gpt2.GPT2Block")
def gpt2_block(
    self: Any,
    weights: Weights,
    x: Tensor,
    past_key_values: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    use_cache: bool | None = False,
    **kwargs: Any,
) -> Tensor:
    assert encoder_hidden_states is None
    (a1, b1), (a2, b2) = weights
    mask = {"past_key_values": past_key_values, "attention_mask": attention_mask, "use_cache": use_cache}
    f, _ = self.attn(self.ln_1(x), **mask, **kwargs)
    x = a1 * x + b1 * f
    return a2 * x + b2 * self.mlp(self.ln_2(x))


@reference("transformers.models.llama.modeling_llama.LlamaDecoderLayer")
def llama_layer(self: Any, weights: Weights, x: Tensor, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)
    x = a1 * x + b1 * f
    return a2 * x + b2 * self.mlp(self.post_attention_layernorm(x))


@reference("transformers.models.albert.modeling_albert.AlbertAttention")
def albert_attention(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    assert attention_mask is None
    [(a, b)] = weights
    shape = (*x.shape[:-1], -1, self.attention_head_size)
    q, k, v = (linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value))
    dropout = self.attention_dropout.p if self.training else 0.0
    attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    f = self.dense(attended.transpose(1, 2).reshape(x.shape))
    return self.LayerNorm(a * x + b * self.output_dropout(f)), None


@reference("transformers.models.albert.modeling_albert.AlbertLayer")
def albert_layer(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
    [(a, b)] = weights
    x, _ = self.attention(x, attention_mask, **kwargs)
    return self.full_layer_layer_norm(a * x + b * self.ffn_output(self.activation(self.ffn(x))))


@reference("torchvision.models.vision_transformer.EncoderBlock")
def encoder_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    y = self.ln_1(x)
    f, _ = self.self_attention(y, y, y, need_weights=False)
    x = a1 * x + b1 * self.dropout(f)
    return a2 * x + b2 * self.mlp(self.ln_2(x))


# --- Handwritten models -----------------------------------------------------------------------------------------------


def _hand(*classes: type[nn.Module]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    return reference(*(f"{cls.__module__}.{cls.__qualname__}" for cls in classes))


@_hand(handmade.ControlFlow)
def control_flow(self: Any, weights: Weights, x: Tensor, attend: bool = True, times: int = 2) -> Tensor:
    (a1, b1), (a2, b2), (a3, b3) = weights
    if attend:
        x = a1 * x + b1 * self.attention(self.norm1(x))
    if times > 0:
        x = a2 * x + b2 * self.mlps[0](self.norm2(x))
    if times > 1:
        x = a3 * x + b3 * self.mlps[1](self.norm2(x))
    return x


@_hand(handmade.Nested)
def nested(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    h = self.up(self.norm(x))
    h = a1 * h + b1 * self.inner(h)
    return a2 * x + b2 * self.down(h)


@_hand(handmade.Plain, handmade.Inherited)
def plain(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.attention(self.norm1(x))
    return a2 * x + b2 * self.mlp(self.norm2(x))


@_hand(handmade.SharedBranch)
def shared_branch(self: Any, weights: Weights, x: Tensor) -> Tensor:
    for a, b in weights:
        x = a * x + b * self.mlp(self.norm(x))
    return x


@_hand(handmade.Spellings)
def spellings(self: Any, weights: Weights, x: Tensor) -> Tensor:
    for (a, b), branch in zip(weights, self.branches, strict=True):
        x = a * x + b * branch(x)
    return x


@_hand(handmade.Helpers)
def helpers(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.attention(self.norm1(x))
    return a2 * x + b2 * functional.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


@_hand(handmade.Decorated)
def decorated(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    return 0.5 * (a * x + b * self.mlp(self.norm(x)))


@_hand(handmade.Mangled)
def mangled(self: Any, weights: Weights, x: Tensor, gain: float = 0.9) -> Tensor:
    [(a, b)] = weights
    return a * x + b * (gain * self.mlp(self.norm(x)))


@_hand(handmade.Decoys)
def decoys(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    x = x + self.position + self.kind.weight[0]
    h = self.norm(x)
    q, k, v = self.qkv(h).chunk(3, dim=-1)
    f = (q @ k.transpose(-2, -1) + self.bias(h)).softmax(dim=-1) @ v
    f = f + 0.1 * f**3
    f = self.up(f) * torch.sigmoid(self.gate(f))
    return a * x + b * (self.left(f) + self.right(f))
