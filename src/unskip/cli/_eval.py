"""`unskip eval RUN`: the features of a run judged by named protocols, block by block."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
from typing import Annotated, Any

import tyro

from unskip._words import nearest
from unskip.cli._options import DeviceOfRun, Json, Run, told
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput
from unskip.evals import DTYPES, PROTOCOLS, Result, by_depth, by_time, sheet_file
from unskip.evals import protocol as find
from unskip.recipes import DENSE, Trained, judge_dense, judge_run, judge_times, picture_run

_PROTOCOLS = f"Protocols, separated by commas: {', '.join(PROTOCOLS)}."
_TIMES = "Of a diffusion model: times of noisy images, from noise, 0, to data, 1, such as 0.5,0.9,1."
_DENSE = "Images with masks and boxes for segment and discover protocols: parquet files, name-{split}.parquet."
_PICTURES = "Write a sheet of features as colours, attention and discovered objects."
_CHANGE = "Another value for a setting of a protocol, recorded with the result: finetune-mae-v1.epochs=20."


def evaluate(
    run: Run,
    protocol: Annotated[str, tyro.conf.arg(help=_PROTOCOLS, metavar="NAMES")] = "knn-dino-v1,rank-v1",
    blocks: Annotated[str, tyro.conf.arg(help="all, last, or indices such as 3,7,11.", metavar="BLOCKS")] = "all",
    pool: Annotated[str | None, told("mean or cls instead of the protocols' own.", "POOL")] = None,
    split: Annotated[str | None, told("test or val (default: what the run held out).", "SPLIT")] = None,
    times: Annotated[str | None, told(_TIMES, "TIMES")] = None,
    dense: Annotated[str | None, told(_DENSE, "FILES")] = None,
    pictures: Annotated[str | None, told(_PICTURES, "FILE.png")] = None,
    change: Annotated[  # both --change A B and --change A --change B
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, told(_CHANGE, "SETTING")
    ] = (),
    seed: Annotated[int, tyro.conf.arg(help="Of probes and fine-tuning.", metavar="N")] = 0,
    precision: Annotated[str, tyro.conf.arg(help="float32, bf16 or fp16.", metavar="NAME")] = "float32",
    device: DeviceOfRun = None,
    json: Json = False,
) -> int:
    """Judge the features of a run by protocols, over depth; the results go into its evals.jsonl too.

    Example: unskip eval runs/x --protocol knn-dino-v1,probe-mae-v1
    """
    names = [name.strip() for name in protocol.split(",") if name.strip()]
    for name in names:
        find(name)
    if not names:
        raise BadInput(f"--protocol names none; there are {', '.join(PROTOCOLS)}")
    _refuse_unused(dense, names, pictures)
    _refuse_whole({"pool": pool, "split": split}, names)
    _one_of("pool", pool, ("mean", "cls"))
    _one_of("split", split, ("test", "val"))
    _one_of("precision", precision, tuple(DTYPES))
    if pictures is not None:
        sheet_file(pictures)  # now, and not when all is judged
    options: dict[str, Any] = {"blocks": _blocks(blocks), "split": split, "seed": seed, "precision": precision}
    options |= {"device": device, "changes": _changes([item for items in change for item in items], names)}
    with contextlib.redirect_stdout(sys.stderr), busy(f"judging {run}"):
        if times is not None:
            if pool is not None:
                raise BadInput("--times takes means over all tokens: leave --pool out")
            trained, by = judge_times(run, names, _times(times), **options)
            rows = [{**each.to_dict(), "time": time} for time, found in by.items() for each in found]
        else:
            trained, results = _judged(run, names, dense, {**options, "pool": pool})
            rows = [each.to_dict() for each in results]
        if pictures is not None:
            written = picture_run(run, pictures, dense, device)
            print(f"pictures in {written}")
    if json:
        used = {name: PROTOCOLS[name].to_dict() for name in names}
        print_json({"run": run, "step": trained.step, "protocols": used, "results": rows})
        return 0
    changed = {name: ", ".join(f"{key}={each}" for key, each in to.items()) for name, to in options["changes"].items()}
    said = [f"{name} with {changed[name]}" if name in changed else name for name in names]
    print(f"{run}, step {trained.step}: {', '.join(said)}\n")
    if times is None:
        print(by_depth(results))
        return 0
    for name in dict.fromkeys(name for found in by.values() for each in found for name in each.values):
        print(f"{name}\n{by_time(by, name)}\n")
    return 0


def _judged(run: str, names: list[str], dense: str | None, options: dict[str, Any]) -> tuple[Trained, list[Result]]:
    """Protocols of whole images on the run's own data, dense ones on images with masks and boxes."""
    apart = [name for name in names if PROTOCOLS[name].kind in DENSE]
    if apart and dense is None:
        raise BadInput(f"{', '.join(apart)}: give images with masks and boxes, --dense FILES")
    results: list[Result] = []
    whole = [name for name in names if name not in apart]
    if whole:
        trained, results = judge_run(run, whole, **options)
    if apart:
        assert dense is not None
        mine = {key: value for key, value in options.items() if key not in ("pool", "split")}
        trained, more = judge_dense(run, dense, apart, **mine)
        results = [*results, *more]
    return trained, results


def _refuse_unused(dense: str | None, names: list[str], pictures: str | None) -> None:
    """Masks and boxes are there for protocols that look at them, and for pictures."""
    for_them = [name for name, each in PROTOCOLS.items() if each.kind in DENSE]
    if dense is not None and pictures is None and not {*names} & {*for_them}:
        raise BadInput(
            f"--dense {dense}: {', '.join(names)} look at no masks or boxes. Name protocols that do, --protocol "
            f"{','.join(for_them)}, or leave --dense out"
        )


def _refuse_whole(given: dict[str, str | None], names: list[str]) -> None:
    """A pool and a split are those of whole images with labels."""
    if all(PROTOCOLS[name].kind in DENSE for name in names):
        for option, value in given.items():
            if value is not None:
                raise BadInput(f"--{option} {value}: {', '.join(names)} look at patches of --dense; leave it out")


def _one_of(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise BadInput(f"--{name} {value}: it can be {' or '.join(known)}")


def _blocks(text: str) -> Any:
    if text in ("all", "last"):
        return "all" if text == "all" else -1
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--blocks {text}: write all, last, or indices such as 3,7,11") from None


def _times(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--times {text}: write numbers from 0 to 1, such as 0.5,0.9,1") from None


def _changes(items: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """ "probe-decayed-v1.epochs=50" as {protocol: {setting: value}}."""
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        place, equals, text = item.partition("=")
        name, dot, setting = place.rpartition(".")
        if not equals or not dot or name not in names:
            raise BadInput(f"--change {item}: write PROTOCOL.SETTING=VALUE, with a protocol that is asked for")
        settings = PROTOCOLS[name].settings
        if setting not in settings:
            raise BadInput(
                f"--change {item}: {name} has no setting {setting!r}{nearest(setting, settings)}; it has "
                f"{', '.join(settings)}. Write PROTOCOL.SETTING=VALUE"
            )
        found.setdefault(name, {})[setting] = _value(item, text, settings[setting])
    return found


def _value(item: str, text: str, usual: object) -> object:
    """A value of the kind that the setting has in its protocol; several are separated by commas."""
    several = isinstance(usual, tuple)
    try:
        value = json_format.loads(f"[{text}]" if several and not text.startswith("[") else text)
    except ValueError:
        value = text
    one = usual[0] if isinstance(usual, tuple) else usual
    for each in value if several and isinstance(value, list) and value else [value]:
        if not _alike(each, one):
            like = ",".join(map(str, usual)) if isinstance(usual, tuple) else usual
            raise BadInput(f"--change {item}: {text!r} is not of the kind of its usual value, {like}")
    return value


def _alike(value: object, usual: object) -> bool:
    """Whether a value may stand for a usual one: a whole number for any number, and nothing for what is left out."""
    if usual is None or isinstance(usual, str):
        return True
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    return isinstance(value, int | float if isinstance(usual, float) else int)
