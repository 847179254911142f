"""Latents of images by a user's autoencoder (AutoencoderKL of diffusers), encoded once and kept on disk.

    z = (mean + exp(logvar / 2) n - shift) * scale,   n normal, new in every step

Mean and log variance of every image are kept, and of its mirror image too, as float16 under a key made of the images,
the autoencoder's weights and the size. The same three give the same latents.

They lie in files of PART images. Each process of a launcher makes the files of its own share, and then those that are
still missing, in an order of its own: a process that is gone, or whose files lie on another node, holds nobody up. A
file is written aside and renamed, so that a run that was killed goes on with the files that are missing.
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
from unskip.data._device import put
from unskip.data._feed import Feed
from unskip.data._images import ImageSet, fingerprint
from unskip.data._order import GEOMETRY, Order, Rows, check_world, evaluation_batches, share, stream
from unskip.errors import BadInput, LoadError

_BATCH = 64  # images that are encoded at a time


@dataclass(frozen=True)
class Autoencoder:
    """A frozen autoencoder: bytes to the moments of latents, and latents to bytes."""

    module: nn.Module
    key: str
    channels: int  # of latents
    factor: int  # how many times smaller a latent is than its image
    scale: float
    shift: float

    @staticmethod
    def open(folder: str | Path, device: str | torch.device = "cpu") -> Autoencoder:
        """From a folder that diffusers wrote."""
        diffusers = need("diffusers")
        if not (Path(folder) / "config.json").is_file():
            raise BadInput(f"{folder}: no autoencoder there (it has no config.json); AutoencoderKL.save_pretrained")
        kind: Any = diffusers.AutoencoderKL
        try:
            module = kind.from_pretrained(str(folder), local_files_only=True, low_cpu_mem_usage=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"{folder}: no AutoencoderKL of diffusers: {str(error).partition(chr(10))[0]}") from error
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
        """Bytes (n, 3, size, size) to means and log variances (n, 2 channels, size / factor, size / factor)."""
        module: Any = self.module
        values = images.to(next(module.parameters()).device).float() / 127.5 - 1
        found = module.encode(values.expand(-1, 3, -1, -1)).latent_dist
        return torch.cat([found.mean, found.logvar], 1)

    def latents(self, moments: Tensor, noise: Tensor | None = None) -> Tensor:
        """Moments to latents: drawn where there is noise, otherwise their means."""
        mean, logvar = moments.chunk(2, 1)
        drawn = mean if noise is None else mean + (logvar.clamp(-30, 20) / 2).exp() * noise
        return (drawn - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents to bytes. Raises BadInput where the autoencoder makes no numbers of them: they would be black."""
        module: Any = self.module
        values = module.decode(latents / self.scale + self.shift).sample
        bad = (~values.isfinite().flatten(1).all(1)).nonzero()
        if len(bad):
            raise BadInput(
                f"{len(bad)} of {len(values)} images are not finite as the autoencoder decodes them; it is broken, or "
                "the wrong one"
            )
        pixels: Tensor = ((values.float() + 1) * 127.5).round().clamp(0, 255).byte()
        return pixels


PART = 2048  # images in a file; with four channels of 32 x 32, 67 MB


@dataclass(frozen=True)
class Latents:
    """The moments of all images, in files; `rows` are the images that they are of."""

    parts: list[Any]  # (up to PART, 2, 2 channels, side, side) each, float16; the second is of the mirror image
    rows: Rows  # another image where one could not be read

    def take(self, places: Rows, mirrored: Rows) -> Any:
        """(places, 2 channels, side, side), of mirror images where `mirrored` is 1."""
        found = numpy.empty((len(places), *self.parts[0].shape[2:]), numpy.float16)
        files = places // PART
        for file in numpy.unique(files):
            here = files == file
            found[here] = self.parts[file][places[here] % PART, mirrored[here]]
        return found


def encode(
    images: ImageSet, autoencoder: Autoencoder, size: int, cache: str | Path, rank: int = 0, world: int = 1
) -> Latents:
    """The latents from the cache. Those that are missing are made: by process `rank` of `world` its share first."""
    if size % autoencoder.factor:
        raise BadInput(f"images of {size}: the autoencoder takes multiples of {autoencoder.factor}")
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
        mine = [*share(count, rank, world)]
        others = numpy.random.default_rng(rank).permutation(count).tolist()
        for part in dict.fromkeys([*mine, *others]):
            if not files[part].is_file():
                _write(files[part], feed, autoencoder, range(part * PART, min((part + 1) * PART, len(images))))
    try:
        parts = [numpy.load(file, mmap_mode="r") for file in files]
        rows = [numpy.load(_rows_file(file)) for file in files]
    except (OSError, ValueError, EOFError) as error:
        raise LoadError(f"{folder}: damaged ({error}); delete it, and it is made again") from error
    return Latents(parts, numpy.concatenate(rows))


def _write(file: Path, feed: Feed, autoencoder: Autoencoder, places: range) -> None:
    """The latents of some images, beside the list of the images that they are of."""
    batches = [numpy.array(places[start : start + _BATCH]) for start in range(0, len(places), _BATCH)]
    found, seen = list[Any](), list[Rows]()
    for pixels, rows in feed.unchanged(batches):
        both = [autoencoder.moments(shown).half() for shown in (pixels, pixels.flip(3))]
        for moments in both:
            bad = (~moments.isfinite().flatten(1).all(1)).nonzero()
            if len(bad):
                where = feed.images.place(int(rows[int(bad[0, 0])]))
                raise BadInput(f"{where}: its latents are not finite; the autoencoder is broken, or the wrong one")
        found.append(torch.stack(both, 1).cpu().numpy())
        seen.append(rows.cpu().numpy())
    for target, values in ((_rows_file(file), seen), (file, found)):
        aside = target.with_suffix(f".{os.urandom(4).hex()}.tmp")
        try:
            with aside.open("wb") as opened:
                numpy.save(opened, numpy.concatenate(values))
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


def _rows_file(file: Path) -> Path:
    return file.with_suffix(".rows.npy")


class LatentFeed:
    """Batches of moments and labels, in the order in which `Feed` would give the images."""

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
        self.broken = {row: f"{images.place(row)}: could not be read when latents were made" for row in replaced}
        self._labels = images.labels.numpy()[rows]

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set."""
        return self.order.steps_per_epoch

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of the steps from `start_step` up to but without `stop_step`: this process's part of each, in so
        many `parts` one after the other."""
        check_world(self.batch, rank * parts, world * parts)
        for place in range(start_step * parts, stop_step * parts):
            step, turn = divmod(place, parts)
            rows = self.order.rows(step)
            part = share(len(rows), rank * parts + turn, world * parts)
            mirror = stream(GEOMETRY, self.seed, step).random(len(rows)) < (0.5 if self.flip else 0.0)
            chosen = rows[part.start : part.stop]
            values = self.moments.take(chosen, mirror[part.start : part.stop].astype(numpy.int64))
            yield self._put(values, self._labels[chosen])

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, in order: the means of its latents, scaled; of several processes each has its share."""
        for moments, labels in self.in_order(rank, world):
            yield self.autoencoder.latents(moments), labels

    def in_order(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once: its moments, and its label."""
        for each in evaluation_batches(len(self.images), self.batch, rank, world):
            places = numpy.array(each)
            yield self._put(self.moments.take(places, numpy.zeros_like(places)), self._labels[places])

    def _put(self, moments: Any, labels: Any) -> tuple[Tensor, Tensor]:
        values, names = (put(each, self.device) for each in (moments, labels))
        return values.float(), names
