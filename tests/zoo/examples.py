"""Example inputs for models of transformers whose inputs are not inferred, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Arguments = dict[str, Any]
EXAMPLES: dict[str, Callable[[Any], Arguments]] = {}
BATCH, TOKENS = 2, 8


def example(*types: str) -> Callable[[Callable[[Any], Arguments]], Callable[[Any], Arguments]]:
    """Registers the decorated function, which returns the arguments of a model, for some types."""

    def register(make: Callable[[Any], Arguments]) -> Callable[[Any], Arguments]:
        EXAMPLES.update(dict.fromkeys(types, make))
        return make

    return register


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def ids(*shape: int, high: int = 90) -> Tensor:
    return torch.randint(4, high, shape or (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def with_image_tokens(model: nn.Module, **images: Any) -> Arguments:
    """One row of text for each image; it starts with one image token for each feature of the image."""
    config: Any = model.config
    with torch.no_grad():
        features = model.get_image_features(**images)  # type: ignore[operator]
    rows = sum(f.shape[:-1].numel() for f in getattr(features, "pooler_output", features)) // BATCH
    token = getattr(config, "image_token_id", None) or config.image_token_index
    return {**images, "input_ids": torch.cat([torch.full((BATCH, rows), token), ids()], dim=1)}


# --- Text -------------------------------------------------------------------------------------------------------------


@example("canine")
def canine(model: Any) -> Arguments:
    return {"input_ids": ids(BATCH, 16)}


@example("embedding_gemma2", "gemma4", "gemma4_unified", "minicpmv4_7", "chameleon")
def text_alone(model: Any) -> Arguments:
    """Only text: the default config has no vision tower, or needs images prepared by a processor."""
    return {"input_ids": ids()}


@example("blt")
def without_cache(model: Any) -> Arguments:
    return {"input_ids": ids(), "use_cache": False}


@example("kyutai_speech_to_text")
def codebooks(model: Any) -> Arguments:
    return {"input_ids": ids(BATCH, TOKENS, 33)}


@example("dia")
def dia(model: Any) -> Arguments:
    return {"input_ids": ids(), "decoder_input_ids": ids(BATCH, TOKENS, 9)}


@example("lxmert")
def lxmert(model: Any) -> Arguments:
    config = model.config
    return {
        "input_ids": ids(),
        "visual_feats": normal(BATCH, 5, config.visual_feat_dim),
        "visual_pos": normal(BATCH, 5, config.visual_pos_dim),
    }


# --- Images -----------------------------------------------------------------------------------------------------------


@example("blip_2_qformer")
def queries(model: Any) -> Arguments:
    config = model.config
    return {
        "query_embeds": normal(BATCH, 5, config.hidden_size),
        "encoder_hidden_states": normal(BATCH, TOKENS, config.encoder_hidden_size),
    }


@example("fuyu")
def fuyu(model: Any) -> Arguments:
    config = model.config
    tokens = torch.cat([torch.full((BATCH, 4), config.image_token_id), ids()], dim=1)
    return {"input_ids": tokens, "pixel_values": normal(BATCH, 4, config.num_channels * config.patch_size**2)}


@example("gemma4_vision")
def gemma4_vision(model: Any) -> Arguments:
    config = model.config
    side = 2 * config.pooling_kernel_size
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1).flatten(0, 1)
    return {
        "pixel_values": torch.rand(BATCH, side**2, 3 * config.patch_size**2),
        "pixel_position_ids": grid.expand(BATCH, -1, -1),
    }


@example("idefics")
def idefics(model: Any) -> Arguments:
    size = model.config.vision_config.image_size
    return {
        "input_ids": ids(),
        "attention_mask": ones(BATCH, TOKENS),
        "pixel_values": normal(BATCH, 1, 3, size, size),
        "image_attention_mask": ones(BATCH, TOKENS, 1),
    }


@example("instructblip", "instructblipvideo")
def instructblip(model: Any) -> Arguments:
    config = model.config
    size, video = config.vision_config.image_size, "video" in config.model_type
    pixels = normal(BATCH, 4, 3, size, size) if video else normal(BATCH, 3, size, size)
    token = config.video_token_index if video else config.image_token_index
    rows = config.num_query_tokens * (4 if video else 1)
    return {
        "pixel_values": pixels,
        "qformer_input_ids": ids(),
        "input_ids": torch.cat([torch.full((BATCH, rows), token), ids()], dim=1),
    }


@example("kimi_k25_vision")
def kimi_vision(model: Any) -> Arguments:
    patch = model.config.patch_size
    return {"pixel_values": normal(2 * 16, 3, patch, patch), "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


@example("kimi_k25")
def kimi(model: Any) -> Arguments:
    patch = model.config.vision_config.patch_size
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    return with_image_tokens(model, pixel_values=normal(2 * 16, 3, patch, patch), image_grid_thw=grid)


@example("kosmos-2")
def kosmos2(model: Any) -> Arguments:
    config = model.config
    mask = torch.zeros(BATCH, config.latent_query_num + TOKENS, dtype=torch.long)
    mask[:, 1 : config.latent_query_num + 1] = 1
    size = config.vision_config.image_size
    return {
        "pixel_values": normal(BATCH, 3, size, size),
        "input_ids": ids(*mask.shape),
        "image_embeds_position_mask": mask,
    }


@example("lightglue", "efficientloftr")
def pairs(model: Any) -> Arguments:
    return {"pixel_values": torch.rand(1, 2, 3, 64, 64, generator=torch.Generator().manual_seed(1))}


@example("llava_next", "llava_next_video", "llava_onevision", "granite4_vision")
def tiles(model: Any) -> Arguments:
    size = model.config.vision_config.image_size
    sizes = torch.tensor([[size, size]] * BATCH)
    return with_image_tokens(model, pixel_values=normal(BATCH, 2, 3, size, size), image_sizes=sizes)


@example("mllama")
def mllama(model: Any) -> Arguments:
    vision = model.config.vision_config
    size, tiles = vision.image_size, vision.max_num_tiles
    return {
        "input_ids": ids(),
        "pixel_values": normal(BATCH, 1, tiles, 3, size, size),
        "aspect_ratio_ids": ones(BATCH, 1),
        "aspect_ratio_mask": ones(BATCH, 1, tiles),
        "cross_attention_mask": ones(BATCH, TOKENS, 1, tiles),
    }


@example("muse_glimmer_vision", "muse_spark_vision")
def muse_vision(model: Any) -> Arguments:
    return {"pixel_values": normal(2 * 16, 384), "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


@example("oneformer")
def oneformer(model: Any) -> Arguments:
    return {"pixel_values": normal(BATCH, 3, 64, 64), "task_inputs": ids(BATCH, model.config.task_seq_len)}


@example("seggpt")
def seggpt(model: Any) -> Arguments:
    height, width = (
        model.config.image_size if isinstance(model.config.image_size, list | tuple) else [model.config.image_size] * 2
    )
    image = (BATCH, 3, height // 2, width)
    return {"pixel_values": normal(*image), "prompt_pixel_values": normal(*image), "prompt_masks": normal(*image)}


@example("video_llama_3_vision")
def video_llama_vision(model: Any) -> Arguments:
    patch = model.config.patch_size
    grid, merge = torch.tensor([[1, 4, 4]] * BATCH), torch.tensor([2] * BATCH)
    return {"pixel_values": normal(2 * 16, 3 * patch**2), "grid_thw": grid, "merge_sizes": merge}


@example("video_llama_3")
def video_llama(model: Any) -> Arguments:
    patch = model.config.vision_config.patch_size
    grid, merge = torch.tensor([[1, 4, 4]] * BATCH), torch.tensor([2] * BATCH)
    pixels = normal(2 * 16, 3 * patch**2)
    return with_image_tokens(model, pixel_values=pixels, image_grid_thw=grid, image_merge_sizes=merge)


@example("paddleocr_vl")
def paddleocr(model: Any) -> Arguments:
    patch = model.config.vision_config.patch_size
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    found = with_image_tokens(model, pixel_values=normal(2 * 16, 3, patch, patch), image_grid_thw=grid)
    return found | {"mm_token_type_ids": found["input_ids"].eq(model.config.image_token_id).long()}


@example("pp_ocrv5_mobile_rec", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec", "pp_ocrv6_small_det", "uvdoc")
def lines_of_text(model: Any) -> Arguments:
    return {"pixel_values": normal(BATCH, 3, 96, 96)}


# --- Sound ------------------------------------------------------------------------------------------------------------


@example("dac", "xcodec", "mimi", "mimi_encoder", "encodec", "pe_audio_encoder")
def waveform(model: Any) -> Arguments:
    return {"input_values": normal(BATCH, 1, 16_000)}


@example("vibevoice", "vibevoice_asr")
def speech_after_text(model: Any) -> Arguments:
    return {"input_ids": ids()}


@example("neucodec", "xcodec2")
def waveform_and_frames(model: Any) -> Arguments:
    frames = normal(BATCH, 50, model.config.semantic_model_config.feature_projection_input_dim)
    return {"input_values": normal(BATCH, 1, 16_000), "input_features": frames}


@example("fastspeech2_conformer_with_hifigan")
def phonemes(model: Any) -> Arguments:
    return {"input_ids": ids(high=70)}


@example("muse_spark_audio")
def waveform_in_frames(model: Any) -> Arguments:
    return {"input_values": normal(BATCH, 9_600)}


@example("clap")
def clap(model: Any) -> Arguments:
    audio = model.config.audio_config
    time = audio.spec_size * audio.spec_size // audio.num_mel_bins
    return {"input_ids": ids(), "input_features": normal(BATCH, 1, time, audio.num_mel_bins)}


@example("clvp")
def clvp(model: Any) -> Arguments:
    return {"input_ids": ids(), "input_features": normal(BATCH, model.config.decoder_config.feature_size, 32)}


@example("gemma3n_audio")
def gemma3n_audio(model: Any) -> Arguments:
    bins = model.config.input_feat_size
    return {"audio_mel": normal(BATCH, 64, bins), "audio_mel_mask": torch.zeros(BATCH, 64, dtype=torch.bool)}


@example("pe_audio")
def waveform_and_text(model: Any) -> Arguments:
    return {"input_values": normal(BATCH, 1, 16_000), "input_ids": ids()}


@example("pe_video_encoder")
def frames(model: Any) -> Arguments:
    return {"pixel_values_videos": normal(BATCH, 4, 3, 28, 28)}


@example("pe_video")
def frames_and_text(model: Any) -> Arguments:
    return {"pixel_values_videos": normal(BATCH, 4, 3, 28, 28), "input_ids": ids()}


@example("pe_audio_video_encoder")
def frames_and_sound(model: Any) -> Arguments:
    return {"pixel_values_videos": normal(BATCH, 4, 3, 28, 28), "input_values": normal(BATCH, 1, 16_000)}


@example("pe_audio_video")
def frames_sound_and_text(model: Any) -> Arguments:
    return frames_and_sound(model) | {"input_ids": ids()}


@example("gemma4_audio")
def gemma4_audio(model: Any) -> Arguments:
    return {"input_features": normal(BATCH, 64, 64), "attention_mask": torch.ones(BATCH, 64, dtype=torch.bool)}


@example("granite_speech5_ctc", "granite_speech5_encoder")
def stacked_frames(model: Any) -> Arguments:
    return {"input_features": normal(BATCH, 64, 320)}


@example("fun_asr_nano_encoder")
def low_frame_rate(model: Any) -> Arguments:
    return {"input_features": normal(BATCH, 32, 560), "input_features_mask": torch.ones(BATCH, 32, dtype=torch.bool)}


@example("qwen2_audio")
def qwen2_audio(model: Any) -> Arguments:
    audio = model.config.audio_config
    frames = 2 * audio.max_source_positions
    rows = (audio.max_source_positions - 2) // 2 + 1
    tokens = torch.cat([torch.full((BATCH, rows), model.config.audio_token_id), ids()], dim=1)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "input_features": normal(BATCH, audio.num_mel_bins, frames),
        "feature_attention_mask": ones(BATCH, frames),
    }


@example("qwen3_asr_encoder")
def qwen3_asr(model: Any) -> Arguments:
    frames = 4 * model.config.n_window
    mask = torch.ones(BATCH, frames, dtype=torch.bool)
    return {"input_features": normal(BATCH, model.config.num_mel_bins, frames), "input_features_mask": mask}


@example("mimi_decoder", "pocket_tts_audio_tokenizer_decoder")
def latents(model: Any) -> Arguments:
    return {"latents": normal(BATCH, model.config.hidden_size, 8)}


@example("speecht5")
def speecht5(model: Any) -> Arguments:
    """The encoder-decoder without the networks that embed and predict speech or text."""
    width = model.config.hidden_size
    return {"input_values": normal(BATCH, TOKENS, width), "decoder_input_values": normal(BATCH, TOKENS, width)}


@example("univnet")
def univnet(model: Any) -> Arguments:
    return {"input_features": normal(BATCH, 16, model.config.num_mel_bins)}


@example("vibevoice_acoustic_tokenizer_encoder")
def waveform_as_states(model: Any) -> Arguments:
    return {"hidden_states": normal(BATCH, 1, 6_400)}


@example("vibevoice_acoustic_tokenizer_decoder")
def latent_states(model: Any) -> Arguments:
    return {"hidden_states": normal(BATCH, model.config.hidden_size, 4)}


@example("vibevoice_acoustic_tokenizer")
def short_waveform(model: Any) -> Arguments:
    return {"input_values": normal(BATCH, 1, 6_400)}


# --- Series and games -------------------------------------------------------------------------------------------------


@example("decision_transformer")
def decisions(model: Any) -> Arguments:
    config = model.config
    return {
        "states": normal(BATCH, 4, config.state_dim),
        "actions": normal(BATCH, 4, config.act_dim),
        "rewards": normal(BATCH, 4, 1),
        "returns_to_go": normal(BATCH, 4, 1),
        "timesteps": torch.arange(4).expand(BATCH, -1),
    }


@example("patchtst", "patchtsmixer")
def series(model: Any) -> Arguments:
    return {"past_values": normal(BATCH, model.config.context_length, model.config.num_input_channels)}


@example("perceiver")
def perceiver(model: Any) -> Arguments:
    return {"inputs": normal(BATCH, TOKENS, model.config.d_model)}


@example("time_series_transformer", "informer", "autoformer")
def forecast(model: Any) -> Arguments:
    config = model.config
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": normal(BATCH, past),
        "past_time_features": normal(BATCH, past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": normal(BATCH, config.prediction_length),
        "future_time_features": normal(BATCH, config.prediction_length, config.num_time_features),
    }


@example("timesfm", "timesfm2_5")
def timesfm(model: Any) -> Arguments:
    length = model.config.context_length
    found = {"past_values": normal(BATCH, length), "past_values_padding": torch.zeros(BATCH, length, dtype=torch.long)}
    return found | ({"freq": torch.zeros(BATCH, 1, dtype=torch.long)} if model.config.model_type == "timesfm" else {})
