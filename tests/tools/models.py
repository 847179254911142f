"""Small models without dropout, so that two ways of training are comparable. All weights are random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.zoo.families import randomise_
from torch import Tensor, nn


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in evaluation mode, with the same seed in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        randomise_(model)
    return model.eval()


def vit(depth: int = 2) -> nn.Module:
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    return build(lambda: timm.create_model("vit_tiny_patch16_224", depth=depth, **sizes))


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def labels(batch: int = 4) -> Tensor:
    return torch.arange(batch) % 5


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    # Without an end-of-text token all samples have the requested length.
    return build(lambda: GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=None)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return build(lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=None)))


def ids(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(1, 32, (batch, length), generator=torch.Generator().manual_seed(1))
