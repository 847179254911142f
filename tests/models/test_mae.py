"""The masked autoencoder: comparison with a handwritten one, long skips, initialisation, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.small_mae import draw, images, mae, unshuffled, vit
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.errors import BadInput
from unskip.models import MAE
from unskip.models._vit import Grid, positions, sources


def patchified(x: Tensor, patch: int = 3) -> Tensor:
    """(n, c, h, w) to (n, patches, patch * patch * c), pixel by pixel."""
    n, _, h, w = x.shape
    rows = []
    for top in range(0, h, patch):
        for left in range(0, w, patch):
            rows.append(x[:, :, top : top + patch, left : left + patch].permute(0, 2, 3, 1).reshape(n, -1))
    return torch.stack(rows, 1)


def published(model: MAE, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The loss as in the published code: embed all patches, mask, restore the order, predict, and mask the loss."""
    encoder: Any = model.encoder
    decoder = model.decoder
    order = noise.argsort(1)
    keep = order[:, : model.visible]
    tokens = encoder.patch_embed(x) + encoder.pos_embed[:, 1:]
    tokens = torch.stack([row[where] for row, where in zip(tokens, keep, strict=True)])
    cls = (encoder.cls_token + encoder.pos_embed[:, :1]).expand(len(x), -1, -1)
    tokens = torch.cat([cls, tokens], 1)
    outputs = []
    for block in encoder.blocks:
        tokens = block(tokens)
        outputs.append(tokens)
    outputs[-1] = encoder.norm(outputs[-1])
    if decoder.skips:
        stream = torch.cat([decoder.cls_token.expand(len(x), -1, -1), decoder.positions.expand(len(x), -1, -1)], 1)
    else:
        latent = decoder.embed(outputs[-1])
        patches = unshuffled(latent[:, 1:], decoder.mask_token, order) + decoder.positions
        stream = torch.cat([latent[:, :1], patches], 1)
    for index, block in enumerate(decoder.blocks):
        if index < len(decoder.skips):
            unit, output = decoder.fuse[index], outputs[decoder.skips[index]]
            full = torch.cat([output[:, :1], unshuffled(output[:, 1:], unit.mask_token, order)], 1)
            stream = stream + unit.down(F.silu(unit.up(torch.cat([full, stream], 2))))
        stream = block(stream)
    prediction = decoder.head(decoder.norm(stream))[:, 1:]
    target = patchified(x)
    target = (target - target.mean(2, keepdim=True)) / (target.var(2, keepdim=True) + 1e-6).sqrt()
    masked = torch.ones(len(x), 16).scatter(1, keep, 0.0)
    error = (prediction - target).square().mean(2)
    return (error * masked).sum() / masked.sum(), prediction


def perturbed(model: MAE) -> MAE:
    """Adds noise to all weights, because with zero-initialised weights errors could be hidden."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("long_skips", [False, True])
def test_loss_and_gradients_match_the_published_layout(long_skips: bool) -> None:
    model = perturbed(mae(long_skips))
    x, noise = images(), draw()
    result = model(x, noise)
    loss, prediction = published(model, x, noise)
    assert torch.allclose(result.loss, loss, atol=1e-5)
    rows = torch.stack([row[where] for row, where in zip(prediction, result.order[:, 4:], strict=True)])
    assert torch.allclose(result.prediction, rows, atol=1e-5)
    # Gradients match as well.
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(result.loss, parameters)
    theirs = torch.autograd.grad(loss, parameters)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 2},
        {"class_token": False},
        {"no_embed_class": True, "reg_tokens": 1},
        {"dynamic_img_size": True},
        {"pos_embed": "none"},
        {"pre_norm": True},
        {"init_values": 1e-1, "qk_norm": True},
        {"name": "vit_small_patch16_224"},
        {"name": "deit_tiny_distilled_patch16_224", "global_pool": "token"},
    ],
)
def test_features_without_masking_match_timm(options: dict[str, Any]) -> None:
    encoder: Any = vit(**options)
    model = mae(encoder=encoder).eval()
    everything = torch.arange(16).expand(5, -1)
    x = images()
    outputs = model.encode(model.patches(x), everything)
    expected = unskip.features(encoder, x, pool=None)
    for block, value in expected.items():
        assert torch.allclose(outputs[block], value, atol=1e-5)
    assert torch.isfinite(model(x).loss)


@given(st.integers(1, 24), st.integers(1, 24))
def test_long_skips_are_spread_over_the_encoder(encoder: int, decoder: int) -> None:
    result = sources(encoder, decoder)
    assert result[0] == encoder - 1  # the deepest first
    assert list(result) == sorted(set(result), reverse=True)
    assert min(result) >= 0
    assert len(result) == max(1, min(decoder, encoder // 2))
    gaps = [a - b for a, b in zip(result, (*result[1:], -1), strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert sources(12, 8) == (11, 9, 7, 5, 3, 1)  # as in the paper


@settings(max_examples=12)
@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_all_parameters_are_trained_at_any_depth_ratio(
    encoder: int, decoder: int, long_skips: bool, zero: bool
) -> None:
    model = mae(long_skips, vit(depth=encoder, final_norm=not long_skips), depth=decoder)
    if zero:
        unskip.init.zero_branches_(model.encoder, images(2))
        model.zero_start_()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    moved: dict[str, bool] = {}
    # With a zero start gradients reach the head first, then the last weights of branches, then all others.
    for step in range(8):
        optimizer.zero_grad()
        model(images(seed=step)).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                moved[name] = moved.get(name, False) or bool(parameter.grad.abs().max() > 0)
        optimizer.step()
    # Key biases have no effect on attention; all other parameters change.
    assert [name for name, yes in moved.items() if not yes] == []


def test_the_decoder_depends_on_the_encoder_only_through_long_skips() -> None:
    model = perturbed(mae())
    for unit in model.decoder.fuse:
        nn.init.zeros_(unit.down.weight)
        nn.init.zeros_(unit.down.bias)
    with torch.no_grad():
        assert torch.equal(model(images(), draw()).prediction, model(images(seed=7), draw()).prediction)


def test_bytes_and_floats_are_normalised_equally() -> None:
    model = perturbed(mae())
    raw = torch.randint(256, (5, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert torch.allclose(model(raw, draw()).loss, model((raw / 255 - mean) / std, draw()).loss, atol=1e-5)


@pytest.mark.parametrize("long_skips", [False, True])
def test_with_narrow_stream_the_stream_has_the_dtype_of_autocast(long_skips: bool) -> None:
    wide, narrow = (perturbed(mae(long_skips, narrow=each)) for each in (False, True))
    narrow.load_state_dict(wide.state_dict())
    exact = wide(images(), draw()).loss
    assert torch.equal(narrow(images(), draw()).loss, exact)  # without autocast it has no effect
    seen: dict[bool, set[torch.dtype]] = {}
    for model in (wide, narrow):
        kinds = seen.setdefault(model.narrow, set())
        for block in (*model.encoder.blocks, *model.decoder.blocks):  # type: ignore[misc]
            block.register_forward_hook(lambda module, inputs, output, kinds=kinds: kinds.add(output.dtype))  # type: ignore[misc]
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(model(images(), draw()).loss, exact, atol=0.05)
    assert seen == {False: {torch.float32}, True: {torch.bfloat16}}


# --- Initialisation ---------------------------------------------------------------------------------------------------


def test_a_zero_start_predicts_zero_and_decays_the_stream() -> None:
    model = mae()
    unskip.init.zero_branches_(model.encoder, images(2))
    model.zero_start_()
    wiring = unskip.rewire(model.encoder, "decay:0.5")
    result = model(images(), draw())
    assert torch.equal(result.prediction, torch.zeros_like(result.prediction))
    assert result.loss.item() == pytest.approx(26 / 27, abs=0.01)  # the unbiased variance of 27 pixels divides by 26
    outputs = model.encode(model.patches(images()), torch.arange(16).expand(5, -1))
    first = model.encoder._pos_embed(model.encoder.patch_embed(images()))  # type: ignore[operator]
    assert torch.allclose(outputs[-1], wiring.effective_decay * first, atol=1e-5)


def test_position_codes_are_sines_and_distinct() -> None:
    table = positions(Grid(3, 5, 2, 3, 1), 16)
    assert table.shape == (15, 16)
    assert torch.allclose(table.square().sum(1), torch.full((15,), 8.0))  # sin^2 + cos^2, 16 / 2 times
    assert torch.pdist(table).min() > 0.1
    at = table[1 * 5 + 3]  # row 1, column 3
    rates = [10_000.0 ** -(i / 4) for i in range(4)]
    assert torch.allclose(at[:4], torch.tensor([3 * rate for rate in rates]).sin())
    assert torch.allclose(at[12:], torch.tensor(rates).cos())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("long_skips", [False, True])
def test_gradients_have_the_strides_of_their_parameters(long_skips: bool, channels: int) -> None:
    """Otherwise DistributedDataParallel copies them and warns."""
    model = mae(long_skips, vit(in_chans=channels, final_norm=not long_skips))
    model(images()[:, :channels]).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.stride() == parameter.stride(), name


@pytest.mark.full
def test_it_compiles_without_graph_breaks() -> None:
    model = perturbed(mae())
    with torch.no_grad():
        expected = model(images(), draw()).loss
        result = torch.compile(model, fullgraph=True, backend="aot_eager")(images(), draw()).loss
    assert torch.allclose(result, expected, atol=1e-5)


# --- Bad input --------------------------------------------------------------------------------------------------------


def overlapping() -> nn.Module:
    encoder: Any = vit()
    encoder.patch_embed.proj = nn.Conv2d(3, 16, 5, 3, padding=1)
    return encoder  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": 0.0}, "nothing to predict"),
        ({"mask": 1.0}, "nothing to encode"),
        ({"mask": 0.97}, "leaves 0"),
        ({"depth": 0}, "it needs at least one"),
        ({"heads": 5}, "width is 12 with 5 heads"),
        ({"width": 6, "heads": 3}, "multiple of 4"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        mae(**options)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda: vit(img_size=13), "13 x 13"),
        (lambda: timm.create_model("resnet18", num_classes=0), "ResNet"),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=0), "has no patch tokens"),
        (lambda: nn.Linear(2, 2), "Linear"),
        (lambda: vit(final_norm=True), "final_norm=False"),
        (lambda: vit(patch_size=(3, 4)), "they must be square"),
        (lambda: overlapping(), "is not limited to its patch"),
        (
            lambda: timm.create_model("vit_tiny_r_s16_p8_224", img_size=64),
            r"\(HybridEmbed\) is not limited to its patch",
        ),
        (lambda: vit(embed_dim=18), "multiple of 4, got 18"),
    ],
)
def test_unsuitable_encoders_are_refused(encoder: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        mae(encoder=encoder())


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(BadInput, match=r"\(3, 15, 15\).*\(3, 12, 12\)"):
        mae()(torch.zeros(2, 3, 15, 15))
