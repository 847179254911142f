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
    """The version of each library that is installed; unskip itself may be read from its sources, and has none then."""
    versions = {}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
