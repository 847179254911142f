"""Latents of images by a user's autoencoder (AutoencoderKL of diffusers), encoded once and kept on disk.

    z = (mean + exp(logvar / 2) n - shift) * scale,   n normal, new in every step

Mean and log variance of every image are kept, and of its mirror image too: one file of float16 under a key made of the
images, the autoencoder's weights and the size. The same three give the same file.
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
from unskip.data._images import ImageSet, fingerprint
from unskip.data._order import GEOMETRY, Order, check_world, evaluation_batches, share, stream
from unskip.errors import BadInput, LoadError


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


def encode(
    images: ImageSet, autoencoder: Autoencoder, size: int, cache: str | Path, batch: int = 64
) -> numpy.memmap[Any, Any]:
    """(images, 2, 2 channels, side, side), float16, from the cache or made now; the second is of the mirror image."""
    if size % autoencoder.factor:
        raise BadInput(f"images of {size}: the autoencoder takes multiples of {autoencoder.factor}")
    key = f"{fingerprint(images)}-{autoencoder.key}-{size}"
    file = Path(cache).expanduser() / f"latents-{key}.npy"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}.tmp")  # every process of a run makes its own, and the last one stays
        try:
            _write(aside, images, autoencoder, size, batch)
            aside.replace(file)
        finally:
            aside.unlink(missing_ok=True)
        file.with_suffix(".json").write_text(json.dumps({"images": repr(images), "size": size}))
    try:
        return numpy.load(file, mmap_mode="r")  # type: ignore[no-any-return]
    except (ValueError, EOFError) as error:
        raise LoadError(f"{file}: damaged ({error}); delete it, and it is made again") from error


def _write(file: Path, images: ImageSet, autoencoder: Autoencoder, size: int, batch: int) -> None:
    side = size // autoencoder.factor
    shape = (len(images), 2, 2 * autoencoder.channels, side, side)
    made = numpy.lib.format.open_memmap(file, mode="w+", dtype=numpy.float16, shape=shape)
    for start in range(0, len(images), batch):
        rows = range(start, min(start + batch, len(images)))
        pixels = images.load(rows, size)
        for index, shown in enumerate((pixels, pixels.flip(3))):
            moments = autoencoder.moments(shown).half()
            bad = (~moments.isfinite().flatten(1).all(1)).nonzero()
            if len(bad):
                where = images.place(rows[int(bad[0, 0])])
                raise BadInput(f"{where}: its latents are not finite; the autoencoder is broken, or the wrong one")
            made[start : start + len(rows), index] = moments.cpu().numpy()
    made.flush()


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
        self.moments = encode(images, autoencoder, size, cache)
        self._labels = images.labels.numpy()

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
            values = self.moments[chosen, mirror[part.start : part.stop].astype(numpy.int64)]
            yield self._put(values, self._labels[chosen])

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, in order: the means of its latents, scaled; of several processes each has its share."""
        for moments, labels in self.in_order(rank, world):
            yield self.autoencoder.latents(moments), labels

    def in_order(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once: its moments, and its label."""
        for each in evaluation_batches(len(self.images), self.batch, rank, world):
            part = slice(each.start, each.stop)
            yield self._put(self.moments[part, 0], self._labels[part])

    def _put(self, moments: Any, labels: Any) -> tuple[Tensor, Tensor]:
        # Copies: what lies in the file cannot be written to, which torch warns of.
        values, names = (put(numpy.array(each), self.device) for each in (moments, labels))
        return values.float(), names
