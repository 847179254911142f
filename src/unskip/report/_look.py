"""What a checkpoint shows when it is looked at: measurements of its blocks, and pictures.

The model of a run is built again, filled from its last checkpoint and run on some images of its own test split.
Whatever stands in the way is a note; a report never fails because a model cannot be built.
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

SHOWN, MEASURED, KNOWN, NEAREST = 6, 16, 2000, 5  # images that are shown, measured, searched; neighbours of each


@dataclass(eq=False)
class Look:
    """Measurements (`Measurement.to_dict()`) and pictures of one run, and what could not be had."""

    step: int | None = None
    measurement: dict[str, Any] | None = None
    tiles: list[Tiles] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def look(run: Run, jacobians: bool = False, trust: bool = False, opener: Opener | None = None) -> Look:
    """Looks at the last checkpoint of a run. With `trust` the Python files are run that it names.

    An `opener` that keeps images spares the next run with the same data: to decode a set takes longer than to look.
    """
    if run.checkpoint is None:
        return Look(notes=["not looked at: it has no checkpoint yet"])
    result = Look()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(gpus):
        warnings.simplefilter("always")
        torch.manual_seed(0)
        try:
            opener = opener or cached_opener()
            trained = open_run(run.path, "auto", trust=trust)
            if not trained.facts.channels:
                return Look(trained.step, notes=["not of images, so no pictures; `unskip measure RUN` measures it"])
            train, test = open_splits(trained.config, opener)
            train, test = _some(train, KNOWN), _some(test, max(SHOWN, MEASURED))
        except Exception as error:  # whatever a config of another version, or data that is gone, leads to
            return Look(notes=[f"not looked at: {_message(error)}"])
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
    result.notes += [clean(each.message, 200) for each in caught if issubclass(each.category, UserWarning)]
    result.step, result.notes = trained.step, list(dict.fromkeys(result.notes))
    return result


def _some(images: ImageSet, count: int) -> ImageSet:
    """Images of a random but fixed choice."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images.select(order[:count])


def _feed(trained: Trained, images: ImageSet, batch: int) -> Feed:
    """Images as the model takes them."""
    made = preprocess_of(trained.encoder, images.channels)
    device = next(trained.model.parameters()).device
    return Feed(images, batch, made.size, augment=made.augment(), device=device)


def _ready(trained: Trained, images: ImageSet) -> Tensor:
    """All of them, as the model takes them."""
    return next(iter(_feed(trained, images, max(1, len(images))).evaluate()))[0]


def _measurement(result: Look, trained: Trained, test: ImageSet, jacobians: bool) -> None:
    batch = _ready(trained, test)[:MEASURED]
    taken = measure(trained.encoder, batch, jacobians="auto" if jacobians else "off")
    result.measurement = taken.to_dict()
    result.notes += taken.notes


def _reconstructions(result: Look, trained: Trained, test: ImageSet) -> None:
    model = trained.model
    if not isinstance(model, MAE):
        return
    raw = _raw(trained, test)
    batch = _ready(trained, test)[:SHOWN]
    noise = torch.rand(len(batch), model.grid.patches, generator=torch.Generator().manual_seed(0)).to(batch.device)
    with torch.no_grad():
        output = model.eval()(batch, noise)
    true = model.patches(raw).float().cpu()  # (images, patches, pixels)
    order, masked = output.order.cpu(), output.order.cpu()[:, model.visible :]
    predicted = _in_bytes(model, true, masked, output.prediction.float().cpu())
    shown, whole = true.clone(), true.clone()
    rows = torch.arange(len(true))[:, None]
    shown[rows, masked] = 128.0
    whole[rows, masked] = predicted
    error = (whole - true).square()[rows, masked].mean((1, 2)).sqrt() / 255
    pictures = [_assembled(model, each, len(order)) for each in (true, shown, whole)]
    result.tiles.append(
        Tiles(
            "reconstructions",
            "Reconstructions of masked patches",
            tuple(tuple(picture) for picture in pictures),
            ("image", "visible", "output"),
            (),
            f"{len(true)} test images: as they are, with the masked patches grey, and with these reconstructed.",
            note="Targets are normalised per patch: predictions are shown at the true patch's mean and variance."
            if model.norm_pix
            else "",
            header=("image", "class", "error of masked pixels (root mean square, fraction of the range)"),
            table=tuple((place, _name(test, place), float(value)) for place, value in enumerate(error)),
        )
    )


def _in_bytes(model: MAE, true: Tensor, masked: Tensor, prediction: Tensor) -> Tensor:
    """What the decoder predicts, 0 to 255."""
    # Those that the images were fed with; the model's own are for bytes.
    made = preprocess_of(model, model.grid.channels)
    middle, scale = (255 * torch.tensor(each).repeat(model.grid.patch**2) for each in (made.mean, made.std))
    if model.norm_pix:
        target = (true.gather(1, masked[:, :, None].expand(-1, -1, true.shape[2])) - middle) / scale
        variance, mean = torch.var_mean(target, -1, keepdim=True)
        prediction = prediction * (variance + 1e-6).sqrt() + mean
    return (prediction * scale + middle).clamp(0, 255)


def _assembled(model: MAE, patches: Tensor, count: int) -> list[Pixels]:
    grid = model.grid
    cut = patches.reshape(count, grid.rows, grid.columns, grid.patch, grid.patch, grid.channels)
    images = cut.permute(0, 5, 1, 3, 2, 4).reshape(count, grid.channels, grid.rows * grid.patch, -1)
    return _pixels(images)


def _patch_features(result: Look, trained: Trained, test: ImageSet) -> None:
    raw, encoder, size = _raw(trained, test), trained.encoder.eval(), trained.config.size
    with torch.no_grad():
        tokens = features(encoder, _ready(trained, test)[:SHOWN], pool=None)
    columns: list[list[Pixels]] = []
    fractions: list[tuple[object, ...]] = []
    for block, values in tokens.items():
        grid = _grid(encoder, values, (size, size))
        if grid is None:
            result.notes.append(f"patch features: the {values.shape[1]} tokens of block {block} are no grid of patches")
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
            f"{len(raw)} test images, each beside its patch features after {len(chosen)} blocks. Patches of one colour "
            "have similar features.",
            note="Colours compare patches and images within a block, not blocks with each other.",
            header=("block", "1st direction (fraction of variance)", "2nd direction", "3rd direction"),
            table=tuple(fractions),
        )
    )


def _neighbours(result: Look, trained: Trained, train: ImageSet, test: ImageSet) -> None:
    train_features = extract(trained.encoder, _feed(trained, train, 256).evaluate(), -1)
    test_features = extract(trained.encoder, _feed(trained, test, 256).evaluate(), -1)
    ((index, known),) = train_features["mean", "none"].items()
    queries = test_features["mean", "none"][index][:SHOWN]
    cosines = F.normalize(queries.double(), dim=1) @ F.normalize(known.double(), dim=1).T
    best = cosines.topk(min(NEAREST, cosines.shape[1]), 1)
    images, captions, table = [], [], []
    right = 0
    for row, picture in enumerate(_raw(trained, test)):
        places = best.indices[row].tolist()
        own = _name(test, row)
        names = [_name(train, place) for place in places]
        # Of labels, not of names: those are cut, and some sets have two classes of one name.
        same = (train.labels[places] == test.labels[row]).tolist()
        right += sum(same)
        images.append((*_pixels(picture[None]), *_pixels(train.load(places, trained.config.size))))
        captions.append((own, *(name if fits else name + MARK for name, fits in zip(names, same, strict=True))))
        cosine = best.values[row].tolist()
        table += [(row, own, rank + 1, name, cosine[rank]) for rank, name in enumerate(names)]
    result.tiles.append(
        Tiles(
            "neighbours",
            f"Nearest neighbours in the features of block {index}",
            tuple(images),
            tuple("" for _ in images),
            ("image", *(f"{rank + 1}." for rank in range(best.indices.shape[1]))),
            f"{len(images)} test images and the training images nearest to them; {right} of {len(table)} neighbours "
            "have the class of the image.",
            captions=tuple(captions),
            note=f"By cosine of mean tokens, among {len(train)} training images; ✗ marks another class.",
            header=("image", "class", "neighbour", "its class", "cosine"),
            table=tuple(table),
        )
    )


def _grid(encoder: nn.Module, tokens: Tensor, size: tuple[int, int]) -> Tensor | None:
    """(images, tokens, dim) as (images, rows, columns, dim), without class and register tokens."""
    place = patch_grid(encoder, tokens, -1, size)
    return None if place is None else tokens[:, place[0] :].unflatten(1, place[1:])


def _raw(trained: Trained, images: ImageSet) -> Tensor:
    return images.load(range(min(SHOWN, len(images))), trained.config.size)


def _pixels(images: Tensor) -> list[Pixels]:
    """(n, channels, height, width), 0 to 255, as (height, width, 3) each."""
    rgb = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]
    return [*_bytes(rgb.permute(0, 2, 3, 1))]


def _bytes(values: Tensor) -> Pixels:
    pixels: Pixels = np.ascontiguousarray(values.round().to(torch.uint8).cpu().numpy())
    return pixels


def _name(images: ImageSet, place: int) -> str:
    return clean(images.classes[int(images.labels[place])], 24)


def _spread_out(count: int, most: int) -> list[int]:
    """Up to so many places, first and last among them."""
    if count <= most:
        return [*range(count)]
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _message(error: BaseException) -> str:
    text = clean(error, 500)
    return text if isinstance(error, UnskipError) and text else f"{type(error).__name__}: {text}"
