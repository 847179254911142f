"""Further families, each with its expected sites according to the source, and its weighted forward.

Importing this module registers them, and those of `more_images`. They run only in the full tests.
"""

from __future__ import annotations

import functools
from typing import Any

import tests.zoo.more_images  # noqa: F401
import torch
from tests.zoo.families import _TEXT, _VIT, POST, PRE, Expected, Poison, add, generator, ids, image, repeat
from tests.zoo.oracle import REFERENCES, Weights, reference
from torch import Tensor, nn

more = functools.partial(add, core=False)

# --- timm -------------------------------------------------------------------------------------------------------------

_timm = functools.partial(more, inputs=image, checkpoint="set_grad_checkpointing")
_PRE_READERS = Poison("blocks.0", "input", ("norm1", "norm2"))


@_timm(
    "timm_respost",
    repeat("blocks.{}", ("attention", "out"), ("mlp", "out")),
    poison=Poison("blocks.0", "input", ("attn", "mlp")),
)
def timm_respost() -> nn.Module:
    from timm.models.vision_transformer import ResPostBlock, VisionTransformer

    return VisionTransformer(**_VIT, block_fn=ResPostBlock, proj_drop_rate=0.1)


@reference("timm.models.vision_transformer.ResPostBlock")
def respost_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path1(self.norm1(self.attn(x)))
    return a2 * x + b2 * self.drop_path2(self.norm2(self.mlp(x)))


@_timm(
    "timm_diff_parallel",
    repeat("blocks.{}", ("parallel", "pre")),
    poison=Poison("blocks.0", "input", ("in_norm",)),
    oracle=False,
)
def timm_diff_parallel() -> nn.Module:
    from timm.models.vision_transformer import DiffParallelScalingBlock, VisionTransformer

    return VisionTransformer(**_VIT, block_fn=DiffParallelScalingBlock, proj_drop_rate=0.1)


@_timm("timm_beit", repeat("blocks.{}", *PRE), poison=_PRE_READERS)
def timm_beit() -> nn.Module:
    from timm.models.beit import Beit

    return Beit(**_VIT, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1, proj_drop_rate=0.1)


@reference("timm.models.beit.Block")
def beit_block(self: Any, weights: Weights, x: Tensor, shared_rel_pos_bias: Any = None) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path1(self.gamma_1 * self.attn(self.norm1(x), shared_rel_pos_bias=shared_rel_pos_bias))
    return a2 * x + b2 * self.drop_path2(self.gamma_2 * self.mlp(self.norm2(x)))


_SWIN = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4, "num_classes": 5}


def _stages(path: str, *sites: tuple[str, str]) -> tuple[Expected, ...]:
    return tuple(Expected(path.format(s, b), kind, norm) for s in range(2) for b in range(2) for kind, norm in sites)


@_timm(
    "timm_swin",
    _stages("layers.{}.blocks.{}", *PRE),
    inputs=lambda batch: image(batch, 32),
    poison=Poison("layers.0.blocks.0", "input", ("norm1", "norm2")),
)
def timm_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(**_SWIN, drop_path_rate=0.0)


@reference("timm.models.swin_transformer.SwinTransformerBlock")
def swin_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path1(self._attn(self.norm1(x)))
    return a2 * x + b2 * self.drop_path2(self.mlp(self.norm2(x)))


@_timm(
    "timm_swinv2",
    _stages("layers.{}.blocks.{}", ("attention", "out"), ("mlp", "out")),
    inputs=lambda batch: image(batch, 32),
    poison=Poison("layers.0.blocks.0", "input", ("attn", "mlp")),
)
def timm_swinv2() -> nn.Module:
    from timm.models.swin_transformer_v2 import SwinTransformerV2

    return SwinTransformerV2(**_SWIN, drop_path_rate=0.0)


@reference("timm.models.swin_transformer_v2.SwinTransformerV2Block")
def swinv2_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path1(self.norm1(self._attn(x)))
    return a2 * x + b2 * self.drop_path2(self.norm2(self.mlp(x)))


@_timm(
    "timm_convnext",
    repeat("stages.{}.blocks.0", ("conv", "inner"), count=4),
    inputs=lambda batch: image(batch, 32),
    poison=Poison("stages.0.blocks.0", "input", ("conv_dw",)),
)
def timm_convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5, ls_init_value=0.1)


@reference("timm.models.convnext.ConvNeXtBlock")
def convnext_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    f = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return a * x + b * self.drop_path(f * self.gamma.reshape(1, -1, 1, 1))


@_timm(
    "timm_resnet",
    tuple(Expected(f"layer{s}.{b}", "conv", "out", projected=s > 1 and b == 0) for s in range(1, 5) for b in range(2)),
    inputs=lambda batch: image(batch, 64),
    poison=Poison("layer1.0", "input", ("conv1",)),
)
def timm_resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (2, 2, 2, 2), channels=(64, 8, 16, 16), num_classes=5)


@reference("timm.models.resnet.BasicBlock")
def basic_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    f = self.bn2(self.conv2(self.aa(self.act1(self.drop_block(self.bn1(self.conv1(x)))))))
    stream = x if self.downsample is None else self.downsample(x)
    return self.act2(a * stream + b * f)


@_timm("timm_mixer", repeat("blocks.{}", ("mlp", "pre"), ("mlp", "pre")), poison=_PRE_READERS)
def timm_mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=16, patch_size=8, num_blocks=2, embed_dim=16, num_classes=5, proj_drop_rate=0.1)


@reference("timm.models.mlp_mixer.MixerBlock")
def mixer_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.drop_path(self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2))
    return a2 * x + b2 * self.drop_path(self.mlp_channels(self.norm2(x)))


# --- transformers -----------------------------------------------------------------------------------------------------

_hf = functools.partial(more, checkpoint="gradient_checkpointing_enable")
_text = functools.partial(_hf, inputs=lambda batch: {"input_ids": ids(batch)})


@_hf(
    "hf_dinov2",
    repeat("encoder.layer.{}", *PRE),
    lambda batch: {"pixel_values": image(batch)},
    poison=Poison("encoder.layer.0", "input", ("norm1", "norm2")),
    drop_path=True,
)
def hf_dinov2() -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    sizes = {key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return Dinov2Model(
        Dinov2Config(**sizes, mlp_ratio=2, image_size=16, patch_size=8, drop_path_rate=0.5, use_swiglu_ffn=True)
    )


@reference("transformers.models.dinov2.modeling_dinov2.Dinov2Layer")
def dinov2_layer(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.attention(self.norm1(x), attention_mask=attention_mask, **kwargs)
    x = a1 * x + b1 * self.drop_path(self.layer_scale1(f))
    return a2 * x + b2 * self.drop_path(self.layer_scale2(self.mlp(self.norm2(x))))


_T5_ENCODER = tuple(
    Expected(f"encoder.block.{i}.layer.{j}", k, "pre") for i in range(2) for j, k in enumerate(("attention", "mlp"))
)
_T5_DECODER = tuple(
    Expected(f"decoder.block.{i}.layer.{j}", k, "pre")
    for i in range(2)
    for j, k in enumerate(("attention", "attention", "mlp"))
)


@_hf(
    "hf_t5",
    (*_T5_ENCODER, *_T5_DECODER),
    lambda batch: {"input_ids": ids(batch), "decoder_input_ids": ids(batch, length=5)},
    poison=(
        *[Poison("encoder.block.0", "input", ("layer_norm",))] * 4,
        *[Poison("decoder.block.0", "input", ("layer_norm",))] * 6,
    ),
)
def hf_t5() -> nn.Module:
    from transformers import T5Config, T5Model

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5Model(T5Config(**sizes, use_cache=False))


@reference("transformers.models.t5.modeling_t5.T5LayerSelfAttention")
def t5_attention(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    [(a, b)] = weights
    f, *rest = self.SelfAttention(self.layer_norm(x), mask=attention_mask, **kwargs)
    return a * x + b * self.dropout(f), *rest


@reference("transformers.models.t5.modeling_t5.T5LayerCrossAttention")
def t5_cross_attention(self: Any, weights: Weights, x: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
    [(a, b)] = weights
    f, *rest = self.EncDecAttention(self.layer_norm(x), mask=attention_mask, **kwargs)
    return a * x + b * self.dropout(f), *rest


@reference("transformers.models.t5.modeling_t5.T5LayerFF")
def t5_mlp(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    return a * x + b * self.dropout(self.DenseReluDense(self.layer_norm(x)))


@_text(
    "hf_bloom",  # the additions are in a function, dropout_add
    tuple(
        Expected(f"h.{i}.{path}", kind, "pre")
        for i in range(2)
        for path, kind in (("self_attention", "attention"), ("mlp", "mlp"))
    ),
    poison=Poison("h.0", "input", ("input_layernorm", "post_attention_layernorm")),
)
def hf_bloom() -> nn.Module:
    from transformers import BloomConfig, BloomModel

    return BloomModel(
        BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1, use_cache=False)
    )


@reference("transformers.models.bloom.modeling_bloom.BloomAttention")
def bloom_attention(self: Any, weights: Weights, x: Tensor, residual: Tensor, *args: Any, **kwargs: Any) -> Any:
    [(a, b)] = weights
    f, *rest = type(self).forward(self, x, torch.zeros_like(residual), *args, **kwargs)
    return a * residual + b * f, *rest


@reference("transformers.models.bloom.modeling_bloom.BloomMLP")
def bloom_mlp(self: Any, weights: Weights, x: Tensor, residual: Tensor) -> Tensor:
    [(a, b)] = weights
    f = self.dense_4h_to_h(self.gelu_impl(self.dense_h_to_4h(x)))
    return a * residual + b * torch.dropout(f, self.hidden_dropout, self.training)


@_text(
    "hf_gemma2",
    repeat("layers.{}", ("attention", "sandwich"), ("mlp", "sandwich")),
    poison=Poison("layers.0", "input", ("input_layernorm", "pre_feedforward_layernorm")),
)
def hf_gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2Model

    sizes = _TEXT | {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
    return Gemma2Model(Gemma2Config(**sizes, use_cache=False))


@reference("transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer")
def gemma2_layer(self: Any, weights: Weights, x: Tensor, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)
    x = a1 * x + b1 * self.post_attention_layernorm(f)
    return a2 * x + b2 * self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


@_text("hf_cohere", repeat("layers.{}", ("parallel", "pre")), poison=Poison("layers.0", "input", ("input_layernorm",)))
def hf_cohere() -> nn.Module:
    """x + attention + mlp: two additions, one site."""
    from transformers import CohereConfig, CohereModel

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CohereModel(CohereConfig(**_TEXT, **tokens, use_cache=False))


@reference("transformers.models.cohere.modeling_cohere.CohereDecoderLayer")
def cohere_layer(self: Any, weights: Weights, x: Tensor, **kwargs: Any) -> Tensor:
    [(a, b)] = weights
    y = self.input_layernorm(x)
    f, _ = self.self_attn(hidden_states=y, **kwargs)
    return a * x + b * (f + self.mlp(y))


@_text(
    "hf_gpt_neox",
    repeat("layers.{}", ("parallel", "pre")),
    poison=Poison("layers.0", "input", ("input_layernorm", "post_attention_layernorm")),
)
def hf_gpt_neox() -> nn.Module:
    """mlp + attention + x: the first addition is not a residual."""
    from transformers import GPTNeoXConfig, GPTNeoXModel

    return GPTNeoXModel(GPTNeoXConfig(**_TEXT, hidden_dropout=0.1, use_cache=False))


@reference("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXLayer")
def gpt_neox_layer(self: Any, weights: Weights, x: Tensor, **kwargs: Any) -> Tensor:
    [(a, b)] = weights
    f, _ = self.attention(self.input_layernorm(x), **kwargs)
    f = self.post_attention_dropout(f)
    return a * x + b * (self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(x))) + f)


@_text(
    "hf_modernbert",
    # In the first layer the norm before attention is the identity.
    (Expected("layers.0", "attention", "none"), *repeat("layers.{}", *PRE)[1:]),
    poison=Poison("layers.0", "input", ("attn_norm", "mlp_norm")),
)
def hf_modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertModel

    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertModel(ModernBertConfig(**_TEXT, **tokens, mlp_dropout=0.1))


@reference("transformers.models.modernbert.modeling_modernbert.ModernBertEncoderLayer")
def modernbert_layer(self: Any, weights: Weights, x: Tensor, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.attn(self.attn_norm(x), **kwargs)
    x = a1 * x + b1 * f
    return a2 * x + b2 * self.mlp(self.mlp_norm(x))


@_text(
    "hf_roberta",
    tuple(
        Expected(f"encoder.layer.{i}.{path}", *site)
        for i in range(2)
        for path, site in zip(("attention.output", "output"), POST, strict=True)
    ),
    poison=Poison("encoder.layer.0", "input", ("attention.self", "intermediate")),
)
def hf_roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaModel

    return RobertaModel(RobertaConfig(**_TEXT))


for _name in ("RobertaSelfOutput", "RobertaOutput"):  # equal to those of BERT
    REFERENCES[f"transformers.models.roberta.modeling_roberta.{_name}"] = REFERENCES[
        "transformers.models.bert.modeling_bert.BertOutput"
    ]

# --- diffusers --------------------------------------------------------------------------------------------------------


@more(
    "diffusers_dit",
    repeat("transformer_blocks.{}", *PRE),
    lambda batch: {
        "hidden_states": torch.randn(batch, 4, 8, 8, generator=generator()),
        "timestep": torch.arange(1, batch + 1),
        "class_labels": torch.arange(batch),
    },
    poison=Poison("transformer_blocks.0", "input", ("norm1", "norm3")),
    checkpoint="enable_gradient_checkpointing",
)
def diffusers_dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    return DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10, norm_num_groups=4, dropout=0.1)


@reference("diffusers.models.attention.BasicTransformerBlock")
def dit_block(
    self: Any, weights: Weights, x: Tensor, timestep: Any = None, class_labels: Any = None, **kwargs: Any
) -> Tensor:
    (a1, b1), (a2, b2) = weights
    y, gate, shift, scale, gate2 = self.norm1(x, timestep, class_labels, hidden_dtype=x.dtype)
    x = a1 * x + b1 * (gate.unsqueeze(1) * self.attn1(y))
    y = self.norm3(x) * (1 + scale[:, None]) + shift[:, None]
    return a2 * x + b2 * (gate2.unsqueeze(1) * self.ff(y))
