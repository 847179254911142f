"""Text as tokens: splits, packing, order, tokenizers, the cache, and bad input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from unskip.data import TextFeed, open_text, open_tokenizer
from unskip.errors import BadInput, LoadError

DATA = Path(os.environ.get("UNSKIP_DATA", "no-such-folder"))


def files(folder: Path, **texts: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    def opened(source: object, split: Any = "train", **options: Any) -> Any:
        return open_text(str(source), split, cache=tmp_path / "cache", **options)

    return opened


def text_of(found: Any) -> list[bytes]:
    """The documents, from the tokens."""
    starts = [0, *found.ends[:-1]]
    return [bytes(found.tokens[a : b - 1].astype(numpy.uint8)) for a, b in zip(starts, found.ends, strict=True)]


# --- Splits -----------------------------------------------------------------------------------------------------------


def test_splits_of_documents_are_a_partition(tmp_path: Path, opened: Any) -> None:
    texts = {f"file{i}": f"text number {i}\n" * (i + 1) for i in range(30)}
    folder = files(tmp_path / "many", **texts)
    parts = {split: text_of(opened(folder, split, hold_out=True)) for split in ("train", "val", "test")}
    assert {split: len(each) for split, each in parts.items()} == {"train": 24, "val": 3, "test": 3}
    assert sorted(text for each in parts.values() for text in each) == sorted(text.encode() for text in texts.values())
    assert sorted(text_of(opened(folder))) == sorted(parts["train"] + parts["val"])
    few = files(tmp_path / "few", one="".join(f"line {i} é\n" for i in range(200)))
    parts = {split: text_of(opened(few, split, hold_out=True)) for split in ("train", "val", "test")}
    assert b"".join(parts["train"] + parts["val"] + parts["test"]) == (few / "one.txt").read_bytes()
    assert all(part[0].endswith(b"\n") for part in parts.values())
    assert 0.08 < len(parts["test"][0]) / (few / "one.txt").stat().st_size < 0.12


def test_folders_and_patterns_name_splits(tmp_path: Path, opened: Any) -> None:
    root = tmp_path / "named"
    for split in ("train", "validation", "test"):
        files(root / split, a=split)
    files(root, README="no part of it")
    assert [text_of(opened(root, split)) for split in ("train", "val", "test")] == [
        [b"train"],
        [b"validation"],
        [b"test"],
    ]
    pattern = str(root / "{split}" / "*.txt")
    assert text_of(opened(pattern, "val")) == [b"validation"]
    files(tmp_path / "two", **{"x-train": "t", "x-val": "v"})
    found = opened(tmp_path / "two" / "x-{split}.txt", "test")
    assert (text_of(found), found.report) == ([b"v"], ("no test split: this is the validation split",))


def test_parquet_rows_are_documents(tmp_path: Path, opened: Any) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i} ü" for i in range(25)]
    pq.write_table(pa.table({"text": rows, "n": [*range(25)]}), tmp_path / "set-train.parquet", row_group_size=7)
    pq.write_table(pa.table({"text": ["held", None, "out"]}), tmp_path / "set-val.parquet")
    source = tmp_path / "set-{split}.parquet"
    assert text_of(opened(source)) == [row.encode() for row in rows]
    assert text_of(opened(source, "test")) == [b"held", b"out"]
    assert len(opened(tmp_path / "set-train.parquet", "test").ends) == 3  # a tenth of 25, as none is named
    with pytest.raises(BadInput, match=r"no column 'content'; its columns are text, n"):
        opened(source, column="content")
    with pytest.raises(BadInput, match=r"column 'n' is int64, not text; give column"):
        opened(source, column="n")
    pq.write_table(pa.table({"text": [b"caf\xe9"] * 2, "lines": [["a"]] * 2}), tmp_path / "raw-train.parquet")
    assert text_of(opened(tmp_path / "raw-{split}.parquet"))[0].startswith(b"caf")
    with pytest.raises(BadInput, match="column 'lines' is list"):
        opened(tmp_path / "raw-{split}.parquet", column="lines")
    (tmp_path / "set-train.parquet").write_bytes(b"PAR1")
    for split in ("train", "test"):
        with pytest.raises(BadInput, match=r"set-train.parquet: not a parquet file, or damaged"):
            opened(tmp_path / "set-train.parquet", split)


def test_the_standard_library_is_a_text_set(opened: Any) -> None:
    train, test = opened("stdlib"), opened("stdlib", "test")
    assert len(train.ends) > 5 * len(test.ends) > 200
    assert all(len(text) < 200 for text in {*text_of(train)} & {*text_of(test)})  # a line of copyright
    assert any(b"def namedtuple(" in text for text in text_of(train) + text_of(test))
    assert opened("stdlib").fingerprint == train.fingerprint != test.fingerprint


@pytest.mark.skipif(
    not (DATA / "english-val.parquet").is_file(), reason="no English text; set UNSKIP_DATA to its folder"
)
def test_english_prose(opened: Any) -> None:
    test = opened(DATA / "english-{split}.parquet", "test")
    assert (len(test.ends), test.tokenizer.name) == (139, "bytes")
    assert b" the " in text_of(test)[0]


# --- Bad input --------------------------------------------------------------------------------------------------------


def test_files_that_are_not_text_are_named(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no files in it; a text is stdlib"):
        opened(tmp_path / "empty")
    with pytest.raises(BadInput, match="no such text"):
        opened(tmp_path / "nowhere" / "*.txt")
    folder = files(tmp_path / "mixed", a=b"\x00\x01binary", b="latin é".encode("latin-1") * 40, c="", d="fine\n" * 40)
    found = opened(folder)
    assert found.report == ("1 document (a.txt) left out: not text (zero bytes in it)",)
    assert len(found.ends) == 2  # empty files are skipped
    assert b"\xe9" in text_of(found)[0]  # bytes are kept as they are
    with pytest.raises(BadInput, match="the train split contains no text; 1 document"):
        opened(files(tmp_path / "binary", a=b"\x00" * 100))


def test_changed_text_is_tokenized_again_and_a_damaged_cache_is_named(tmp_path: Path, opened: Any) -> None:
    folder = files(tmp_path / "text", a="one two three\n" * 20)
    before = opened(folder)
    (folder / "a.txt").write_bytes(b"one two thrEe\n" * 20)  # of the same length
    after = opened(folder)
    assert after.fingerprint != before.fingerprint
    assert b"thrEe" in text_of(after)[0]
    cached = next((tmp_path / "cache").glob(f"{after.fingerprint}-*")) / "tokens.bin"
    cached.write_bytes(cached.read_bytes()[:-2])
    with pytest.raises(LoadError, match=r"damaged .* delete it to rebuild it"):
        opened(folder)


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def words(folder: Path, special: tuple[str, ...] = ()) -> Path:
    """Writes a tokenizer.json: a byte-level BPE with a few merges."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[*special], show_progress=False
    )
    inner.train_from_iterator(["the cat sat on the mat\n"] * 50, trainer)
    folder.mkdir(exist_ok=True)
    inner.enable_truncation(5)  # which must not cut documents
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("special", [(), ("</s>",)])
def test_a_tokenizer_file_adds_an_end_token_to_every_document(
    tmp_path: Path, opened: Any, special: tuple[str, ...]
) -> None:
    folder = words(tmp_path / "words", special)
    found = open_tokenizer(folder)
    text = "the cat sat on the mat, déjà vu\n" * 20
    (ids,) = found.encode([text.encode()])
    assert found.decode(ids.tolist()) == text
    assert len(ids) < len(text.encode())
    assert found.end == (0 if special else found.size - 1)
    train = opened(files(tmp_path / "text", a=text), tokenizer=folder / "tokenizer.json")
    assert train.tokens[-1] == found.end
    assert found.end not in train.tokens[:-1]
    ending = files(tmp_path / "ending", a=f"the {found.inner.id_to_token(found.end)} cat\n" * 9)
    assert "with the end-of-text token in the text" in opened(ending, tokenizer=folder).report[0]
    found.save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert (again.end, again.size) == (found.end, found.size)


def test_an_invalid_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="not a Hugging Face tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(BadInput, match=r"there is no .*other\.json; give"):
        open_tokenizer(tmp_path / "other.json")


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def feed(tmp_path: Path, opened: Any) -> Any:
    text = opened(files(tmp_path / "numbers", a="".join(f"{i} " for i in range(400))))
    return lambda **options: TextFeed(text, options.pop("batch", 4), options.pop("context", 16), **options)


def test_an_epoch_has_every_token_once(feed: Any) -> None:
    made = feed(batch=1)
    for epoch in (0, 1):
        start = epoch * made.steps_per_epoch
        seen = torch.cat([ids for ids, _ in made.iterate(start, start + made.steps_per_epoch)]).flatten()
        # Each epoch cuts windows at another offset, cyclically, so less than one window of tokens is left out.
        counts, whole = (
            seen.bincount(minlength=257),
            torch.as_tensor(made.text.tokens.astype(int)).bincount(minlength=257),
        )
        assert (counts <= whole).all()
        assert len(seen) == made.steps_per_epoch * 16 > len(made.text) - 17
    for ids, following in made.iterate(0, 8):
        assert torch.equal(ids[:, 1:], following[:, :-1])
    first = [next(made.iterate(e * made.steps_per_epoch, e * made.steps_per_epoch + 1))[0] for e in (0, 1)]
    assert not torch.equal(*first)


def test_batches_do_not_depend_on_the_start_or_the_processes(feed: Any) -> None:
    whole = [*feed(seed=3).iterate(0, 60)]
    for start in (1, 37):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(feed(seed=3).iterate(start, 60), whole[start:], strict=True))
    for world, parts in ((2, 1), (4, 1), (2, 2)):
        ranks = [[*feed(seed=3).iterate(5, 9, rank, world, parts)] for rank in range(world)]
        for step in range(4):
            rows = [ranks[rank][step * parts + part][1] for rank in range(world) for part in range(parts)]
            assert torch.equal(torch.cat(rows), whole[5 + step][1])
    assert not torch.equal(whole[0][0], next(feed(seed=4).iterate(0, 1))[0])
    with pytest.raises(BadInput, match="divided evenly among 3"):
        feed().iterate(0, 1, 0, 3)


def test_an_evaluation_predicts_every_token_once(feed: Any) -> None:
    made = feed(batch=7)
    following = torch.cat([each for _, each in made.evaluate()]).flatten()
    assert torch.equal(following, torch.as_tensor(made.text.tokens[1 : 1 + len(following)].astype(int)))
    assert len(made.text) - 1 - len(following) < 16
    shared = [torch.cat([ids for ids, _ in made.evaluate(rank, 3)]) for rank in range(3)]
    assert torch.equal(torch.cat(shared), torch.cat([ids for ids, _ in made.evaluate()]))
    some = feed(most=5)
    assert len(some) == sum(len(ids) for ids, _ in some.evaluate()) == 5
    assert some.starts[-1] > 0.7 * len(some.text)


def test_a_text_that_is_too_short_is_refused(feed: Any) -> None:
    with pytest.raises(BadInput, match=r"has \d+ tokens, but context 5000 needs at least 5001; use"):
        feed(context=5000)
    with pytest.raises(BadInput, match=r"\d+ sequences do not fill one batch of 4000"):
        feed(batch=4000).iterate(0, 1)
    with pytest.raises(BadInput, match="context is 0"):
        feed(context=0)
