"""Measurements and sample images from a run's last checkpoint.

The model is loaded from its last checkpoint and run on images of its own test split. Failures become notes; they never
fail the report.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.anatomy import features, patch_grid
from unskip.data import Feed, ImageSet, preprocess_of
from unskip.errors import UnskipError
from unskip.evals import extract, pca_colours
from unskip.measures import measure
from unskip.models import MAE
from unskip.recipes import Opener, Trained, cached_opener, open_run, open_splits
from unskip.report._read import Run
from unskip.report._text import clean
from unskip.report.figures._draw import MARK, Pixels, Tiles

SHOWN, MEASURED, SEARCHED, NEAREST = 6, 16, 2000, 5  # images shown, measured, searched for neighbours; neighbours shown


@dataclass(eq=False)
class Look:
    """Measurements (`Measurement.to_dict()`) and pictures of one run, and what is missing."""

    step: int | None = None
    measurement: dict[str, Any] | None = None
    tiles: list[Tiles] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look(run: Run, jacobians: bool = False, trust: bool = False, opener: Opener | None = None) -> Look:
    """Measures the last checkpoint of a run. `trust` allows running the Python files that it names.

    Pass an `opener` that caches images where several runs share their data: decoding takes longer than measuring.
    """
    if run.checkpoint is None:
        return Look(notes=["not measured: it has no checkpoint yet"])
    result = Look()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(gpus):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            opener = opener or cached_opener()
            trained = open_run(run.path, "auto", trust=trust)
            if not trained.facts.channels:
                return Look(trained.step, notes=["not an image model, so no pictures; use `unskip measure RUN`"])
            train, test = open_splits(trained.config, opener)
            train, test = _some(train, SEARCHED), _some(test, max(SHOWN, MEASURED))
        except Exception as error:  # such as a config of another version, or data that was deleted
            return Look(notes=[f"not measured: {_message(error)}"])
        for name, part in (
            ("measurement", partial(_measurement, result, trained, test, jacobians)),
            ("reconstructions", partial(_reconstructions, result, trained, test)),
            ("patch features", partial(_patch_features, result, trained, test)),
            ("neighbours", partial(_neighbours, result, trained, train, test)),
        ):
            try:
                part()
            except Exception as error:
                result.notes.append(f"{name}: {_message(error)}")
    result.notes += [clean(entry.message, 200) for entry in caught if issubclass(entry.category, UserWarning)]
    result.step, result.notes = trained.step, list(dict.fromkeys(result.notes))
    return result


def _some(images: ImageSet, count: int) -> ImageSet:
    """A random subset, the same every time."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.select(order[:count])


def _feed(trained: Trained, images: ImageSet, batch: int) -> Feed:
    """Batches of preprocessed images."""
    preprocess = preprocess_of(trained.encoder, images.channels)
    device = next(trained.model.parameters()).device
    return Feed(images, batch, preprocess.size, augment=preprocess.augment(), device=device)


def _batch(trained: Trained, images: ImageSet) -> Tensor:
    """All images as one preprocessed batch."""
    return next(iter(_feed(trained, images, max(1, len(images))).evaluate()))[0]


def _measurement(result: Look, trained: Trained, test: ImageSet, jacobians: bool) -> None:
    batch = _batch(trained, test)[:MEASURED]
    measurement = measure(trained.encoder, batch, jacobians="auto" if jacobians else "off")
    result.measurement = measurement.to_dict()
    result.notes += measurement.notes


def _reconstructions(result: Look, trained: Trained, test: ImageSet) -> None:
    model = trained.model
    if not isinstance(model, MAE):
        return
    raw = _raw(trained, test)
    batch = _batch(trained, test)[:SHOWN]
    noise = torch.rand(len(batch), model.grid.patches, generator=torch.Generator().manual_seed(0)).to(batch.device)
    with torch.no_grad():
        output = model.eval()(batch, noise)
    true = model.patches(raw).float().cpu()  # (images, patches, pixels)
    order, masked = output.order.cpu(), output.order.cpu()[:, model.visible :]
    predicted = _in_bytes(model, true, masked, output.prediction.float().cpu())
    visible, filled = true.clone(), true.clone()
    rows = torch.arange(len(true))[:, None]
    visible[rows, masked] = 128.0
    filled[rows, masked] = predicted
    error = (filled - true).square()[rows, masked].mean((1, 2)).sqrt() / 255
    pictures = [_assembled(model, patches, len(order)) for patches in (true, visible, filled)]
    result.tiles.append(
        Tiles(
            "reconstructions",
            "Reconstructions of masked patches",
            tuple(tuple(picture) for picture in pictures),
            ("image", "visible", "output"),
            (),
            f"{len(true)} test images: the original, masked patches in grey, and masked patches reconstructed.",
            note="Targets are per-patch normalised; predictions are shown with the true patch's mean and variance."
            if model.norm_pix
            else "",
            header=("image", "class", "RMS error of masked pixels (fraction of the pixel range)"),
            table=tuple((place, _name(test, place), float(value)) for place, value in enumerate(error)),
        )
    )


def _in_bytes(model: MAE, true: Tensor, masked: Tensor, prediction: Tensor) -> Tensor:
    """The decoder's predictions as pixels, 0 to 255."""
    # The mean and std that the images were normalised with; the model's own are for bytes.
    preprocess = preprocess_of(model, model.grid.channels)
    mean, std = (255 * torch.tensor(x).repeat(model.grid.patch**2) for x in (preprocess.mean, preprocess.std))
    if model.norm_pix:
        target = (true.gather(1, masked[:, :, None].expand(-1, -1, true.shape[2])) - mean) / std
        patch_variance, patch_mean = torch.var_mean(target, -1, keepdim=True)
        prediction = prediction * (patch_variance + 1e-6).sqrt() + patch_mean
    return (prediction * std + mean).clamp(0, 255)


def _assembled(model: MAE, patches: Tensor, count: int) -> list[Pixels]:
    grid = model.grid
    split = patches.reshape(count, grid.rows, grid.columns, grid.patch, grid.patch, grid.channels)
    images = split.permute(0, 5, 1, 3, 2, 4).reshape(count, grid.channels, grid.rows * grid.patch, -1)
    return _pixels(images)


def _patch_features(result: Look, trained: Trained, test: ImageSet) -> None:
    raw, encoder, size = _raw(trained, test), trained.encoder.eval(), trained.config.size
    with torch.no_grad():
        tokens = features(encoder, _batch(trained, test)[:SHOWN], pool=None)
    columns: list[list[Pixels]] = []
    fractions: list[tuple[object, ...]] = []
    for block, values in tokens.items():
        grid = _grid(encoder, values, (size, size))
        if grid is None:
            result.notes.append(f"patch features: the {values.shape[1]} tokens of block {block} form no patch grid")
            return
        colours, explained = pca_colours(grid.flatten(0, 2))
        columns.append([*_bytes(colours.view(*grid.shape[:3], 3) * 255)])
        fractions.append((block, *explained))
    chosen = _spread_out(len(columns), 8)
    pictures = [_pixels(raw), *(columns[index] for index in chosen)]
    result.tiles.append(
        Tiles(
            "patch-features",
            "Patch features by block, first three principal components as colours",
            tuple(tuple(picture[row] for picture in pictures) for row in range(len(raw))),
            tuple(_name(test, row) for row in range(len(raw))),
            ("image", *(f"{index}" for index in chosen)),
            f"{len(raw)} test images, each with its patch features after {len(chosen)} blocks. Patches of the same "
            "colour have similar features.",
            note="Colours are comparable within a block, not between blocks.",
            header=("block", "1st component (fraction of variance)", "2nd component", "3rd component"),
            table=tuple(fractions),
        )
    )


def _neighbours(result: Look, trained: Trained, train: ImageSet, test: ImageSet) -> None:
    train_features = extract(trained.encoder, _feed(trained, train, 256).evaluate(), -1)
    test_features = extract(trained.encoder, _feed(trained, test, 256).evaluate(), -1)
    ((index, keys),) = train_features["mean", "none"].items()
    queries = test_features["mean", "none"][index][:SHOWN]
    cosines = F.normalize(queries.double(), dim=1) @ F.normalize(keys.double(), dim=1).T
    best = cosines.topk(min(NEAREST, cosines.shape[1]), 1)
    images, captions, table = [], [], []
    right = 0
    for row, picture in enumerate(_raw(trained, test)):
        nearest = best.indices[row].tolist()
        label = _name(test, row)
        names = [_name(train, neighbour) for neighbour in nearest]
        # Compare labels, not names: names are shortened, and some data sets use a name for two classes.
        same = (train.labels[nearest] == test.labels[row]).tolist()
        right += sum(same)
        images.append((*_pixels(picture[None]), *_pixels(train.load(nearest, trained.config.size))))
        captions.append((label, *(name if match else name + MARK for name, match in zip(names, same, strict=True))))
        cosine = best.values[row].tolist()
        table += [(row, label, rank + 1, name, cosine[rank]) for rank, name in enumerate(names)]
    result.tiles.append(
        Tiles(
            "neighbours",
            f"Nearest neighbours by features of block {index}",
            tuple(images),
            tuple("" for _ in images),
            ("image", *(f"{rank + 1}." for rank in range(best.indices.shape[1]))),
            f"{len(images)} test images and their nearest training images; {right} of {len(table)} neighbours have the "
            "class of the image.",
            captions=tuple(captions),
            note=f"Cosine similarity of mean-pooled tokens, among {len(train)} training images; ✗ marks another class.",
            header=("image", "class", "neighbour", "neighbour's class", "cosine"),
            table=tuple(table),
        )
    )


def _grid(encoder: nn.Module, tokens: Tensor, size: tuple[int, int]) -> Tensor | None:
    """(images, tokens, dim) as (images, rows, columns, dim), without class and register tokens."""
    grid = patch_grid(encoder, tokens, -1, size)
    return None if grid is None else tokens[:, grid[0] :].unflatten(1, grid[1:])


def _raw(trained: Trained, images: ImageSet) -> Tensor:
    return images.load(range(min(SHOWN, len(images))), trained.config.size)


def _pixels(images: Tensor) -> list[Pixels]:
    """(n, channels, height, width), 0 to 255, as n arrays (height, width, 3)."""
    rgb = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]
    return [*_bytes(rgb.permute(0, 2, 3, 1))]


def _bytes(values: Tensor) -> Pixels:
    pixels: Pixels = np.ascontiguousarray(values.round().to(torch.uint8).cpu().numpy())
    return pixels


def _name(images: ImageSet, index: int) -> str:
    return clean(images.classes[int(images.labels[index])], 24)


def _spread_out(count: int, most: int) -> list[int]:
    """At most `most` evenly spaced indices, including the first and the last."""
    if count <= most:
        return [*range(count)]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _message(error: BaseException) -> str:
    text = clean(error, 500)
    return text if isinstance(error, UnskipError) and text else f"{type(error).__name__}: {text}"
