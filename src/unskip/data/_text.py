"""Text as tokens: one long row of them, memory-mapped from a cache, with the end of every document.

    CACHE/KEY/tokens.bin       the ids of all documents, each followed by the one that ends it
    CACHE/KEY/documents.npy    (2, documents): the place after each one, and its bytes
    CACHE/KEY/about.json       what was assumed and left out on reading

KEY is made of the content of the files, the split and the tokenizer: the same three give the same tokens.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy
from numpy.typing import NDArray

from unskip._words import count
from unskip.data._documents import Documents, open_documents
from unskip.data._order import Rows
from unskip.data._tokenizer import Tokenizer, open_tokenizer
from unskip.errors import BadInput, LoadError

CACHE = "~/.cache/unskip/text"
_AT_ONCE = 64  # documents that are tokenized together
_LOOKED_AT = 8192  # bytes of a file; one with a zero among them is no text


@dataclass(frozen=True, eq=False)
class TextSet:
    """One split of a text. `tokens` holds all documents one after the other, each with the token that ends it."""

    name: str
    split: str
    tokens: NDArray[Any]  # (N,) memory-mapped
    ends: Rows  # (documents,) the place after the last token of each
    bytes: Rows  # (documents,) of the text
    tokenizer: Tokenizer
    fingerprint: str
    report: tuple[str, ...] = ()  # what was skipped or assumed on opening

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        size = f"{len(self.ends)} documents, {int(self.bytes.sum())} bytes, {len(self)} tokens ({self.tokenizer.name})"
        return f"TextSet({self.name}, {self.split}: {size})"

    def document(self, places: Rows) -> Rows:
        """The document of each place among the tokens."""
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

    `source` is stdlib (the source files of Python's standard library), a folder of text files, with train/, val/ and
    test/ in it or without, a glob or a path with {split}, parquet files with a `column` of text, as in
    "name-{split}.parquet", or hf:NAME. Without a test split a tenth of the documents is one. `tokenizer` is "bytes", a
    tokenizer.json, its folder, or a name of the Hugging Face hub. `hold_out` takes the documents of the "val" split out
    of "train".
    """
    if split not in get_args(Literal["train", "val", "test"]):
        raise BadInput(f"split is {split!r}; it can be train, val, test")
    words = open_tokenizer(tokenizer)
    documents = open_documents(str(source), split, hold_out, column)
    fingerprint = documents.fingerprint()
    folder = Path(cache).expanduser() / f"{fingerprint}-{words.key}"
    if not folder.is_dir():
        _write(folder, documents, words)
    tokens, ends, sizes, notes = _read(folder, words)
    if not len(tokens):
        raise BadInput(f"{source}: its {split} split holds no text; {'; '.join(notes) or 'give more files'}")
    report = (*documents.report, *notes)
    return TextSet(str(source), split, tokens, ends, sizes, words, fingerprint, report)


def _write(folder: Path, documents: Documents, words: Tokenizer) -> None:
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")  # every process makes its own, and one of them stays
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    ends, sizes, total = list[int](), list[int](), 0
    binary, foreign, ended = list[str](), list[str](), list[str]()
    try:
        with (aside / "tokens.bin").open("wb") as file:
            for batch in _batches(_texts(documents, binary)):
                for (name, text), ids in zip(batch, words.encode([text for _, text in batch]), strict=True):
                    if words.key != "bytes" and not _is_utf8(text):
                        foreign.append(name)
                    if words.end in ids:
                        ended.append(name)
                    file.write(numpy.append(ids, words.end).astype(_dtype(words)).tobytes())
                    total += len(ids) + 1
                    ends.append(total)
                    sizes.append(len(text))
        notes = []
        if binary:
            notes.append(f"{_named(binary)} left out: no text, they hold zero bytes")
        if foreign:
            notes.append(f"{_named(foreign)} no UTF-8: what cannot be read there became the replacement character")
        if ended:
            notes.append(f"{_named(ended)} with the token that ends documents in the text: it is read as that token")
        numpy.save(aside / "documents.npy", numpy.array([ends, sizes], numpy.int64))
        (aside / "about.json").write_text(json.dumps({"notes": notes}))
        if not folder.is_dir():
            aside.replace(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _read(folder: Path, words: Tokenizer) -> tuple[NDArray[Any], Rows, Rows, list[str]]:
    try:
        ends, sizes = numpy.load(folder / "documents.npy")
        notes = json.loads((folder / "about.json").read_text())["notes"]
        length = int(ends[-1]) if len(ends) else 0
        file = folder / "tokens.bin"
        if file.stat().st_size != length * _dtype(words).itemsize:
            raise ValueError(f"{file.stat().st_size} bytes of tokens where {length} tokens should be")
        tokens: Any = (
            numpy.memmap(file, _dtype(words), "r", shape=(length,)) if length else numpy.zeros(0, _dtype(words))
        )
        return tokens, ends, sizes, notes
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise LoadError(f"{folder}: damaged ({error}); delete it, and it is made again") from error


def _dtype(words: Tokenizer) -> numpy.dtype[Any]:
    return numpy.dtype("<u2" if words.size <= 2**16 else "<u4")


def _texts(documents: Documents, binary: list[str]) -> Iterator[tuple[str, bytes]]:
    """The documents that hold text; names of files that hold none are added to `binary`."""
    for name, text in documents:
        if b"\0" in text[:_LOOKED_AT]:
            binary.append(name)
        elif text:
            yield name, text


def _batches(texts: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch: list[tuple[str, bytes]] = []
    for each in texts:
        batch.append(each)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{count(len(names), 'document')} ({', '.join(names[:3])}{more})"
