"""`unskip eval MODEL`: named protocols over the blocks of a run or of any other model."""

from __future__ import annotations

import contextlib
import json as json_format
import os
import sys
from collections.abc import Sequence
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
_DATA = "Images with labels: digits, a folder with train/ and val/, parquet files, ... (default: those of the run)."
_TIMES = "Of a diffusion model: times of noisy images, from noise, 0, to data, 1, such as 0.5,0.9,1."
_DENSE = "Images with masks and boxes for segment and discover protocols: parquet files, name-{split}.parquet."
_USUAL, _TEXT = "knn-dino-v1,rank-v1", "bits-per-byte-v1,bits-per-byte-by-context-v1,next-token-v1"
_CHANGE = "Another value for a setting of a protocol, recorded with the result: finetune-mae-v1.epochs=20."


def eval_command(
    model: Annotated[
        str, tyro.conf.Positional, model_help("What to evaluate, with pretrained weights unless --random")
    ],
    protocol: Annotated[str | None, option(f"{_PROTOCOLS} Default: {_USUAL}; of text {_TEXT}.", "NAMES")] = None,
    data: Annotated[str | None, option(_DATA, "DATA")] = None,
    blocks: Blocks = "all",
    pool: Annotated[Literal["mean", "cls"] | None, option("Instead of the protocols' own.", "mean|cls")] = None,
    split: Annotated[Literal["test", "val"] | None, option("Default: what was held out, or test.", "test|val")] = None,
    times: Annotated[str | None, option(_TIMES, "TIMES")] = None,
    dense: Annotated[str | None, option(_DENSE, "FILES")] = None,
    change: Annotated[  # both --change A B and --change A --change B
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, option(_CHANGE, "SETTING")
    ] = (),
    size: Annotated[int | None, option("Pixels along a side of the images (default: the model's own).", "N")] = None,
    mean: Mean = None,
    std: Std = None,
    batch: Annotated[int | None, option("Images at a time (default: as in training, or 256).", "N")] = None,
    seed: Annotated[int, tyro.conf.arg(help="Of probes and fine-tuning.", metavar="N")] = 0,
    precision: PrecisionOption = "float32",
    device: DeviceOfRun = None,
    random: Random = False,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Evaluate a model by protocols, over depth; the results of a run go into its evals.jsonl too.

    Example: unskip eval runs/x --protocol knn-dino-v1,probe-mae-v1
    """
    from unskip.cli._model import channel_numbers, weighted

    protocol = protocol if protocol is not None else _TEXT if _is_text(model) else _USUAL
    names = [name.strip() for name in protocol.split(",") if name.strip()]
    with with_plugins(_plugins_of(model), trust):
        for name in names:
            find(name)
    if not names:
        raise BadInput(f"--protocol names none; there are {', '.join(PROTOCOLS)}")
    _refuse_unused({"pool": pool, "split": split}, dense, names)
    if times is not None and pool is not None:
        raise BadInput("--times takes means over all tokens: leave --pool out")
    options: dict[str, Any] = {"blocks": blocks_of(blocks), "split": split, "seed": seed, "precision": precision}
    options |= {"pool": "mean" if times is not None else pool, "dense": dense, "batch": batch}
    options["changes"] = _changes([item for items in change for item in items], names)
    numbers = {"size": size, "mean": channel_numbers("mean", mean), "std": channel_numbers("std", std)}
    runs: Sequence[Path | None] = [None] if _is_model(model) else find_runs(model)
    rows: list[dict[str, Any]] = []
    for each in runs:
        with contextlib.redirect_stdout(sys.stderr), busy(f"evaluating {each or model}"):
            if each is not None and data is None:
                chosen = [*_times(times)] if times is not None else None
                trained = open_run(each, device, trust=trust)
                with _processes(trained.model):
                    about, results = _of_run(trained, names, options | {"times": chosen}, numbers)
            else:
                if times is not None:
                    raise BadInput("--times is for runs on their own data: leave --data out")
                name = str(each or model)
                torch.manual_seed(0)  # random weights, but the same ones each time
                built = weighted(name, random, trust).to(device_of(device or "cpu"))
                with _processes(built):
                    about = {"model": name, "data": data}
                    results = _of_model(built, data, names, options, numbers)
        rows.append({**about, "results": [result.to_dict() for result in results]})
        if not json and is_main():
            _show(str(each or model), about, names, results, options["changes"])
    if json and is_main():
        used = {name: PROTOCOLS[name].to_dict() for name in names}
        record = rows[0] if len(rows) == 1 else {"runs": rows}
        print_json({"protocols": used, **record})
    return 0


def _processes(model: nn.Module) -> Any:
    """Where a launcher has started several processes, they evaluate together."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return engine(next(model.parameters()).device) if several else contextlib.nullcontext()


def _of_run(
    trained: Trained, names: list[str], options: dict[str, Any], numbers: dict[str, Any]
) -> tuple[dict[str, Any], list[Result]]:
    """A run on its own data."""
    from unskip.cli._model import preprocess_for

    if trained.facts.channels:  # else it is a run on text
        options = {**options, "normalise": preprocess_for(trained.encoder, trained.facts.channels, numbers)}
    _, results = evaluate_run(trained, names, **options)
    return {"run": str(trained.folder.path), "step": trained.step}, results


def _of_model(
    built: nn.Module,
    data: str | None,
    names: list[str],
    options: dict[str, Any],
    numbers: dict[str, Any],
) -> list[Result]:
    """Any model on data that is named."""
    from unskip.cli._model import preprocess_for

    made = preprocess_for(built, image_channels(built) or 3, numbers)
    options = {**options, "normalise": made, "batch": options["batch"] or 256}
    return evaluate_model(built, names, data, **options)


def _plugins_of(name: str) -> list[str]:
    """The plugins that the runs in a folder were made with."""
    if _is_model(name) or not Path(name).expanduser().is_dir():
        return []
    return [plugin for run in find_runs(name) for plugin in RunFolder.open(run).plugins]


def _is_text(name: str) -> bool:
    """Whether it is a run, or runs, of a language model."""
    if _is_model(name) or not Path(name).expanduser().is_dir():
        return False
    return all(RunFolder.open(run).config.get("recipe") == "lm" for run in find_runs(name))


def _is_model(name: str) -> bool:
    """Whether MODEL is none of a run: a name, or a folder of unskip.save."""
    folder = Path(name).expanduser()
    return (":" in name and not folder.exists()) or (folder / "unskip.json").is_file()


def _show(name: str, about: dict[str, Any], names: list[str], results: list[Result], changes: dict[str, Any]) -> None:
    """Tables as text, with n, the split, and how images were made."""
    changed = {key: ", ".join(f"{setting}={value}" for setting, value in to.items()) for key, to in changes.items()}
    titles = [f"{each} with {changed[each]}" if each in changed else each for each in names]
    print(f"{name}{', step {step}'.format(**about) if 'step' in about else ''}: {', '.join(titles)}")
    for n, split in dict.fromkeys((each.n, each.split) for each in results):
        of = ", ".join(dict.fromkeys(each.protocol for each in results if (each.n, each.split) == (n, split)))
        print(f"n = {n}, {split} split: {of}")
    for made in dict.fromkeys(each.preprocess for each in results if each.preprocess is not None):
        print(f"images: {made}")
    if any(each.intervals for each in results):
        print("in brackets: 95% interval")
    print(f"\n{by_depth(results)}")


def _refuse_unused(given: dict[str, str | None], dense: str | None, names: list[str]) -> None:
    """Masks and boxes are there for protocols that look at them; pool and split for the others."""
    for_them = [name for name, each in PROTOCOLS.items() if each.truth != "labels"]
    apart = [name for name in names if name in for_them]
    if dense is not None and not apart:
        raise BadInput(
            f"--dense {dense}: {', '.join(names)} look at no masks or boxes. Name protocols that do, --protocol "
            f"{','.join(for_them)}, or leave --dense out"
        )
    for flag, value in given.items():
        if value is not None and len(apart) == len(names):
            raise BadInput(f"--{flag} {value}: {', '.join(names)} look at patches of --dense; leave it out")


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
            raise BadInput(f"--change {item}: write PROTOCOL.SETTING=VALUE, with a protocol that is asked for")
        several = isinstance(PROTOCOLS[name].settings.get(setting), tuple)
        try:
            value = json_format.loads(f"[{text}]" if several and not text.startswith("[") else text)
        except ValueError:
            value = text
        changes.setdefault(name, {})[setting] = value
        PROTOCOLS[name].settings_with({setting: value})
    return changes
