"""Custom evaluators: registered in one file, and used by evaluate, the command line and the tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.evals.digits import digits, vit
from torch import nn

from unskip import cli, evals
from unskip.data import Feed
from unskip.errors import BadInput, UnskipWarning


@evals.register(
    "spread-test-v1", needs="features", about="Mean distance to the mean.", positive=("samples",), samples=30
)
def spread(train: evals.Split, test: evals.Split, samples: int) -> dict[str, float]:
    assert len(train.features) == len(train.labels) == 300
    return {"spread": float((test.features - test.features.mean(0)).norm(dim=1).mean()), "seen": len(test)}


@evals.register("above-test-v1", needs="tokens", fractions=("above",), train=False)
def above(train: evals.Split, test: evals.Split) -> dict[str, float]:
    return {"above": float((test.tokens.mean((1, 2)) > 0).double().mean())}


@evals.register("weights-test-v1", needs="model", fractions=("right",))
def weights(model: nn.Module, train: evals.Split, test: evals.Split) -> dict[str, float]:
    count = sum(len(labels) for _, labels in test.batches())
    return {"right": count / len(test), "weights": sum(each.numel() for each in model.parameters())}


def test_custom_evaluators() -> None:
    model, train, test = vit().eval(), digits(), digits("test", 50)
    names = ["spread-test-v1", "above-test-v1", "weights-test-v1", "knn-dino-v1"]
    results = evals.evaluate(
        model, train, test, names, split="test", blocks={"spread-test-v1": -1, "knn-dino-v1": [1, 2]}
    )
    by = {(each.protocol, each.block): each for each in results}
    assert set(by) == {
        ("spread-test-v1", 2),
        *(("above-test-v1", block) for block in range(3)),
        ("weights-test-v1", None),
        ("knn-dino-v1", 1),
        ("knn-dino-v1", 2),
    }
    features = evals.extract(model, Feed(test, 50).evaluate())["mean", "none"][2][:30]
    expected = float((features - features.mean(0)).norm(dim=1).mean())
    first = by["spread-test-v1", 2]
    assert first.values == {"spread": pytest.approx(expected, rel=1e-5), "seen": 30}
    assert (first.n, first.intervals) == (30, {})  # the first 30 of 50 images
    tokens = by["above-test-v1", 1]
    assert tokens.intervals == {"above": evals.wilson(tokens.values["above"], 50)}
    whole = by["weights-test-v1", None]
    assert whole.values == {"right": 1.0, "weights": sum(each.numel() for each in model.parameters())}
    assert [*whole.intervals] == ["right"]
    flat = evals.flat(results, "test")
    assert flat["test_right"] == 1.0
    assert (flat.about["n"], flat.about["split"]) == (50, "test")
    assert flat.about["intervals"]["test_right"] == list(whole.intervals["right"])
    assert {name for name in flat if name.startswith("above")} == {"above", *(f"above_block_{i}" for i in range(3))}
    assert flat["above"] == flat["above_block_2"] == by["above-test-v1", 2].values["above"]
    assert flat["knn20"] == by["knn-dino-v1", 2].values["knn20"]


def test_a_feed_gives_the_results_of_its_set() -> None:
    model, train, test = vit().eval(), digits(), digits("test", 50)
    names = ["knn-dino-v1", "rank-v1"]
    sets = evals.evaluate(model, train, test, names, blocks=-1)
    feeds = evals.evaluate(model, Feed(train, 64), Feed(test, 7), names, blocks=-1)
    for one, other in zip(sets, feeds, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-4)
        assert one.preprocess is not None
        assert other.preprocess is None  # the feed's own


def test_accuracy_of_logits() -> None:
    model = vit(num_classes=10).eval()
    test = digits("test", 60)
    (result,) = evals.evaluate(model, None, test, ["accuracy-v1"])
    with torch.no_grad():
        logits = torch.cat([model(images) for images, _ in Feed(test, 60).evaluate()])
    assert result.values["accuracy"] == pytest.approx(float((logits.argmax(1) == test.labels).float().mean()))
    assert result.values["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, test.labels)), rel=1e-5)
    assert (result.n, result.block, [*result.intervals]) == (60, None, ["accuracy"])
    with pytest.raises(BadInput, match="classes"):
        evals.evaluate(vit(num_classes=3), None, test, ["accuracy-v1"])
    with pytest.raises(BadInput, match="training samples"):
        evals.evaluate(model, None, test, ["knn-dino-v1"])


@given(st.integers(1, 5000), st.floats(0, 1))
def test_wilson_intervals_match_scipy(n: int, share: float) -> None:
    hits = round(share * n)
    expected = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert evals.wilson(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-9)
    assert math.isnan(evals.wilson(0.5, 0)[0])


def test_unknown_protocols_and_bad_results() -> None:
    with pytest.raises(BadInput, match="nearest: spread-test-v1"):
        evals.evaluate(vit(), digits(), digits("test"), ["spread-tst-v1"])
    with pytest.raises(BadInput, match="probe-mae-v1"):
        evals.knn(*(torch.zeros(2, 2), torch.zeros(2).long()) * 2, "probe-mae-v1")

    @evals.register("broken-test-v1", needs="features", train=False)
    def broken(train: evals.Split, test: evals.Split) -> float:
        return 0.5

    with pytest.raises(BadInput, match=r"broken-test-v1.*float"):
        evals.evaluate(vit(), None, digits("test", 20), ["broken-test-v1"])

    @evals.register("empty-test-v1", needs="model", fractions=("share",), train=False)
    def empty(model: nn.Module, train: evals.Split, test: evals.Split) -> dict[str, float]:
        return {"share": math.nan}

    with pytest.warns(UnskipWarning, match=r"empty-test-v1.*share"):
        (result,) = evals.evaluate(vit(), None, digits("test", 20), ["empty-test-v1"])
    assert result.intervals == {}


PLUGIN = """
import unskip

@unskip.evals.register("mean-plugin-v1", needs="features", about="The mean.", train=False)
def mean(train, test):
    return {"mean": float(test.features.mean())}
"""
MODEL = """
import timm

def small():
    size = dict(img_size=8, patch_size=2, depth=2, embed_dim=16, num_heads=2, num_classes=0)
    return timm.create_model("vit_tiny_patch16_224", **size)
"""


def test_a_plugin_evaluates_any_model_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not a run, with timm's or the caller's preprocessing; gray images get three channels."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "model.py").write_text(MODEL)
    command = ["eval", "model.py:small", "--random", "--data", "digits", "--plugin", "plugin.py"]
    command += ["--protocol", "mean-plugin-v1,knn-dino-v1", "--blocks", "last"]

    def rows(*more: str) -> Any:
        assert cli.main([*command, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    result = rows()
    assert result["model"] == "model.py:small"
    mean, knn = result["results"]
    assert (mean["evaluation"], mean["n"], mean["split"]) == ("mean-plugin-v1", knn["n"], "test")
    assert knn["preprocess"]["mean"] == [0.5] * 3
    low, high = knn["intervals"]["knn20"]
    assert low < knn["knn20"] < high
    other = rows("--mean", "0.1", "--std", "0.3")["results"]
    assert other[0]["preprocess"] | {"source": ""} == mean["preprocess"] | {
        "mean": [0.1] * 3,
        "std": [0.3] * 3,
        "source": "",
    }
    assert other[0]["mean"] != mean["mean"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert f"n = {knn['n']}, test split" in shown
    assert "mean 0.5, 0.5, 0.5" in shown
    assert f"{knn['knn20']:.4g} [{low:.3f}, {high:.3f}]" in shown
    assert cli.main(command[:3]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "function", "message"),
    [
        ("a,b", {}, lambda train, test: {}, "not a valid protocol name"),
        ("odd-test-v1", {"fractions": "own"}, lambda train, test: {}, "fractions is the string"),
        ("odd-test-v1", {"pool": "clss"}, lambda train, test: {}, "pool"),
        ("odd-test-v1", {"power": 2}, lambda train, test: {}, "power"),
        ("odd-test-v1", {"needs": "model"}, lambda train, test: {}, r"\(model, train, test\)"),
        ("spread-test-v1", {}, lambda train, test: {}, "already"),
    ],
)
def test_register_refuses(name: str, options: dict[str, Any], function: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evals.register(name, **({"needs": "features"} | options))(function)
    assert name == "spread-test-v1" or name not in evals.PROTOCOLS


@evals.register("fraction-test-v1", needs="model", fractions=("a",), train=False, samples=20, value=0.5)
def fraction(model: nn.Module, train: Any, test: evals.Split, samples: int, value: float) -> dict[str, float]:
    return {"a": value}


def test_fractions_and_their_intervals() -> None:
    def evaluated(value: float) -> evals.Result:
        changes = {"fraction-test-v1": {"value": value}}
        return evals.evaluate(vit(), None, digits("test", 50), ["fraction-test-v1"], changes=changes)[0]

    assert (evaluated(0.5).n, evaluated(0.5).intervals["a"]) == (20, evals.wilson(0.5, 20))
    with pytest.raises(BadInput, match=r"a is 1\.7"):
        evaluated(1.7)

    @evals.register("misnamed-test-v1", needs="model", fractions=("b*",), train=False)
    def misnamed(model: nn.Module, train: Any, test: evals.Split) -> dict[str, float]:
        return {"a": 0.5}

    with pytest.raises(BadInput, match=r"misnamed-test-v1: fractions has 'b\*', but it returns a"):
        evals.evaluate(vit(), None, digits("test", 20), ["misnamed-test-v1"])
