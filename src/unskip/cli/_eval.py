"""`unskip eval MODEL`: evaluate the blocks of a run or of any other model by named protocols."""

from __future__ import annotations

import contextlib
import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn

from unskip._plugins import with_plugins
from unskip.cli._options import (
    Blocks,
    DeviceOfRun,
    Json,
    Mean,
    PrecisionOption,
    Random,
    Std,
    Trust,
    blocks_of,
    model_help,
    option,
)
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput
from unskip.evals import PROTOCOLS, Result, by_depth, image_channels
from unskip.evals import protocol as find
from unskip.recipes import Trained, evaluate_model, evaluate_run, open_run
from unskip.training import RunFolder, device_of, engine, find_runs, is_main

_PROTOCOLS = f"Protocols, separated by commas: {', '.join(PROTOCOLS)}."
_DATA = (
    "Labelled images: digits, a folder with train/ and val/, parquet files, ...; for the run of a language model text, "
    "as for train lm (default: the data of the run)."
)
_TIMES = "For diffusion models: times of the noisy images, from 0 (noise) to 1 (data), such as 0.5,0.9,1."
_DENSE = "Images with masks and boxes, for segment and discover protocols: parquet files, name-{split}.parquet."
_DEFAULT, _DEFAULT_TEXT = "knn-dino-v1,rank-v1", "bits-per-byte-v1,bits-per-byte-by-context-v1,next-token-v1"
_WHOLE = ("logits", "predictions", "samples", "model")  # what protocols need that do not evaluate blocks
_CHANGE = "Change a setting of a protocol, such as finetune-mae-v1.epochs=20; recorded with the result."


def eval_command(
    model: Annotated[
        str, tyro.conf.Positional, model_help("Model to evaluate, with pretrained weights unless --random is given")
    ],
    protocol: Annotated[
        str | None, option(f"{_PROTOCOLS} Default: {_DEFAULT}; for text: {_DEFAULT_TEXT}.", "NAMES")
    ] = None,
    data: Annotated[str | None, option(_DATA, "DATA")] = None,
    blocks: Blocks = "all",
    pool: Annotated[
        Literal["mean", "cls"] | None, option("Pooling of tokens (default: that of each protocol).", "mean|cls")
    ] = None,
    split: Annotated[
        Literal["test", "val"] | None,
        option("Split to evaluate on (default: val for runs with --validate, else test).", "test|val"),
    ] = None,
    times: Annotated[str | None, option(_TIMES, "TIMES")] = None,
    dense: Annotated[str | None, option(_DENSE, "FILES")] = None,
    change: Annotated[  # both --change A B and --change A --change B
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, option(_CHANGE, "SETTING")
    ] = (),
    size: Annotated[int | None, option("Image size in pixels (default: the model's own).", "N")] = None,
    mean: Mean = None,
    std: Std = None,
    batch: Annotated[int | None, option("Images per batch (default: that of training, or 256).", "N")] = None,
    seed: Annotated[int, tyro.conf.arg(help="Seed of probes and fine-tuning.", metavar="N")] = 0,
    precision: PrecisionOption = "float32",
    device: DeviceOfRun = None,
    random: Random = False,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Evaluate the blocks of a model by named protocols. Results of a run are also appended to its evals.jsonl.

    Example: unskip eval runs/x --protocol knn-dino-v1,probe-mae-v1
    """
    from unskip.cli._model import channel_numbers, open_weighted

    runs = _runs_in(model)
    text = bool(runs) and all(run.config.get("recipe") == "lm" for run in runs)
    if protocol is None:
        protocol = _DEFAULT_TEXT if text else _DEFAULT
    names = [name.strip() for name in protocol.split(",") if name.strip()]
    with with_plugins([plugin for run in runs for plugin in run.plugins], trust):
        for name in names:
            find(name)
    if not names:
        raise BadInput(f"--protocol is empty; give any of {', '.join(PROTOCOLS)}")
    _refuse_unused({"pool": pool, "split": split}, dense, blocks, names)
    if times is not None and pool is not None:
        raise BadInput("--times uses the mean over all tokens: leave --pool out")
    if not runs and not _is_model(model):
        find_runs(model)  # raises: there is no such folder
    own_data = bool(runs) and data is None
    if times is not None and not own_data:
        raise BadInput("--times is for runs on their own data: leave --data out")
    options: dict[str, Any] = {"blocks": blocks_of(blocks), "split": split, "seed": seed, "precision": precision}
    options |= {"pool": "mean" if times is not None else pool, "dense": dense, "batch": batch}
    options["changes"] = _changes([item for items in change for item in items], names)
    numbers = {"size": size, "mean": channel_numbers("mean", mean), "std": channel_numbers("std", std)}
    rows: list[dict[str, Any]] = []
    for each in [str(run.path) for run in runs] or [model]:
        with contextlib.redirect_stdout(sys.stderr), busy(f"evaluating {each}"):
            if own_data or text:
                chosen = {"times": None if times is None else _times(times), "data": data}
                about, results = _of_run(open_run(each, device, trust=trust), names, options | chosen, numbers)
            else:
                torch.manual_seed(0)  # the same random weights each time
                built = open_weighted(each, random, trust).to(device_of(device or "cpu"))
                about, results = {"model": each, "data": data}, _of_model(built, data, names, options, numbers)
        rows.append({**about, "results": [result.to_dict() for result in results]})
        if not json and is_main():
            _show(each, about, names, results, options["changes"])
    if json and is_main():
        used = {name: PROTOCOLS[name].to_dict() for name in names}
        print_json({"protocols": used, **(rows[0] if len(rows) == 1 else {"runs": rows})})
    return 0


def _distributed(model: nn.Module) -> Any:
    """Distributes the evaluation if a launcher has started several processes."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return engine(next(model.parameters()).device) if several else contextlib.nullcontext()


def _of_run(
    trained: Trained, names: list[str], options: dict[str, Any], numbers: dict[str, Any]
) -> tuple[dict[str, Any], list[Result]]:
    """Evaluates a run on its own data, or a language model on any text."""
    from unskip.cli._model import preprocess_for

    if trained.facts.channels:  # 0 for text
        options = {**options, "normalise": preprocess_for(trained.encoder, trained.facts.channels, numbers)}
    with _distributed(trained.model):
        _, results = evaluate_run(trained, names, **options)
    return {"run": str(trained.folder.path), "step": trained.step}, results


def _of_model(
    built: nn.Module, data: str | None, names: list[str], options: dict[str, Any], numbers: dict[str, Any]
) -> list[Result]:
    """Evaluates any model on named data."""
    from unskip.cli._model import preprocess_for

    preprocess = preprocess_for(built, image_channels(built) or 3, numbers)
    options = {**options, "normalise": preprocess, "batch": options["batch"] or 256}
    with _distributed(built):
        return evaluate_model(built, names, data, **options)


def _runs_in(name: str) -> list[RunFolder]:
    """The runs of a folder; none for other models, or if there is no such folder."""
    if _is_model(name) or not Path(name).is_dir():
        return []
    return [RunFolder.open(run) for run in find_runs(name)]


def _is_model(name: str) -> bool:
    """Whether MODEL is not a run, but a name or a folder of unskip.save."""
    folder = Path(name).expanduser()
    return (":" in name and not folder.exists()) or (folder / "unskip.json").is_file()


def _show(name: str, about: dict[str, Any], names: list[str], results: list[Result], changes: dict[str, Any]) -> None:
    """Prints tables with n, the split and the preprocessing."""
    changed = {key: ", ".join(f"{setting}={value}" for setting, value in to.items()) for key, to in changes.items()}
    titles = [f"{each} with {changed[each]}" if each in changed else each for each in names]
    print(f"{name}{', step {step}'.format(**about) if 'step' in about else ''}: {', '.join(titles)}")
    for n, split in dict.fromkeys((each.n, each.split) for each in results):
        of = ", ".join(dict.fromkeys(each.protocol for each in results if (each.n, each.split) == (n, split)))
        print(f"n = {n}, {split} split: {of}")
    for preprocess in dict.fromkeys(each.preprocess for each in results if each.preprocess is not None):
        print(f"images: {preprocess}")
    if any(each.intervals for each in results):
        print("in brackets: 95% interval")
    print(f"\n{by_depth(results)}")


def _refuse_unused(given: dict[str, str | None], dense: str | None, blocks: str, names: list[str]) -> None:
    """Refuses --dense, --blocks and --pool without a protocol that uses them, and --split if all use --dense."""
    dense_names = [name for name, each in PROTOCOLS.items() if each.truth != "labels"]
    chosen = [name for name in names if name in dense_names]
    if dense is not None and not chosen:
        raise BadInput(
            f"--dense {dense}: {', '.join(names)} use no masks or boxes; give protocols that do, --protocol "
            f"{','.join(dense_names)}, or leave --dense out"
        )
    if blocks != "all" and all(PROTOCOLS[name].needs in _WHOLE for name in names):
        raise BadInput(f"--blocks {blocks}: {', '.join(names)} evaluate the whole model, not its blocks; leave it out")
    for flag, value in given.items():
        if value is not None and len(chosen) == len(names):
            raise BadInput(f"--{flag} {value}: {', '.join(names)} use only --dense; leave it out")
    if given["pool"] is not None and not any(PROTOCOLS[name].needs == "features" for name in names):
        raise BadInput(f"--pool {given['pool']}: {', '.join(names)} use no pooled features; leave it out")


def _times(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--times {text}: write numbers from 0 to 1, such as 0.5,0.9,1") from None


def _changes(items: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """ "probe-decayed-v1.epochs=50" as {protocol: {setting: value}}."""
    changes: dict[str, dict[str, Any]] = {}
    for item in items:
        place, equals, text = item.partition("=")
        name, dot, setting = place.rpartition(".")
        if not equals or not dot or name not in names:
            raise BadInput(f"--change {item}: write PROTOCOL.SETTING=VALUE, with a protocol of --protocol")
        several = isinstance(PROTOCOLS[name].settings.get(setting), tuple)
        try:
            value = json_format.loads(f"[{text}]" if several and not text.startswith("[") else text)
        except ValueError:
            value = text
        changes.setdefault(name, {})[setting] = value
        PROTOCOLS[name].settings_with({setting: value})
    return changes
