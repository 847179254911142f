"""Samples images from the EMA weights of a run, and writes PNG files and a grid.

RUN/samples/step-N-SAMPLER-cfg-seed.png          the grid; the report shows the newest
RUN/samples/step-N-SAMPLER-cfg-seed/00000.png    sample 0, 1, 2, ...
RUN/samples/step-N-SAMPLER-cfg-seed.json         settings and cost
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip._modes import evaluating
from unskip._warn import warn
from unskip.data import preprocess_of
from unskip.errors import BadInput
from unskip.evals import autocast
from unskip.models import Sampler, Sampling, draw
from unskip.recipes._flow import FlowMatching
from unskip.recipes._open import Trained, open_run

_IN_GRID = 100
_MIN_SIDE = 32  # of an image in the grid; smaller ones are enlarged
_GAP = 2  # pixels between the images of a grid
_DECODED = 16  # latents decoded at a time: images take far more memory than latents


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as bytes (n, channels, size, size), their labels, and the cost."""

    images: Tensor
    labels: Tensor
    evaluations: float  # of the network per sample; guidance needs two per velocity
    seconds: float
    grid: Path | None  # the image file of the grid


def sample(
    run: str | Path | Trained,
    n: int = 64,
    cfg: float = 1.0,
    *,
    sampler: Sampler = "heun",
    steps: int = 50,
    tolerance: float = 1e-5,
    labels: int | Sequence[int] | None = None,
    seed: int = 0,
    batch: int = 256,
    precision: Any = "float32",
    compile: bool = False,  # noqa: A002
    device: str | None = None,
    write: bool = True,
) -> Samples:
    """Draws n samples of a run's last checkpoint and writes them into its folder.

    Sample i has class i modulo the number of classes, unless `labels` gives one label for all or one for each; the
    class after the model's last one means no label. A sample is the same for any n and batch, up to rounding. `compile`
    pays off for hundreds of samples on a GPU. `write=False` writes nothing.
    """
    sampling = Sampling(sampler, steps, cfg, tolerance, seed)
    if not isinstance(n, int) or n < 1:
        raise BadInput(f"{n} samples; draw one or more")
    trained = run if isinstance(run, Trained) else open_run(run, device)
    start = time.perf_counter()
    parts = list(sampled(trained, n, sampling, labels=labels, batch=batch, precision=precision, compile=compile))
    images, classes = (torch.cat([part[index] for part in parts]) for index in range(2))
    costs = float(torch.cat([part[2] for part in parts]).double().mean())
    seconds = time.perf_counter() - start
    grid = None
    if write:
        about = {"step": trained.step, "n": n, **asdict(sampling), "evaluations": costs, "seconds": seconds}
        name = f"step-{trained.step}-{sampler}-cfg{cfg:g}-seed{seed}"
        grid = _write(trained.folder.path / "samples", name, images, {**about, "labels": classes.tolist()})
    return Samples(images, classes, costs, seconds, grid)


def sampled(
    trained: Trained,
    n: int,
    sampling: Sampling,
    *,
    labels: int | Sequence[int] | None = None,
    batch: int = 256,
    precision: Any = "float32",
    compile: bool = False,  # noqa: A002
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Bytes, labels and evaluations of n samples, a batch at a time, on the CPU."""
    config, model, objective = trained.config, trained.model, trained.objective
    if not isinstance(objective, FlowMatching):
        raise BadInput(f"{trained.folder.path}: its recipe does not generate images; use a run of sit or uvit")
    network: Any = model
    device = next(model.parameters()).device
    classes = int(network.classes)
    wanted = _labels(labels, n, trained.facts.classes)
    if not config.label_dropout and config.weights is None and (sampling.cfg != 1 or bool((wanted == classes).any())):
        warn(
            f"{trained.folder.path}: trained without label dropout, so guidance and samples without a label are "
            "unavailable. Sample with labels and cfg=1, or train with label_dropout 0.1"
        )
    wanted = wanted.to(device)
    shape = (int(network.channels), int(network.size), int(network.size))
    pixels = _decoder(objective, model, shape[0])
    with evaluating(model):
        for part in draw(
            torch.compile(model) if compile else model,  # type: ignore[arg-type]  # a module that is called the same way
            wanted,
            shape,
            classes,
            config.flow,
            sampling,
            batch=batch,
            autocast=partial(autocast, device, precision),
        ):
            yield pixels(part.values).cpu(), part.labels.cpu(), part.evaluations.cpu()


def _labels(labels: int | Sequence[int] | None, n: int, classes: int) -> Tensor:
    if labels is None:
        return torch.arange(n) % max(1, classes)
    chosen = torch.as_tensor(labels)
    chosen = chosen if chosen.is_floating_point() else chosen.long()
    chosen = chosen.expand(n) if chosen.ndim == 0 else chosen
    if len(chosen) != n:
        raise BadInput(f"{len(chosen)} labels for {n} samples; give one for all, or one for each")
    return chosen


def _decoder(objective: FlowMatching, model: nn.Module, channels: int) -> Any:
    """Converts the model's values to bytes: decodes latents, or undoes the normalisation."""
    autoencoder = objective.autoencoder
    if autoencoder is not None:
        return lambda values: torch.cat([autoencoder.decode(part) for part in values.split(_DECODED)])
    return preprocess_of(model, channels).pixels


def _write(folder: Path, name: str, images: Tensor, about: dict[str, Any]) -> Path:
    Image = need("PIL.Image")
    single = folder / name
    single.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        Image.fromarray(_channels_last(image)).save(single / f"{index:05d}.png")
    for old in single.glob("*.png"):  # of an earlier call with a larger n
        if old.stem.isdigit() and int(old.stem) >= len(images):
            old.unlink(missing_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(about) + "\n")
    target = folder / f"{name}.png"
    Image.fromarray(_channels_last(grid_of(images[:_IN_GRID]))).save(target)
    return target


def grid_of(images: Tensor) -> Tensor:
    """Arranges images (n, channels, size, size) in one image (channels, height, width), by rows, on white."""
    times = max(1, -(-_MIN_SIDE // images.shape[2]))
    images = images.repeat_interleave(times, 2).repeat_interleave(times, 3)
    count, channels, tall, wide = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    out = images.new_full((channels, rows * (tall + _GAP) + _GAP, columns * (wide + _GAP) + _GAP), 255)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        top, left = _GAP + row * (tall + _GAP), _GAP + column * (wide + _GAP)
        out[:, top : top + tall, left : left + wide] = image
    return out


def _channels_last(image: Tensor) -> Any:
    if image.shape[0] not in (1, 3):
        raise BadInput(f"PNG has no images of {image.shape[0]} channels; sample with write=False")
    return image[0].numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).contiguous().numpy()
