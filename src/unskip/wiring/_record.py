"""Writes and reads unskip.json, the record of a saved model, and checks what it reads."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from unskip._plugins import load_plugins
from unskip._provenance import sha256
from unskip.anatomy import Hop, Place, Site, Survey, Unknown
from unskip.errors import BadInput, LoadError, UnskipError
from unskip.wiring._select import Assignment
from unskip.wiring._shortcut import UnknownShortcut, defined_in, from_dict, is_registered
from unskip.wiring._wiring import Wiring

FORMAT = 2
WEIGHTS, RECORD = "model.safetensors", "unskip.json"
PRETRAINED = "transformers"  # "weights" of a record whose files save_pretrained wrote, perhaps under other names
_TRAINER_STATE = "trainer_state.json"
MALFORMED = (AttributeError, KeyError, IndexError, TypeError, ValueError, UnskipError)

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "class": str,
    "builder": (dict, type(None)),
    "structure": dict,
    "buffers": dict,
    "wiring": (dict, type(None)),
    "versions": dict,
    "sha256": dict,
}
_TYPES: dict[Any, type] = {"int": int, "str": str, "bool": bool}


def write(path: Path, record: dict[str, Any]) -> None:
    """Writes a record."""
    path.write_text(json.dumps(record, allow_nan=False, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The record of a folder. Raises LoadError if it or a file of weights is damaged."""
    path = folder / RECORD
    if not folder.exists():
        raise LoadError(f"{folder}: no such folder. Check the path.")
    if not path.is_file():
        if (folder / _TRAINER_STATE).is_file():
            raise LoadError(
                f"{folder}: a checkpoint of transformers' Trainer without {RECORD}: it was written without "
                "unskip.integrations.transformers.WiringCallback, or holds an adapter. Load it with from_pretrained "
                "and rewire it."
            )
        # The models of a run are in its checkpoints; for some recipes the encoder alone is a model too.
        records = [record for depth in ("*", "*/*", "*/*/*") for record in folder.glob(f"{depth}/{RECORD}")]
        newest = f", such as {max(records, key=lambda path: path.stat().st_mtime).parent}" if records else ""
        raise LoadError(f"{folder}: no {RECORD}. Give a folder that unskip.save wrote{newest}.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{path}: damaged, it is not a record of unskip ({error}).") from error
    _check_format(path, version)
    for name, kind in _FIELDS.items():
        if name not in record:
            raise LoadError(f"{path}: damaged, {name} is missing.")
        if not isinstance(record[name], kind):
            raise LoadError(f"{path}: damaged, {name} holds a {type(record[name]).__name__}.")
    if not isinstance(record.get("about", {}), dict):  # absent from folders of earlier versions
        raise LoadError(f"{path}: damaged, about holds a {type(record['about']).__name__}.")
    files = record["sha256"] if record.get("weights") == PRETRAINED else {WEIGHTS: record["sha256"].get(WEIGHTS)}
    for name, digest in files.items():
        weights = folder / Path(name).name
        if not weights.is_file():
            raise LoadError(f"{folder}: no {name}. Give a folder that unskip.save wrote.")
        if sha256(weights) != digest:
            raise LoadError(f"{weights}: damaged, its checksum is not the recorded one.")
    return record  # type: ignore[no-any-return]


def _check_format(path: Path, version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool):
        raise LoadError(f"{path}: damaged, its format is {version!r}.")
    if version > FORMAT:
        raise LoadError(f"{path}: written in format {version}; this unskip reads format {FORMAT}. Update unskip.")
    if version < FORMAT:
        raise LoadError(
            f"{path}: written by an earlier version of unskip, in format {version}; this one reads format {FORMAT}. "
            f"Build the model and rewire it as it was, read {WEIGHTS} with safetensors.torch.load_model, and save it "
            "again."
        )


# --- Wirings ----------------------------------------------------------------------------------------------------------


def wiring_record(wiring: Wiring) -> dict[str, Any]:
    """A wiring as plain data for JSON; a predicate is recorded as the sites it selected."""
    return {
        "sites": [{**asdict(site), "ratio": _number(site.ratio)} for site in wiring.sites],
        "unknown": [asdict(unknown) for unknown in wiring.survey.unknown],
        "notes": list(wiring.survey.notes),
        "plan": [
            {"rule": a.rule.to_dict(), "where": a.where, "sites": [site.index for site in a.sites]}
            | ({"defined_in": modules} if (modules := defined_in(a.rule)) else {})
            for a in wiring._plan
        ],
        "step": wiring.at_step,
        "alphas": [_number(alpha) for alpha in wiring.alphas],
        "betas": [_number(beta) for beta in wiring.betas],
    }


def _number(value: float | None) -> float | str | None:
    """A non-finite number as text, because JSON has none: a diverged weight, the ratio to a zero stream."""
    return value if value is None or math.isfinite(value) else str(value)


def wiring_of(data: dict[str, Any], source: object, trust: bool) -> tuple[Survey, tuple[Assignment, ...], int]:
    """The sites, plan and step from the data of `wiring_record`. `trust` imports the modules that define its rules."""
    if trust:
        _import_rules(data, source)
    try:
        sites = tuple(_site(site) for site in data["sites"])
        if [site.index for site in sites] != list(range(len(sites))):
            raise ValueError("its sites are not numbered in order")
        survey = Survey(sites, tuple(Unknown(**unknown) for unknown in data["unknown"]), tuple(data["notes"]))
        plan = tuple(
            Assignment(from_dict(a["rule"]), tuple(sites[i] for i in _indices(a["sites"])), a["where"])
            for a in data["plan"]
        )
        governed = [site.index for a in plan for site in a.sites]
        if len(set(governed)) != len(governed):
            raise ValueError("a site has two rules")
        if not _is_whole(data["step"]) or not len(data["alphas"]) == len(data["betas"]) == len(sites):
            raise ValueError("its step or weights are invalid")
        return survey, plan, data["step"]
    except UnknownShortcut as error:
        modules = [a["defined_in"][error.name] for a in data["plan"] if error.name in a.get("defined_in", {})]
        where = f"the module {modules[0]}, which registers it" if modules else "the module that registers it"
        raise LoadError(
            f"{source}: its wiring has the rule {error.name!r}, which is not registered. Import {where} (on the "
            "command line --plugin FILE), or pass trust=True (--trust), which imports it"
        ) from error
    except MALFORMED as error:
        raise LoadError(f"{source}: damaged, its wiring is invalid ({error}).") from error


def _import_rules(data: dict[str, Any], source: object) -> None:
    try:
        defined = {name: module for a in data["plan"] for name, module in a.get("defined_in", {}).items()}
    except MALFORMED:
        return  # `wiring_of` reports it
    for name, module in defined.items():
        if is_registered(name):
            continue
        try:
            load_plugins([module])
        except BadInput as error:
            raise LoadError(
                f"{source}: its rule {name!r} comes from the module {module}, which cannot be imported here ({error}); "
                "import its file first, on the command line --plugin FILE"
            ) from error


def _site(data: dict[str, Any]) -> Site:
    places = tuple(
        Place(**{**place, "hops": tuple(Hop(**{**hop, "position": tuple(hop["position"])}) for hop in place["hops"])})
        for place in data["places"]
    )
    ratio = None if data["ratio"] is None else float(data["ratio"])
    site = Site(**{**data, "branch": tuple(data["branch"]), "places": places, "ratio": ratio})
    for field in fields(site):
        if field.type in _TYPES and type(getattr(site, field.name)) is not _TYPES[field.type]:
            raise TypeError(f"{field.name} of a site is {getattr(site, field.name)!r}")
    return site


def _indices(values: list[Any]) -> list[int]:
    if not all(_is_whole(value) for value in values):
        raise ValueError(f"not site indices: {values}")
    return values


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
