"""Batches depend only on (seed, step), not on the number of processes or workers."""

import copy
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.files import picture, write_folder
from torch import Tensor
from torchvision.transforms import v2

from unskip.data import Augment, Feed, ImageSet, _loader, open_images
from unskip.errors import BadInput

EVERYTHING = Augment("resized", mixup=0.8, cutmix=1.0, erase=0.3)


def noise_set(count: int = 40, classes: int = 4, size: int = 6, channels: int = 3) -> ImageSet:

    images = torch.randint(0, 256, (count, channels, size, size), generator=torch.Generator().manual_seed(1))
    names = tuple("abcdefgh"[:classes])
    return ImageSet("noise", "train", names, torch.arange(count) % classes, images.to(torch.uint8))


def constant_set(count: int = 32) -> ImageSet:
    """All pixels of image i have the value i, which is also its label."""
    values = torch.arange(count, dtype=torch.uint8)
    names = tuple(map(str, range(count)))
    return ImageSet("constant", "train", names, torch.arange(count), values[:, None, None, None].expand(-1, 1, 8, 8))


def assert_same(first: Iterator[tuple[Tensor, Tensor]], second: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Bit for bit."""
    count = 0
    for (x, y), (u, v) in zip(first, second, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
        count += 1
    assert count


@pytest.mark.parametrize("augment", [None, Augment(), EVERYTHING, Augment("none", erase=1.0)])
def test_training_can_start_at_any_step(augment: Augment | None) -> None:
    feed = Feed(noise_set(), 8, seed=5, augment=augment)
    whole = list(feed.iterate(0, 13))
    assert len(whole) == 13
    assert_same(iter(whole[7:]), Feed(noise_set(), 8, seed=5, augment=augment).iterate(7, 13))
    assert not torch.equal(whole[0][0], next(Feed(noise_set(), 8, seed=6, augment=augment).iterate(0, 1))[0])


def test_with_flips_alone_images_are_equal_or_mirrored() -> None:
    images = noise_set()
    seen = {False: 0, True: 0}
    plain = Feed(images, 8, seed=5, augment=Augment("none", flip=False)).iterate(0, 5)
    for (x, _), (u, _) in zip(Feed(images, 8, seed=5, augment=Augment("none")).iterate(0, 5), plain, strict=True):
        for one, original in zip(x, u, strict=True):
            mirrored = torch.equal(one, original.flip(-1))
            assert mirrored or torch.equal(one, original)
            seen[mirrored] += 1
    assert min(seen.values()) > 8


@settings(max_examples=25)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([Augment(), EVERYTHING]), st.integers(0, 30))
def test_several_processes_get_the_batches_of_one(world: int, augment: Augment, step: int) -> None:
    feed = Feed(noise_set(), 12, augment=augment)  # shares of 12, 6, 4, 3, 2 and 1: even and odd
    parts = [next(feed.iterate(step, step + 1, rank, world)) for rank in range(world)]
    assert [len(x) for x, _ in parts] == [12 // world] * world
    alone = next(feed.iterate(step, step + 1))
    assert torch.equal(torch.cat([x for x, _ in parts]), alone[0])
    assert torch.equal(torch.cat([y for _, y in parts]), alone[1])


def test_a_short_last_batch_is_divided_among_processes() -> None:
    feed = Feed(noise_set(41), 8, augment=EVERYTHING, drop_last=False)
    assert feed.steps_per_epoch == 6
    parts = [next(feed.iterate(5, 6, rank, 2)) for rank in range(2)]
    assert [len(x) for x, _ in parts] == [0, 1]
    assert torch.equal(parts[1][0], next(feed.iterate(5, 6))[0])


def test_mixing_partners_in_other_processes_are_found() -> None:
    feed = Feed(noise_set(23), 12, augment=EVERYTHING, drop_last=False)
    for step in (1, 3, 5, 7):  # of 11 images: the second process begins and ends with one whose partner lies elsewhere
        parts = [next(feed.iterate(step, step + 1, rank, 3)) for rank in range(3)]
        assert [len(x) for x, _ in parts] == [3, 4, 4]
        assert torch.equal(torch.cat([x for x, _ in parts]), next(feed.iterate(step, step + 1))[0])


def test_every_step_draws_new_augmentations() -> None:
    feed = Feed(
        constant_set(), 32, augment=Augment("none", flip=False, mixup=1.0)
    )  # every label once: shares alone differ
    shares = [y.max(1).values.sort().values for _, y in feed.iterate(0, 2)]
    assert not torch.equal(*shares)


def test_erased_boxes_have_the_mean_colour() -> None:
    feed = Feed(constant_set(), 32, augment=Augment("none", flip=False, erase=0.5, mean=(0.5,), std=(0.5,)))
    gone = [(x == 0).flatten(1).sum(1) for x, _ in feed.iterate(0, 20)]
    assert 0.4 < float((torch.cat(gone) > 0).float().mean()) < 0.6
    assert int(torch.cat(gone).max()) < 0.5 * 64


def test_images_keep_their_labels() -> None:
    feed = Feed(constant_set(), 8, augment=Augment("resized", mean=(0.0,), std=(1 / 255,)))
    seen = []
    for x, y in feed.iterate(0, feed.steps_per_epoch):
        torch.testing.assert_close(x, y[:, None, None, None].float().expand_as(x))
        seen += y.tolist()
    assert sorted(seen) == list(range(32))
    assert seen != sorted(seen)


@pytest.mark.parametrize("augment", [Augment("none", mixup=0.8), Augment("none", cutmix=1.0)])
def test_label_weights_match_the_mixed_pixels(augment: Augment) -> None:
    feed = Feed(constant_set(), 8, augment=replace(augment, mean=(0.0,), std=(1 / 255,)))
    mixed = 0
    for x, y in feed.iterate(0, 4):
        torch.testing.assert_close(y.sum(1), torch.ones(8))
        # All pixels of image i have value i, so the mean pixel is the weighted mean of the labels.
        torch.testing.assert_close(x.mean((1, 2, 3)), y @ torch.arange(32.0), atol=1e-4, rtol=1e-5)
        mixed += int((y.max(1).values < 0.999).sum())
    assert mixed > 16


def test_half_of_the_images_are_flipped() -> None:
    ramp = torch.arange(6, dtype=torch.uint8).expand(400, 1, 6, 6).contiguous()
    images = ImageSet("ramps", "train", ("a",), torch.zeros(400, dtype=torch.int64), ramp)
    x, _ = next(Feed(images, 400, augment=Augment("none")).iterate(0, 1))
    flipped = x[:, 0, 0, 0] > x[:, 0, 0, -1]
    assert 160 < int(flipped.sum()) < 240
    assert torch.equal(x[flipped][0].flip(-1), x[~flipped][0])


def test_evaluation_yields_every_image_once_in_order() -> None:
    images = noise_set(19)
    feed = Feed(images, 8, augment=EVERYTHING)
    parts = list(feed.evaluate())
    assert [len(x) for x, _ in parts] == [8, 8, 3]
    assert torch.equal(torch.cat([y for _, y in parts]), images.labels)
    mean, std = feed.mean, feed.std
    assert images.images is not None
    torch.testing.assert_close(torch.cat([x for x, _ in parts]), (images.images / 255 - mean) / std)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_evaluation_by_several_processes(world: int) -> None:
    feed = Feed(noise_set(17), 8, augment=None)
    ranks = [list(feed.evaluate(rank, world)) for rank in range(world)]

    def rows(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[float], int]]:
        return [(x.flatten().tolist(), int(y)) for xs, ys in batches for x, y in zip(xs, ys, strict=True)]

    assert rows(batch for rank in ranks for batch in rank) == rows(feed.evaluate())
    assert all(len(x) for rank in ranks for x, _ in rank)
    assert len({len(rank) for rank in ranks}) == 1


def test_a_set_smaller_than_a_batch_is_evaluated_and_not_trained_on() -> None:
    feed = Feed(noise_set(5), 8)
    assert len(next(feed.evaluate())[0]) == 5
    with pytest.raises(BadInput, match=r"5 images .* batch of 8"):
        feed.iterate(0, 1)


def test_sizes_and_channels() -> None:
    x, y = next(Feed(noise_set(channels=1), 8, 10, augment=Augment()).iterate(0, 1))
    assert (x.shape, x.dtype, y.dtype) == ((8, 1, 10, 10), torch.float32, torch.int64)
    wide = ImageSet("wide", "train", ("a",), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3, 6, 9).byte())
    for augment in (None, Augment(), Augment("resized"), Augment("none")):
        assert next(Feed(wide, 4, 8, augment=augment).iterate(0, 1))[0].shape == (4, 3, 8, 8)


def test_the_global_generator_is_not_used(tmp_path: Path) -> None:
    disk = open_images(write_folder(tmp_path, {"a": 4, "b": 4}))
    state = torch.random.get_rng_state()
    for images, augment in ((noise_set(), EVERYTHING), (disk, replace(EVERYTHING, randaugment="2,9"))):
        feed = Feed(images, 4, 8, augment=augment)
        list(feed.iterate(0, 2))
        list(feed.evaluate())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    folder = tmp_path_factory.mktemp("disk")
    write_folder(folder, {"a": 7, "b": 6, "c": 5}, (20, 14))
    picture(99, 9, 30, "L").save(folder / "a" / "gray.png")
    return open_images(folder)


@pytest.mark.parametrize("augment", [None, Augment(), replace(EVERYTHING, randaugment="2,9")])
def test_disk_any_step_any_workers_any_processes(disk: ImageSet, augment: Augment | None) -> None:
    feed = Feed(disk, 6, 8, augment=augment)
    whole = list(feed.iterate(0, 5))
    assert all(x.shape == (6, 3, 8, 8) for x, _ in whole)
    assert_same(iter(whole[3:]), feed.iterate(3, 5))
    assert_same(iter(whole), Feed(disk, 6, 8, augment=augment, workers=2).iterate(0, 5))
    parts = [list(feed.iterate(0, 5, rank, 2)) for rank in range(2)]
    for step, (x, y) in enumerate(whole):  # shares of 3: a partner lies in the other process
        assert torch.equal(torch.cat([part[step][0] for part in parts]), x)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), y)


def test_disk_draws_new_augmentations_in_every_epoch(disk: ImageSet) -> None:
    feed = Feed(disk, len(disk), 8, augment=replace(EVERYTHING, mixup=0.0, cutmix=0.0))
    seen = torch.cat([x for x, _ in feed.iterate(0, 2)])
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 2 * len(disk)


def test_disk_randaugment_is_drawn_for_every_sample(tmp_path: Path) -> None:
    for index in range(8):
        picture(0).save(tmp_path / f"{index}.png")
    feed = Feed(open_images(tmp_path), 8, 12, augment=Augment("none", flip=False, randaugment="2,9"))
    first, second = (x for x, _ in feed.iterate(0, 2))
    assert len({tuple(x.flatten().tolist()) for x in first}) > 4  # of the same picture
    assert not torch.equal(first, second)


def test_disk_and_memory_give_the_same_evaluation(disk: ImageSet, tmp_path: Path) -> None:
    """Images that already have the requested size are unchanged in both."""
    folder = write_folder(tmp_path, {"a": 3, "b": 2}, (8, 8))
    streamed, held = open_images(folder), open_images(folder, size=8)
    assert streamed.images is None
    assert held.images is not None
    assert_same(Feed(streamed, 4, 8).evaluate(), Feed(held, 4, 8).evaluate())
    assert len(torch.cat([y for _, y in Feed(disk, 4, 8, workers=1).evaluate()])) == len(disk)


def test_disk_and_memory_give_the_same_crops(tmp_path: Path) -> None:
    """The same boxes give the same pixels, up to the rounding of Pillow's resizing to bytes."""
    from unskip.data import _device
    from unskip.data._augment import geometry
    from unskip.data._decode import decoded
    from unskip.data._loader import ViewDecoder
    from unskip.data._order import GEOMETRY, stream

    images = open_images(write_folder(tmp_path, {"a": 6}, (20, 14)), size=None)
    held = images.load(range(6), (20, 14))
    for augment in (Augment("resized"), Augment("pad"), Augment("center", center=0.6)):
        for index in range(6):
            assert images.reader is not None
            (got,) = ViewDecoder(augment, 10, seed=0)(decoded(images.reader, index), 2, index)
            boxes = torch.from_numpy(geometry(augment, stream(GEOMETRY, 0, 2, index), 1, 20, 14))
            expected = _device.crop_resize(held[index : index + 1], boxes, (10, 10), pad=4)[0]
            torch.testing.assert_close(torch.from_numpy(got.copy()).float(), expected, atol=2.0, rtol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_disk_replaces_broken_images(tmp_path: Path, workers: int) -> None:
    """Each by another image, with its label, that depends on (seed, step, position). Broken files are named."""
    folder = write_folder(tmp_path, dict.fromkeys("abcdef", 3), (8, 8))
    whole = open_images(folder)
    (folder / "b" / "001.png").write_bytes(b"broken")  # row 4
    augment = Augment("none", flip=False)
    feeds = [Feed(whole, 6, 8, augment=augment, workers=workers) for _ in range(2)]
    batches = list(feeds[0].iterate(0, 6))
    assert list(feeds[0].broken) == [4]
    assert "b/001.png" in feeds[0].broken[4]
    assert_same(iter(batches[2:]), feeds[1].iterate(2, 6))
    for rank in range(2):
        part = list(Feed(whole, 6, 8, augment=augment, workers=0).iterate(0, 6, rank, 2))
        assert all(torch.equal(x, y[0][3 * rank : 3 * rank + 3]) for (x, _), y in zip(part, batches, strict=True))
    seen = [tuple(x.flatten().tolist()) for xs, _ in batches for x in xs]
    labels = {tuple(whole_x.flatten().tolist()): row // 3 for row, whole_x in enumerate(_pixels(folder))}
    assert [labels[x] for x in seen] == [int(y) for _, ys in batches for y in ys]
    assert len(set(seen)) == 17


def _pixels(folder: Path) -> list[Tensor]:
    """The images of a folder in the order of its rows, without broken ones."""
    (folder / "b" / "001.png").write_bytes((folder / "a" / "000.png").read_bytes())
    found = [x for xs, _ in Feed(open_images(folder), 18, 8).evaluate() for x in xs]
    found[4] = torch.zeros(3, 8, 8)
    return found


@pytest.mark.parametrize("workers", [0, 1])
def test_disk_raises_if_too_many_images_are_broken(tmp_path: Path, workers: int) -> None:
    images = open_images(write_folder(tmp_path, {"a": 3, "b": 3}))
    for name in ("b/001.png", "a/000.png"):
        (tmp_path / name).unlink()
    with pytest.raises(BadInput, match=r"\.png: .*No such file.* 2 of 6"):
        list(Feed(images, 6, 8, workers=workers).iterate(0, 1))
    for file in tmp_path.rglob("*.png"):
        file.unlink()
    with pytest.raises(BadInput, match=r"\.png: .*8 images drawn"):
        list(Feed(images, 6, 8, workers=workers).iterate(0, 1))


def test_disk_parts_together_are_the_batch(disk: ImageSet) -> None:
    for images, augment in ((disk, EVERYTHING), (noise_set(), EVERYTHING)):
        feed = Feed(images, 12, 8, augment=augment)
        for x, y in feed.iterate(1, 2):
            parts = list(feed.iterate(1, 2, parts=3))
            assert [len(part) for part, _ in parts] == [4, 4, 4]
            assert torch.equal(torch.cat([part for part, _ in parts]), x)
            assert torch.equal(torch.cat([part for _, part in parts]), y)


def test_disk_a_transform_replaces_the_crop(disk: ImageSet) -> None:
    transform = v2.Compose([v2.RandomResizedCrop(8, interpolation=v2.InterpolationMode.BICUBIC), v2.RandomRotation(30)])
    feed = Feed(disk, 6, 8, transform=transform, workers=0)
    whole = list(feed.iterate(0, 4))
    assert_same(iter(whole[2:]), Feed(disk, 6, 8, transform=transform, workers=2).iterate(2, 4))
    for workers, wrong, says in (
        (0, v2.Resize((10, 10)), r"^the transform makes uint8 of shape \(3, 10, 10\)"),
        (1, v2.Compose([v2.Resize((8, 8)), v2.Grayscale()]), r"^the transform makes uint8 of shape \(8, 8\)"),
        (0, v2.Compose([v2.Resize((8, 8)), v2.PILToTensor(), v2.ToDtype(torch.float32)]), "makes float32"),
        (0, lambda image: None, "makes object"),
    ):
        with pytest.raises(BadInput, match=says):
            next(Feed(disk, 6, 8, transform=wrong, workers=workers).iterate(0, 1))
    with pytest.raises(BadInput, match="these are in memory"):
        Feed(noise_set(), 6, 8, transform=transform)


def test_prefetched_batches_are_limited_in_bytes(disk: ImageSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is read in parts; the number of prefetched parts depends on their size."""
    asked: list[dict[str, Any]] = []
    real = _loader.DataLoader

    def spied(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return real(*given, **options)

    monkeypatch.setattr(_loader, "DataLoader", spied)
    monkeypatch.setattr(_loader, "AHEAD", 3000)  # bytes: a batch has 12 * 3 * 8 * 8 = 2304
    whole = list(Feed(disk, 12, 8, workers=2).iterate(0, 2))
    assert asked[0]["prefetch_factor"] == 2  # of 2 workers, each with parts of 3 images
    assert_same(iter(whole), Feed(disk, 12, 8, workers=0).iterate(0, 2))


def test_readers_can_be_pickled(disk: ImageSet) -> None:
    again = pickle.loads(pickle.dumps(disk))
    assert_same(Feed(again, 4, 8).evaluate(), Feed(disk, 4, 8).evaluate())


def test_wrong_arguments(disk: ImageSet) -> None:
    with pytest.raises(BadInput, match="--size"):
        Feed(disk, 4)
    with pytest.raises(BadInput, match=r"randaugment.* read from disk"):
        Feed(noise_set(), 4, augment=Augment(randaugment="2,9"))
    with pytest.raises(BadInput, match="workers must be a whole number"):
        Feed(disk, 4, 8, workers=-1)
    with pytest.raises(BadInput, match="size must be a whole number"):
        Feed(disk, 4, 0)
    feed = Feed(noise_set(), 8)
    with pytest.raises(BadInput, match="among 3"):
        feed.iterate(0, 1, 0, 3)
    with pytest.raises(BadInput, match="steps from 3 to 2"):
        feed.iterate(3, 2)
    with pytest.raises(BadInput, match="ranks go from 0"):
        feed.evaluate(1, 1)


def test_attributes_and_repr() -> None:
    images = noise_set()
    feed = Feed(images, 8)
    assert feed.classes == ("a", "b", "c", "d")
    assert feed.steps_per_epoch == 5
    assert repr(images) == "ImageSet(noise, train: 40 images, 4 classes, 6x6)"
    assert copy.copy(images).labels is images.labels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_equals_cpu() -> None:
    for augment in (None, Augment(), EVERYTHING):
        cpu, gpu = (Feed(noise_set(), 8, augment=augment, device=device).iterate(0, 8) for device in ("cpu", "cuda"))
        for (x, y), (u, v) in zip(cpu, gpu, strict=True):
            torch.testing.assert_close(u.cpu(), x, atol=0.25 / (255 * 0.224), rtol=0)  # a quarter of a byte's step
            torch.testing.assert_close(v.cpu(), y)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_cuda_feed_does_not_synchronise() -> None:
    feed = Feed(noise_set(), 8, augment=EVERYTHING, device="cuda")
    list(feed.iterate(0, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(feed.iterate(0, 8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
