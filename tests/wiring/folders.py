"""Small models to save, and helpers that damage a saved folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import timm
import torch
from tests.anatomy import handmade as h
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
)

X = torch.randn(2, 5, h.DIM, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = {
    "spec": "timm:vit_tiny_patch16_224",
    "kwargs": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2},
}
SITE, PLACE = ("wiring", "sites", -1), ("wiring", "sites", -1, "places", 0)  # of the last site in a record


def vit() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", **VIT["kwargs"]).eval()
    return model.requires_grad_(True)


def bert() -> nn.Module:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return BertModel(config).eval()


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def edit(folder: Path, change: Any) -> None:
    """Applies `change` to the record of a saved folder."""
    path = folder / "unskip.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def put(*keys: str | int, value: Any) -> Any:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


def damage_weights(folder: Path, data: bytes) -> None:
    """Replaces the weights by `data` and records its checksum."""
    (folder / "model.safetensors").write_bytes(data)
    edit(folder, put("sha256", "model.safetensors", value=hashlib.sha256(data).hexdigest()))


def snapshot(model: nn.Module) -> Any:
    """Everything that loading could change in a model."""
    modules = [(path, type(module), dict(vars(module))) for path, module in model.named_modules()]
    attributes = [(path, cls, {k: v for k, v in data.items() if not k.startswith("_")}) for path, cls, data in modules]
    names = [(path, sorted(data)) for path, _, data in modules]
    values = [(name, value.dtype, value.clone()) for name, value in model.state_dict().items()]
    return attributes, names, values, [id(value) for value in (*model.parameters(), *model.buffers())]


def unchanged(model: nn.Module, before: Any) -> bool:
    attributes, names, values, identities = snapshot(model)
    return (
        attributes == before[0]
        and names == before[1]
        and identities == before[3]
        and [value[:2] for value in values] == [value[:2] for value in before[2]]
        and all(torch.equal(a[2], b[2]) for a, b in zip(values, before[2], strict=True))
    )


def rope(theta: float) -> nn.Module:
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        rope_parameters=parameters, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaModel(config).eval()
