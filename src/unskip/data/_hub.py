"""hf:NAME or hf:NAME:CONFIG: a set on the Hugging Face hub, its cache or a folder, as parquet files or tar shards.

The library `datasets` assigns files to splits and downloads missing ones. They are read in place, without a copy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from unskip._extras import need
from unskip.data._parquet import open_parquet
from unskip.data._splits import WORDS, Parts
from unskip.data._tar import open_tar
from unskip.errors import BadInput

_OPENERS: dict[str, Any] = {"parquet": open_parquet, "webdataset": open_tar}


def hub_parts(text: str, size: int | None) -> Parts:
    """The splits of an image set on the hub."""
    kind, splits = hub_files(text, (*_OPENERS,))
    if kind not in _OPENERS:
        raise BadInput(
            f"{text}: its files are {kind}, but only parquet files and tar shards can be read; open a folder of images "
            "without hf:, or convert the set with datasets.Dataset.to_parquet"
        )
    return {split: partial(_OPENERS[kind], text, split, splits, size) for split in splits}


def hub_files(text: str, kinds: tuple[str, ...] = ("parquet", "text")) -> tuple[str, dict[str, list[str]]]:
    """The format of a set on the hub, and its files by split; formats other than `kinds` are not downloaded."""
    datasets = need("datasets")
    name, _, config = text.removeprefix("hf:").partition(":")
    try:
        builder = datasets.load_dataset_builder(str(Path(name).expanduser()), config or None)
        kind, files = builder.info.builder_name, builder.config.data_files or {}
        downloads = datasets.DownloadManager(download_config=datasets.DownloadConfig())
        splits = {
            split: downloads.download([*files[word]])
            for split, words in WORDS.items()
            for word in words
            if word in files and kind in kinds
        }
    except Exception as error:  # of the library or the network
        raise BadInput(f"{text}: datasets cannot load it ({type(error).__name__}: {error})") from error
    return kind, splits
