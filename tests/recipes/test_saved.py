"""Folders of unskip.save are readable by timm, transformers and the hub: config, model card, preprocessing, results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from packaging.version import Version
from safetensors.torch import save_model
from torch import nn
from transformers import AutoModel, BertConfig, BertModel

import unskip
from unskip._provenance import sha256
from unskip.data import Preprocess, preprocess_of, set_preprocess
from unskip.errors import BadInput, LoadError
from unskip.recipes import evaluate_run, supervised

# timm before 1.0.26 does not read safetensors files from local folders.
local = pytest.mark.skipif(Version(timm.__version__) < Version("1.0.26"), reason="needs timm 1.0.26")
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2}


def vit(**changes: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL, **changes).eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@local
@pytest.mark.parametrize("changes", [{}, {"num_classes": 5}, {"num_classes": 0, "in_chans": 4}, {"in_chans": 1}])
def test_timm_reads_the_plain_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = vit(**changes)
    unskip.rewire(model, unskip.Decay(0.6))
    unskip.save(model, tmp_path / "saved")
    plain = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    assert same(plain, model)
    assert same(unskip.load(tmp_path / "saved"), model)


def test_transformers_reads_the_plain_model(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    model = BertModel(config)
    unskip.save(model, tmp_path)
    assert same(AutoModel.from_pretrained(tmp_path), model)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vit()
    unskip.rewire(model, unskip.Cut(), where="attention")
    folder = unskip.save(model, tmp_path / "saved")
    # The layout of huggingface_hub's cache after a download.
    cached = tmp_path / "cache" / "models--someone--small"
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = unskip.load("hf-hub:someone/small")
    assert same(loaded, model)
    assert unskip.Wiring.of(loaded).alphas == unskip.Wiring.of(model).alphas
    for name in ("hf-hub:someone/other", "hf-hub:someone/small@v9", "hf-hub:a/b/c"):
        with pytest.raises(LoadError, match=name):
            unskip.load(name)


def test_preprocessing_is_kept(tmp_path: Path) -> None:
    own = Preprocess((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 16, "bicubic", 0.8, "a test")
    model = vit()
    set_preprocess(model, own)
    unskip.save(model, tmp_path / "saved")
    again = unskip.load(tmp_path / "saved")
    assert preprocess_of(again) == own
    config = timm.create_model(f"local-dir:{tmp_path / 'saved'}").pretrained_cfg
    assert (tuple(config["mean"]), config["interpolation"], config["crop_pct"]) == (own.mean, "bicubic", 0.8)
    assert tuple(config["input_size"]) == (3, 16, 16)
    unskip.save(again, tmp_path / "twice")
    assert preprocess_of(unskip.load(tmp_path / "twice")) == own


def test_a_folder_of_the_earlier_layout_loads(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, unskip.Decay(0.6))
    unskip.save(model, tmp_path / "new")
    (tmp_path / "old").mkdir()
    save_model(model, str(tmp_path / "old" / "model.safetensors"))
    record = json.loads((tmp_path / "new" / "unskip.json").read_text())
    del record["about"]
    record["sha256"] = {"model.safetensors": sha256(tmp_path / "old" / "model.safetensors")}
    (tmp_path / "old" / "unskip.json").write_text(json.dumps(record))
    assert same(unskip.load(tmp_path / "old"), model)


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # short runs give health warnings
def test_the_card_of_a_run(tmp_path: Path) -> None:
    small = {"model_args": "depth=2,embed_dim=16,num_heads=2", "health": False, "device": "cpu"}
    unskip.train(supervised("digits", steps=2, batch=16, shortcut="decay:0.6", **small), tmp_path / "run", quiet=True)
    evaluate_run(tmp_path / "run", ["knn-dino-v1"])
    online = {"step": 2, "evaluation": "features", "rank": 3.0, "rank_block_0": 2.0, "rank_block_1": 3.0}
    with (tmp_path / "run" / "evals.jsonl").open("a") as file:
        file.write(json.dumps(online) + "\n")
    rows = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    run = unskip.load(tmp_path / "run")
    unskip.save(run, tmp_path / "digits-vit")
    again = unskip.load(tmp_path / "digits-vit")
    assert same(again, run)
    assert preprocess_of(again, 1) == preprocess_of(run, 1)
    unskip.save(again, tmp_path / "digits-vit")  # recipe and results are kept over load and save
    card = ModelCard.load(tmp_path / "digits-vit" / "README.md")
    assert card.data.library_name == "unskip"
    assert card.data.license is None
    recorded = {(each.task_name, each.metric_type): each.metric_value for each in card.data.eval_results or []}
    assert recorded["accuracy-v1", "test_accuracy"] == rows[0]["test_accuracy"]
    assert recorded["knn-dino-v1", "knn20"] == rows[-2]["knn20"]  # the last block
    assert [name for evaluation, name in recorded if evaluation == "features"] == ["rank"]
    low, high = rows[0]["intervals"]["test_accuracy"]
    assert f"{low:.4g} to {high:.4g} | 359 | test" in card.text
    for fact in ("decay:0.6", "adamw", "supervised", "hf-hub:"):
        assert fact in card.text
    with pytest.raises(BadInput, match="run"):
        unskip.save(run, tmp_path / "run")


def test_an_existing_model_card_is_kept(tmp_path: Path) -> None:
    unskip.save(vit(), tmp_path)
    first = (tmp_path / "README.md").read_text()
    model = vit()
    unskip.rewire(model, unskip.Cut())
    unskip.save(model, tmp_path)
    assert "cut" in (tmp_path / "README.md").read_text() != first
    (tmp_path / "README.md").write_text("mine")
    unskip.save(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
