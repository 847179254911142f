"""Global and local crops depend only on (seed, step); colour changes match torchvision and numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from scipy import ndimage
from tests.data.files import write_folder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from unskip.data import Augment, CropFeed, Crops, ImageSet, open_images
from unskip.data._augment import geometry
from unskip.data._crops import DrawnFeed, coloured
from unskip.data._order import VIEWS, Order, stream
from unskip.errors import BadInput


def images(count: int = 24, channels: int = 3, size: int = 20) -> ImageSet:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, size, size), generator=draw, dtype=torch.uint8)
    return ImageSet("noise", "train", ("a", "b"), torch.arange(count) % 2, pixels)


def crops(**changes: Any) -> Crops:
    return Crops(**{"local_crops": 3, "size": 16, "local_size": 8, **changes})


def test_shapes_and_labels() -> None:
    feed = CropFeed(images(), 8, crops())
    large, small, labels = next(feed.iterate(0, 1))
    assert large.shape == (8, 2, 3, 16, 16)
    assert small.shape == (8, 3, 3, 8, 8)
    assert labels.shape == (8,)
    assert feed.steps_per_epoch == 3
    large, small, _ = next(CropFeed(images(), 8, crops(local_crops=0)).iterate(0, 1))
    assert small.shape == (8, 0, 3, 8, 8)


def test_crops_depend_only_on_seed_and_step() -> None:
    feed = CropFeed(images(), 8, crops(), seed=3)
    whole = list(feed.iterate(0, 5))
    (again,) = feed.iterate(4, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole[4], again, strict=True))
    torch.manual_seed(99)  # the global generator is not used
    assert torch.equal(next(CropFeed(images(), 8, crops(), seed=3).iterate(2, 3))[0], whole[2][0])
    assert not torch.equal(next(CropFeed(images(), 8, crops(), seed=4).iterate(2, 3))[0], whole[2][0])
    # Crops of one image differ from each other.
    assert not torch.equal(whole[0][0][:, 0], whole[0][0][:, 1])


def test_several_processes_give_the_crops_of_one() -> None:
    feed = CropFeed(images(), 8, crops())
    one = next(feed.iterate(3, 4))
    parts = [next(feed.iterate(3, 4, rank, 4)) for rank in range(4)]
    for index in range(3):
        assert torch.allclose(torch.cat([part[index] for part in parts]), one[index], atol=1e-6)


@pytest.mark.parametrize("small", [0, 3])
def test_crops_can_be_made_in_the_training_step(small: int) -> None:
    """At any precision, and in parts."""
    feed = CropFeed(images(), 8, crops(local_crops=small))
    large, little, labels = next(feed.iterate(2, 3))
    batch = next(DrawnFeed(feed).iterate(2, 3))
    assert DrawnFeed(feed).steps_per_epoch == feed.steps_per_epoch
    assert torch.equal(batch[3], labels)
    with torch.autocast("cpu", torch.bfloat16):
        made = feed.made(*batch[:3])
    assert [each.dtype for each in made] == [torch.float32] * 2
    assert torch.equal(made[0], large)
    assert torch.equal(made[1], little)
    halves = [feed.made(*(each.chunk(2)[part] for each in batch[:3])) for part in range(2)]
    assert torch.allclose(torch.cat([half[0] for half in halves]), large, atol=1e-6)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_on_disk_are_cropped_from_the_whole_image(tmp_path: Path, interpolation: Any) -> None:
    """Each crop matches torchvision's crop of the whole image, which is not made square first."""
    files = write_folder(tmp_path, {"a": 8}, (40, 100))
    settings = crops(jitter=0.0, gray=0.0, blur=(0.0, 0.0, 0.0), solarize=0.0, interpolation=interpolation)
    feed = CropFeed(open_images(files), 8, settings, seed=3, workers=0)
    large, small, labels = next(feed.iterate(1, 2))
    assert (large.shape, small.shape, labels.tolist()) == ((8, 2, 3, 16, 16), (8, 3, 3, 8, 8), [0] * 8)
    rows = Order(8, 8, 3).rows(1)
    for position in (0, 5):
        image = Image.open(files / "a" / f"{rows[position]:03d}.png")
        for kind, (made, scale) in enumerate(((large, (0.4, 1.0)), (small, (0.05, 0.4)))):
            boxes = geometry(
                Augment("resized", scale=scale), stream(VIEWS, 3, 1, kind, position), made.shape[1], 40, 100
            )
            assert float((boxes[:, 2] * boxes[:, 3]).min()) >= 0.9 * scale[0] * 4000
            for found, (*box, flip) in zip(made[position], boxes, strict=True):
                way = v2.InterpolationMode(interpolation)
                size = [made.shape[-1]] * 2
                expected = tv.resized_crop(image, *(int(each) for each in box), size, way, antialias=True)
                expected = tv.pil_to_tensor(tv.horizontal_flip(expected) if flip else expected)
                pixels = (found * feed.base.std + feed.base.mean) * 255
                assert torch.allclose(pixels, expected.float(), atol=1e-2)


def test_crops_of_images_on_disk_do_not_depend_on_processes_and_parts(tmp_path: Path) -> None:
    images = open_images(write_folder(tmp_path, {"a": 9, "b": 7}, (20, 30)))
    whole = [*CropFeed(images, 8, crops(), workers=0).iterate(0, 4)]
    for world, parts, workers in ((1, 1, 2), (2, 1, 0), (2, 2, 0)):
        feed = CropFeed(images, 8, crops(), workers=workers)
        each = [[*feed.iterate(3, 4, rank, world, parts)] for rank in range(world)]
        for index in range(3):
            made = torch.cat([part[index] for rank in each for part in rank])
            assert torch.allclose(made, whole[3][index], atol=1e-6)


def test_only_the_second_global_crop_is_solarized_and_probabilities_are_right() -> None:
    feed = CropFeed(images(2000), 2000, crops(global_crops=3, blur=(1.0, 0.0, 0.5), solarize=0.2))
    _, large, small, _ = next(feed.drawn(0, 1))
    solar, blurred = large[..., 11].mean(0), (large[..., 10] > 0).float().mean(0)
    assert solar[0] == solar[2] == small[..., 11].max() == 0
    assert 0.15 < float(solar[1]) < 0.25
    assert blurred.tolist() == [1.0, 0.0, 0.0]
    assert 0.45 < float((small[..., 10] > 0).float().mean()) < 0.55
    assert 0.75 < float((large[..., 5] != 1).float().mean()) < 0.85  # brightness is changed with `jitter`
    area = large[..., 2] * large[..., 3] / 400
    assert float(area.min()) > 0.35
    assert float((small[..., 2] * small[..., 3] / 400).max()) < 0.45


def crop_settings(count: int = 5, **changes: float) -> torch.Tensor:
    table = torch.tensor([[1.0, 1, 1, 0, 0, 0, 0]]).repeat(count, 1)
    for name, value in changes.items():
        table[:, ("brightness", "contrast", "saturation", "hue", "gray", "sigma", "solar").index(name)] = value
    return table


def test_without_changes_images_are_equal() -> None:
    x = torch.rand(5, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(coloured(x, crop_settings()), x, atol=1e-5)
    gray = x[:, :1]
    assert torch.allclose(coloured(gray, crop_settings()), gray, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({"brightness": 1.3}, lambda x: tv.adjust_brightness(x, 1.3)),
        ({"brightness": 0.6}, lambda x: tv.adjust_brightness(x, 0.6)),
        ({"contrast": 0.5}, lambda x: tv.adjust_contrast(x, 0.5)),
        ({"contrast": 1.4}, lambda x: tv.adjust_contrast(x, 1.4)),
        ({"saturation": 0.4}, lambda x: tv.adjust_saturation(x, 0.4)),
        ({"gray": 1.0}, lambda x: tv.rgb_to_grayscale(x, 3)),
        ({"solar": 1.0}, lambda x: tv.solarize(x, 0.5)),
    ],
)
def test_colour_changes_match_torchvision(changes: dict[str, float], theirs: Any) -> None:
    x = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.7
    assert torch.allclose(
        coloured(x, crop_settings(**changes)), theirs(x), atol=2e-3
    )  # torchvision's gray weights have four digits


def test_blur_is_a_gaussian() -> None:
    x = torch.zeros(2, 3, 21, 21)
    x[:, :, 10, 10] = 1
    found = coloured(x, crop_settings(2, sigma=1.5))
    expected = ndimage.gaussian_filter(x[0, 0].numpy(), 1.5, truncate=7)
    assert numpy.allclose(found[0, 0].numpy(), expected, atol=1e-5)


def test_hue_changes_colours_but_not_gray() -> None:
    x = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.3
    turned = coloured(x, crop_settings(4, hue=0.3))
    back = coloured(turned, crop_settings(4, hue=-0.3))
    assert not torch.allclose(turned, x, atol=1e-2)
    assert torch.allclose(back, x, atol=1e-4)
    gray = x[:, :1].expand(-1, 3, -1, -1)
    assert torch.allclose(coloured(gray, crop_settings(4, hue=0.3)), gray, atol=1e-3)


def test_crops_stay_in_the_range_of_pixels() -> None:
    feed = CropFeed(images(), 8, crops())
    large, small, _ = next(feed.iterate(0, 1))
    mean, std = feed.base.mean, feed.base.std
    for each in (large, small):
        pixels = each * std + mean
        assert float(pixels.min()) > -1e-3
        assert float(pixels.max()) < 1 + 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_crops": 0}, "at least one global crop"),
        ({"scale": (0.9, 0.2)}, "two fractions"),
        ({"local_size": 0}, "at least one pixel"),
    ],
)
def test_bad_crops_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        crops(**changes)
