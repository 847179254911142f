"""Further families of image models: convolutional networks, CLIP, and diffusion networks.

As in `more`, each has its expected sites according to the source, and its weighted forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tests.zoo.families import _TEXT, PRE, Expected, Poison, add, generator, ids, image, repeat
from tests.zoo.oracle import Weights, reference
from torch import Tensor, nn
from torch.nn import functional

more = functools.partial(add, core=False)


def _each(paths: list[str], reader: str) -> tuple[Poison, ...]:
    """One Poison for each site, at its own block: modules between blocks would pass NaN on after a cut."""
    return tuple(Poison(path, "input", (f"{path}.{reader}",)) for path in paths)


# --- Convolutional networks -------------------------------------------------------------------------------------------

# A block adds its input only if it keeps width and resolution. The first block of a stage has stride 2, and the block
# of the first stage changes the width.
_MOBILE = ["blocks.1.1", "blocks.1.2", "blocks.2.1"]


@more(
    "timm_mobilenetv2",
    tuple(Expected(path, "conv", "out") for path in _MOBILE),
    lambda batch: image(batch, 64),
    poison=_each(_MOBILE, "conv_pw"),
    checkpoint="set_grad_checkpointing",
)
def timm_mobilenetv2() -> nn.Module:
    """The first stages, with a smooth activation: at the kink of a ReLU, rounding would change gradients."""
    from timm.models._efficientnet_builder import decode_arch_def
    from timm.models.efficientnet import EfficientNet

    blocks = decode_arch_def([["ds_r1_k3_s1_c8"], ["ir_r3_k3_s2_e6_c16"], ["ir_r2_k3_s2_e6_c24"]])
    return EfficientNet(blocks, num_classes=5, num_features=32, stem_size=16, act_layer=nn.SiLU)


@reference("timm.models._efficientnet_blocks.InvertedResidual")
def inverted_residual(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    f = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
    f = self.bn3(self.conv_pwl(self.se(self.aa(f))))
    return a * x + b * self.drop_path(f)


_CONVNEXT = ["features.1.0", "features.1.1", "features.3.0"]


@more(
    "torchvision_convnext",
    tuple(Expected(path, "conv", "inner") for path in _CONVNEXT),
    lambda batch: image(batch, 32),
    poison=Poison("features.1.0", "input", ("block",)),
    checkpoint=tuple(_CONVNEXT),
)
def torchvision_convnext() -> nn.Module:
    """The sum is computed in place, in the branch."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)], layer_scale=0.5, num_classes=5)


@reference("torchvision.models.convnext.CNBlock")
def cn_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    return a * x + b * self.stochastic_depth(self.layer_scale * self.block(x))


@more(
    "torchvision_resnet",
    (
        Expected("layer1.0", "conv", "out"),
        Expected("layer2.0", "conv", "out", projected=True),
        Expected("layer2.1", "conv", "out"),
        Expected("layer3.0", "conv", "out", projected=True),
        Expected("layer4.0", "conv", "out", projected=True),
    ),
    lambda batch: image(batch, 64),
    poison=Poison("layer1.0", "input", ("conv1",)),
    checkpoint=("layer1.0", "layer2.0", "layer2.1", "layer3.0", "layer4.0"),
)
def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 2, 1, 1], num_classes=5)


@reference("torchvision.models.resnet.BasicBlock")
def basic_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    [(a, b)] = weights
    f = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    stream = x if self.downsample is None else self.downsample(x)
    return self.relu(a * stream + b * f)


# --- Transformers -----------------------------------------------------------------------------------------------------

_SWIN = [f"features.{stage}.{block}" for stage in (1, 3) for block in range(2)]


@more(
    "torchvision_swin",
    tuple(Expected(path, *site) for path in _SWIN for site in PRE),
    lambda batch: image(batch, 32),
    poison=Poison("features.1.0", "input", ("norm1", "norm2")),
    checkpoint=tuple(_SWIN),
    drop_path=True,
)
def torchvision_swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, 2]}
    return SwinTransformer(**sizes, stochastic_depth_prob=0.5, num_classes=5)


@reference("torchvision.models.swin_transformer.SwinTransformerBlock")
def swin_block(self: Any, weights: Weights, x: Tensor) -> Tensor:
    (a1, b1), (a2, b2) = weights
    x = a1 * x + b1 * self.stochastic_depth(self.attn(self.norm1(x)))
    return a2 * x + b2 * self.stochastic_depth(self.mlp(self.norm2(x)))


@more(
    "hf_clip",
    (*repeat("vision_model.encoder.layers.{}", *PRE), *repeat("text_model.encoder.layers.{}", *PRE)),
    lambda batch: {"input_ids": ids(batch), "pixel_values": image(batch)},
    poison=tuple(
        Poison(f"{tower}.encoder.layers.0", "input", ("layer_norm1", "layer_norm2"))
        for tower in ("vision_model", "text_model")
        for _ in range(4)
    ),
    checkpoint="gradient_checkpointing_enable",
)
def hf_clip() -> nn.Module:
    """The image tower runs first."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {
        key: _TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    tokens = {"vocab_size": 32, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=sizes | tokens, vision_config=sizes | vision, projection_dim=16))


@reference("transformers.models.clip.modeling_clip.CLIPEncoderLayer")
def clip_layer(self: Any, weights: Weights, x: Tensor, attention_mask: Any, **kwargs: Any) -> Tensor:
    (a1, b1), (a2, b2) = weights
    f, _ = self.self_attn(hidden_states=self.layer_norm1(x), attention_mask=attention_mask, **kwargs)
    x = a1 * x + b1 * f
    return a2 * x + b2 * self.mlp(self.layer_norm2(x))


# --- Diffusion --------------------------------------------------------------------------------------------------------

# In execution order: kind, path, and whether the block changes the width, so that its stream has a convolution.
# In the upsampling half each block reads the previous output concatenated with a stored one.
_UNET = [
    ("conv", "down_blocks.0.resnets.0", False),
    ("conv", "down_blocks.1.resnets.0", True),
    ("attention", "down_blocks.1.attentions.0", False),
    ("conv", "mid_block.resnets.0", False),
    ("attention", "mid_block.attentions.0", False),
    ("conv", "mid_block.resnets.1", False),
    ("conv", "up_blocks.0.resnets.0", True),
    ("attention", "up_blocks.0.attentions.0", False),
    ("conv", "up_blocks.0.resnets.1", True),
    ("attention", "up_blocks.0.attentions.1", False),
    ("conv", "up_blocks.1.resnets.0", True),
    ("conv", "up_blocks.1.resnets.1", True),
]


@more(
    "diffusers_unet",
    tuple(Expected(path, kind, "pre", projected=projected) for kind, path, projected in _UNET),
    lambda batch: {
        "sample": torch.randn(batch, 3, 16, 16, generator=generator()),
        "timestep": torch.arange(1, batch + 1),
    },
    poison=tuple(
        Poison(path, "input", (f"{path}.{'norm1' if kind == 'conv' else 'group_norm'}",)) for kind, path, _ in _UNET
    ),
    checkpoint="enable_gradient_checkpointing",
)
def diffusers_unet() -> nn.Module:
    """Its long skips are concatenations, so they are not sites."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


@reference("diffusers.models.resnet.ResnetBlock2D")
def resnet_block(self: Any, weights: Weights, x: Tensor, temb: Tensor) -> Tensor:
    assert self.upsample is None
    assert self.downsample is None
    [(a, b)] = weights
    f = self.conv1(self.nonlinearity(self.norm1(x)))
    f = f + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
    f = self.conv2(self.dropout(self.nonlinearity(self.norm2(f))))
    stream = x if self.conv_shortcut is None else self.conv_shortcut(x)
    return (a * stream + b * f) / self.output_scale_factor


@reference("diffusers.models.attention_processor.Attention")
def unet_attention(self: Any, weights: Weights, x: Tensor, temb: Tensor | None = None) -> Tensor:
    """The addition is in an attention processor, which is not a module."""
    [(a, b)] = weights
    tokens = self.group_norm(x.flatten(2)).transpose(1, 2)
    q, k, v = (
        linear(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.to_q, self.to_k, self.to_v)
    )
    f = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    f = self.to_out[1](self.to_out[0](f)).transpose(1, 2).reshape(x.shape)
    return (a * x + b * f) / self.rescale_output_factor


@more(
    "diffusers_flux",
    (*repeat("transformer_blocks.0", *PRE), Expected("single_transformer_blocks.0", "parallel", "pre")),
    lambda batch: {
        "hidden_states": torch.randn(batch, 4, 4, generator=generator()),
        "encoder_hidden_states": torch.randn(batch, 3, 16, generator=generator()),
        "pooled_projections": torch.randn(batch, 16, generator=generator()),
        "timestep": torch.linspace(0.2, 0.8, batch),
        "img_ids": torch.arange(12).view(4, 3) % 5,
        "txt_ids": torch.zeros(3, 3),
    },
    poison=(
        *[Poison("transformer_blocks.0", "input", ("norm1", "norm2"))] * 2,
        *[Poison("context_embedder", "output", ("norm1_context", "norm2_context"))] * 2,
        Poison("single_transformer_blocks.0", "input", ("single_transformer_blocks.0.norm",)),
    ),
    checkpoint="enable_gradient_checkpointing",
)
def diffusers_flux() -> nn.Module:
    """A block with separate streams for image and text, image first; then a block on their concatenation."""
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    inputs = {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)}
    return FluxTransformer2DModel(**sizes, **inputs, num_attention_heads=2)


@reference("diffusers.models.transformers.transformer_flux.FluxTransformerBlock")
def flux_block(
    self: Any,
    weights: Weights,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> Any:
    assert not joint_attention_kwargs
    (a1, b1), (a2, b2), (a3, b3), (a4, b4) = weights
    x, c = hidden_states, encoder_hidden_states
    y, gate, shift, scale, gate2 = self.norm1(x, emb=temb)
    z, c_gate, c_shift, c_scale, c_gate2 = self.norm1_context(c, emb=temb)
    f, g = self.attn(hidden_states=y, encoder_hidden_states=z, image_rotary_emb=image_rotary_emb)
    x = a1 * x + b1 * (gate.unsqueeze(1) * f)
    x = a2 * x + b2 * (gate2.unsqueeze(1) * self.ff(self.norm2(x) * (1 + scale[:, None]) + shift[:, None]))
    c = a3 * c + b3 * (c_gate.unsqueeze(1) * g)
    y = self.norm2_context(c) * (1 + c_scale[:, None]) + c_shift[:, None]
    return a4 * c + b4 * (c_gate2.unsqueeze(1) * self.ff_context(y)), x


@reference("diffusers.models.transformers.transformer_flux.FluxSingleTransformerBlock")
def flux_single_block(
    self: Any,
    weights: Weights,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Any = None,
    joint_attention_kwargs: Any = None,
) -> Any:
    assert not joint_attention_kwargs
    [(a, b)] = weights
    x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    y, gate = self.norm(x, emb=temb)
    attended = self.attn(hidden_states=y, image_rotary_emb=image_rotary_emb)
    f = self.proj_out(torch.cat([attended, self.act_mlp(self.proj_mlp(y))], dim=2))
    x = a * x + b * (gate.unsqueeze(1) * f)
    count = encoder_hidden_states.shape[1]
    return x[:, :count], x[:, count:]
