"""Latents of an autoencoder: encoded once, loaded in batches, used in training and decoded to samples."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.recipes.generative import few, tiny
from torch import Tensor

import unskip
from unskip import cli
from unskip.data import _latents, open_images
from unskip.data._latents import Autoencoder, LatentFeed, Latents, encode
from unskip.errors import BadInput, LoadError
from unskip.recipes import evaluate_run
from unskip.recipes._flow import FlowConfig

# Short runs give health warnings.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    module = diffusers.AutoencoderKL(
        **kinds, block_out_channels=[8, 8], layers_per_block=1, norm_num_groups=4, latent_channels=2, scaling_factor=0.5
    )
    folder = tmp_path_factory.mktemp("autoencoder") / "kl"
    module.save_pretrained(folder)
    return folder


def moments(latents: Latents) -> Any:
    """(images, 2, 2 channels, side, side)."""
    places = numpy.arange(len(latents.rows))
    return numpy.stack([latents.take(places, numpy.full_like(places, mirrored)) for mirrored in range(2)], 1)


def test_latents_match_the_autoencoder_and_are_encoded_once(
    autoencoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    mine, theirs = Autoencoder.open(autoencoder), diffusers.AutoencoderKL.from_pretrained(autoencoder)
    images = few()
    held = moments(encode(images, mine, 8, tmp_path))
    assert held.shape == (48, 2, 4, 4, 4)
    pixels = images.load(range(48), 8).float().expand(-1, 3, -1, -1) / 127.5 - 1
    with torch.no_grad():
        for index, shown in enumerate((pixels, pixels.flip(3))):
            result = theirs.encode(shown).latent_dist
            expected = torch.cat([result.mean, result.logvar], 1)
            torch.testing.assert_close(torch.from_numpy(held[:, index].copy()).float(), expected, rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(Autoencoder, "moments", lambda *args: pytest.fail("encoded again"))
    assert numpy.array_equal(moments(encode(images, mine, 8, tmp_path)), held)
    noise = torch.randn(3, 2, 4, 4)
    first = torch.from_numpy(held[:3, 0].copy()).float()
    drawn = mine.latents(first, noise)
    expected = 0.5 * (first[:, :2] + torch.exp(0.5 * first[:, 2:]) * noise)
    torch.testing.assert_close(drawn, expected)


def test_batches_of_latents_depend_only_on_seed_and_step(autoencoder: Path, tmp_path: Path) -> None:
    feed = LatentFeed(few(), Autoencoder.open(autoencoder), 16, 8, tmp_path, seed=3)
    whole = list(feed.iterate(0, 6))
    late = list(feed.iterate(4, 6))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(whole[4:], late, strict=True))
    halves = [next(feed.iterate(2, 3, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([half[0] for half in halves]), whole[2][0])
    # Every image or its mirror image once per epoch.
    rows = torch.cat([part[0] for part in whole[:3]]).flatten(1)
    either = torch.from_numpy(moments(feed.moments).astype(numpy.float32)).flatten(2)
    apart = (rows[:, None, None] - either[None]).abs().amax(3)
    which, mirrored = apart.amin(2).argmin(1), apart.amin(1).argmin(1)
    assert sorted(which.tolist()) == list(range(48))
    assert 0 < int(mirrored.sum()) < 48
    assert sum(len(part[1]) for part in feed.evaluate()) == 48
    alone = LatentFeed(few(), feed.autoencoder, 47, 8, tmp_path)  # a last batch of one
    assert torch.equal(torch.cat([part[0] for part in alone.evaluate()]), torch.cat([p[0] for p in feed.evaluate()]))


def test_a_run_on_latents_learns_and_samples(
    autoencoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(latents=str(autoencoder), cache=str(tmp_path / "cache"), health=False)
    assert isinstance(config, FlowConfig)
    unskip.train(config, tmp_path / "run", quiet=True)
    result = unskip.sample(tmp_path / "run", n=3, steps=2, write=False)
    assert result.images.shape == (3, 3, 8, 8)
    assert cli.main(["eval", str(tmp_path / "run")]) == 2
    assert "trained on latents" in capsys.readouterr().err
    with pytest.raises(BadInput, match="trained on latents"):
        evaluate_run(tmp_path / "run", ["knn-dino-v1"], times=(1.0,))


def test_processes_encode_their_share_and_files_left_by_others(
    autoencoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes encode six files. The first is killed in its third file, which the second encodes as well."""
    mine = Autoencoder.open(autoencoder)
    whole = moments(encode(few(), mine, 8, tmp_path / "whole"))
    monkeypatch.setattr(_latents, "PART", 8)
    made, write = list[int](), _latents._write

    def counted(file: Path, *options: Any) -> None:
        if made == [0, 1]:
            made.append(-1)
            raise KeyboardInterrupt
        write(file, *options)
        made.append(int(file.stem))

    monkeypatch.setattr(_latents, "_write", counted)
    with pytest.raises(KeyboardInterrupt):
        encode(few(), mine, 8, tmp_path / "cache", rank=0, world=2)
    assert numpy.array_equal(moments(encode(few(), mine, 8, tmp_path / "cache", rank=1, world=2)), whole)
    assert made == [0, 1, -1, 3, 4, 5, 2]
    assert numpy.array_equal(moments(encode(few(), mine, 8, tmp_path / "cache", rank=0, world=2)), whole)
    assert len(made) == 7
    assert not [*tmp_path.rglob("*.tmp")]


def test_latents_of_a_broken_image_are_those_of_its_replacement(autoencoder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for index in range(4):
            picture = numpy.full((8, 8, 3), 20 * index + 100 * (name == "b"), numpy.uint8)
            Image.fromarray(picture).save(tmp_path / "set" / name / f"{index}.png")
    (tmp_path / "set" / "b" / "3.png").write_bytes(b"nothing")
    feed = LatentFeed(open_images(tmp_path / "set"), Autoencoder.open(autoencoder), 8, 8, tmp_path / "cache")
    assert "b/3.png: could not be read" in feed.broken[7]
    other = int(feed.moments.rows[7])
    assert other < 7
    values, labels = next(feed.in_order())
    assert torch.equal(values[7], values[other])
    assert labels[7] == labels[other]


def test_bad_autoencoders_and_latents_are_refused(autoencoder: Path, tmp_path: Path) -> None:
    mine = Autoencoder.open(autoencoder)
    with pytest.raises(BadInput, match="multiples of 2"):
        encode(few(), mine, 7, tmp_path)

    class Broken(Autoencoder):
        def moments(self, images: Tensor) -> Tensor:
            result = super().moments(images)
            result[5] = torch.nan
            return result

    broken = Broken(mine.module, "broken", mine.channels, mine.factor, mine.scale, mine.shift)
    with pytest.raises(BadInput, match=r"image 5: .* not finite"):
        encode(few(), broken, 8, tmp_path)
    assert not [*tmp_path.rglob("*.npy")]
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"latents cannot be written there .* choose another cache"):
        encode(few(), mine, 8, tmp_path / "file")
    encode(few(), mine, 8, tmp_path / "cache")
    for held in [*(tmp_path / "cache").rglob("*.npy")]:
        whole = held.read_bytes()
        for damaged in (whole[:-100], b"", b"nothing"):
            held.write_bytes(damaged)
            with pytest.raises(LoadError, match=r"damaged .* delete it"):
                encode(few(), mine, 8, tmp_path / "cache")
        held.write_bytes(whole)
    latents = torch.randn(3, 2, 4, 4)
    latents[1, 0, 0, 0] = torch.nan
    with pytest.raises(BadInput, match=r"1 of 3 .* not finite"):
        mine.decode(latents)
    shutil.copytree(autoencoder, tmp_path / "kl")
    for file in (tmp_path / "kl").glob("*.safetensors"):
        file.write_bytes(b"nothing")
    with pytest.raises(LoadError, match="cannot be loaded as AutoencoderKL"):
        Autoencoder.open(tmp_path / "kl")


def test_the_baseline_loss_counts_the_noise_of_latents(autoencoder: Path, tmp_path: Path) -> None:
    """Latents are sampled as mean + std * noise, and the baseline is the mean square of both parts."""
    config = tiny(latents=str(autoencoder), cache=str(tmp_path / "cache"), batch=1024)
    task, _ = unskip.recipes.build_task(config)
    torch.manual_seed(0)
    result = float(task.loss(task.model, next(task.feed.iterate(0, 1)))[0].detach())
    assert result == pytest.approx(task.baseline_loss, rel=0.03)
