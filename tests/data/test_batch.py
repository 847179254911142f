"""`batch_from`: one batch from a folder of images, an array, or noise; and bad sources."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from unskip.data import batch
from unskip.data._batch import IMAGENET_MEAN, IMAGENET_STD
from unskip.errors import BadInput, UnskipWarning

PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
RNG = numpy.random.default_rng(0)


def save(path: Path, color: Any, size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path, **options)
    return path


def array(path: Path, values: Any) -> Path:
    numpy.save(path, values)
    return path


# --- Noise ------------------------------------------------------------------------------------------------------------


def test_noise_has_the_requested_number_of_images() -> None:
    x = batch("random:5", n=2, size=(4, 6))
    assert x.shape == (5, 3, 4, 6)
    assert torch.equal(x, batch("random:5", size=(4, 6)))
    assert not torch.equal(x, batch("random:5", size=(4, 6), seed=1))
    assert batch("random:1", size=4, mean=(0.5,), std=(0.5,)).shape == (1, 1, 4, 4)


def test_noise_does_not_use_the_global_generator() -> None:
    before = torch.get_rng_state()
    batch("random:2", size=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("source", ["random:", "random:0", "random:-3", "random:two", "random:1.5", "random:²"])
def test_noise_needs_a_number(source: str) -> None:
    with pytest.raises(BadInput, match="write random:N"):
        batch(source)


def test_a_folder_called_random_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "random" / "a.png", (255, 0, 0))
    monkeypatch.chdir(tmp_path)
    assert batch("random", size=4).shape == (1, 3, 4, 4)


# --- Folders ----------------------------------------------------------------------------------------------------------


def test_colours_are_scaled_and_normalised(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (255, 0, 51))
    x = batch(tmp_path, size=4)
    assert x.dtype == torch.float32
    for channel, value in enumerate((1.0, 0.0, 0.2)):
        expected = (value - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        torch.testing.assert_close(x[0, channel], torch.full((4, 4), expected))


def test_images_are_spread_over_the_sorted_files(tmp_path: Path) -> None:
    for label in range(4):
        for number in range(3):
            save(tmp_path / f"class{label}" / f"{number}.png", (60 * label, 0, 0))
    x = batch(tmp_path, n=4, size=2, **PLAIN)
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [0, 60, 120, 180]
    assert len(batch(tmp_path, n=100, size=2)) == 12
    assert torch.equal(batch(str(tmp_path), n=4, size=2, **PLAIN), x)


def test_an_image_is_cropped_at_its_centre(tmp_path: Path) -> None:
    image = Image.new("RGB", (12, 4), (255, 0, 0))
    image.paste((0, 255, 0), (4, 0, 8, 4))
    image.save(tmp_path / "a.png")
    x = batch(tmp_path, size=4, **PLAIN)
    assert x[0, 1].mean() > 0.95
    assert x[0, 0].mean() < 0.05


@pytest.mark.parametrize(("way", "crop"), [("bilinear", 1.0), ("bicubic", 0.75)])
def test_images_match_pillow(way: Any, crop: float, tmp_path: Path) -> None:
    """From a folder and from an array: a central crop, resized with the given interpolation."""
    pixels = numpy.repeat(numpy.repeat(RNG.integers(0, 256, (6, 10, 3), numpy.uint8), 4, 0), 4, 1)  # 24 x 40
    image, side = Image.fromarray(pixels), round(24 * crop)
    left, top = (40 - side) // 2, (24 - side) // 2
    small = image.crop((left, top, left + side, top + side)).resize((8, 8), Image.Resampling[way.upper()])
    expected = torch.from_numpy(numpy.array(small)).movedim(-1, 0) / 255
    image.save(tmp_path / "a.png")
    path = array(tmp_path / "x.npy", pixels[None])
    for source in (tmp_path, path):
        x = batch(source, size=8, crop=crop, interpolation=way, **PLAIN)
        torch.testing.assert_close(x[0], expected, atol=1.1 / 255, rtol=0)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    image.paste((0, 0, 255), (0, 0, 8, 4))  # blue above
    exif = Image.Exif()
    exif[0x0112] = 3  # rotated by 180 degrees
    image.save(tmp_path / "a.png", exif=exif)
    x = batch(tmp_path, size=8, **PLAIN)
    assert x[0, 2, 7, 4] > 0.9
    assert x[0, 0, 0, 4] > 0.9


@pytest.mark.parametrize(
    ("mode", "color", "suffix"),
    [
        ("L", 102, "png"),
        ("LA", (102, 255), "png"),
        ("1", 1, "png"),
        ("P", 3, "png"),
        ("RGBA", (102, 102, 102, 0), "png"),
        ("CMYK", (0, 0, 0, 153), "tif"),
        ("RGB", (102, 102, 102), "bmp"),
        ("L", 102, "gif"),
        ("RGB", (102,) * 3, "webp"),
    ],
)
def test_every_mode_becomes_three_channels(tmp_path: Path, mode: str, color: Any, suffix: str) -> None:
    save(tmp_path / f"a.{suffix}", color, mode=mode)
    x = batch(tmp_path, size=4, **PLAIN)
    assert x.shape == (1, 3, 4, 4)
    if color not in (1, 3):
        torch.testing.assert_close(x, torch.full_like(x, 0.4), atol=0.02, rtol=0)


def test_deep_grey_images_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(numpy.full((8, 8), 26214, dtype=numpy.uint16)).save(tmp_path / "a.png")  # 0.4 of 65535
    x = batch(tmp_path, size=4, **PLAIN)
    torch.testing.assert_close(x, torch.full_like(x, 0.4), atol=0.01, rtol=0)


def test_deep_grey_images_of_the_pgm_format_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    values = numpy.full((8, 8), 26214, dtype=">u2")  # 0.4 of 65535
    (tmp_path / "a.pgm").write_bytes(b"P5 8 8 65535\n" + values.tobytes())
    x = batch(tmp_path, size=4, **PLAIN)
    torch.testing.assert_close(x, torch.full_like(x, 0.4), atol=0.01, rtol=0)


@pytest.mark.parametrize("dtype", [numpy.int32, numpy.float32])
def test_images_of_32_bits_a_channel_are_refused(tmp_path: Path, dtype: Any) -> None:
    Image.fromarray(numpy.full((8, 8), 1000, dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(BadInput, match="32 bits a channel"):
        batch(tmp_path, size=4, **PLAIN)


def test_one_channel_can_be_requested(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (255, 255, 255))
    x = batch(tmp_path, size=4, mean=(0.5,), std=(0.5,))
    assert x.shape == (1, 1, 4, 4)
    torch.testing.assert_close(x, torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n broken"])
def test_a_broken_image_is_named_and_replaced(tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "a.png", (1, 2, 3))
    (tmp_path / "b.png").write_bytes(content)
    with pytest.warns(UnskipWarning, match=r"b\.png: cannot be read as an image .*; the next image") as caught:
        x = batch(tmp_path, size=4)
    assert caught[0].filename == __file__
    assert torch.equal(x[0], x[1])
    (tmp_path / "c.png").write_bytes(content)
    with pytest.raises(BadInput, match=r"c\.png: cannot be read as an image"):
        batch(tmp_path, size=4)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.bmp", (1, 2, 3), (64, 64))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(BadInput, match=r"a\.bmp: cannot be read as an image"):
        batch(tmp_path, size=4)


def test_an_image_above_the_pixel_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a.png", (1, 2, 3), (64, 64))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadInput, match=r"a\.png: cannot be read as an image"):
        batch(tmp_path, size=4)


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(BadInput, match=r"no images in it .*\.bmp"):
        batch(tmp_path)
    with pytest.raises(BadInput, match="no such file"):
        batch(tmp_path / "missing")
    with pytest.raises(BadInput, match="a source is a folder"):
        batch(tmp_path / "notes.txt")


# --- Arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["last", "first", "grey", "grey first", "grey last"])
@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.float32, numpy.float64, numpy.float16, ">f4", "bool"])
def test_images_of_every_layout(tmp_path: Path, layout: str, dtype: Any) -> None:
    values = RNG.random((5, 6, 6, 3)) > 0.5
    scale = 255 if dtype is numpy.uint8 else 1
    stored = {
        "last": values,
        "first": values.transpose(0, 3, 1, 2),
        "grey": values[..., 0],
        "grey first": values[:, None, :, :, 0],
        "grey last": values[..., :1],
    }[layout]
    expected = torch.from_numpy(values.transpose(0, 3, 1, 2)).float()
    expected = expected[:, :1].expand(-1, 3, -1, -1) if "grey" in layout else expected
    path = array(tmp_path / "x.npy", (stored.astype(numpy.float64) * scale).astype(dtype))
    x = batch(path, n=5, size=6, **PLAIN)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, expected)


def test_arrays_are_spread_resized_and_normalised(tmp_path: Path) -> None:
    values = numpy.zeros((10, 8, 8, 3), dtype=numpy.uint8)
    values[:] = numpy.arange(10, dtype=numpy.uint8)[:, None, None, None] * 20
    path = array(tmp_path / "x.npy", values)
    x = batch(path, n=5, size=(4, 6))
    assert x.shape == (5, 3, 4, 6)
    raw = x * torch.tensor(IMAGENET_STD)[:, None, None] + torch.tensor(IMAGENET_MEAN)[:, None, None]
    torch.testing.assert_close(raw[:, 0, 0, 0] * 255, torch.tensor([0.0, 40, 80, 120, 160]), atol=1e-3, rtol=0)


def test_integer_and_float_arrays_that_are_not_images_are_unchanged(tmp_path: Path) -> None:
    ids = batch(array(tmp_path / "ids.npy", numpy.arange(12, dtype=numpy.int32).reshape(3, 4)), n=2)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    features = RNG.normal(size=(3, 7))
    assert torch.equal(batch(array(tmp_path / "f.npy", features), n=3), torch.from_numpy(features).float())
    maps = RNG.normal(size=(2, 5, 4, 6))
    assert torch.equal(batch(array(tmp_path / "m.npy", maps), n=3), torch.from_numpy(maps).float())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (numpy.full((2, 4, 4, 3), 200.0), "0 to 1; .* 200"),
        (numpy.full((2, 4, 4, 3), -0.5), "from 0 to 1"),
        (numpy.full((2, 4, 4, 3), numpy.nan), "not finite"),
        (numpy.full((2, 4, 4, 3), 300, dtype=numpy.uint16), "from 0 to 1"),
        (numpy.array(3.0), "first axis"),
        (numpy.zeros((0, 4, 4, 3)), "first axis"),
        (numpy.array(["a", "b"]), "first axis"),
        (numpy.zeros(2, dtype=complex), "first axis"),
        (numpy.full((3, 7), numpy.inf), "not finite"),
    ],
)
def test_invalid_arrays_are_refused(tmp_path: Path, values: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        batch(array(tmp_path / "x.npy", values))


def test_files_without_an_array_are_refused(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("text", b"hello"), ("cut", b"\x93NUMPY\x01\x00v")):
        (tmp_path / f"{name}.npy").write_bytes(content)
        with pytest.raises(BadInput, match=rf"{name}\.npy: cannot be read as an array"):
            batch(tmp_path / f"{name}.npy")
    numpy.save(tmp_path / "objects.npy", numpy.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(BadInput, match="cannot be read as an array"):
        batch(tmp_path / "objects.npy")
    with (tmp_path / "zip.npy").open("wb") as file:
        numpy.savez(file, a=numpy.zeros(3))
    with pytest.raises(BadInput, match="several arrays"):
        batch(tmp_path / "zip.npy")


def test_changing_the_batch_does_not_change_the_file(tmp_path: Path) -> None:
    path = array(tmp_path / "x.npy", RNG.normal(size=(3, 7)).astype(numpy.float32))
    before = path.read_bytes()
    batch(path).zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"n": -1}, {"n": 1.5}, {"size": 0}, {"size": (4, -1)}, {"size": (4,)}, {"size": "4"}, {"size": 2.5}],
)
def test_invalid_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"n is|size is"):
        batch("random:2", **options)


def test_the_number_of_channels_must_match_the_mean(tmp_path: Path) -> None:
    path = array(tmp_path / "x.npy", numpy.zeros((2, 4, 4, 3)))
    with pytest.raises(BadInput, match=r"3 channels, .* mean of 1"):
        batch(path, size=4, mean=(0.5,), std=(0.5,))
