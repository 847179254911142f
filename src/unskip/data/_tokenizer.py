"""Tokenizers: raw bytes, or any fast Hugging Face tokenizer, by name, folder or file.

Every document is followed by an end-of-text token: 256 for bytes; for another tokenizer its own one, which is added if
it has none.
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
from unskip._words import brief
from unskip.errors import BadInput

FILE = "tokenizer.json"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
Ids = NDArray[numpy.int64]


class Tokenizer(Protocol):
    """Maps documents to token ids and back."""

    name: str
    key: str  # changes if the ids do; for the cache
    size: int  # ids go from 0 to size - 1
    end: int  # the end-of-text id after every document

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without the end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the files that `open_tokenizer(folder)` reads."""
        ...


class Bytes:
    """The bytes of the text in any encoding, as ids."""

    name = key = "bytes"
    size = 257
    end = 256

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [numpy.frombuffer(text, numpy.uint8).astype(numpy.int64) for text in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Does nothing: a folder without a tokenizer file stands for bytes."""


class Fast:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, name: str, inner: Any, end: str | None = None) -> None:
        known = [token for token in (end, *_ENDS) if token is not None and inner.token_to_id(token) is not None]
        if not known:
            inner.add_special_tokens([_ENDS[0]])
        inner.no_truncation()  # some are saved with a maximum length, which would truncate documents
        inner.no_padding()
        self.name, self.inner = name, inner
        self.end = int(inner.token_to_id(known[0] if known else _ENDS[0]))
        self.size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.key = hashlib.sha256(f"{self.end} {inner.to_str()}".encode()).hexdigest()[:16]

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        texts = [text.decode("utf-8", "replace") for text in documents]
        encodings = self.inner.encode_batch(texts, add_special_tokens=False)
        return [numpy.asarray(encoding.ids, numpy.int64) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode([int(token) for token in ids if token < self.size], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        self.inner.save(str(folder / FILE))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self.inner.id_to_token(self.end)}) + "\n"
        )


def open_tokenizer(name: str | Path = "bytes") -> Tokenizer:
    """Opens a tokenizer: "bytes", a tokenizer.json, a folder with one, or a name on the Hugging Face hub."""
    if str(name) == "bytes":
        return Bytes()
    path = Path(name).expanduser()
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        return Fast(str(name), _read(file), _end_of(file.with_name("tokenizer_config.json")))
    if path.is_dir() or path.suffix == ".json" or str(name).startswith(("/", ".", "~")):
        raise BadInput(
            f"tokenizer {name}: there is no {file}; give a tokenizer.json, its folder, a name on the hub or bytes"
        )
    return _from_hub(str(name))


def _read(file: Path) -> Any:
    need("transformers")  # it depends on tokenizers
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain exceptions
        raise BadInput(f"{file}: not a Hugging Face tokenizer ({error}); give a tokenizer.json") from error


def _end_of(file: Path) -> str | None:
    """The end-of-text token in a tokenizer_config.json."""
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _from_hub(name: str) -> Tokenizer:
    auto: Any = need("transformers").AutoTokenizer
    try:
        with spec.hub(needed=True):
            tokenizer = auto.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of the library or the network
        raise BadInput(
            f"tokenizer {name}: {brief(error)}; give bytes, a tokenizer.json, or a name on the hub"
        ) from error
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise BadInput(f"tokenizer {name}: not a fast tokenizer; convert it to a tokenizer.json first")
    return Fast(name, inner, tokenizer.eos_token)
