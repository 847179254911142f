"""Cached index of a large set: its images, their locations and their labels.

An index is a safetensors file, so it contains no code. The index of shards is stored beside them; if that folder is not
writable, or for a folder of images, in ~/.cache/unskip/index. It is rebuilt if the files have changed, by their names,
sizes and modification times.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT_FROM = 10_000  # images; the index of a smaller set is not cached


@dataclass(frozen=True)
class Index:
    """Named arrays, of which `labels` has one entry per image, and named texts."""

    arrays: Mapping[str, Any]
    texts: Mapping[str, str]


def stamp(paths: Iterable[str]) -> str:
    """A hash of the names, sizes and modification times of files or folders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        status = Path(path).stat()
        digest.update(f"{path}\n{status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def shard_index(files: Sequence[str], build: Callable[[Sequence[str]], Index]) -> Index:
    """The index of parquet files or tar shards, cached beside the first."""
    files = [str(Path(file).absolute()) for file in files]
    return cached("\n".join(files), Path(files[0]).parent, lambda: build(files), lambda _: stamp(files))


def cached(key: str, beside: Path | None, build: Callable[[], Index], current: Callable[[Index], str]) -> Index:
    """The index of a set, from its cache or newly built. `current` returns the present stamp of the indexed files."""
    name = f"unskip-{hashlib.blake2b(key.encode(errors='surrogateescape'), digest_size=8).hexdigest()}.index"
    cache = Path.home() / ".cache" / "unskip" / "index" / name
    files = [cache] if beside is None else [beside / f".{name}", cache]
    for file in files:
        with suppress(Exception):  # damaged or foreign files raise anything; the index is rebuilt
            index = _read(file)
            if index.texts["stamp"] == current(index):
                return index
    index = build()
    index = Index(index.arrays, {**index.texts, "stamp": current(index)})
    if len(index.arrays["labels"]) >= KEPT_FROM:
        for file in files:
            with suppress(OSError):  # not writable, or the disk is full
                _write(file, index)
                break
    return index


def _read(file: Path) -> Index:
    from safetensors import safe_open

    with safe_open(file, framework="np") as opened:
        return Index({name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata())  # noqa: SIM118


def _write(file: Path, index: Index) -> None:
    from safetensors.numpy import save

    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.urandom(4).hex()}.tmp")  # a unique name: processes may write at the same time
    try:
        temporary.write_bytes(save(dict(index.arrays), dict(index.texts)))
        temporary.replace(file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
