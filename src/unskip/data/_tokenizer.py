"""Tokenizers: bytes as they are, or any fast tokenizer of Hugging Face, by name, folder or file.

Every document is followed by one token that ends it. Of bytes that is 256, after the 256 bytes; of another tokenizer it
is its own end-of-text token, or one that is added where it has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from unskip import spec
from unskip._extras import need
from unskip.errors import BadInput

FILE = "tokenizer.json"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
Ids = NDArray[numpy.int64]


class Tokenizer(Protocol):
    """From documents to token ids and back."""

    name: str
    key: str  # what changes when the ids do
    size: int  # ids go from 0 to size - 1
    end: int  # the id after every document

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without the end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what `open_tokenizer(folder)` reads."""
        ...


class Bytes:
    """The bytes of the text, whatever its encoding."""

    name = key = "bytes"
    size = 257
    end = 256

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [numpy.frombuffer(each, numpy.uint8).astype(numpy.int64) for each in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Nothing: a folder without a file is one of bytes."""


class Fast:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, name: str, inner: Any, end: str | None = None) -> None:
        known = [each for each in (end, *_ENDS) if each is not None and inner.token_to_id(each) is not None]
        if not known:
            inner.add_special_tokens([_ENDS[0]])
        inner.no_truncation()  # some are saved with a length, and would cut documents there
        inner.no_padding()
        self.name, self.inner = name, inner
        self.end = int(inner.token_to_id(known[0] if known else _ENDS[0]))
        self.size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.key = hashlib.sha256(f"{self.end} {inner.to_str()}".encode()).hexdigest()[:16]

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        texts = [each.decode("utf-8", "replace") for each in documents]
        return [
            numpy.asarray(each.ids, numpy.int64) for each in self.inner.encode_batch(texts, add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode([int(each) for each in ids if each < self.size], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        self.inner.save(str(folder / FILE))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self.inner.id_to_token(self.end)}) + "\n"
        )


def open_tokenizer(name: str | Path = "bytes") -> Tokenizer:
    """The tokenizer of a name: "bytes", a tokenizer.json, a folder with one, or a name of the Hugging Face hub."""
    if str(name) == "bytes":
        return Bytes()
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return Fast(str(name), _read(file), _end_of(file.with_name("tokenizer_config.json")))
    if path.is_dir() or path.suffix == ".json" or str(name).startswith(("/", ".", "~")):
        raise BadInput(
            f"tokenizer {name}: there is no {file}; give a tokenizer.json, its folder, a name of the hub or bytes"
        )
    return _from_hub(str(name))


def _read(file: Path) -> Any:
    need("transformers")  # which brings the library
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # its errors are plain exceptions
        raise BadInput(f"{file}: no tokenizer of Hugging Face: {error}") from error


def _end_of(file: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json names."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return found.get("content") if isinstance(found, dict) else found


def _from_hub(name: str) -> Tokenizer:
    kind: Any = need("transformers").AutoTokenizer
    try:
        with spec.hub(needed=True):
            found = kind.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # it has many, and the network adds its own
        line = " ".join(str(error).split())[:200]
        raise BadInput(f"tokenizer {name}: {line}; give bytes, a tokenizer.json, or a name of the hub") from error
    inner = getattr(found, "backend_tokenizer", None)
    if inner is None:
        raise BadInput(f"tokenizer {name}: it is no fast tokenizer; convert it to a tokenizer.json first")
    return Fast(name, inner, found.eos_token)
