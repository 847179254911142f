"""Evaluation of trained models by protocols: a run on its own data, or any model on named data.

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
from unskip.data import TextFeed, absolute_source, infer_classes, open_dense, open_images, open_text, preprocess_of
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
from unskip.recipes._lm import Lm, NextToken
from unskip.recipes._open import Trained, open_run
from unskip.recipes._registry import from_dict
from unskip.recipes._sample import Samples, sampled
from unskip.training import RunFolder, is_main


def evaluate_run(
    run: str | Path | Trained,
    protocols: Sequence[str],
    *,
    data: str | None = None,
    dense: str | None = None,
    times: Sequence[float] | None = None,
    split: Literal["val", "test"] | None = None,
    batch: int | None = None,
    device: str | None = None,
    opener: Opener | None = None,
    **options: Any,
) -> tuple[Trained, list[Result]]:
    """Evaluates a run on its own data and adds a row for each result to its evals.jsonl; `options` go to `evaluate`.

    A language model can be evaluated on another text, `data`, which adds no rows; other models by `evaluate_model`.
    `split` is by default that of the run's own evaluations: "val" if the run held one out, otherwise "test". A "val"
    split that the run was trained on is refused. Protocols of masks and boxes are evaluated on `dense`, parquet files
    with masks and boxes. With `times` the features are those of a diffusion model on noisy images, from 0, noise, to 1,
    data.
    """
    trained = run if isinstance(run, Trained) else open_run(run, device)
    config = trained.config
    if getattr(config, "latents", None) is not None:
        raise BadInput(
            f"{trained.folder.path}: it was trained on latents; call unskip.evals.evaluate with feeds of latents and "
            "inputs=unskip.evals.noised(flow, time)"
        )
    dense_names, names = _split_protocols(protocols, dense, options)
    objective = trained.objective if data is None else NextToken(_text_config(trained.folder, data))
    own = objective.config.data == config.data
    split = split or evaluated_split(objective.config)
    settings = {"batch": batch or config.batch, "workers": config.workers, "graph": getattr(config, "graph", False)}
    settings |= {"split": split, **options}
    results: list[Result] = []
    note: dict[str, str] = {}
    if names:
        train, test = objective.open_splits(opener or cached_opener(), split)
        before = trained.folder.data if own else {}
        if split == "val" and not config.validate and data_changes(before, {"train": data_record(train)}):
            raise BadInput(  # holding the split out has changed the training data
                f"{trained.folder.path}: it was trained without --validate, so its val split is a part of its training "
                "data; evaluate on --split test, or train with --validate"
            )
        if split == evaluated_split(config):
            changed = data_changes(before, {"train": data_record(train), "test": data_record(test)})
            if changed is not None:
                warn(f"{trained.folder.path}: {changed}. Results on it do not compare with earlier ones")
                note = {"data": "changed since the run began"}
        target = next(trained.model.parameters()).device
        train, test = (objective.evaluated(images, target, settings["batch"]) for images in (train, test))
        inputs = [(None, None)] if times is None else [(time, noised(_flow(trained), time)) for time in times]
        for time, hook in inputs:
            for whole in (False, True):
                chosen = [name for name in names if protocol(name).whole == whole]
                if chosen:
                    model = trained.model if whole or hook is not None else trained.encoder
                    new = evaluate(model, train, test, chosen, inputs=hook, **_options_for(chosen, settings))
                    results += [replace(result, time=time) for result in new]
    if own:
        _append(trained, results, settings | note)
    if dense_names and dense is not None:
        new = _evaluate_dense(trained.encoder, dense, dense_names, config.size, settings)
        _append(trained, new, settings | {"data": Path(dense).name, "size": config.size})
        results += new
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
    dense_names, names = _split_protocols(protocols, dense, options)
    split = split or "test"
    results: list[Result] = []
    text = [name for name in names if protocol(name).needs == "predictions"]
    if text:
        raise BadInput(
            f"{', '.join(text)}: evaluated for the run of a language model; for another model, in Python: "
            "unskip.evals.evaluate(model, None, unskip.data.TextFeed(...), [...])"
        )
    if names:
        if data is None:
            raise BadInput(f"{', '.join(names)}: give the images to evaluate on, --data DATA")
        opener = opener or open_images
        train, test = opener(data, "train", hold_out=split == "val"), opener(data, split)
        channels = image_channels(model) or 3
        train, test = (with_channels(images, channels) for images in (train, test))
        results += evaluate(model, train, test, names, split=split, **_options_for(names, options))
    if dense_names and dense is not None:
        size = preprocess_of(model, 3, options.get("normalise")).size
        results += _evaluate_dense(model, dense, dense_names, options.get("size") or size, options | {"split": split})
    return results


def text_batch(
    run: str | Path, n: int = 8, data: str | None = None, split: Literal["train", "val", "test"] | None = None
) -> Tensor:
    """n sequences for the language model of a run, ids (n, context), evenly spaced in its own text or in `data`.

    `data` has the forms of `open_text`, and becomes tokens by the tokenizer in the run's checkpoint. `split` is by
    default that of the run's evaluations.
    """
    folder = RunFolder.open(run)
    config = _text_config(folder, data)
    text = open_text(
        config.data,
        split or evaluated_split(config),
        tokenizer=config.tokenizer,
        column=config.column,
        hold_out=config.validate,
        cache=config.cache,
    )
    return next(TextFeed(text, n, config.context, most=n).evaluate())[0]


def _text_config(folder: RunFolder, data: str | None) -> Lm:
    """The config of a language model, with the tokenizer of its checkpoint, for its own text or another one."""
    config = from_dict(folder.config)
    if not isinstance(config, Lm):
        raise BadInput(f"{folder.path}: its recipe is no language model; give a run of lm")
    if folder.last_checkpoint() is None:
        raise BadInput(f"{folder.path}: no checkpoint yet; continue with `{folder.resume_command}`")
    if data is not None and absolute_source(data) != config.data:
        config = replace(config, data=data, validate=False)
    return config.resumed(folder)


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
    """Draws n samples and compares their features, from an extractor, with those of a split of the run's data.

    Adds a row to evals.jsonl. All classes are drawn equally often, by default with 50 steps of Heun's method. If
    `samples` are given, no others are drawn; `sampling` and `precision` then describe how they were made.
    """
    trained = run if isinstance(run, Trained) else open_run(run)
    config = trained.config
    _flow(trained)
    sampling = sampling or Sampling()
    features = extractor(source, device=next(trained.model.parameters()).device)
    images = open_split(config, split, cached_opener())
    costs: list[Tensor] = []

    def drawn() -> Iterator[Tensor]:
        for pixels, _, evaluations in sampled(trained, n, sampling, batch=batch, precision=precision):
            costs.append(evaluations.double())
            yield pixels

    options: dict[str, Any] = {"size": config.size, "batch": batch, "split": split, "cache": cache}
    generated = drawn() if samples is None else samples.images.split(batch)
    (result,) = evaluate(
        trained.model, images, images, ["generation-v1"], samples=generated, extractor=features, **options
    )
    result.values["evaluations"] = float(torch.cat(costs).mean()) if samples is None else samples.evaluations
    about = {"precision": precision, "extractor": features.key, **asdict(sampling)}
    trained.folder.append("evals.jsonl", {"step": trained.step, **result.to_dict(), **about})
    return {"precision" if name == "sample_precision" else name: value for name, value in result.values.items()}


def _split_protocols(
    protocols: Sequence[str], dense: str | None, options: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Protocols of masks and boxes, and the others. Raises BadInput if `dense` is missing, or for changes of protocols
    that are not evaluated."""
    entries = find_protocols(protocols, options.get("changes"))
    dense_names = [entry.name for entry in entries if entry.truth != "labels"]
    if dense_names and dense is None:
        raise BadInput(f"{', '.join(dense_names)}: give images with masks and boxes, --dense FILES")
    return dense_names, [name for name in protocols if name not in dense_names]


def _options_for(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `evaluate`, with the changes of these protocols only."""
    changes = options.get("changes") or {}
    return {**options, "changes": {name: value for name, value in changes.items() if name in names}}


def _evaluate_dense(
    model: nn.Module, source: str, names: Sequence[str], size: int | None, options: Mapping[str, Any]
) -> list[Result]:
    """Evaluates on parquet files with masks and boxes; images are resized to `size`."""
    train, test = infer_classes(*(open_dense(source, split, size=size) for split in ("train", "test")))
    kept = {key: value for key, value in _options_for(names, options).items() if key not in ("pool", "size", "graph")}
    return evaluate(model, train, test, names, **(kept | {"batch": 64, "split": "test"}))


def _append(trained: Trained, results: Sequence[Result], options: Mapping[str, Any]) -> None:
    """Adds rows to evals.jsonl, with the settings that are not part of the protocol."""
    about = {key: options[key] for key in ("data", "size") if options.get(key) is not None}
    about |= {"seed": options.get("seed", 0), "precision": options.get("precision", "float32")}
    try:
        for result in results if is_main() else ():
            trained.folder.append("evals.jsonl", {"step": trained.step, **result.to_dict(), **about})
    except OSError as error:  # a full disk or a run of another user; the results are returned all the same
        warn(f"{trained.folder.path}: results were not added to evals.jsonl ({error.strerror})")


def _flow(trained: Trained) -> Any:
    if not isinstance(trained.config, FlowConfig):
        raise BadInput(f"{trained.folder.path}: its recipe has no noise levels and draws no samples; use sit or uvit")
    return trained.config.flow
