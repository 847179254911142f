"""Bits per byte, perplexity and next-token accuracy against closed forms and a bootstrap."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from unskip.data import ImageSet, TextFeed, open_text
from unskip.errors import BadInput
from unskip.evals import evaluate

NAMES = ["bits-per-byte-v1", "bits-per-byte-by-context-v1", "next-token-v1"]
NAME = "quantised-bits-per-byte-v1"


class Fixed(nn.Module):
    """Fixed logits for every next token, or logits that depend on the last token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)  # (vocabulary,) or (vocabulary, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits[ids] if self.logits.ndim == 2 else self.logits.expand(*ids.shape, -1)


@pytest.fixture
def feed(tmp_path: Path) -> Any:
    def make(texts: list[str], context: int = 8, most: int | None = None) -> TextFeed:
        folder = tmp_path / "text" / "test"
        for each in ("train", "test"):
            (tmp_path / "text" / each).mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / "train" / "a.txt").write_text("unused")
        for index, text in enumerate(texts):
            (folder / f"{index:03d}.txt").write_text(text)
        text = open_text(tmp_path / "text", "test", cache=tmp_path / "cache")
        return TextFeed(text, 16, context, most=most)

    return make


def numbers(model: nn.Module, feed: Any) -> tuple[dict[str, float], dict[str, Any], int]:
    results = evaluate(model, None, feed, NAMES)
    values = {name: value for each in results for name, value in each.values.items()}
    intervals = {name: ends for each in results for name, ends in each.intervals.items()}
    return values, intervals, results[0].n


def test_a_uniform_model_costs_log2_of_the_vocabulary(feed: Any) -> None:
    data = feed(["abcdefg" * 9, "hello\n" * 30])
    values, _, n = numbers(Fixed(torch.zeros(257)), data)
    assert values["perplexity"] == pytest.approx(257)
    tokens = sum(len(ids) * 8 for ids, _ in data.evaluate())
    assert n * 8 == tokens
    # The token that ends a document costs bits, but has no bytes.
    bytes_per_token = data.text.bytes / numpy.diff(data.text.ends, prepend=0)
    total = bytes_per_token[data.text.document(numpy.arange(1, tokens + 1))].sum()
    assert values["bits_per_byte"] == pytest.approx(tokens * math.log2(257) / total)
    assert values["next_token_accuracy"] == 0  # of equal logits argmax takes byte 0


def test_a_perfect_model_costs_nothing(feed: Any) -> None:
    after = torch.full((257, 257), -1e4)
    for a, b in zip(b"abcd", b"bcda", strict=True):
        after[a, b] = 0
    values, intervals, _ = numbers(Fixed(after), feed(["abcd" * 100 + "abc"]))  # no full window contains its end
    assert values["bits_per_byte"] == pytest.approx(0, abs=1e-9)
    assert (values["perplexity"], values["next_token_accuracy"]) == (1, 1)
    assert intervals["next_token_accuracy"] == (1, 1)


def test_losses_by_position_and_context(feed: Any) -> None:
    texts = ["aaaaaaaaaaa", "bbbbbb", "cc", "dddddddddddddddddddd"]
    logits = torch.full((257,), -3.0)
    logits[ord("b")] = 2.0
    data = feed(texts)
    values, _, _ = numbers(Fixed(logits), data)
    costs = -logits.log_softmax(0)
    flat = data.text.tokens.astype(int)
    position, context = dict[int, list[float]](), dict[int, list[float]]()
    for start in range(0, len(flat) - 8, 8):
        for i in range(8):
            index = start + i + 1
            document = numpy.searchsorted(data.text.ends, index, side="right")
            first = data.text.ends[document - 1] if document else 0
            seen = min(index - first, i + 1)
            cost = float(costs[flat[index]])
            position.setdefault(1 << ((i + 1).bit_length() - 1), []).append(cost)
            context.setdefault(0 if seen == 0 else 1 << (int(seen).bit_length() - 1), []).append(cost)
    for name, by_range in (("position", position), ("context", context)):
        for low, cost in by_range.items():
            assert values[f"perplexity_{name}_{low}"] == pytest.approx(math.exp(numpy.mean(cost)))
    assert {name for name in values if "perplexity_context" in name} == {f"perplexity_context_{low}" for low in context}


def test_intervals_match_a_bootstrap_over_documents(feed: Any) -> None:
    random = numpy.random.default_rng(0)
    # Documents have different distributions, so tokens are far from independent.
    texts = ["".join(random.choice([*"ab"], 40, p=[share, 1 - share])) for share in random.random(60)]
    logits = torch.full((257,), -9.0)
    logits[[ord("a"), ord("b")]] = torch.tensor([1.0, -1.0])
    data = feed(texts)
    values, intervals, _ = numbers(Fixed(logits), data)
    costs = -logits.double().log_softmax(0).numpy()
    flat = data.text.tokens.astype(int)[1 : 1 + 8 * ((len(data.text) - 1) // 8)]
    document = data.text.document(numpy.arange(1, len(flat) + 1))
    sums, counts = numpy.bincount(document, costs[flat]), numpy.bincount(document)
    draws = random.integers(len(sums), size=(4000, len(sums)))
    spread = (sums[draws].sum(1) / counts[draws].sum(1)).std()
    low, high = intervals["loss"]
    assert (high - low) / 2 == pytest.approx(1.96 * spread, rel=0.06)
    assert low < values["loss"] < high
    assert intervals["perplexity"] == pytest.approx((math.exp(low), math.exp(high)))


def test_bad_input_is_refused(feed: Any) -> None:
    with pytest.raises(BadInput, match="its vocabulary is 90, but the text has token"):
        numbers(Fixed(torch.zeros(90)), feed(["abcdefg" * 9]))
    with pytest.raises(BadInput, match=r"must return logits \(sequences, tokens, vocabulary\)"):
        numbers(nn.Sequential(nn.Embedding(257, 4), nn.Flatten()), feed(["abcdefg" * 9]))
    images = ImageSet("noise", "test", ("a",), torch.zeros(4).long(), torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(BadInput, match="predictions need text"):
        evaluate(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), None, images, ["next-token-v1"])


def test_rounding_to_fewer_bits_costs_more(feed: Any) -> None:
    torch.manual_seed(0)
    data = feed(["abcdefgh" * 30, "aabbccdd" * 30])
    model = nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 257))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for ids, following in data.iterate(0, 60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), following.flatten()).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (result,) = evaluate(model, data, data, ["quantised-bits-per-byte-v1"], changes={NAME: {"bits": (16, 8, 3)}})
    (plain,) = evaluate(model, None, data, ["bits-per-byte-v1"])
    bits = result.values
    assert bits["bits_per_byte"] == pytest.approx(plain.values["bits_per_byte"])
    assert bits["bits_per_byte_16_tensor_minmax"] == pytest.approx(bits["bits_per_byte"], rel=1e-3)
    errors = [abs(bits[f"bits_per_byte_{width}_tensor_minmax"] - bits["bits_per_byte"]) for width in (16, 8, 3)]
    assert errors == sorted(errors)
    assert errors[2] > 0.02
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
