"""SiT and U-ViT: published checkpoints, sites and long skips, initialisation, sizes, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.published_sit import Published
from torch import Tensor, nn

import unskip
from unskip.errors import BadInput, LoadError
from unskip.models import SiT, UViT, load_published_sit

SMALL: dict[str, Any] = {"size": 8, "patch": 2, "channels": 2, "width": 16, "heads": 2, "classes": 5}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "sit": lambda: SiT(**SMALL, depth=4),
    "sit, long skips, even": lambda: SiT(**SMALL, depth=6, long_skips=True),
    "sit, long skips, odd": lambda: SiT(**SMALL, depth=5, long_skips=True),
    "uvit": lambda: UViT(**SMALL, depth=5),
}


def seeded(make: Callable[[], nn.Module], lively: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    if lively:  # gates of zero would hide errors in the branches
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.2)
    return model


def batch(count: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(count, 2, 8, 8, generator=draw)
    return images, torch.rand(count, generator=draw), torch.randint(6, (count,), generator=draw)


def published(depth: int = 3) -> Published:
    torch.manual_seed(0)
    return Published(size=8, patch=2, channels=2, width=16, depth=depth, heads=2, classes=5)


@pytest.mark.parametrize("wrap", ["plain", "model", "ema", "file"])
def test_a_published_checkpoint_gives_the_same_outputs(wrap: str, tmp_path: Path) -> None:
    theirs, mine = published(), SiT(**SMALL, depth=3)
    state: Any = theirs.state_dict()
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    given = {"plain": state, "model": {"model": state}, "ema": {"model": other, "ema": state}}.get(wrap)
    if given is None:
        torch.save(state, tmp_path / "sit.pt")
        given = tmp_path / "sit.pt"
    load_published_sit(mine, given)
    with torch.no_grad():
        torch.testing.assert_close(mine(*batch()), theirs(*batch()), rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_another_size_is_refused_and_the_model_is_unchanged() -> None:
    mine = SiT(**SMALL, depth=4)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    with pytest.raises(LoadError, match=r"blocks\.3\..* is missing.*Build the SiT"):
        load_published_sit(mine, published(3).state_dict())
    with pytest.raises(LoadError, match="not known"):
        load_published_sit(SiT(**SMALL, depth=2), published(3).state_dict())
    with pytest.raises(LoadError, match=r"is \(.*\), not \("):
        load_published_sit(SiT(**{**SMALL, "width": 32}, depth=3), published(3).state_dict())
    with pytest.raises(LoadError, match="no tensors by name"):
        load_published_sit(mine, {"epoch": 3})
    with pytest.raises(LoadError, match="plain tensors"):
        load_published_sit(mine, "missing.pt")
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())


@pytest.mark.parametrize(("name", "sites", "long"), [
    ("sit", 8, 0), ("sit, long skips, even", 12, 2), ("sit, long skips, odd", 10, 2), ("uvit", 10, 0),
])  # fmt: skip
def test_sites_and_long_skips_are_found(name: str, sites: int, long: int) -> None:
    for lively in (True, False):
        model = seeded(MODELS[name], lively)
        for example in (None, batch()):
            audit = unskip.audit(model, example)
            own = [site for site in audit if not site.long]
            assert (len(own), len(audit.long_skips), len(audit.unknown)) == (sites, long, 0)
            assert [site.kind for site in own] == ["attention", "mlp"] * (sites // 2)
            assert {site.norm for site in own} == {"pre"}


@pytest.mark.parametrize("name", MODELS)
def test_decay_reaches_alpha_min_in_the_last_block_and_matches_the_formula(name: str) -> None:
    model = seeded(MODELS[name])
    inputs = batch()
    plain = model(*inputs).detach()
    with unskip.rewired(model, "decay:0.6", inputs) as wiring:
        governed = [site for site in wiring.sites if not site.long]
        alphas = [wiring.alphas[site.index] for site in governed]
        last = len(alphas) - 1
        assert alphas == pytest.approx([1 - 0.4 * index / last for index in range(last + 1)])
        result = model(*inputs).detach()
    expected = by_hand(model, inputs, iter(alphas))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert (result - plain).abs().max() > 1e-3
    torch.testing.assert_close(model(*inputs).detach(), plain)


@torch.no_grad()
def by_hand(model: Any, inputs: tuple[Tensor, Tensor, Tensor], alphas: Any) -> Tensor:
    """The forward of the model with weighted shortcuts, block by block."""
    images, time, labels = inputs
    held: list[Tensor] = []
    if isinstance(model, UViT):
        from unskip.models._conditioned import images_of, waves

        tokens = [waves(1000 * time, 16)[:, None], model.label_emb(labels)[:, None], model.patch_embed(images)]
        x = torch.cat(tokens, 1) + model.pos_embed
        half = len(model.in_blocks)
        for index, block in enumerate([*model.in_blocks, model.mid_block, *model.out_blocks]):
            if index > half:
                x = block.skip_linear(torch.cat([x, held.pop()], 2))
            x = next(alphas) * x + block.attn(block.norm1(x))
            x = next(alphas) * x + block.mlp(block.norm2(x))
            if index < half:
                held.append(x)
        patches = model.decoder_pred(model.norm(x)[:, 2:])
        return model.final_layer(images_of(patches, 2, 2))
    c = model.t_embedder(time) + model.y_embedder(labels)
    x = model.x_embedder(images) + model.pos_embed
    outputs: list[Tensor] = []
    for index, block in enumerate(model.blocks):
        if block.skip is not None:
            x = x + block.skip(outputs[len(model.blocks) - 1 - index])
        b1, s1, g1, b2, s2, g2 = block.adaLN_modulation(c).chunk(6, 1)
        x = next(alphas) * x + g1[:, None] * block.attn((1 + s1[:, None]) * block.norm1(x) + b1[:, None])
        x = next(alphas) * x + g2[:, None] * block.mlp((1 + s2[:, None]) * block.norm2(x) + b2[:, None])
        outputs.append(x)
    patches = model.final_layer(x, c).reshape(len(x), 4, 4, 2, 2, 2)
    return patches.permute(0, 5, 1, 3, 2, 4).reshape(len(x), 2, 8, 8)


def test_time_and_label_change_the_output_and_default_to_clean_unlabelled_data() -> None:
    for name in ("sit", "uvit"):
        model = seeded(MODELS[name])
        images, time, labels = batch()
        with torch.no_grad():
            whole = model(images, time, labels)
            assert (whole - model(images, 1 - time, labels)).abs().max() > 1e-3
            assert (whole - model(images, time, (labels + 1) % 6)).abs().max() > 1e-3
            none = torch.full((3,), 5)
            assert torch.equal(model(images), model(images, torch.ones(3), none))


def test_sit_predicts_zero_at_first_and_all_weights_are_trained() -> None:
    model: Any = seeded(MODELS["sit, long skips, odd"], lively=False)
    assert model(*batch()).abs().max() == 0
    for make in MODELS.values():
        lively = seeded(make)
        images, time, labels = batch()
        (lively(images, time, labels) - images).square().mean().backward()
        assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in lively.parameters())


def test_named_sizes_have_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        # Published numbers: 33, 130, 458 and 675 million with learned variances; U-ViT 44 and 501 million.
        for name, millions in (("S/2", 33), ("B/2", 130), ("L/2", 458), ("XL/2", 675)):
            count = sum(weight.numel() for weight in SiT.named(name).parameters())
            assert round(count / 1e6) == pytest.approx(millions, abs=1)
        count = sum(weight.numel() for weight in UViT.named("S/2").parameters())
        assert round(count / 1e6) == 44
    for wrong in ("B", "B/", "Q/2", "B/two"):
        with pytest.raises(BadInput, match="no size"):
            SiT.named(wrong)


def test_input_of_wrong_shapes_is_refused() -> None:
    model = SiT(**SMALL, depth=2)
    images, time, _ = batch()
    for labels in (torch.tensor([0, 6, 1]), torch.tensor([0, -1, 1])):
        with pytest.raises(BadInput, match="5 classes"):
            model(images, time, labels)
    with pytest.raises(BadInput, match="whole numbers"):
        model(images, time, torch.zeros(3))
    wrong: Any
    for wrong, text in ((0.5, "float"), (torch.tensor(0.5), r"\(\)"), (time[:, None], r"\(3, 1\)")):
        for each in (model, UViT(**SMALL, depth=3)):
            with pytest.raises(BadInput, match=rf"got .*{text}"):
                each(images, wrong)
    with pytest.raises(BadInput, match=r"\(2, 4, 4\).*\(2, 8, 8\)"):
        model(images[:, :, :4, :4])
    with pytest.raises(BadInput, match="do not divide"):
        SiT(**{**SMALL, "patch": 3}, depth=2)
    with pytest.raises(BadInput, match=r"multiple of 4 .* heads"):
        UViT(**{**SMALL, "width": 18}, depth=3)
    with pytest.raises(BadInput, match="depth must be odd"):
        UViT(**SMALL, depth=4)


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load_with_the_wiring(name: str, tmp_path: Path) -> None:
    model = seeded(MODELS[name])
    wiring = unskip.rewire(model, "decay:0.6", batch())
    unskip.save(model, tmp_path / "model")
    again = MODELS[name]()
    unskip.load(tmp_path / "model", again)
    with torch.no_grad():
        assert torch.equal(model(*batch()), again(*batch()))
    assert wiring.effective_decay < 0.2


@pytest.mark.parametrize("kind", [SiT, UViT])
def test_with_narrow_stream_the_stream_has_the_dtype_of_autocast(kind: Any) -> None:
    result = {}
    for narrow in (False, True):
        model: Any = seeded(lambda narrow=narrow: kind(**SMALL, depth=3, narrow=narrow))
        middle = model.blocks[1] if kind is SiT else model.mid_block
        kinds: list[torch.dtype] = []
        middle.register_forward_pre_hook(lambda module, inputs, kinds=kinds: kinds.append(inputs[0].dtype))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            result[narrow] = model(*batch()).float()
        assert kinds == [torch.bfloat16 if narrow else torch.float32]
        with torch.no_grad():
            exact = model(*batch())
        assert (result[narrow] - exact).norm() < 0.1 * exact.norm()
