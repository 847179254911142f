"""Pictures of patch features: principal components as colours, attention maps, and discovered objects.

colours      the first three principal components of a block's patch tokens, over all images, as red, green and blue
attention    from the class token to the patches, or the mean over all queries if there is no class token, by head
discovery    TokenCut's mask and box over the image
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._extras import need
from unskip.anatomy import Example, PartsTrace, block_indices, trace_again, trace_parts
from unskip.data import Normalise, preprocess_of
from unskip.errors import BadInput, UnskipError
from unskip.evals._discover import in_pixels
from unskip.evals._patches import Reader
from unskip.evals._registry import What
from unskip.evals._tokencut import tokencut

Pixels = NDArray[numpy.uint8]
_CELL, _TITLE, _EDGE = 128, 14, 2


def pca_colours(rows: Tensor) -> tuple[Tensor, tuple[float, ...]]:
    """Maps (rows, dim) to colours (rows, 3) in [0, 1], and the fraction of variance that each component explains.

    Each component is scaled from its 2nd to its 98th percentile. Its sign makes the third moment positive, so that the
    same features always have the same colours. A component without variance is gray.
    """
    if not bool(rows.isfinite().all()):
        raise BadInput("pca_colours: the features are not all finite")
    rows = rows.double() - rows.double().mean(0)
    _, values, directions = torch.linalg.svd(rows, full_matrices=False)
    parts = rows @ directions[:3].T
    parts = parts * torch.where((parts**3).sum(0) < 0, -1.0, 1.0)
    kept = values[:3] > 1e-9 * values[0].clamp_min(1e-300)
    low, high = parts.quantile(0.02, 0), parts.quantile(0.98, 0)
    scaled = ((parts - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    shares = values.square() / values.square().sum().clamp_min(1e-300)
    absent = max(0, 3 - len(values))
    colours = F.pad(torch.where(kept, scaled, 0.5), (0, absent), value=0.5)
    return colours.float(), (*shares[:3].tolist(), *[0.0] * absent)


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor, block: int = -1, *, normalise: Normalise | None = None) -> Tensor:
    """(images, heads, rows, columns): the attention of the class token to each patch.

    Without a token before the patches it is the mean over all queries. These are the probabilities that the model
    computes, including norms of queries and keys, rotary positions and biases.
    """
    reader = Reader(model, images, block, "keys", normalise=normalise)
    (attention,) = reader.attentions.values()
    grid = reader(images[:1]).grid  # raises BadInput for attention over parts of the image
    shown = Example.of(reader.fitted(images))
    traced = trace_parts(model, shown.rows(0, 1), weighted=True)
    maps = []
    for index in range(len(images)):  # one by one, because a trace keeps every intermediate tensor
        trace = trace_again(model, shown.rows(index, index + 1), traced.trace) if index else traced.trace
        p = PartsTrace(trace, traced.parts, traced.attentions).probabilities(attention.attention.site.index)
        prefix = p.shape[-1] - grid[0] * grid[1]
        rows = p[:, :, 0] if prefix else p.mean(2)  # p is (1, heads, queries, keys)
        maps.append(rows[..., prefix:].unflatten(2, grid).float())
    return torch.cat(maps)


def pictures(
    model: nn.Module,
    images: Tensor,
    out: str | Path,
    *,
    blocks: Sequence[int] | None = None,
    normalise: Normalise | None = None,
) -> Path:
    """Writes one image file with a row for each image: colours of some blocks, the last attention, and discovery.

    `images` are normalised floats or bytes, at most 12; `normalise` is as in `patches`. Without attention its column
    stays white and is titled so.
    """
    Image, ImageDraw = need("PIL.Image"), need("PIL.ImageDraw")
    target = Path(out)
    if Image.registered_extensions().get(target.suffix.lower()) not in Image.SAVE:
        raise BadInput(f"pictures: {out}: unknown image format; use a name ending in .png")
    if not 1 <= len(images) <= 12:
        raise BadInput(f"pictures: got {len(images)} images; pass 1 to 12")
    count = len(Reader(model, images, normalise=normalise).all_blocks)
    if images.shape[1] not in (1, 3):
        raise BadInput(f"pictures: images of {images.shape[1]} channels cannot be drawn; pass images of 1 or 3")
    chosen = block_indices(blocks, count) if blocks is not None else _spread(count)
    preprocess = preprocess_of(model, images.shape[1], normalise)
    raw = images if images.dtype == torch.uint8 else preprocess.pixels(images)
    pixels: list[Pixels] = list(raw.cpu().expand(-1, 3, -1, -1).movedim(1, -1).numpy())
    columns: list[tuple[str, list[Pixels]]] = [("image", pixels)]
    for index in chosen:
        # One reader for each block, because blocks of a hierarchical model have different grids.
        read = Reader(model, images, index, normalise=normalise)(images)
        colours, _ = pca_colours(read.blocks[index].flatten(0, 1))
        tiles = (colours.view(len(images), *read.grid, 3) * 255).byte().cpu().numpy()
        columns.append((f"block {index}", list(tiles)))
    what: What
    try:
        maps = attention_maps(model, images, normalise=normalise).mean(1)
        scaled = maps / maps.amax((1, 2), keepdim=True).clamp_min(1e-12)
        columns.append(("attention", [_gray(each) for each in scaled]))
        what = "keys"
    except UnskipError:
        white = numpy.full((1, 1, 3), 255, dtype=numpy.uint8)
        columns.append(("no attention", [white] * len(images)))
        what = "tokens"
    read = Reader(model, images, -1, what, normalise=normalise)(images)
    (tokens,) = read.blocks.values()
    objects = tokencut(tokens, read.grid)
    boxes = in_pixels(objects.boxes, read.stride, read.size).tolist()
    overlays = [_overlay(image, mask, read.stride) for image, mask in zip(pixels, objects.masks, strict=True)]
    columns.append(("discovered", overlays))
    width, height = len(columns) * (_CELL + _EDGE), len(images) * (_CELL + _EDGE) + _TITLE
    sheet = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(sheet)
    scale = (_CELL / images.shape[3], _CELL / images.shape[2])
    for column, (title, cells) in enumerate(columns):
        left = column * (_CELL + _EDGE)
        pen.text((left + 2, 1), title, fill="black")
        for row, cell in enumerate(cells):
            top = _TITLE + row * (_CELL + _EDGE)
            sheet.paste(Image.fromarray(cell).resize((_CELL, _CELL), Image.Resampling.NEAREST), (left, top))
            if title == "discovered" and objects.masks[row].any():
                x0, y0, x1, y1 = boxes[row]
                edge = [left + x0 * scale[0], top + y0 * scale[1], left + x1 * scale[0] - 1, top + y1 * scale[1] - 1]
                pen.rectangle(edge, outline="red", width=2)
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(target)
    return target


def _spread(count: int) -> list[int]:
    """Four blocks spread over the depth, including the last."""
    return sorted({max(0, round(count * share / 4) - 1) for share in (1, 2, 3, 4)})


def _gray(values: Tensor) -> Pixels:
    gray: Any = (values * 255).byte().cpu()[:, :, None].expand(-1, -1, 3).numpy()
    return numpy.ascontiguousarray(gray)


def _overlay(image: Pixels, mask: Tensor, stride: tuple[float, float]) -> Pixels:
    """The image, darkened outside the mask."""
    height, width = image.shape[:2]
    rows = (numpy.arange(height) / stride[0]).astype(int).clip(max=mask.shape[0] - 1)
    columns = (numpy.arange(width) / stride[1]).astype(int).clip(max=mask.shape[1] - 1)
    inside = mask.cpu().numpy()[rows][:, columns]
    shown: Pixels = numpy.where(inside[:, :, None], image, image // 3)
    return shown
