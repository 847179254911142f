"""save and load: equal models back, and a specific error with nothing half loaded otherwise."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from diffusers import DiTTransformer2DModel
from tests.anatomy import handmade as h
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring
from unskip.errors import BadInput, LoadError

X = torch.randn(2, 5, h.DIM, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = {
    "spec": "timm:vit_tiny_patch16_224",
    "kwargs": {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2},
}


def vit() -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", **VIT["kwargs"]).eval()
    return model.requires_grad_(True)


@pytest.mark.parametrize(
    "rule",
    [None, Decay(0.6), Cut(), Learn(0.5), Learn(0.5, per="channel"), {"mlp": Cut()}, Anneal(Keep(), Cut(), steps=10)],
    ids=str,
)
def test_round_trip(tmp_path: Path, rule: Any) -> None:
    model = vit()
    if rule is not None:
        unskip.rewire(model, rule).step(5)
    unskip.save(model, tmp_path / "m", builder=VIT)
    again = unskip.load(tmp_path / "m").eval()
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"model.safetensors", "unskip.json"}
    if rule is not None:
        ours, theirs = Wiring.of(model), Wiring.of(again)
        assert theirs.alphas == ours.alphas
        assert theirs.sites == ours.sites
        assert str(theirs) == str(ours)
        theirs.undo()
        assert type(again.blocks[0]) is timm.models.vision_transformer.Block


def test_a_predicate_is_saved_as_the_sites_it_picked(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, Cut(), where=lambda site: site.index in (0, 3))
    unskip.save(model, tmp_path, builder=VIT)
    assert Wiring.of(unskip.load(tmp_path)).alphas == [0.0, 1.0, 1.0, 0.0]


def bert() -> nn.Module:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    return BertModel(config).eval()


def gpt2() -> nn.Module:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def dit() -> nn.Module:
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    ).eval()


@pytest.mark.parametrize("build", [bert, gpt2, dit])
def test_configurations_are_recorded(tmp_path: Path, build: Any) -> None:
    model = build()
    unskip.rewire(model, Decay(0.6))
    unskip.save(model, tmp_path)
    again = unskip.load(tmp_path)
    assert type(again) is type(model)
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert Wiring.of(again).alphas == Wiring.of(model).alphas


def test_a_plain_timm_model_is_recorded_by_name(tmp_path: Path) -> None:
    model = timm.create_model("test_vit").eval()
    unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] == {"spec": "timm:test_vit", "kwargs": {}}
    images = torch.randn(1, 3, 160, 160)
    assert torch.equal(unskip.load(tmp_path).eval()(images), model(images))


def test_a_model_that_cannot_be_built_is_asked_for(tmp_path: Path) -> None:
    model = h.PreNorm()
    unskip.rewire(model, Cut(), X)
    unskip.save(model, tmp_path)
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)
    again = unskip.load(tmp_path, model=h.PreNorm())
    assert torch.equal(again(X), model(X))


def test_a_function_of_a_file_builds_it_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.anatomy.handmade import Loop\n\ndef build(depth=2):\n    return Loop(depth)\n")
    model = h.Loop(4)
    unskip.rewire(model, Decay(0.5), X)
    unskip.save(model, tmp_path / "m", builder={"spec": f"{file}:build", "kwargs": {"depth": 4}})
    torch.save(X, tmp_path / "x.pt")
    code = "import torch, unskip, sys; model, x = unskip.load(sys.argv[1]), torch.load(sys.argv[2])\n"
    code += "print(model(x).double().sum().item())"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "x.pt")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert float(done.stdout) == pytest.approx(model(X).double().sum().item(), rel=1e-5)


def test_tied_weights_survive(tmp_path: Path) -> None:
    model = gpt2()
    unskip.save(model, tmp_path)
    again = unskip.load(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = vit()
    unskip.rewire(model, Learn(0.5))
    return unskip.save(model, tmp_path / "m", builder=VIT)


def edit(folder: Path, change: Any) -> None:
    path = folder / "unskip.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def stale(record: dict[str, Any]) -> None:
    record["wiring"]["sites"][0]["places"][0]["hops"][0]["digest"] = "0" * 16


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "unskip.json").unlink(), "no unskip.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "unskip.json").write_text('{"format": 1'), "damaged, it does not read"),
        (lambda f: (f / "unskip.json").write_text("[]"), "damaged, it does not read"),
        (lambda f: edit(f, lambda r: r.update(format=2)), "written in format 2; this unskip reads format 1"),
        (lambda f: edit(f, lambda r: r.pop("wiring")), "damaged, wiring missing"),
        (lambda f: edit(f, lambda r: r["wiring"]["sites"][0].pop("path")), "its wiring does not read"),
        (lambda f: edit(f, stale), r"Block\.forward.*another version"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-10]), "checksum"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\0" + (f / "model.safetensors").read_bytes()[1:]),
            "checksum",
        ),
        (lambda f: edit(f, lambda r: r["builder"]["kwargs"].update(depth=3)), "does not fit"),
        (lambda f: edit(f, lambda r: r["builder"].update(spec="timm:vit_tyni")), "building the .*nearest"),
        (lambda f: edit(f, lambda r: r.update({"class": "a.B"})), "holds a a.B, but the model is a timm"),
    ],
)
def test_a_bad_folder_is_refused_and_nothing_is_half_loaded(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(LoadError, match=message):
        unskip.load(folder)
    model = vit()
    before = copy.deepcopy(model.state_dict())
    if "kwargs" not in message and message not in ("does not fit", "building the .*nearest"):
        with pytest.raises(LoadError, match=message):
            unskip.load(folder, model=model)
    assert type(model.blocks[0]) is timm.models.vision_transformer.Block
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_of_other_shapes_is_left_as_it_was(folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT["kwargs"], "embed_dim": 32})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(LoadError, match="does not fit the weights"):
        unskip.load(folder, model=model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model.blocks[0]) is timm.models.vision_transformer.Block
    assert not hasattr(model, "_unskip_wiring")


def test_bad_builders_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not build this model"):
        unskip.save(vit(), tmp_path, builder="timm:vit_tiny_patch16_224")
    with pytest.raises(BadInput, match="a mapping with 'spec' and 'kwargs'"):
        unskip.save(vit(), tmp_path, builder={"name": "x"})
    assert list(tmp_path.iterdir()) == []


def test_a_rewired_model_is_not_loaded_into(folder: Path) -> None:
    model = vit()
    unskip.rewire(model, Cut())
    with pytest.raises(BadInput, match="rewired already"):
        unskip.load(folder, model=model)


def test_no_pickle_is_written(folder: Path) -> None:
    assert (folder / "model.safetensors").read_bytes()[8:9] == b"{"  # the header of safetensors is JSON
    json.loads((folder / "unskip.json").read_text())


SOURCE = """
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.f(x)
        x = x + self.g(x)
        return x

def build():
    return Two()
"""


def test_a_function_that_moved_in_its_file_keeps_its_wiring(tmp_path: Path) -> None:
    """Both for save and for pickle, in processes of their own: lines above a function are not its source."""
    file = tmp_path / "moving.py"
    file.write_text(SOURCE)
    first = """
import pickle, torch, unskip
from moving import build
torch.manual_seed(0)
model, x = build(), torch.ones(1, 8)
unskip.rewire(model, unskip.Decay(0.1), x)
unskip.save(model, "saved")
open("model.pkl", "wb").write(pickle.dumps(model))
print(model(x).tolist())
"""
    second = """
import pickle, torch, unskip
from moving import build
for model in (unskip.load("saved", model=build()), pickle.load(open("model.pkl", "rb"))):
    print(model(torch.ones(1, 8)).tolist())
"""
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    wanted = subprocess.run([sys.executable, "-c", first], env=env, **run).stdout.strip()
    file.write_text("# a line\n# and another\n" + SOURCE)
    found = subprocess.run([sys.executable, "-c", second], env=env, **run).stdout.split("\n")
    assert found[:2] == [wanted, wanted]
