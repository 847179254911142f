"""The documents of a text: Python's standard library, files, or parquet files with a column of text.

Each file, or each row of a parquet file, is a document. Without splits in the file names, a tenth of the documents is
the test split and another tenth the validation split (`hold_out`), selected by a hash of the document names, the same
on every machine. With fewer than 20 documents, these splits are the last tenths of each document, cut at line ends.
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
_FEW = 20  # documents; fewer are each cut into splits
_WHOLE = 2**30  # bytes; the fingerprint of a larger text hashes samples only
_TENTHS = frozenset(range(10))


@dataclass(frozen=True)
class Documents:
    """Files as documents, or rows of parquet files if `column` names their text; limited to `tenths` of them."""

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
            low, high = 9 - max(self.tenths), 10 - min(self.tenths)  # tenth 0 is the last one
            for name, text in self._all():
                yield name, text[_cut(text, low) : _cut(text, high)]
            return
        names.sort(key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
        kept = {name for index, name in enumerate(names) if index * 10 // len(names) in self.tenths}
        yield from ((name, text) for name, text in self._all() if name in kept)

    def fingerprint(self) -> str:
        """A hash of the names and content of all files; for a large text, of a sample of the content."""
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
    files, root, text_column = _files_by_split(source, column)
    if split == "test" and "test" not in files and "val" in files:
        return Documents(root, files["val"], text_column, report=("no test split: this is the validation split",))
    if split != "train" and split in files:
        return Documents(root, files[split], text_column)
    if "train" not in files:
        raise BadInput(
            f"{source}: no train split (it has: {', '.join(files)}); name one by a folder train/ or {{split}}"
        )
    # Without a test split tenth 0 of the documents is one, without a validation split tenth 1.
    if split == "train":
        test = set[int]() if "test" in files or "val" in files else {0}
        tenths = _TENTHS - test - ({1} if hold_out and "val" not in files else set())
    else:
        tenths = frozenset({0} if split == "test" else {1})
    return Documents(root, files["train"], text_column, tenths)


def _files_by_split(source: str, column: str) -> tuple[Mapping[str, tuple[str, ...]], Path, str | None]:
    """The files of each split, the folder their names are relative to, and the column of text of parquet files."""
    path = Path(source).expanduser()
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return {"train": _stdlib(root)}, root, None
    if source.startswith("hf:"):
        kind, by_split = hub_files(source)
        if kind not in ("parquet", "text"):
            raise BadInput(f"{source}: its files are {kind}; text is read from parquet files with a column of text")
        return _relative(by_split, column if kind == "parquet" else None)
    if path.is_dir():
        for folder in (path, path / "data"):
            if any(folder.glob("*.parquet")):
                return _relative(files_by_split(str(folder / "*.parquet")), column)
        return _relative(_not_empty(_folder(path), source), None, path)
    is_parquet = source.endswith(".parquet")
    by_split = files_by_split(str(path)) if is_parquet or "{split}" in source else {"train": matches(str(path))}
    return _relative(_not_empty(by_split, source), column if is_parquet else None)


def _not_empty(by_split: dict[str, list[str]], source: str) -> dict[str, list[str]]:
    if any(by_split.values()):
        return by_split
    problem = "no files in it" if Path(source).expanduser().is_dir() else "no such text"
    raise BadInput(
        f"{source}: {problem}; a text is {STDLIB}, a folder or a glob of text files, 'path/{{split}}-*.parquet' with a "
        "column of text, or hf:NAME"
    )


def _relative(
    by_split: Mapping[str, list[str]], column: str | None, root: Path | None = None
) -> tuple[dict[str, tuple[str, ...]], Path, str | None]:
    """The result of `_files_by_split`; without a `root` it is the deepest folder that contains all files."""
    files = {split: tuple(sorted(names)) for split, names in by_split.items()}
    if root is None:
        first, *others = [Path(file).parent for names in files.values() for file in names]
        root = next(up for up in (first, *first.parents) if all(other.is_relative_to(up) for other in others))
    return files, root, column


def _folder(path: Path) -> dict[str, list[str]]:
    """The files of a folder: by split if it contains a folder train/, else all of them for training."""
    split_by_word = {word: split for split, words in WORDS.items() for word in words}
    if not any(split_by_word.get(inner.name) == "train" and inner.is_dir() for inner in path.iterdir()):
        return {"train": _files(path)}
    by_split: dict[str, list[str]] = {}
    for file in _files(path):
        first, *rest = Path(file).relative_to(path).parts
        if rest and first in split_by_word:  # skips files outside the splits, such as a README
            by_split.setdefault(split_by_word[first], []).append(file)
    return by_split


def _files(folder: Path) -> list[str]:
    """All files below a folder, except hidden ones and those in hidden folders."""
    paths = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    return sorted(str(path) for path in paths if path.is_file())


def _stdlib(root: Path) -> tuple[str, ...]:
    """The source files, without tests, installed packages and data on this machine."""
    excluded = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
    files = [
        str(file)
        for file in root.rglob("*.py")
        if not excluded & {*file.relative_to(root).parts} and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise BadInput(
            f"{STDLIB}: no source files in {root} (some Pythons keep them in a zip file); name a folder of text"
        )
    return tuple(sorted(files, key=lambda file: Path(file).relative_to(root).as_posix()))


def _parquet(file: str, column: str) -> Any:
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        opened = parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise BadInput(f"{file}: not a parquet file, or damaged ({error}); leave it out, or repair it") from error
    schema = opened.schema_arrow
    if column not in schema.names:
        raise BadInput(f"{file}: no column {column!r}; its columns are {', '.join(schema.names)}: give column")
    kind = schema.field(column).type
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(word in str(plain) for word in ("string", "binary", "null")) or pyarrow.types.is_nested(plain):
        raise BadInput(f"{file}: column {column!r} is {kind}, not text; give column")
    return opened


def _cut(text: bytes, tenth: int) -> int:
    """The start of a tenth of a text: after the next line end, if it is near; never inside a UTF-8 character."""
    position = len(text) * tenth // 10
    if tenth in (0, 10):
        return position
    line = text.find(b"\n", position, position + 1 + len(text) // 20)
    if line >= 0:
        return line + 1
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position += 1
    return position
