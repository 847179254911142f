"""Compare generated with real images: Fréchet distance, precision, recall, KID and a score, for one extractor.

Features are computed batch by batch, and their mean and covariance accumulated in float64. With a cache, the reference
statistics are stored on disk under the hashes of the images and the extractor. Precision, recall and KID use single
features of at most `manifold` images: a fixed random subset, because sets are often sorted by class, or the first
images of an iterator of batches, whose length is unknown.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip.data import ImageSet, fingerprint
from unskip.errors import BadInput, LoadError
from unskip.evals._extractor import Extractor
from unskip.evals._extractor import extractor as find
from unskip.evals._frechet import Moments, frechet
from unskip.evals._manifold import kid, precision_recall, score
from unskip.evals._registry import register
from unskip.evals._split import Split

Pictures = Tensor | ImageSet | Iterable[Tensor]


@dataclass(frozen=True)
class Statistics:
    """Statistics of an image set: moments, features of some images, and the score."""

    moments: Moments
    features: Tensor  # (n, dim), float32, at most `manifold`
    score: float | None
    extractor: str  # its hash, `Extractor.key`


def statistics(
    images: Pictures,
    extractor: str | Path | nn.Module | Extractor,
    *,
    size: int | None = None,
    batch: int = 256,
    manifold: int = 10_000,
    cache: str | Path | None = None,
) -> Statistics:
    """Statistics of bytes (n, channels, height, width), an image set (at `size`), or batches of bytes.

    `cache` is a folder to store the result in. Batches are never cached, because they cannot be hashed beforehand.
    """
    chosen = find(extractor)
    if min(batch, manifold) < 1:
        raise BadInput(f"generation: batch is {batch} and manifold {manifold}; each must be 1 or more")
    file = None
    if cache is not None and isinstance(images, Tensor | ImageSet):
        key = f"{_fingerprint(images, size)}-{chosen.key}-{manifold}"
        file = Path(cache).expanduser() / f"statistics-{key}.safetensors"
        if file.is_file():
            return _read(file, chosen)
    moments, kept, logits = Moments(), list[Tensor](), list[Tensor]()
    compared = _compared(images, manifold)
    for part in _batches(images, size, batch):
        features, scores = chosen(part)
        rows = compared[(compared >= moments.count) & (compared < moments.count + len(part))] - moments.count
        kept.append(features[rows.to(features.device)])
        moments.update(features)
        if scores is not None:
            logits.append(scores.cpu())
    if not moments.count:
        raise BadInput("generation: there is no image to compare; pass at least one")
    result = Statistics(moments, torch.cat(kept), score(torch.cat(logits)) if logits else None, chosen.key)
    if file is not None:
        _write(file, result)
    return result


def generation(
    samples: Pictures | Statistics,
    reference: Pictures | Statistics,
    extractor: str | Path | nn.Module | Extractor = "inception",
    *,
    size: int | None = None,
    batch: int = 256,
    k: int = 3,
    manifold: int = 10_000,
    cache: str | Path | None = None,
) -> dict[str, float]:
    """{"FD-name": ..., "precision", "recall", "kid", and "score" if the extractor is a classifier}.

    The first name is "FID" only with the standard Inception weights. Images are bytes; a set is loaded at `size`.
    """
    chosen = find(extractor)
    options: dict[str, Any] = {"size": size, "batch": batch, "manifold": manifold}
    ours = samples if isinstance(samples, Statistics) else statistics(samples, chosen, **options)
    real = reference if isinstance(reference, Statistics) else statistics(reference, chosen, cache=cache, **options)
    for name, each in (("samples", ours), ("reference", real)):
        if each.extractor != chosen.key:
            raise BadInput(f"generation: the {name} statistics are from another extractor ({each.extractor})")
    metrics = {chosen.distance: frechet(ours.moments, real.moments)}
    metrics["precision"], metrics["recall"] = precision_recall(ours.features, real.features, k)
    metrics["kid"] = kid(ours.features, real.features)
    return metrics | ({} if ours.score is None else {"score": ours.score})


@register(
    "generation-v1",
    needs="samples",
    about="Fréchet distance, precision, recall and KID of samples against the images of `train`, for one extractor.",
    positive=("k", "manifold"),
    k=3,
    manifold=10_000,
)
def evaluate_generation(train: Split, test: Split, k: int, manifold: int) -> dict[str, float]:
    """The metrics of the generated images of `test` against the real images of `train`."""
    if test.samples is None or train.images is None:
        raise BadInput("generation-v1: needs samples and an image set; pass both, or call `unskip sample`")
    options = test.options
    chosen = find(options.extractor, device=options.device)
    size = options.preprocess.size if options.preprocess is not None else None
    limits: dict[str, Any] = {"batch": options.batch, "manifold": manifold}
    reference = statistics(train.images, chosen, size=size, cache=options.cache, **limits)
    metrics = generation(test.samples, reference, chosen, k=k, **limits)
    # In a row of evals.jsonl "precision" already means the floating-point precision.
    return {"sample_precision" if name == "precision" else name: value for name, value in metrics.items()}


def _compared(images: Pictures, manifold: int) -> Tensor:
    """The sorted indices of the images whose single features are compared."""
    if not isinstance(images, Tensor | ImageSet) or len(images) <= manifold:
        return torch.arange(manifold)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return order[:manifold].sort().values


def _batches(images: Pictures, size: int | None, batch: int) -> Iterator[Tensor]:
    if isinstance(images, Tensor):
        yield from images.split(batch) if len(images) else ()
    elif isinstance(images, ImageSet):
        for start in range(0, len(images), batch):
            yield images.load(range(start, min(start + batch, len(images))), size)
    else:
        yield from images


def _fingerprint(images: Tensor | ImageSet, size: int | None) -> str:
    if isinstance(images, ImageSet):
        return f"{fingerprint(images)}-{size}"
    digest = hashlib.sha256(str(tuple(images.shape)).encode())
    digest.update(images.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def _write(file: Path, kept: Statistics) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {**kept.moments.state(), "features": kept.features.cpu()}
    if kept.score is not None:
        tensors["score"] = torch.tensor(kept.score, dtype=torch.float64)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")  # several processes may write the same file
    save_file(tensors, temporary)
    temporary.replace(file)


def _read(file: Path, extractor: Extractor) -> Statistics:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
        kept = float(tensors["score"]) if "score" in tensors else None
        return Statistics(Moments.from_state(tensors), tensors["features"].to(extractor.device), kept, extractor.key)
    except (SafetensorError, KeyError, OSError) as error:
        raise LoadError(f"{file}: damaged ({error}); delete it to compute it again") from error
