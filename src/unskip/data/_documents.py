"""Where the documents of a text come from: Python's standard library, files, parquet files with a column of text.

Each file is a document, or each row of a parquet file. Where files are not named after splits, a tenth of the
documents is the test split, and another tenth what `hold_out` holds out: those whose names come first by a hash, the
same on every machine. Of fewer than 20 documents it is the last tenth of each, from the end of a line on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskip._extras import need
from unskip.data._hub import hub_files
from unskip.data._images import samples
from unskip.data._splits import WORDS, files_by_split, matches
from unskip.errors import BadInput

STDLIB = "stdlib"
_FEW = 20  # documents; fewer are divided by position
_WHOLE = 2**30  # bytes that a fingerprint reads all of; of more it reads some places
_TENTHS = frozenset(range(10))


@dataclass(frozen=True)
class Documents:
    """Documents of files, or of rows of parquet files where `column` names their text; `tenths` of them are taken."""

    root: Path  # names are relative to it
    files: tuple[str, ...]
    column: str | None = None
    tenths: frozenset[int] = _TENTHS
    report: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        if self.tenths == _TENTHS:
            yield from self._all()
            return
        names = [*self._names()]
        if len(names) < _FEW:
            low, high = 9 - max(self.tenths), 10 - min(self.tenths)  # of ten; tenth 0 is the last one
            for name, text in self._all():
                yield name, text[_cut(text, low) : _cut(text, high)]
            return
        first = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        kept = {name for place, name in enumerate(first) if place * 10 // len(first) in self.tenths}
        yield from ((name, text) for name, text in self._all() if name in kept)

    def fingerprint(self) -> str:
        """What changes when the documents do: names and content of all files; of a large set, bytes of some places."""
        digest = hashlib.sha256(repr((self.column, sorted(self.tenths))).encode())
        if sum(Path(file).stat().st_size for file in self.files) > _WHOLE:
            for part in samples(self.files):
                digest.update(part)
        else:
            for file in self.files:
                digest.update(self._name(file).encode(errors="surrogateescape") + b"\0")
                digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
        return digest.hexdigest()[:16]

    def _name(self, file: str) -> str:
        return Path(file).relative_to(self.root).as_posix()

    def _names(self) -> Iterator[str]:
        for file in self.files:
            if self.column is None:
                yield self._name(file)
            else:
                rows = _parquet(file, self.column).metadata.num_rows
                yield from (f"{self._name(file)}:{row}" for row in range(rows))

    def _all(self) -> Iterator[tuple[str, bytes]]:
        for file in self.files:
            if self.column is None:
                try:
                    yield self._name(file), Path(file).read_bytes()
                except OSError as error:
                    raise BadInput(f"{file}: cannot be read ({error.strerror}); leave it out, or repair it") from error
                continue
            row = 0
            for batch in _parquet(file, self.column).iter_batches(1024, columns=[self.column]):
                for text in batch.column(0).to_pylist():
                    yield f"{self._name(file)}:{row}", text.encode() if isinstance(text, str) else text or b""
                    row += 1


def open_documents(source: str, split: str, hold_out: bool, column: str) -> Documents:
    """The documents of one split of a source."""
    parts, root, used = _parts(source, column)
    notes: tuple[str, ...] = ()
    own = split
    if split == "test" and "test" not in parts and "val" in parts:
        own, notes = "val", ("no test split: this is the validation split",)
    if own in parts and own != "train":
        return Documents(root, parts[own], used, report=notes)
    if "train" not in parts:
        raise BadInput(
            f"{source}: no train split (it has: {', '.join(parts)}); name one by a folder train/ or {{split}}"
        )
    made = set[int]() if "test" in parts or "val" in parts else {0}
    if split == "train":
        tenths = _TENTHS - made - ({1} if hold_out and "val" not in parts else set())
    else:
        tenths = frozenset({0} if split == "test" else {1})
    return Documents(root, parts["train"], used, tenths)


def _parts(source: str, column: str) -> tuple[Mapping[str, tuple[str, ...]], Path, str | None]:
    """The files of each split, what their names are relative to, and the column of parquet files."""
    path = Path(source).expanduser()
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return {"train": _stdlib(root)}, root, None
    if source.startswith("hf:"):
        kind, by_split = hub_files(source)
        if kind not in ("parquet", "text"):
            raise BadInput(f"{source}: its files are of the kind {kind}; parquet files with a column of text are read")
        return _relative(by_split, column if kind == "parquet" else None)
    if path.is_dir():
        inside = [each for each in (path, path / "data") if any(each.glob("*.parquet"))]
        if inside:
            return _relative(files_by_split(str(inside[0] / "*.parquet")), column)
        return _relative(_some(_folder(path), source), None, path)
    found = (
        files_by_split(str(path))
        if "{split}" in source or source.endswith(".parquet")
        else {"train": matches(str(path))}
    )
    return _relative(_some(found, source), column if source.endswith(".parquet") else None)


def _some(found: dict[str, list[str]], source: str) -> dict[str, list[str]]:
    if any(found.values()):
        return found
    what = "no files in it" if Path(source).expanduser().is_dir() else "no such text"
    raise BadInput(
        f"{source}: {what}; a text is {STDLIB}, a folder or a glob of text files, 'path/{{split}}-*.parquet' with a "
        "column of text, or hf:NAME"
    )


def _relative(
    found: Mapping[str, list[str]], column: str | None, root: Path | None = None
) -> tuple[dict[str, tuple[str, ...]], Path, str | None]:
    files = {split: tuple(sorted(each)) for split, each in found.items()}
    if root is None:  # the folder that all of them share
        folders = [Path(file).parent for each in files.values() for file in each]
        root = next(each for each in (folders[0], *folders[0].parents) if all(f.is_relative_to(each) for f in folders))
    return files, root, column


def _folder(path: Path) -> dict[str, list[str]]:
    """The files of a folder: by split where it has a folder train/, and otherwise all of them for training."""
    words = {word: split for split, words in WORDS.items() for word in words}
    if not any(words.get(each.name) == "train" and each.is_dir() for each in path.iterdir()):
        return {"train": _files(path)}
    found: dict[str, list[str]] = {}
    for file in _files(path):
        first, *rest = Path(file).relative_to(path).parts
        if rest and first in words:  # beside them lies what is no text of a split, such as a README
            found.setdefault(words[first], []).append(file)
    return found


def _files(folder: Path) -> list[str]:
    """All files below a folder whose names, and whose folders' names, do not begin with a dot."""
    found = (each for each in folder.rglob("*") if not any(p.startswith(".") for p in each.relative_to(folder).parts))
    return sorted(str(each) for each in found if each.is_file())


def _stdlib(root: Path) -> tuple[str, ...]:
    """The source files, without tests, installed packages and what describes this machine."""
    beside = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    found = [
        str(file)
        for file in root.rglob("*.py")
        if not beside & {*file.relative_to(root).parts} and not file.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise BadInput(
            f"{STDLIB}: no source files in {root} (some Pythons keep them in a zip file); name a folder of text"
        )
    return tuple(sorted(found, key=lambda file: Path(file).relative_to(root).as_posix()))


def _parquet(file: str, column: str) -> Any:
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        opened = parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise BadInput(f"{file}: no parquet file, or a damaged one ({error}); leave it out, or repair it") from error
    schema = opened.schema_arrow
    if column not in schema.names:
        raise BadInput(f"{file}: no column {column!r}; its columns are {', '.join(schema.names)}: give column")
    kind = schema.field(column).type
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(word in str(plain) for word in ("string", "binary", "null")) or pyarrow.types.is_nested(plain):
        raise BadInput(f"{file}: its column {column!r} holds {kind}, and text is read; give column")
    return opened


def _cut(text: bytes, tenth: int) -> int:
    """Where a tenth of a text begins: after the next end of a line, unless that is far; never inside a character."""
    place = len(text) * tenth // 10
    if tenth in (0, 10):
        return place
    line = text.find(b"\n", place, place + 1 + len(text) // 20)
    if line >= 0:
        return line + 1
    while place < len(text) and text[place] & 0xC0 == 0x80:
        place += 1
    return place
