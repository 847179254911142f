"""Evaluation of trained models by protocols: a run on its own data, or any model on data that is named.

The results of a run are added to its evals.jsonl, with n, intervals, split and preprocessing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip._warn import warn
from unskip.data import infer_classes, open_dense, open_images, preprocess_of
from unskip.errors import BadInput
from unskip.evals import Extractor, Result, evaluate, extractor, find_protocols, image_channels, noised, protocol
from unskip.models import Sampling
from unskip.recipes._data import (
    Opener,
    cached_opener,
    data_changes,
    data_record,
    evaluated_split,
    open_split,
    with_channels,
)
from unskip.recipes._flow import FlowConfig
from unskip.recipes._open import Trained, open_run
from unskip.recipes._sample import Samples, sampled
from unskip.training import is_main


def evaluate_run(
    run: str | Path | Trained,
    protocols: Sequence[str],
    *,
    dense: str | None = None,
    times: Sequence[float] | None = None,
    split: Literal["val", "test"] | None = None,
    batch: int | None = None,
    device: str | None = None,
    opener: Opener | None = None,
    **options: Any,
) -> tuple[Trained, list[Result]]:
    """Evaluates a run on its own data and adds a row for each result to its evals.jsonl; `options` go to `evaluate`.

    The `split` is by default the one the run itself is evaluated on: "val" where it held one out, otherwise "test".
    Protocols of masks and boxes are evaluated on `dense`, parquet files that hold those. With `times` the features are
    those of noisy images of a diffusion model, from noise, 0, to data, 1.
    """
    trained = run if isinstance(run, Trained) else open_run(run, device)
    config = trained.config
    if getattr(config, "latents", None) is not None:
        raise BadInput(
            f"{trained.folder.path}: it was trained on latents; call unskip.evals.evaluate with feeds of those, and "
            "inputs=unskip.evals.noised(flow, time)"
        )
    apart, own = _apart(protocols, dense, options)
    split = split or evaluated_split(config)
    given = {"batch": batch or config.batch, "workers": config.workers, "graph": getattr(config, "graph", False)}
    given |= {"split": split, **options}
    results: list[Result] = []
    note: dict[str, str] = {}
    if own:
        train, test = trained.objective.open_splits(opener or cached_opener(), split)
        if split == evaluated_split(config):
            changed = data_changes(trained.folder.data, {"train": data_record(train), "test": data_record(test)})
            if changed is not None:
                warn(f"{trained.folder.path}: {changed}. Results on it do not compare with earlier ones")
                note = {"data": "changed since the run began"}
        place = next(trained.model.parameters()).device
        train, test = (trained.objective.evaluated(each, place, given["batch"]) for each in (train, test))
        inputs = [(None, None)] if times is None else [(time, noised(_flow(trained), time)) for time in times]
        for time, hook in inputs:
            for whole in (False, True):
                names = [name for name in own if protocol(name).whole == whole]
                if names:
                    model = trained.model if whole or hook is not None else trained.encoder
                    more = evaluate(model, train, test, names, inputs=hook, **_mine(given, names))
                    results += [replace(each, time=time) for each in more]
    _append(trained, results, given | note)
    if apart and dense is not None:
        more = _evaluate_dense(trained.encoder, dense, apart, config.size, given)
        _append(trained, more, given | {"data": Path(dense).name, "size": config.size})
        results += more
    return trained, results


def evaluate_model(
    model: nn.Module,
    protocols: Sequence[str],
    data: str | None = None,
    *,
    dense: str | None = None,
    split: Literal["val", "test"] | None = None,
    opener: Opener | None = None,
    **options: Any,
) -> list[Result]:
    """Evaluates any model on the splits of a named set; protocols of masks and boxes on those of `dense`."""
    apart, own = _apart(protocols, dense, options)
    split = split or "test"
    results: list[Result] = []
    if own:
        if data is None:
            raise BadInput(f"{', '.join(own)}: name the images that the model is evaluated on, --data DATA")
        opener = opener or open_images
        train, test = opener(data, "train", hold_out=split == "val"), opener(data, split)
        channels = image_channels(model) or 3
        train, test = (with_channels(each, channels) for each in (train, test))
        results += evaluate(model, train, test, own, split=split, **_mine(options, own))
    if apart and dense is not None:
        size = preprocess_of(model, 3, options.get("normalise")).size
        results += _evaluate_dense(model, dense, apart, options.get("size") or size, options | {"split": split})
    return results


def evaluate_samples(
    run: str | Path | Trained,
    source: str | Path | nn.Module | Extractor,
    n: int = 10_000,
    sampling: Sampling | None = None,
    *,
    samples: Samples | None = None,
    split: Literal["train", "test"] = "train",
    batch: int = 512,
    precision: Any = "float32",
    cache: str | Path | None = None,
) -> dict[str, float]:
    """Draws n samples and compares them with a split of the run's data over an extractor; adds a row to evals.jsonl.

    All classes are drawn equally often. `sampling` is 50 steps of Heun's unless said otherwise. Where `samples` are
    given, made as `sampling` and `precision` say, these are compared and none are drawn.
    """
    trained = run if isinstance(run, Trained) else open_run(run)
    config = trained.config
    _flow(trained)
    sampling = sampling or Sampling()
    chosen = extractor(source, device=next(trained.model.parameters()).device)
    images = open_split(config, split, cached_opener())
    costs: list[Tensor] = []

    def drawn() -> Iterator[Tensor]:
        for pixels, _, evaluations in sampled(trained, n, sampling, batch=batch, precision=precision):
            costs.append(evaluations.double())
            yield pixels

    options: dict[str, Any] = {"size": config.size, "batch": batch, "extractor": chosen, "cache": cache, "split": split}
    given = drawn() if samples is None else samples.images.split(batch)
    (result,) = evaluate(trained.model, images, images, ["generation-v1"], samples=given, **options)
    result.values["evaluations"] = float(torch.cat(costs).mean()) if samples is None else samples.evaluations
    about = {"precision": precision, "extractor": chosen.key, **asdict(sampling)}
    trained.folder.append("evals.jsonl", {"step": trained.step, **result.to_dict(), **about})
    return {"precision" if name == "sample_precision" else name: value for name, value in result.values.items()}


def _apart(protocols: Sequence[str], dense: str | None, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Protocols of masks and boxes, and the others. Raises BadInput for masks that are missing, and for changes of
    protocols that are not asked for."""
    apart = [each.name for each in find_protocols(protocols, options.get("changes")) if each.truth != "labels"]
    if apart and dense is None:
        raise BadInput(f"{', '.join(apart)}: give images with masks and boxes, --dense FILES")
    return apart, [name for name in protocols if name not in apart]


def _mine(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Options of `evaluate` with the changes of some protocols only."""
    changes = options.get("changes") or {}
    return {**options, "changes": {name: value for name, value in changes.items() if name in names}}


def _evaluate_dense(
    model: nn.Module, source: str, names: Sequence[str], size: int | None, options: Mapping[str, Any]
) -> list[Result]:
    """Images are resized to `size`."""
    train, test = infer_classes(*(open_dense(source, split, size=size) for split in ("train", "test")))
    kept = {key: value for key, value in _mine(options, names).items() if key not in ("pool", "size", "graph")}
    return evaluate(model, train, test, names, **(kept | {"batch": 64, "split": "test"}))


def _append(trained: Trained, results: Sequence[Result], options: Mapping[str, Any]) -> None:
    """Rows of evals.jsonl, with what decided the numbers beside the protocol."""
    about = {key: options[key] for key in ("data", "size") if options.get(key) is not None}
    about |= {"seed": options.get("seed", 0), "precision": options.get("precision", "float32")}
    for each in results if is_main() else ():
        trained.folder.append("evals.jsonl", {"step": trained.step, **each.to_dict(), **about})


def _flow(trained: Trained) -> Any:
    if not isinstance(trained.config, FlowConfig):
        raise BadInput(
            f"{trained.folder.path}: its recipe has no noise levels and draws no samples; take one of sit or uvit"
        )
    return trained.config.flow
