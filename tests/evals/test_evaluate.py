"""Frozen protocols; features of all blocks in one pass; whole evaluations."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.evals.digits import digits, vit
from torch import Tensor, nn

import unskip
from unskip import evals
from unskip.data import Feed
from unskip.errors import BadInput

FROZEN = {
    "accuracy-v1": "d84d2c1622944624",
    "bits-per-byte-v1": "d3ceb4c892146a5e",
    "bits-per-byte-by-context-v1": "d98584c21d202a92",
    "discover-tokencut-v1": "7390adb478c6e16e",
    "finetune-mae-v1": "f0ab6cfab5b468bc",
    "flow-loss-v1": "6412c6d10c6468bd",
    "generation-v1": "b1cd82048b871d56",
    "knn-cls-v1": "76db6c2b7ea6bdd9",
    "knn-dino-v1": "bd3fdfc943e0dea6",
    "next-token-v1": "545b3e0d2c56fedf",
    "probe-mae-v1": "fea3312684a5c8c4",
    "probe-decayed-v1": "eb999675917d419b",
    "probe-lbfgs-v1": "b6ba6d9682fd19f7",
    "quantised-accuracy-v1": "3aad035723fb6f25",
    "quantised-bits-per-byte-v1": "5cd38d8f4aad14e8",
    "reconstruction-v1": "521ae8ca79d44dd7",
    "rank-v1": "500cb2122d137b18",
    "patchrank-v1": "04739c5ec602e8bd",
    "segment-linear-v1": "f2aaad47b9a5e534",
    "segment-ridge-v1": "d73cc62545ec07f3",
}


def test_a_protocol_never_changes() -> None:
    """Changed settings need a new name: add hashes here, but never edit one."""
    result = {
        name: hashlib.sha256(json.dumps(each.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
        for name, each in evals.PROTOCOLS.items()
        if each.function.__module__.startswith("unskip.evals.")
    }
    assert result == FROZEN
    with pytest.raises(TypeError):
        evals.PROTOCOLS["rank-v1"].settings["samples"] = 5  # type: ignore[index]
    with pytest.raises(TypeError):
        evals.PROTOCOLS["mine"] = evals.PROTOCOLS["rank-v1"]  # type: ignore[index]


# --- Features ---------------------------------------------------------------------------------------------------------


def test_features_match_unskip_features_in_any_batching() -> None:
    model = vit()
    images = digits()
    whole = torch.cat([x for x, _ in Feed(images, 300, 8).evaluate()])
    views: Any = [("mean", "none"), ("cls", "none"), ("mean", "layer"), ("cls", "layer")]
    features = evals.extract(model, Feed(images, 64, 8).evaluate(), "all", views)
    assert features.blocks == 3
    assert len(features) == 300
    assert torch.equal(features.labels, images.labels)
    with torch.no_grad():
        model.eval()
        tokens = unskip.features(model, whole, pool=None)
    for block, expected in tokens.items():
        plain = nn.functional.layer_norm(expected, (16,), eps=1e-6)
        assert torch.allclose(features["mean", "none"][block], expected.mean(1), atol=1e-5)
        assert torch.allclose(features["cls", "none"][block], expected[:, 0], atol=1e-5)
        assert torch.allclose(features["mean", "layer"][block], plain.mean(1), atol=1e-5)
        assert torch.allclose(features["cls", "layer"][block], plain[:, 0], atol=1e-5)


def test_each_image_goes_through_the_model_once() -> None:
    model = vit()
    seen: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    evals.extract(model, Feed(digits(), 100, 8).evaluate(), "all", [("mean", "none"), ("cls", "layer")])
    # One row to find the blocks, then three batches.
    assert sum(size for size in seen if size > 1) == 300


def test_extract_runs_in_evaluation_mode_and_restores_the_modes() -> None:
    model = vit(drop_path_rate=0.5, proj_drop_rate=0.5)
    model.train()
    model.blocks[1].eval()  # type: ignore[index,operator,union-attr]
    modes = [module.training for module in model.modules()]
    first = evals.extract(model, Feed(digits(), 64, 8).evaluate())
    assert [module.training for module in model.modules()] == modes
    again = evals.extract(model.eval(), Feed(digits(), 64, 8).evaluate())
    assert torch.equal(first["mean", "none"][2], again["mean", "none"][2])
    assert not first["mean", "none"][2].requires_grad


def test_extract_of_chosen_blocks_and_of_a_rewired_model() -> None:
    model = vit().eval()
    plain = evals.extract(model, Feed(digits(), 100, 8).evaluate(), -1)
    assert list(plain["mean", "none"]) == [2]
    with unskip.rewired(model, "decay:0.5"):
        decayed = evals.extract(model, Feed(digits(), 100, 8).evaluate(), [2])
    assert not torch.allclose(plain["mean", "none"][2], decayed["mean", "none"][2])


def test_bad_views_and_empty_sets_are_refused() -> None:
    with pytest.raises(BadInput, match="max"):
        evals.extract(vit(), [], views=[("max", "none")])  # type: ignore[list-item]
    with pytest.raises(BadInput, match="no batch"):
        evals.extract(vit(), [])
    with pytest.raises(BadInput, match="int8"):
        evals.extract(vit(), [], precision="int8")  # type: ignore[arg-type]


# --- Whole evaluations ------------------------------------------------------------------------------------------------


def test_all_protocols_over_depth() -> None:
    model = vit().eval()
    train, test = digits(), digits("test", 100)
    names = ["knn-dino-v1", "rank-v1", "probe-lbfgs-v1"]
    results = evals.evaluate(model, train, test, names, size=8, batch=100, split="test")
    assert [(each.protocol, each.block) for each in results] == [(name, block) for name in names for block in range(3)]
    train_features, test_features = (evals.extract(model, Feed(x, 100, 8).evaluate()) for x in (train, test))
    x, y = train_features["mean", "none"][1], test_features["mean", "none"][1]
    expected = evals.knn(x, train.labels, y, test.labels)
    assert results[1].values == {f"knn{k}": value for k, value in expected.items()}
    assert results[4].values == evals.rank(y)
    accuracy = evals.linear_probe(x, train.labels, y, test.labels, "probe-lbfgs-v1")
    assert results[7].values == {"probe_lbfgs": pytest.approx(accuracy, abs=1e-9)}
    row = results[7].to_dict()
    assert {name: row[name] for name in ("evaluation", "block", "pool", "n", "split")} == {
        "evaluation": "probe-lbfgs-v1",
        "block": 1,
        "pool": "mean",
        "n": 100,
        "split": "test",
    }
    assert row["preprocess"]["mean"] == [0.5]
    assert json.loads(json.dumps(row)) == row
    shown = evals.by_depth(results)
    assert shown.splitlines()[0].split() == ["block", "path", *results[0].values, "rank", "rank_entropy", "probe_lbfgs"]
    assert len(shown.splitlines()) == 5
    low, high = results[7].intervals["probe_lbfgs"]
    assert f"{accuracy:.4g} [{low:.3f}, {high:.3f}]" in shown
    assert results[4].intervals == {}  # a rank is not a fraction
    both = evals.by_depth([results[0], replace(results[0], protocol="knn-cls-v1", values={"knn10": 0.25})])
    assert "knn10 (knn-dino-v1)" in both.splitlines()[0]
    assert "knn10 (knn-cls-v1)" in both.splitlines()[0]
    assert "0.25" in both.splitlines()[2]


def test_changes_reach_every_kind_of_protocol_or_are_refused() -> None:
    model = vit().eval()
    names = ["knn-dino-v1", "rank-v1"]
    changes: dict[str, dict[str, Any]] = {"knn-dino-v1": {"k": [1, 5]}, "rank-v1": {"samples": 10}}
    options: dict[str, Any] = {"size": 8, "blocks": [2]}
    results = evals.evaluate(model, digits(), digits("test", 50), names, changes=changes, **options)
    assert list(results[0].values) == ["knn1", "knn5"]
    assert results[1].values["rank"] < 10
    assert [each.changes for each in results] == [*changes.values()]
    with pytest.raises(BadInput, match="probe-mae-v1"):
        evals.evaluate(model, digits(), digits("test"), names, changes={"probe-mae-v1": {"epochs": 2}}, **options)
    with pytest.raises(BadInput, match=r"images.*samples, center"):
        evals.evaluate(model, digits(), digits("test"), names, changes={"rank-v1": {"images": 2}}, **options)


def test_fixed_settings_cannot_be_changed() -> None:
    with pytest.raises(BadInput, match="probe-lbfgs-v1: standardise cannot be changed"):
        evals.PROTOCOLS["probe-lbfgs-v1"].settings_with({"standardise": False})


@pytest.mark.parametrize(
    ("protocol", "setting", "value", "form"),
    [
        ("knn-dino-v1", "k", (10, 0), "whole numbers"),
        ("knn-dino-v1", "k", (), "whole numbers"),
        ("knn-dino-v1", "k", 10, "whole numbers"),
        ("knn-dino-v1", "k", (1.5,), "whole numbers"),
        ("knn-dino-v1", "temperature", float("nan"), "a number"),
        ("probe-decayed-v1", "epochs", 0, "a whole number"),
        ("rank-v1", "samples", True, "a whole number"),
        ("segment-ridge-v1", "penalty", -1.0, "a number"),
    ],
)
def test_bad_settings_are_refused(protocol: str, setting: str, value: Any, form: str) -> None:
    with pytest.raises(BadInput, match=f"{protocol}: {setting} .*{form} above 0"):
        evals.PROTOCOLS[protocol].settings_with({setting: value})


def test_blocks_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing a model takes longer than evaluating a small one."""
    from unskip.evals import _extract

    calls = []
    search = _extract.find_blocks
    monkeypatch.setattr(_extract, "find_blocks", lambda *arguments: calls.append(1) or search(*arguments))
    results = evals.evaluate(vit(), digits(), digits("test", 50), ["rank-v1"], size=8, batch=40)
    assert len(results) == 3
    assert calls == [1]


def test_blocks_of_different_widths_are_evaluated_separately() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([Stage(1, 4), Stage(4, 8)])

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    class Stage(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.grow, self.conv = nn.Conv2d(before, after, 1), nn.Conv2d(after, after, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.grow(x)
            return x + self.conv(x).relu()

    results = evals.evaluate(Pyramid(), digits(), digits("test", 50), ["probe-lbfgs-v1", "rank-v1"], size=8)
    assert [each.block for each in results] == [0, 1, 0, 1]
