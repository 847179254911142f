"""Initialisations given as text, and MLPs centred by removing the mean of their activation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
from unskip import Cut
from unskip.errors import BadInput, InitError, UnskipWarning
from unskip.init import PRESETS, skipless_, start_, zero_branches_


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignores the warnings that small models give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        yield


def vit(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, **changes)
    return model


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("skipless", PRESETS["vit-base"]),
        ("skipless:vit-small", PRESETS["vit-small"]),
        ("skipless:vit-small, beta=2", {**PRESETS["vit-small"], "qk_identity": 2.0}),
        ("skipless:centre", {**PRESETS["vit-base"], "centre": True}),
        ("skipless:paired,mix=0.1", {**PRESETS["paired"], "mix": 0.1}),
        ("skipless:beta=2,vit-small", {**PRESETS["vit-small"], "qk_identity": 2.0}),
    ],
)
def test_text_is_parsed_to_arguments(words: str, options: dict[str, float]) -> None:
    one, other = vit(), vit()
    start_(one, words, seeded())
    skipless_(other, generator=seeded(), **options)  # type: ignore[arg-type]
    assert same(one, other)


def test_default_changes_nothing_and_zero_does() -> None:
    one = vit()
    start_(one, "default")
    assert same(one, vit())
    start_(one, "zero")
    assert not any(block.mlp.fc2.weight.any() for block in one.blocks)  # type: ignore[union-attr]


def test_where_selects_sites() -> None:
    one, other = vit(), vit()
    start_(one, "zero", where="mlp")
    zero_branches_(other, where="mlp")
    assert same(one, other)
    assert all(block.attn.proj.weight.any() for block in one.blocks)  # type: ignore[union-attr]
    start_(one, "skipless", seeded(), where="attention")
    skipless_(other, generator=seeded(), where="attention")
    assert same(one, other)
    assert not any(block.mlp.fc2.weight.any() for block in one.blocks)  # type: ignore[union-attr]


@pytest.mark.parametrize("words", ["zero", "skipless"])
def test_warnings_have_the_line_of_the_caller(words: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnskipWarning)
        start_(vit(init_values=1e-5, drop_path_rate=0.1), words, seeded())
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("skiples", "default, zero, skipless"),
        ("zero:centre", "default, zero, skipless"),
        ("skipless:vit-smal", "nearest: vit-small"),
        ("skipless:beta=much", "beta.*much"),
        ("skipless:gamma=1", "'gamma=1' is not one of"),
        ("skipless:vit-base,vit-small", "one preset, .* vit-small"),
        (None, "text such as"),
    ],
)
def test_invalid_text_is_refused(words: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        start_(vit(), words)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(BadInput, match="nearest: vit-base"):
        start_(vit(), "skipless", preset="vit-bas")


# --- Centring ---------------------------------------------------------------------------------------------------------


def test_the_bias_is_the_closed_form_of_gelu() -> None:
    """E[gelu(s z)] = s^2 / sqrt(2 pi (1 + s^2))."""
    model = vit()
    skipless_(model, generator=seeded(), centre=True)
    for block in model.blocks:  # type: ignore[union-attr]
        up, down = block.mlp.fc1.weight.double(), block.mlp.fc2.weight.double()
        squares = up.square().sum(1)
        mean = squares / (2 * math.pi * (1 + squares)).sqrt()
        torch.testing.assert_close(block.mlp.fc2.bias.double(), -down @ mean, atol=1e-6, rtol=1e-5)


def test_the_bias_is_the_closed_form_of_relu() -> None:
    """E[relu(s z)] = s / sqrt(2 pi)."""
    model = vit(act_layer=nn.ReLU)
    skipless_(model, generator=seeded(), centre=True)
    for block in model.blocks:  # type: ignore[union-attr]
        up, down = block.mlp.fc1.weight.double(), block.mlp.fc2.weight.double()
        mean = up.norm(dim=1) / math.sqrt(2 * math.pi)
        torch.testing.assert_close(block.mlp.fc2.bias.double(), -down @ mean, atol=1e-4, rtol=1e-3)


def test_the_output_of_a_centred_mlp_has_mean_zero() -> None:
    sizes = {}
    for centre in (False, True):
        model = vit()
        skipless_(model, generator=seeded(), centre=centre)
        tokens = torch.randn(4096, 192, generator=seeded())
        with torch.no_grad():
            out: Tensor = model.blocks[0].mlp(tokens)  # type: ignore[index,union-attr]
        sizes[centre] = float(out.mean(0).norm() / out.norm(dim=1).mean())
    assert sizes[False] > 0.3
    assert sizes[True] < 0.03


def test_centring_keeps_tokens_of_a_skipless_model_apart() -> None:
    images = torch.randn(4, 3, 32, 32, generator=seeded())
    alike = {}
    for centre in (False, True):
        model = vit().eval()
        skipless_(model, generator=seeded(), centre=centre)
        unskip.rewire(model, Cut(), images)
        with torch.no_grad():
            tokens = [*unskip.features(model, images, pool=None).values()][-1]
        alike[centre] = float(nn.functional.cosine_similarity(tokens[:, None], tokens[:, :, None], dim=-1).mean())
    assert alike[True] < alike[False] - 0.1


def test_centring_does_not_change_a_gated_mlp() -> None:
    one, other = (vit(mlp_layer=timm.layers.SwiGLU) for _ in range(2))
    skipless_(one, generator=seeded(), centre=True)
    skipless_(other, generator=seeded())
    assert same(one, other)


def test_impossible_centring_is_refused() -> None:
    with pytest.raises(BadInput, match="centre applies to mlp"):
        skipless_(vit(), parts=("query-key",), centre=True)
    model = vit()
    for block in model.blocks:  # type: ignore[union-attr]
        block.mlp.fc2 = nn.Linear(768, 192, bias=False)
    before = model.state_dict()["blocks.0.mlp.fc1.weight"].clone()
    with pytest.raises(InitError, match="no output bias"):
        skipless_(model, centre=True)
    assert torch.equal(before, model.state_dict()["blocks.0.mlp.fc1.weight"])
