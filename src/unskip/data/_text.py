"""Text as tokens: one array of ids, memory-mapped from a cache, with the end of every document.

    CACHE/KEY/tokens.bin       the ids of all documents, each followed by the end-of-text token
    CACHE/KEY/documents.npy    (2, documents): the position after each document, and its size in bytes
    CACHE/KEY/about.json       what was skipped or assumed on reading

KEY is a hash of the content of the files, the split and the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy
from numpy.typing import NDArray

from unskip._words import count, some
from unskip.data._documents import Documents, open_documents
from unskip.data._order import Rows
from unskip.data._tokenizer import Tokenizer, open_tokenizer
from unskip.errors import BadInput, LoadError

CACHE = "~/.cache/unskip/text"
_AT_ONCE = 64  # documents tokenized together
_LOOKED_AT = 8192  # bytes of a document; a zero among them marks it as binary


@dataclass(frozen=True, eq=False)
class TextSet:
    """One split of a text. `tokens` concatenates all documents, each with its end-of-text token."""

    name: str
    split: str
    tokens: NDArray[Any]  # (N,) memory-mapped
    ends: Rows  # (documents,) the position after the last token of each
    bytes: Rows  # (documents,) sizes of the text
    tokenizer: Tokenizer
    fingerprint: str
    report: tuple[str, ...] = ()  # what was skipped or assumed on opening

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        size = f"{len(self.ends)} documents, {int(self.bytes.sum())} bytes, {len(self)} tokens ({self.tokenizer.name})"
        return f"TextSet({self.name}, {self.split}: {size})"

    def document(self, places: Rows) -> Rows:
        """The document of each token position."""
        return numpy.searchsorted(self.ends, places, side="right")


def open_text(
    source: str | Path,
    split: Literal["train", "val", "test"] = "train",
    *,
    tokenizer: str | Path = "bytes",
    column: str = "text",
    hold_out: bool = False,
    cache: str | Path = CACHE,
) -> TextSet:
    """A text as tokens.

    `source` is stdlib (the source files of Python's standard library), a folder of text files, with or without train/,
    val/ and test/ in it, a glob or a path with {split}, parquet files with a `column` of text, as in
    "name-{split}.parquet", or hf:NAME. Without a test split, a tenth of the documents is used as one. `tokenizer` is
    "bytes", a tokenizer.json, its folder, or a name on the Hugging Face hub. `hold_out` removes the documents of the
    "val" split from "train".
    """
    if split not in get_args(Literal["train", "val", "test"]):
        raise BadInput(f"split is {split!r}; it can be train, val, test")
    encoder = open_tokenizer(tokenizer)
    documents = open_documents(str(source), split, hold_out, column)
    fingerprint = documents.fingerprint()
    folder = Path(cache).expanduser() / f"{fingerprint}-{encoder.key}"
    if not folder.is_dir():
        _write(folder, documents, encoder)
    tokens, ends, sizes, notes = _read(folder, encoder)
    if not len(tokens):
        raise BadInput(f"{source}: the {split} split contains no text; {'; '.join(notes) or 'give more files'}")
    report = (*documents.report, *notes)
    return TextSet(str(source), split, tokens, ends, sizes, encoder, fingerprint, report)


def _write(folder: Path, documents: Documents, tokenizer: Tokenizer) -> None:
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")  # one per process; the first to finish is kept
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    ends, sizes, total = list[int](), list[int](), 0
    binary, not_utf8, with_end = list[str](), list[str](), list[str]()
    try:
        with (temporary / "tokens.bin").open("wb") as file:
            for batch in _batches(_texts(documents, binary)):
                for (name, text), ids in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True):
                    if tokenizer.key != "bytes" and not _is_utf8(text):
                        not_utf8.append(name)
                    if tokenizer.end in ids:
                        with_end.append(name)
                    file.write(numpy.append(ids, tokenizer.end).astype(_dtype(tokenizer)).tobytes())
                    total += len(ids) + 1
                    ends.append(total)
                    sizes.append(len(text))
        notes = []
        if binary:
            notes.append(f"{_named(binary)} left out: not text (zero bytes in it)")
        if not_utf8:
            notes.append(f"{_named(not_utf8)} not UTF-8: undecodable bytes became the replacement character")
        if with_end:
            notes.append(f"{_named(with_end)} with the end-of-text token in the text: it is read as that token")
        numpy.save(temporary / "documents.npy", numpy.array([ends, sizes], numpy.int64))
        (temporary / "about.json").write_text(json.dumps({"notes": notes}))
        if not folder.is_dir():
            temporary.replace(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(folder: Path, tokenizer: Tokenizer) -> tuple[NDArray[Any], Rows, Rows, list[str]]:
    try:
        ends, sizes = numpy.load(folder / "documents.npy")
        notes = json.loads((folder / "about.json").read_text())["notes"]
        length, dtype = int(ends[-1]) if len(ends) else 0, _dtype(tokenizer)
        file = folder / "tokens.bin"
        if file.stat().st_size != length * dtype.itemsize:
            raise ValueError(f"tokens.bin has {file.stat().st_size} bytes, but should have {length} tokens")
        tokens: Any = numpy.memmap(file, dtype, "r", shape=(length,)) if length else numpy.zeros(0, dtype)
        return tokens, ends, sizes, notes
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise LoadError(f"{folder}: damaged ({error}); delete it to rebuild it") from error


def _dtype(tokenizer: Tokenizer) -> numpy.dtype[Any]:
    return numpy.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")


def _texts(documents: Documents, binary: list[str]) -> Iterator[tuple[str, bytes]]:
    """The documents that are text and not empty; names of binary ones are added to `binary`."""
    for name, text in documents:
        if b"\0" in text[:_LOOKED_AT]:
            binary.append(name)
        elif text:
            yield name, text


def _batches(texts: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    while batch := [*islice(texts, _AT_ONCE)]:
        yield batch


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _named(names: list[str]) -> str:
    return f"{count(len(names), 'document')} ({some(names)})"
