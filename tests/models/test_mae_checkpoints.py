"""Published checkpoints of MAE give the same outputs, or are refused without loading anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.small_mae import draw, images, made_up, mae, unshuffled
from torch import Tensor
from torch.nn import functional as F

from unskip.errors import BadInput, LoadError
from unskip.models import load_published


def attention(x: Tensor, state: dict[str, Tensor], at: str, heads: int = 2) -> Tensor:
    """A pre-norm block computed from a state dict."""

    def linear(value: Tensor, name: str) -> Tensor:
        return value @ state[f"{at}.{name}.weight"].T + state[f"{at}.{name}.bias"]

    def norm(value: Tensor, name: str) -> Tensor:
        return F.layer_norm(value, value.shape[-1:], state[f"{at}.{name}.weight"], state[f"{at}.{name}.bias"], 1e-6)

    n, tokens, dim = x.shape
    qkv = linear(norm(x, "norm1"), "attn.qkv").reshape(n, tokens, 3, heads, dim // heads).permute(2, 0, 3, 1, 4)
    scores = (qkv[0] @ qkv[1].mT / (dim // heads) ** 0.5).softmax(-1)
    x = x + linear((scores @ qkv[2]).transpose(1, 2).reshape(n, tokens, dim), "attn.proj")
    return x + linear(F.gelu(linear(norm(x, "norm2"), "mlp.fc1")), "mlp.fc2")


@pytest.mark.parametrize("as_file", [False, True])
def test_a_published_checkpoint_gives_the_same_outputs(as_file: bool, tmp_path: Path) -> None:
    state = made_up()
    model = mae(long_skips=False).eval()
    if as_file:
        torch.save({"model": state, "epoch": 3}, tmp_path / "mae.pth")
        load_published(model, tmp_path / "mae.pth")
    else:
        load_published(model, state)
    x, noise = images(), draw()
    order = noise.argsort(1)
    tokens = F.conv2d(x, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=3)
    tokens = tokens.flatten(2).mT + state["pos_embed"][:, 1:]
    tokens = torch.stack([row[where] for row, where in zip(tokens, order[:, :4], strict=True)])
    tokens = torch.cat([(state["cls_token"] + state["pos_embed"][:, :1]).expand(5, -1, -1), tokens], 1)
    for index in range(4):
        tokens = attention(tokens, state, f"blocks.{index}")
    tokens = F.layer_norm(tokens, (16,), state["norm.weight"], state["norm.bias"], 1e-6)
    tokens = tokens @ state["decoder_embed.weight"].T + state["decoder_embed.bias"]
    full = torch.cat([tokens[:, :1], unshuffled(tokens[:, 1:], state["mask_token"], order)], 1)
    full = full + state["decoder_pos_embed"]
    for index in range(2):
        full = attention(full, state, f"decoder_blocks.{index}")
    full = F.layer_norm(full, (12,), state["decoder_norm.weight"], state["decoder_norm.bias"], 1e-6)
    expected = (full @ state["decoder_pred.weight"].T + state["decoder_pred.bias"])[:, 1:]
    rows = torch.stack([row[where] for row, where in zip(expected, order[:, 4:], strict=True)])
    with torch.no_grad():
        assert torch.allclose(model(x, noise).prediction, rows, atol=1e-4)


def test_a_checkpoint_without_a_decoder_is_loaded_into_the_encoder() -> None:
    model = mae(long_skips=False)
    before = model.decoder.head.weight.clone()
    state = {name: value for name, value in made_up().items() if "decoder" not in name and name != "mask_token"}
    load_published(model, state)
    assert torch.equal(model.encoder.norm.weight, state["norm.weight"])  # type: ignore[union-attr,arg-type]
    assert torch.equal(model.decoder.head.weight, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.3.mlp.fc2.bias"), "blocks.3.mlp.fc2.bias is missing"),
        (lambda s: s.update({"blocks.9.norm1.bias": torch.zeros(16)}), "blocks.9.norm1.bias is not known"),
        (lambda s: s.update({"pos_embed": torch.zeros(1, 26, 16)}), r"pos_embed .*26, .*17,"),
        (lambda s: s.update({"decoder_pos_embed": torch.zeros(1, 26, 12)}), r"decoder.positions is \(25, 12\)"),
        (lambda s: s.update({"decoder_pos_embed": torch.zeros(12)}), r"decoder.positions is \(12,\)"),
        (lambda s: s.clear(), "has no tensors by name"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_and_nothing_is_loaded(change: Any, message: str) -> None:
    model = mae(long_skips=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = made_up()
    change(state)
    with pytest.raises(LoadError, match=message):
        load_published(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no long skips"):
        load_published(mae(), made_up())
    (tmp_path / "broken.pth").write_bytes(b"not a checkpoint")
    (tmp_path / "words.pth").write_bytes(b"hello")  # these bytes happen to be valid pickle opcodes
    for name in ("broken.pth", "words.pth", "missing.pth"):
        with pytest.raises(LoadError, match=name):
            load_published(mae(long_skips=False), tmp_path / name)
