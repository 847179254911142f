"""The index of a large set, made once: which images there are, where they lie, and their labels.

It is a safetensors file: numbers, and no code. That of shards lies beside them, or where that folder cannot be written
to, as always for a folder of images, in ~/.cache/unskip/index. An index that does not belong to the files as they are
now, by names, sizes and times of change, is made anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT_FROM = 10_000  # images; a smaller set is listed anew each time


@dataclass(frozen=True)
class Index:
    """Arrays of equal length, one entry an image, or of any other length; and texts."""

    arrays: Mapping[str, Any]
    texts: Mapping[str, str]


def stamp(paths: Iterable[str]) -> str:
    """What changes when one of the files or folders does: their names, sizes and times of change."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        found = Path(path).stat()
        digest.update(f"{path}\n{found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def kept(
    key: str, beside: Path | None, build: Callable[[], Index], current: Callable[[Index], str], rows: str
) -> Index:
    """The index of a set, from its file or built now. `current` gives the stamp that the files have now, and `rows`
    names an array with one entry for each image."""
    name = f"unskip-{hashlib.blake2b(key.encode(errors='surrogateescape'), digest_size=8).hexdigest()}.index"
    cache = Path.home() / ".cache" / "unskip" / "index" / name
    places = [cache] if beside is None else [beside / f".{name}", cache]
    for place in places:
        with suppress(Exception):  # whatever a damaged or foreign file leads to: it is made anew
            found = _read(place)
            if found.texts["stamp"] == current(found):
                return found
    made = build()
    made = Index(made.arrays, {**made.texts, "stamp": current(made)})
    if len(made.arrays[rows]) >= KEPT_FROM:
        for place in places:
            with suppress(OSError):  # a folder that cannot be written to, or a full disk
                _write(place, made)
                break
    return made


def _read(file: Path) -> Index:
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        return Index({name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata())  # noqa: SIM118


def _write(file: Path, index: Index) -> None:
    from safetensors.numpy import save

    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(f".{os.urandom(4).hex()}.tmp")  # every process of a run may make one
    try:
        aside.write_bytes(save(dict(index.arrays), dict(index.texts)))
        aside.replace(file)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
