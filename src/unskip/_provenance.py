"""What a written file is checked against later: checksums, and the versions of the libraries that made it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """The version of each library that is installed."""
    from unskip import __version__  # metadata of an editable installation may be older

    versions = {}
    for name in libraries:
        try:
            versions[name] = __version__ if name == "unskip" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
