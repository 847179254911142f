"""Latents of images by a user's autoencoder (AutoencoderKL of diffusers), encoded once and cached on disk.

    z = (mean + exp(logvar / 2) n - shift) * scale,   n normal, new in every step

The mean and log variance of every image and of its mirror image are cached as float16, under a key of the images, the
autoencoder's weights and the size.

A file has PART images. Each process of a launcher writes the files of its own share, then those still missing, in a
random order of its own, so no process waits for one that has died or that writes on another node. Files are written
under a temporary name and renamed, so a killed run continues with the missing files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip._words import brief
from unskip.data._device import put
from unskip.data._feed import Feed
from unskip.data._images import ImageSet, fingerprint
from unskip.data._order import GEOMETRY, Order, Rows, check_world, evaluation_batches, share, stream
from unskip.errors import BadInput, LoadError

PART = 2048  # images per file; with four channels of 32 x 32, 67 MB
_BATCH = 64  # images encoded at a time


@dataclass(frozen=True)
class Autoencoder:
    """A frozen autoencoder: maps bytes to the moments of latents, and latents to bytes."""

    module: nn.Module
    key: str
    channels: int  # of latents
    factor: int  # side of an image / side of its latent
    scale: float
    shift: float

    @staticmethod
    def open(folder: str | Path, device: str | torch.device = "cpu") -> Autoencoder:
        """Opens a folder written by AutoencoderKL.save_pretrained of diffusers."""
        diffusers = need("diffusers")
        if not (Path(folder) / "config.json").is_file():
            raise BadInput(f"{folder}: no config.json; give a folder written by AutoencoderKL.save_pretrained")
        kind: Any = diffusers.AutoencoderKL
        try:
            module = kind.from_pretrained(str(folder), local_files_only=True, low_cpu_mem_usage=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"{folder}: cannot be loaded as AutoencoderKL of diffusers ({brief(error)})") from error
        module = module.to(device).eval().requires_grad_(False)
        digest = hashlib.sha256()
        for name, value in sorted(module.state_dict().items()):
            digest.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
        config = module.config
        return Autoencoder(
            module,
            digest.hexdigest()[:16],
            int(config.latent_channels),
            2 ** (len(config.block_out_channels) - 1),
            float(config.scaling_factor),
            float(getattr(config, "shift_factor", None) or 0.0),
        )

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Bytes (n, 1 or 3, size, size) to means and log variances (n, 2 channels, size / factor, size / factor)."""
        module: Any = self.module
        values = images.to(next(module.parameters()).device).float() / 127.5 - 1
        normal = module.encode(values.expand(-1, 3, -1, -1)).latent_dist
        return torch.cat([normal.mean, normal.logvar], 1)

    def latents(self, moments: Tensor, noise: Tensor | None = None) -> Tensor:
        """Moments to latents: samples if there is noise, else the means."""
        mean, logvar = moments.chunk(2, 1)
        latent = mean if noise is None else mean + (logvar.clamp(-30, 20) / 2).exp() * noise
        return (latent - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents to bytes. Raises BadInput for non-finite images, which would become black ones."""
        module: Any = self.module
        values = module.decode(latents / self.scale + self.shift).sample
        bad = (~values.isfinite().flatten(1).all(1)).nonzero()
        if len(bad):
            raise BadInput(
                f"{len(bad)} of {len(values)} decoded images are not finite; the autoencoder is broken or the wrong one"
            )
        pixels: Tensor = ((values.float() + 1) * 127.5).round().clamp(0, 255).byte()
        return pixels


@dataclass(frozen=True)
class Latents:
    """The moments of all images, in files, and the row of the image that each entry comes from."""

    parts: list[Any]  # each (up to PART, 2, 2 channels, side, side), float16; the second is of the mirror image
    rows: Rows  # (images,) differs from its index where an image could not be read and was replaced

    def take(self, places: Rows, mirrored: Rows) -> Any:
        """The moments (places, 2 channels, side, side), of the mirror images where `mirrored` is 1."""
        moments = numpy.empty((len(places), *self.parts[0].shape[2:]), numpy.float16)
        files = places // PART
        for file in numpy.unique(files):
            inside = files == file
            moments[inside] = self.parts[file][places[inside] % PART, mirrored[inside]]
        return moments


def encode(
    images: ImageSet, autoencoder: Autoencoder, size: int, cache: str | Path, rank: int = 0, world: int = 1
) -> Latents:
    """Loads the latents from the cache, after encoding missing ones: process `rank` of `world` its share first."""
    if size % autoencoder.factor:
        raise BadInput(f"size is {size}; the autoencoder takes multiples of {autoencoder.factor}")
    folder = Path(cache).expanduser() / f"latents-{fingerprint(images)}-{autoencoder.key}-{size}"
    count = -(-len(images) // PART)
    files = [folder / f"{part:05d}.npy" for part in range(count)]
    if not all(file.is_file() for file in files):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "about.json").write_text(json.dumps({"images": repr(images), "size": size}))
        except OSError as error:
            raise BadInput(f"{folder}: latents cannot be written there ({error}); choose another cache") from error
        feed = Feed(images, _BATCH, size, device=next(autoencoder.module.parameters()).device)
        everything = numpy.random.default_rng(rank).permutation(count).tolist()
        for part in dict.fromkeys([*share(count, rank, world), *everything]):  # each once, its own first
            if not files[part].is_file():
                _write(files[part], feed, autoencoder, range(part * PART, min((part + 1) * PART, len(images))))
    try:
        parts = [numpy.load(file, mmap_mode="r") for file in files]
        rows = [numpy.load(_rows_file(file)) for file in files]
    except (OSError, ValueError, EOFError) as error:
        raise LoadError(f"{folder}: damaged ({error}); delete it to rebuild it") from error
    return Latents(parts, numpy.concatenate(rows))


def _write(file: Path, feed: Feed, autoencoder: Autoencoder, places: range) -> None:
    """Encodes some images to a file, and writes their rows beside it."""
    batches = [numpy.array(places[start : start + _BATCH]) for start in range(0, len(places), _BATCH)]
    all_moments, all_rows = list[Any](), list[Rows]()
    for pixels, rows in feed.unchanged(batches):
        both = [autoencoder.moments(images).half() for images in (pixels, pixels.flip(3))]
        for moments in both:
            bad = (~moments.isfinite().flatten(1).all(1)).nonzero()
            if len(bad):
                place = feed.images.place(int(rows[int(bad[0, 0])]))
                raise BadInput(f"{place}: its latents are not finite; the autoencoder is broken, or the wrong one")
        all_moments.append(torch.stack(both, 1).cpu().numpy())
        all_rows.append(rows.cpu().numpy())
    for target, values in ((_rows_file(file), all_rows), (file, all_moments)):  # a file of moments marks both as done
        temporary = target.with_suffix(f".{os.urandom(4).hex()}.tmp")
        try:
            with temporary.open("wb") as opened:
                numpy.save(opened, numpy.concatenate(values))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def _rows_file(file: Path) -> Path:
    return file.with_suffix(".rows.npy")


class LatentFeed:
    """Batches of moments and labels, in the same order as the images of `Feed`."""

    def __init__(
        self,
        images: ImageSet,
        autoencoder: Autoencoder,
        batch: int,
        size: int,
        cache: str | Path,
        *,
        seed: int = 0,
        flip: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        self.images, self.autoencoder, self.batch, self.seed, self.flip = images, autoencoder, batch, seed, flip
        self.device = torch.device(device)
        self.order = Order(len(images), batch, seed)
        process = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        self.moments = encode(images, autoencoder, size, cache, *process)
        rows = self.moments.rows
        replaced = numpy.flatnonzero(rows != numpy.arange(len(images))).tolist()
        self.broken = {row: f"{images.place(row)}: could not be read when it was encoded" for row in replaced}
        self._labels = images.labels.numpy()[rows]

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set."""
        return self.order.steps_per_epoch

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of each batch of steps `start_step` to `stop_step` (exclusive), in `parts` pieces."""
        check_world(self.batch, rank * parts, world * parts)
        for step in range(start_step, stop_step):
            rows = self.order.rows(step)
            mirrored = stream(GEOMETRY, self.seed, step).random(len(rows)) < (0.5 if self.flip else 0.0)
            for part in range(parts):
                own = share(len(rows), rank * parts + part, world * parts)
                chosen = rows[own.start : own.stop]
                moments = self.moments.take(chosen, mirrored[own.start : own.stop].astype(numpy.int64))
                yield self._put(moments, self._labels[chosen])

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The mean latents of every image once, in order, scaled; each process gets a consecutive share."""
        for moments, labels in self.in_order(rank, world):
            yield self.autoencoder.latents(moments), labels

    def in_order(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The moments and label of every image once, in order."""
        for batch in evaluation_batches(len(self.images), self.batch, rank, world):
            places = numpy.array(batch)
            yield self._put(self.moments.take(places, numpy.zeros_like(places)), self._labels[places])

    def _put(self, moments: Any, labels: Any) -> tuple[Tensor, Tensor]:
        return put(moments, self.device).float(), put(labels, self.device)
