"""Preprocessing: the transform itself, and where its settings are taken from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import timm
import torch
from PIL import Image
from tests.evals.digits import digits
from torch import nn
from torch.nn import functional as F

from unskip.data import Feed, ImageSet, Preprocess, open_images, preprocess_of, set_preprocess
from unskip.errors import BadInput


def images(count: int = 3, height: int = 40, width: int = 56) -> ImageSet:
    """Smooth images, so that bicubic interpolation does not overshoot."""
    draw = torch.Generator().manual_seed(0)
    rough = torch.rand(count, 3, 5, 7, generator=draw) * 180 + 40
    pixels = F.interpolate(rough, (height, width), mode="bicubic").round().clamp(0, 255).byte()
    return ImageSet("x", "test", ("a",), torch.zeros(count, dtype=torch.int64), pixels)


@pytest.mark.parametrize(("way", "size", "crop"), [("bicubic", 16, 0.9), ("bicubic", 64, 1.0), ("bilinear", 16, 0.8)])
def test_images_match_pillow(way: Any, size: int, crop: float, tmp_path: Path) -> None:
    """In memory and from disk: central crop, resizing with antialiasing, normalisation."""
    made = Preprocess((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), size, way, crop)
    held = images()
    assert held.images is not None
    (found, _), *_ = Feed(held, 3, made.size, augment=made.augment()).evaluate()
    side = round(40 * crop)
    box = ((56 - side) // 2, (40 - side) // 2, (56 - side) // 2 + side, (40 - side) // 2 + side)
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    for row, pixels in enumerate(held.images):
        image = Image.fromarray(pixels.movedim(0, -1).numpy())
        (tmp_path / "test" / "a").mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "test" / "a" / f"{row}.png")
        small = torch.from_numpy(numpy.array(image.crop(box).resize((size, size), filters[way]))).movedim(-1, 0)
        expected = made.normalised(small)
        assert float((found[row] - expected).abs().max()) < 1.1 / 255 / 0.5  # a step of a byte
    (tmp_path / "train" / "a").mkdir(parents=True)
    image.save(tmp_path / "train" / "a" / "0.png")
    (read, _), *_ = Feed(open_images(tmp_path, "test"), 3, made.size, augment=made.augment()).evaluate()
    assert float((read - found).abs().max()) < 2.1 / 255 / 0.5


def test_normalisation_can_be_inverted() -> None:
    made = Preprocess((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    held = images().images
    assert held is not None
    assert torch.equal(made.pixels(made.normalised(held)), held)
    with pytest.raises(BadInput, match="1 channels"):
        made.normalised(held[:, :1])


def test_settings_of_timm_are_used_unless_recorded_or_given() -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    config = model.pretrained_cfg
    found = preprocess_of(model)
    assert (found.mean, found.std, found.size) == (config["mean"], config["std"], 224)
    assert (found.crop, found.interpolation) == (config["crop_pct"], config["interpolation"])
    gray = preprocess_of(timm.create_model("vit_tiny_patch16_224", in_chans=1, img_size=8, patch_size=2), 1)
    assert (gray.mean, gray.size, gray.crop) == ((0.5,), 8, 1.0)  # the config of timm is for colour images
    theirs = preprocess_of(model, normalise=((0, 0, 0), (1, 1, 1)))
    assert (theirs.mean, theirs.size) == ((0, 0, 0), 224)
    assert theirs.source == "timm's config; mean, std from the caller"
    mine = Preprocess((0.3,) * 3, (0.4,) * 3, 32, source="the run")
    set_preprocess(model, mine)
    assert preprocess_of(copy.deepcopy(model)) == mine
    assert "mean 0.3" in str(mine)
    assert "the run" in str(mine)
    assert preprocess_of(nn.Conv2d(3, 3, 1)).mean == (0.485, 0.456, 0.406)  # a model without settings
    with pytest.raises(BadInput, match="std"):
        Preprocess((0.5,), (0.0,))
    with pytest.raises(BadInput, match="cubic"):
        Preprocess((0.5,), (0.5,), interpolation="cubic")  # type: ignore[arg-type]


def test_settings_of_a_hugging_face_image_processor_are_used(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.ViTModel(config).save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    assert preprocess_of(model).source == "the default"
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 20}, '
        '"crop_size": {"height": 16, "width": 16}, "do_center_crop": true, "resample": 3}'
    )
    found = preprocess_of(model)
    assert (found.mean, found.std, found.size, found.interpolation) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 16, "bicubic")
    assert found.crop == 0.8


def test_a_hugging_face_model_without_an_image_processor_gets_images_of_its_configs_size() -> None:
    from unskip import evals

    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_channels=1, num_labels=10, **sizes)
    changes = {"quantised-accuracy-v1": {"bits": [8]}}
    model = transformers.ViTForImageClassification(config)
    (result,) = evals.evaluate(model, digits(), digits("test", 20), [*changes], changes=changes)
    assert result.preprocess is not None
    assert result.preprocess.size == 32
    with pytest.raises(BadInput, match=r"use a classifier \(hf:NAME builds no head; .* unskip.save"):
        evals.evaluate(transformers.ViTModel(config), digits(), digits("test", 20), [*changes], changes=changes)
    both = transformers.CLIPConfig(vision_config={**sizes, "image_size": 48}, text_config=sizes)
    assert preprocess_of(transformers.CLIPModel(both)).size == 48


def test_evaluation_uses_the_mean_and_std_of_the_model() -> None:
    """They change the kNN accuracy, so they are recorded with the result."""
    from unskip import evals

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, depth=2, embed_dim=16, num_heads=2, num_classes=0
    )
    given: dict[str, Any] = {"protocols": ["knn-dino-v1"], "blocks": -1}
    (usual,) = evals.evaluate(model, digits(), digits("test", 100), **given)
    (own,) = evals.evaluate(model, digits(), digits("test", 100), normalise=((0.0,), (1.0,)), **given)
    set_preprocess(model, Preprocess((0.0,), (1.0,), 8, source="the run"))
    (kept,) = evals.evaluate(model, digits(), digits("test", 100), **given)
    assert usual.values != own.values == kept.values
    assert kept.to_dict()["preprocess"]["source"] == "the run"
