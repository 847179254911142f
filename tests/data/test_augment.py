"""Augmentations: the distribution of their parameters, and the images against torchvision and by hand."""

import json
import math
from dataclasses import asdict

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import RandomResizedCrop, functional

from unskip.data import Augment, _device
from unskip.data._augment import central, geometry, mixing, normalisation, partners
from unskip.errors import BadInput

MANY = 20_000


def rng(seed: int = 0) -> numpy.random.Generator:
    return numpy.random.default_rng(seed)


@given(
    st.integers(1, 80),
    st.integers(1, 80),
    st.sampled_from([(0.08, 1.0), (0.5, 0.5), (1.0, 1.0), (0.001, 0.01)]),
    st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.1, 10.0)]),
)
def test_resized_boxes_are_inside_the_image(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    top, left, tall, wide, _ = geometry(Augment("resized", scale=scale, ratio=ratio), rng(), 50, height, width).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (tall >= 1).all()
    assert (wide >= 1).all()
    assert (top + tall <= height).all()
    assert (left + wide <= width).all()


def test_resized_boxes_have_the_requested_area_and_aspect() -> None:
    boxes = geometry(Augment("resized", scale=(0.1, 0.5), ratio=(0.5, 2.0)), rng(), MANY, 1000, 1000)
    area, aspect = boxes[:, 2] * boxes[:, 3] / 1e6, boxes[:, 3] / boxes[:, 2]
    assert 0.099 < area.min() < 0.11
    assert 0.49 < area.max() < 0.501
    assert 0.497 < aspect.min() < 0.51
    assert 1.96 < aspect.max() < 2.01
    # Every draw fits at these sizes, so the area is uniform and the logarithm of the aspect symmetric about 0.
    assert area.mean() == pytest.approx(0.3, abs=0.005)
    assert numpy.log(aspect).mean() == pytest.approx(0, abs=0.02)
    # All corners that fit are equally likely.
    assert (boxes[:, 0] / (1000 - boxes[:, 2])).mean() == pytest.approx(0.5, abs=0.01)


def test_resized_boxes_match_torchvision() -> None:
    """Equal means and standard deviations, at sizes where some draws do not fit and the fallback is used."""
    scale, ratio, image = (0.6, 1.0), (0.5, 2.0), torch.empty(3, 30, 40)
    theirs = RandomResizedCrop(8, scale=scale, ratio=ratio)
    drawn = [theirs.make_params([image]) for _ in range(8000)]
    ours = geometry(Augment("resized", scale=scale, ratio=ratio), rng(), 8000, 30, 40).T
    for column, name in enumerate(("top", "left", "height", "width")):
        values = numpy.array([float(params[name]) for params in drawn])
        assert ours[column].mean() == pytest.approx(values.mean(), abs=0.15), name
        assert ours[column].std() == pytest.approx(values.std(), abs=0.15), name


def test_the_fallback_is_a_central_box() -> None:
    strip = geometry(Augment("resized", scale=(0.9, 1.0), flip=False), rng(), 5, 10, 100)
    assert strip.tolist() == [[0, 43, 10, 13, 0]] * 5  # 10 x 13.3 is the widest box allowed


def test_pad_shifts_by_at_most_pad() -> None:
    boxes = geometry(Augment(pad=3), rng(), MANY, 32, 32)
    for column in (0, 1):
        values, counts = numpy.unique(boxes[:, column], return_counts=True)
        assert values.tolist() == list(range(-3, 4))
        assert counts / MANY == pytest.approx([1 / 7] * 7, abs=0.01)
    assert (boxes[:, 2:4] == 32).all()
    assert boxes[:, 4].mean() == pytest.approx(0.5, abs=0.01)


def test_boxes_without_augmentation() -> None:
    assert geometry(None, rng(), 2, 20, 30).tolist() == [[0, 5, 20, 20, 0]] * 2
    assert geometry(Augment("center", center=0.5, flip=False), rng(), 1, 20, 30).tolist() == [[5, 10, 10, 10, 0]]
    assert geometry(Augment("none", flip=False), rng(), 1, 20, 30).tolist() == [[0, 0, 20, 30, 0]]
    assert central(20, 30, (10, 30)) == (5, 0, 10, 30)


def test_mixup_shares_have_a_beta_distribution() -> None:
    table = mixing(Augment(mixup=0.8), rng(), MANY, 32)
    share = table[:, 0]
    assert (table[:, 1] == share).all()
    assert (table[:, 2:] == 0).all()
    assert share.mean() == pytest.approx(0.5, abs=0.01)
    assert share.var() == pytest.approx(1 / (4 * (2 * 0.8 + 1)), rel=0.03)  # of Beta(a, a)


def test_cutmix_label_weight_is_the_area() -> None:
    table = mixing(Augment(cutmix=1.0), rng(), 500, 32)
    top, left, bottom, right = table[:, 2:6].T
    assert (table[:, 0] == 1).all()
    assert table[:, 1] == pytest.approx(1 - (bottom - top) * (right - left) / 32**2, abs=1e-12)
    # On the device: after pasting zeros into ones, the share of ones is the label weight.
    values = torch.from_numpy(table).float()
    mixed = _device.mixed(torch.ones(500, 3, 32, 32), torch.zeros(500, 3, 32, 32), values)
    assert ((mixed == 0) | (mixed == 1)).all()
    torch.testing.assert_close(mixed.mean((1, 2, 3)), values[:, 1])


def test_mixup_and_cutmix_alternate() -> None:
    table = mixing(Augment(mixup=0.8, cutmix=1.0), rng(), MANY, 32)
    assert (table[:, 0] == 1).mean() == pytest.approx(0.5, abs=0.01)


def test_erase() -> None:
    table = mixing(Augment(erase=0.25), rng(), MANY, 64)
    area = (table[:, 8] - table[:, 6]) * (table[:, 9] - table[:, 7]) / 64**2
    assert (area > 0).mean() == pytest.approx(0.25, abs=0.01)
    assert area[area > 0].min() > 0.015
    assert area.max() < 0.35
    assert table[:, 6:].min() >= 0
    assert table[:, 6:].max() <= 64
    images = _device.erased(torch.ones(MANY // 100, 1, 64, 64), torch.from_numpy(table[: MANY // 100, 6:]).float())
    torch.testing.assert_close(1 - images.mean((1, 2, 3)).double(), torch.from_numpy(area[: MANY // 100]))


@given(st.integers(1, 300))
def test_partners(count: int) -> None:
    found = partners(count)
    assert ((found >= 0) & (found < count)).all()
    if count > 1:
        assert (found != numpy.arange(count)).all()
    if count % 2 == 0:
        assert (found[found] == numpy.arange(count)).all()


def test_labels_are_mixed_with_the_weights() -> None:
    table = torch.tensor([[0.3, 0.3, 0, 0, 0, 0], [1.0, 0.75, 0, 0, 8, 8]])
    weights = _device.mixed_labels(torch.tensor([0, 2]), torch.tensor([1, 2]), table, 4)
    torch.testing.assert_close(weights, torch.tensor([[0.3, 0.7, 0, 0], [0, 0, 1.0, 0]]))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.booleans(), st.data())
def test_resized_crop_matches_torchvision(height: int, width: int, out: int, flip: bool, data: st.DataObject) -> None:
    tall, wide = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - tall)), data.draw(st.integers(0, width - wide))
    image = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(height * width))
    boxes = torch.tensor([[top, left, tall, wide, flip]] * 2)
    expected = functional.resized_crop(image, top, left, tall, wide, [out, out], antialias=True)
    expected = functional.horizontal_flip(expected) if flip else expected
    torch.testing.assert_close(_device.crop_resize(image, boxes, (out, out)), expected, atol=2e-5, rtol=0)


def test_pad_crop_copies_bytes() -> None:
    image = torch.randint(0, 256, (1, 3, 9, 9), dtype=torch.uint8)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4)).float()
    for top in range(-4, 5):
        for left in range(-4, 5):
            crop = padded[:, :, top + 4 : top + 13, left + 4 : left + 13]
            for flip in (0, 1):
                got = _device.crop_resize(image, torch.tensor([[top, left, 9, 9, flip]]), (9, 9), pad=4)
                assert torch.equal(got, crop.flip(-1) if flip else crop)  # bitwise


def test_pad_crop_and_resize() -> None:
    """Black padding is interpolated like other pixels."""
    image = torch.rand(1, 3, 9, 9)
    crop = torch.nn.functional.pad(image, (4, 4, 4, 4))[:, :, 1:10, 6:15]
    expected = functional.resize(crop, [14, 14], antialias=True)
    got = _device.crop_resize(image, torch.tensor([[-3, 2, 9, 9, 0]]), (14, 14), pad=4)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_autocast_does_not_lower_the_precision() -> None:
    image, boxes = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8), torch.tensor([[1, 2, 11, 9, 1]] * 2)
    plain = _device.crop_resize(image, boxes, (16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(_device.crop_resize(image, boxes, (16, 16)), plain)


def test_augmentations_compile_without_graph_breaks() -> None:
    def made(images: torch.Tensor, boxes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        values = _device.normalised(
            _device.crop_resize(images, boxes, (8, 8), pad=2), torch.tensor(0.5), torch.tensor(0.2)
        )
        values = _device.erased(values, table[:, 6:])
        return _device.mixed(values, values.flip(0), table)

    augment = Augment("pad", pad=2, mixup=0.8, cutmix=1.0, erase=0.5)
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    boxes = torch.from_numpy(geometry(augment, rng(), 6, 8, 8)).float()
    table = torch.from_numpy(mixing(augment, rng(), 6, 8)).float()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    assert torch.equal(compiled(images, boxes, table), made(images, boxes, table))


def test_normalised() -> None:
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.2, 0.4, 0.6), (0.1, 0.2, 0.5)))
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = functional.normalize(images.float() / 255, [0.2, 0.4, 0.6], [0.1, 0.2, 0.5])
    torch.testing.assert_close(_device.normalised(images, mean, std), expected)


def test_config_goes_through_json() -> None:
    augment = Augment("resized", scale=(0.2, 0.9), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0), randaugment="2,9")
    assert Augment(**json.loads(json.dumps(asdict(augment)))) == augment


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"crop": "random"}, "crop must be one of pad, .* got 'random'"),
        ({"pad": -1}, "pad must be .* got -1"),
        ({"mixup": -0.1}, "mixup must be .* got -0.1"),
        ({"scale": (0.5, 0.2)}, "scale must be .* got .0.5, 0.2."),
        ({"scale": (0.5, 2.0)}, "scale must be"),
        ({"ratio": (0.0, 1.0)}, "ratio must be"),
        ({"erase": 1.5}, "erase must be .* got 1.5"),
        ({"center": 0.0}, "center must be .* got 0.0"),
        ({"randaugment": "rand-m9"}, "write operations,magnitude as in '2,9'"),
        ({"randaugment": "2,31"}, "magnitude up to 30"),
    ],
)
def test_wrong_settings(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Augment(**wrong)  # type: ignore[arg-type]


def test_normalisation_by_channels() -> None:
    assert normalisation(None, 1) == ((0.5,), (0.5,))
    assert math.isclose(normalisation(Augment(), 3)[0][0], 0.485)
    with pytest.raises(BadInput, match=r"1 channels, .* mean of 3"):
        normalisation(Augment(mean=(0.1, 0.2, 0.3)), 1)
    with pytest.raises(BadInput, match="every entry must be above 0"):
        normalisation(Augment(std=(0.0,)), 1)
