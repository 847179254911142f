"""Hugging Face language models with the widths of their published configs, one layer and random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Config = dict[str, Any]
_COMMON: Config = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

# name: (model type, config fields)
ARCHITECTURES: dict[str, tuple[str, Config]] = {
    "GPT-2": ("gpt2", {}),
    "BLOOM-560M": ("bloom", {"hidden_size": 1024, "n_head": 16}),
    "StarCoder2-3B": (
        "starcoder2",
        {"hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24, "num_key_value_heads": 2},
    ),
    "OPT-1.3B": ("opt", {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32}),
    "Minitron-4B": (
        "nemotron",
        {"hidden_size": 3072, "intermediate_size": 9216, "num_attention_heads": 24, "num_key_value_heads": 8}
        | {"head_dim": 128},
    ),
    "Llama-3.1-8B": (
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "Mistral-7B": (
        "mistral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "Qwen2.5-0.5B": (
        "qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"head_dim": 128},
    ),
    "Phi-3-mini": (
        "phi3",
        {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 32},
    ),
    "Gemma-2B": (
        "gemma",
        {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 1}
        | {"head_dim": 256},
    ),
    "ModernBERT-base": ("modernbert", {"cls_token_id": 0, "sep_token_id": 0}),
    "Granite-3B-code": (
        "llama",
        {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "mlp_bias": True},
    ),
    "Gemma-2-2B": (
        "gemma2",
        {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
        | {"head_dim": 256},
    ),
    "OLMo-2-7B": ("olmo2", {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}),
    "BERT-base": ("bert", {}),
    "OPT-350M": (
        "opt",
        {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 512}
        | {"do_layer_norm_before": False},
    ),
    "Pythia-1B": ("gpt_neox", {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8}),
    "Phi-2": ("phi", {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32}),
    "Granite-3.0-1B-A400M": (
        "granitemoe",
        {"hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"num_local_experts": 32, "num_experts_per_tok": 8},
    ),
}


def built(name: str) -> nn.Module:
    """A one-layer model of an architecture. Biases and norm gains are random too: trained ones are not 0 and 1."""
    from transformers import CONFIG_MAPPING, AutoModel

    kind, fields = ARCHITECTURES[name]
    depth = "n_layer" if kind in ("gpt2", "bloom") else "num_hidden_layers"
    torch.manual_seed(0)
    model: nn.Module = AutoModel.from_config(CONFIG_MAPPING[kind](**{**_COMMON, depth: 1, **fields})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.02 * torch.randn_like(weight))
    return model
