"""Small random models of all types of transformers.AutoModel, with reduced widths, depths and vocabularies."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from tests.zoo.families import randomise_
from torch import nn

WIDTH, HEADS, GROUPS, HEAD, LAYERS, VOCABULARY, IMAGE = 64, 4, 2, 16, 2, 128, 32

# Upper limits of config fields: the first pattern that matches the name applies, and None means no limit.
RULES: list[tuple[str, int | None]] = [
    (r"^(n_group|num_expert_group)$", 2),
    (r"^topk_group$", 1),
    (r"(xpath|_2d_|mel|vision_feature|feature_projection|feat_extract)", None),
    (r"(_token_id|_token_index|_token_ids|_idx|_ids?)$", None),
    (r"(kernel|stride|padding|dilation|ratio|factor|multiple|_step|ngram|shards|dropout|chunk)", None),
    (r"vocab", VOCABULARY),
    (r"(image_size|img_size|input_size|crop_size)$", IMAGE),
    (r"patch_size", 8),
    (r"(max_position|n_positions|max_seq|max_source|max_target|context_length)", 256),
    (r"(num_key_value_heads|num_kv_heads|multi_query_group_num|num_query_groups|kv_heads)", GROUPS),
    (r"(mamba_d_head|mamba_head_dim)", 2 * HEAD),
    (r"(heads|n_head)$", HEADS),
    (r"(head_dim|rotary_dim|d_kv|head_size|kv_channels|qk_.*dim|v_head_dim|key_dim|value_dim|d_head)", HEAD),
    (r"(n_layers?|_layers|^depth|num_blocks)$|num_.*_layers", LAYERS),
    (r"(depths|layers_per_stage)$", 1),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", 4),
    (r"(top_k|experts_per_tok|moe_k)", 2),
    (r"(num_quer|num_latents|query_length)", 8),
    (r"(encoder_hidden_dim|vector_quantization)", WIDTH),
    (r"(intermediate|ffn|d_ff|n_inner|d_inner|mlp_dim|hidden_dim)", 2 * WIDTH),
    (r"(hidden|d_model|n_embd|embed|_dim$|^dim$|width|projection|channels|filters|d_latents|_size$|lora_rank)", WIDTH),
]
# Fields that are recomputed from other fields.
DERIVED = {"out_features", "out_indices", "stage_names", "per_layer_config"}

_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
_SWIN = {"image_size": 64, "window_size": 2}
_EFFICIENTNET = {"hidden_dim": 128, "width_coefficient": 0.1, "depth_coefficient": 0.3}
_DAC = {"encoder_hidden_size": 4, "decoder_hidden_size": 64, "hidden_size": 64}
_TIMM = {"depth": 2, "embed_dim": 64, "num_heads": 4, "img_size": 28}
_TOKENIZERS = ("acoustic_tokenizer_config", "semantic_tokenizer_config", "acoustic_tokenizer_encoder_config")
# Exceptions to these rules, by model type.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    (r"efficientnet", _EFFICIENTNET),
    (r"align", {"vision_config": _EFFICIENTNET}),
    (r"(donut-swin|swin|maskformer-swin)", _SWIN),
    (r"(mm-)?grounding-dino", {"backbone_config": _SWIN}),
    (r"aria", {"projector_patch_to_query_dict": {16: 4}}),
    (r"deepseek_v2", {"num_experts_per_tok": 2}),
    (r"bamba", {"attn_layer_indices": [1]}),
    (r"granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    (r"jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    (r"zamba2?", {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"]}),
    (r"falcon_h1", {"mamba_d_ssm": 64, "mamba_d_head": 16}),
    (r"nemotron_h|mamba2", {"n_groups": 2}),
    (r"blip-2", {"image_token_index": 100}),
    (r"bros", {"dim_bbox_projection": 16}),
    (r"gemma3|t5gemma2_encoder", {"mm_tokens_per_image": 4}),
    (r"(qwen2_vl|qwen2_5_vl|glm4v|glm_ocr|glm_image)_text", _MROPE),
    (
        r"(qwen2_vl|qwen2_5_vl|glm4v|glm46v|glm_ocr|glm_image|glmga|qwen2_5_omni_thinker|paddleocr_vl)",
        {"text_config": _MROPE},
    ),
    (r"layoutlmv3", {"coordinate_size": 8, "shape_size": 16}),
    (r"led", {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}),
    (r"lilt", {"hidden_size": 96}),
    (r"mobilevitv2", {"image_size": 64}),
    (r"moonshine", {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}),
    (r"step3p7", {"text_config": {"sliding_window": 4}}),
    (r"vipllava", {"vision_feature_layers": [-1, -2]}),
    (r"voxtral", {"audio_token_id": 100}),
    (r"xmod", {"default_language": "en_XX"}),
    (
        r"sam|sam_hq",
        {
            "vision_config": {"num_pos_feats": 32},
            "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "image_embedding_size": 4},
        },
    ),
    (r"(autoformer|informer|time_series_transformer)", {"prediction_length": 4, "context_length": 8}),
    (r"bit", {"hidden_sizes": [128] * 4, "embedding_size": 64}),
    (r"nemotron", {"num_key_value_heads": 2}),
    (r"mamba2", {"head_dim": 32}),
    (r"esm", {"vocab_size": 33, "mask_token_id": 32}),
    (r"lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    (r"dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    (r"(regnet|resnet)", {"depths": [2, 1, 1, 1]}),
    (r"bit", {"depths": [2, 1, 1, 1]}),
    (r"encodec", {"use_conv_shortcut": False, "num_filters": 4}),
    (r"glm4v_moe_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}),
    (r"glm4v_moe", {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}}),
    (r"hunyuan_vl_text", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2, 2]}}),
    (r"hunyuan_vl", {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2, 2]}}}),
    (r"moonshine_streaming", {"num_key_value_heads": 4, "encoder_config": {"head_dim": 16}}),
    (r"vibevoice.*", {"num_filters": 2}),
    (r"vibevoice", {"audio_config": {"num_filters": 2}, "semantic_model_config": {"num_filters": 2}}),
    (r"vibevoice_asr", {n: {"num_filters": 2} for n in _TOKENIZERS}),
    (r"csm", {"codec_config": {"upsample_groups": 64}}),
    (r"longcat_flash", {"qk_head_dim": 32}),
    (r"llama4", {"vision_config": {"intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64}}),
    (r"mllama", {"vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192}}),
    (r"nemo_speechlm", {"text_config": {"n_groups": 2}}),
    (r"dbrx", {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}),
    (r"pp_ocrv6_.*", {"backbone_config": {"stem_channels": [3, 48, 96], "stage_out_channels": [96, 96, 192, 384]}}),
    (r"gemma3n_vision", {"model_args": {"channel_multiplier": 0.1}}),
    (r"gemma3n", {"vision_config": {"model_args": {"channel_multiplier": 0.1}}}),
    (r"pe_video_encoder", {"vision_config": {"model_args": _TIMM}}),
    (r"pe_video|pe_audio_video_encoder", {"video_config": {"vision_config": {"model_args": _TIMM}}}),
    (r"pe_audio_video", {"audio_video_config": {"video_config": {"vision_config": {"model_args": _TIMM}}}}),
    (r"dac", _DAC),
    (r"pe_audio_encoder", {"dac_config": _DAC}),
    (r"pe_audio|pe_audio_video_encoder", {"audio_config": {"dac_config": _DAC}}),
    (r"pe_audio_video", {"audio_video_config": {"audio_config": {"dac_config": _DAC}}}),
    (r"mimi.*", {"num_filters": 8}),
    (r"csm|kyutai_speech_to_text", {"codec_config": {"num_filters": 8}}),
    (r"vits", {"upsample_initial_channel": 32, "speaking_rate": 20.0}),
    (r"neucodec|xcodec2", {"encoder_hidden_size": 4}),
    (r"chameleon", {"vocabulary_map": {"<image>": 100}}),
    (r"esm", {"pad_token_id": 1}),
    (r"fast_vlm", {"vision_config": {"architecture": "fastvit_t8", "hidden_size": 768}}),
    (r"(llava_next|llava_next_video|granite4_vision)", {"image_grid_pinpoints": [[32, 32], [64, 32]]}),
    (r"llava_onevision", {"image_grid_pinpoints": [[32, 32], [64, 32]]}),
    (r"instructblip(video)?", {"image_token_index": 100, "video_token_index": 101}),
    (r"timm_backbone", {"backbone": "test_resnet"}),
    (r"bridgetower", {"num_attention_heads": 4, "hidden_size": 64}),
    (r"cvt", {"depth": [1, 2, 3], "embed_dim": [16, 32, 64], "num_heads": [1, 2, 2]}),
    (r"reformer", {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 4]}),
    (r"molmo2", {"adapter_config": {"vision_feature_layer": [1, 0]}}),
    (r"gemma3n_text", {"num_kv_shared_layers": 0}),
    (r"gemma3n", {"text_config": {"num_kv_shared_layers": 0}}),
    (r"csm|mimi|mimi_decoder|pocket_tts_audio_tokenizer(_decoder)?", {"upsample_groups": 64}),
]


def shrink(config: dict[Any, Any]) -> dict[Any, Any]:
    """The fields of a config with small numbers, including those of nested configs."""
    staged = "depths" in config  # the number of layers is the sum over stages
    derived = set() if staged else DERIVED if "num_hidden_layers" in config else {"per_layer_config"}
    found = {name: _shrunk(name, value) for name, value in config.items() if name not in derived}
    if "num_key_value_heads" in config and config["num_key_value_heads"] in (None, config.get("num_attention_heads")):
        found["num_key_value_heads"] = found.get("num_attention_heads", HEADS)
    counts = [name for name in ("num_hidden_layers", "num_layers") if isinstance(config.get(name), int)]
    if staged:
        return found | {name: config[name] for name in counts}
    if counts and config[counts[0]] > LAYERS:
        _fewer_layers(config, found, counts)
    return found


def _fewer_layers(config: dict[str, Any], found: dict[str, Any], counts: list[str]) -> None:
    """Shortens fields with one entry per layer, such that one layer of each type remains."""
    layers, types = config[counts[0]], config.get("layer_types") or []
    chosen = sorted({types.index(kind) for kind in types} if len(set(types)) > 1 else range(LAYERS))
    found |= dict.fromkeys(counts, len(chosen))
    for name, value in config.items():
        if isinstance(value, list) and len(value) == layers and "conv" not in name and name in found:
            found[name] = [found[name][i] for i in chosen]


def _shrunk(name: Any, value: Any) -> Any:
    if not isinstance(name, str) or name == "label2id":
        return value
    if name == "head_dim" and value is None:
        return HEAD
    if name == "mrope_section":
        return [HEAD // 4, HEAD // 8, HEAD // 8]
    if name in ("backbone", "architecture") and value == "resnet50":
        return "test_resnet"
    if isinstance(value, dict):
        return shrink(value)
    if isinstance(value, list | tuple):
        several = "heads" in name
        return type(value)(min(v, 2) if several and type(v) is int else _shrunk(name, v) for v in value)
    return _number(name, value) if type(value) is int else value


def _number(name: str, value: int) -> int:
    size = next((size for pattern, size in RULES if re.search(pattern, name)), None)
    return value if size is None else min(value, size)


def _reduce_token_ids(config: dict[Any, Any], seen: list[int]) -> None:
    """Maps the ids of special tokens to different ids inside the small vocabulary."""
    first = VOCABULARY - 28
    for name, value in config.items():
        if isinstance(value, dict):
            _reduce_token_ids(value, seen)
        elif str(name).endswith(("_token_id", "_token_index")) and type(value) is int and value >= first:
            seen += [value] if value not in seen else []
            config[name] = first + seen.index(value)


def _merge(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            _merge(fields[name], value)
        elif name in fields or not str(name).endswith("tokenizer_config"):
            fields[name] = value


def small_config(config_class: Any) -> Any:
    """The default config of a type with small numbers."""
    fields = shrink(copy.deepcopy(config_class().to_dict()))
    for pattern, settings in SETTINGS:
        if re.fullmatch(pattern, config_class.model_type):
            _merge(fields, copy.deepcopy(settings))
    _reduce_token_ids(fields, [])
    return config_class.from_dict(fields)


def build(model_class: type[nn.Module], config: Any) -> nn.Module:
    """A model in evaluation mode, with the same weights in every call."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise_(model)
    return model
