"""Inputs inferred for models of transformers and diffusers: every tower of the model runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import unskip
from unskip.anatomy._example import example_for

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
SOUND = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

    towers = {"vision_config": CLIPVisionConfig(**VISION), "text_config": LlamaConfig(**TEXT)}
    return LlavaModel(LlavaConfig(**towers, image_token_index=60, vision_feature_layer=-1))


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLModel

    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    config = Qwen2VLConfig(text_config=TEXT | rope, vision_config=vision, image_token_id=60, vision_start_token_id=61)
    return Qwen2VLModel(config)


def siglip2() -> nn.Module:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    sizes = {key: value for key, value in VISION.items() if key != "image_size"}
    return Siglip2VisionModel(Siglip2VisionConfig(**sizes, num_patches=9))


def videomae() -> nn.Module:
    from transformers import VideoMAEConfig, VideoMAEModel

    return VideoMAEModel(VideoMAEConfig(**VISION, num_frames=4))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperModel

    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 10}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperModel(WhisperConfig(**sizes, **heads, **tokens, num_mel_bins=12))


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "conv_dim": [8] * 7}
    return Wav2Vec2Model(Wav2Vec2Config(**SOUND, **sizes))


def wav2vec2_bert() -> nn.Module:
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

    return Wav2Vec2BertModel(Wav2Vec2BertConfig(**SOUND, feature_projection_input_dim=20))


def spectrogram_transformer() -> nn.Module:
    from transformers import ASTConfig, ASTModel

    return ASTModel(ASTConfig(**SOUND, max_length=32, num_mel_bins=24, patch_size=8))


def layoutlm() -> nn.Module:
    from transformers import LayoutLMConfig, LayoutLMModel

    return LayoutLMModel(LayoutLMConfig(**{key: TEXT[key] for key in TEXT if "key_value" not in key}))


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    return UNet2DModel(
        sample_size=8, in_channels=4, layers_per_block=1, norm_num_groups=4, add_attention=False, **blocks
    )


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    inputs = {"joint_attention_dim": 12, "pooled_projection_dim": 10, "axes_dims_rope": (4, 4, 8)}
    return FluxTransformer2DModel(**sizes, **inputs, num_attention_heads=2, guidance_embeds=True)


# The shapes that the libraries' processors return, and the modules that add.
CASES: list[tuple[Any, dict[str, tuple[int, ...]], set[str]]] = [
    (llava, {"pixel_values": (2, 3, 16, 16), "input_ids": (2, 12)}, {"vision_tower", "language_model"}),
    (
        qwen2_vl,  # 2 images of 4 x 4 patches, each of 3 channels, 2 frames and 4 x 4 pixels; 4 patches make a token
        {"pixel_values": (32, 96), "image_grid_thw": (2, 3), "input_ids": (2, 12), "mm_token_type_ids": (2, 12)},
        {"visual", "language_model"},
    ),
    (siglip2, {"pixel_values": (2, 9, 192), "pixel_attention_mask": (2, 9), "spatial_shapes": (2, 2)}, set()),
    (videomae, {"pixel_values": (2, 4, 3, 16, 16)}, {"encoder"}),
    (whisper, {"input_features": (2, 12, 20), "decoder_input_ids": (2, 8)}, {"encoder", "decoder"}),
    (wav2vec2, {"input_values": (2, 16000)}, {"encoder"}),
    (wav2vec2_bert, {"input_features": (2, 128, 20)}, {"encoder"}),
    (spectrogram_transformer, {"input_values": (2, 32, 24)}, {"layers"}),
    (layoutlm, {"input_ids": (2, 8), "bbox": (2, 8, 4)}, {"encoder"}),
    (unet, {"sample": (2, 4, 8, 8), "timestep": (2,)}, {"down_blocks", "mid_block", "up_blocks"}),
    (
        flux,
        {
            "hidden_states": (2, 8, 4),
            "encoder_hidden_states": (2, 8, 12),
            "pooled_projections": (2, 10),
            "timestep": (2,),
            "img_ids": (8, 3),
            "txt_ids": (8, 3),
            "guidance": (2,),
        },
        {"transformer_blocks", "single_transformer_blocks"},
    ),
]


@pytest.mark.parametrize(("build", "shapes", "towers"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_tower_gets_its_inputs(build: Any, shapes: dict[str, tuple[int, ...]], towers: set[str]) -> None:
    model = build().eval()
    example = example_for(model)
    assert {name: tuple(value.shape) for name, value in example.kwargs.items()} == shapes
    audit = unskip.audit(model)
    assert {site.path.partition(".")[0] for site in audit} >= towers
    assert not audit.unknown


def test_counting_image_tokens_leaves_the_model_as_it_was() -> None:
    model = llava().train()
    model.vision_tower.eval()
    modes, state = [module.training for module in model.modules()], copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    example = example_for(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (example.kwargs["input_ids"] == 60).sum(1).tolist() == [4, 4]  # one for each patch of 8 x 8 pixels
