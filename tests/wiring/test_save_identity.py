"""Another model is never taken for the saved one: same shapes, other functions; same names, other source."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests.anatomy import handmade as h
from tests.wiring.folders import IMAGES, PLACE, VIT, bert, edit, put, rope, snapshot, unchanged, vit
from torch import nn

import unskip
from unskip import Decay, Wiring, spec
from unskip.errors import BadInput, LoadError, UnskipWarning

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


# --- What shapes do not tell ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"act_layer": "relu"}, r"blocks\.0\.mlp\.act is a .*GELU instead of a .*ReLU"),
        ({"num_heads": 4}, r"head_dim of blocks\.0\.attn is 8 instead of 4"),
        ({"global_pool": "avg"}, "global_pool of the model is 'token' instead of 'avg'|it has no module|is a "),
        ({"drop_path_rate": 0.2}, r"drop_path1 is a .*Identity instead of a .*DropPath"),
        ({"proj_drop_rate": 0.1}, "instead of 0.1"),
    ],
    ids=str,
)
def test_another_function_of_the_same_shapes_is_not_taken_for_the_model(
    tmp_path: Path, option: dict[str, Any], message: str
) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT["kwargs"], **option}).eval()
    with pytest.raises(BadInput, match=message):
        unskip.save(model, tmp_path, builder=VIT)
    with pytest.warns(UnskipWarning, match="timm:vit_tiny_patch16_224 does not"):
        unskip.save(model, tmp_path)
    other = vit()
    before = snapshot(other)
    with pytest.raises(LoadError, match=message):
        unskip.load(tmp_path, model=other)
    assert unchanged(other, before)
    unskip.save(model, tmp_path, builder={**VIT, "kwargs": {**VIT["kwargs"], **option}})
    assert torch.equal(unskip.load(tmp_path).eval()(IMAGES), model(IMAGES))


@pytest.mark.parametrize("option", [{"act_layer": "relu"}, {"num_heads": 4}], ids=str)
def test_a_name_that_builds_another_function_is_not_recorded(tmp_path: Path, option: dict[str, Any]) -> None:
    model = timm.create_model("test_vit", **option)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in timm.create_model("test_vit").state_dict().items()
    }
    with pytest.warns(UnskipWarning, match="timm:test_vit does not: in what it builds"):
        unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] is None
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)


def test_a_module_of_another_librarys_inside_is_asked_for(tmp_path: Path) -> None:
    """A configuration that does not build the model any more, because the model was changed by hand."""
    model = bert()
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
    with pytest.warns(UnskipWarning, match="its configuration does not"):
        unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] is None
    with pytest.raises(LoadError, match=r"intermediate_act_fn is a .*GELU.* instead of a .*ReLU"):
        unskip.load(tmp_path, model=bert())


def test_saving_leaves_the_random_state_alone(tmp_path: Path) -> None:
    """Also where the builder cannot do without values."""
    file = tmp_path / "mine.py"
    body = "    torch.rand(2).tolist()\n    return Loop(2)\n"
    file.write_text(f"import torch\nfrom tests.anatomy.handmade import Loop\n\ndef build():\n{body}")
    model = h.Loop(2)
    state = torch.get_rng_state()
    unskip.save(model, tmp_path / "m", builder=f"{file}:build")
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(unskip.load(tmp_path / "m"), h.Loop)


def test_a_buffer_that_is_no_weight_is_compared(tmp_path: Path) -> None:
    """The base of a rope is in no weight and in no setting of a module."""
    ids = torch.arange(12)[None]
    model = rope(10.0)
    unskip.save(model, tmp_path)
    other = rope(10000.0)
    before = snapshot(other)
    with pytest.raises(LoadError, match=r"rotary_emb\.inv_freq has other values"):
        unskip.load(tmp_path, model=other)
    assert unchanged(other, before)
    for again in (unskip.load(tmp_path), unskip.load(tmp_path, model=rope(10.0))):
        assert torch.equal(again.eval()(ids)[0], model(ids)[0])
    unskip.load(tmp_path, model=other, check_source=False)


def test_weights_that_are_tied_only_in_the_given_model_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unskip.save(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    before = snapshot(tied)
    with pytest.raises(LoadError, match=r"does not fit the weights: 0\.weight, 1\.weight"):
        unskip.load(tmp_path, model=tied)
    assert unchanged(tied, before)


# --- Source -----------------------------------------------------------------------------------------------------------


DEEP = """
from torch import nn

def double(x):
    return x + x * 1.0

class Base(nn.Module):
    def scale(self, x):
        return x * 1.5

class Att(Base):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        return self.scale(self.q(x)) * 1.25

    def scale(self, x):
        return double(super().scale(x))

    def unused(self):
        return 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Att()

    def forward(self, x):
        return x + self.a(x)

def build():
    return Net()
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("* 1.25", "* 3.0", "mine.Att.forward"),
        ("* 1.5", "* 3.0", "mine.Base.scale"),
        ("double(super", "(super", "mine.Att.scale"),
        ("x * 1.0", "x * 2.0", "mine.double"),
        ("def unused(self):", "def reset(self):", None),
        ("\ndef build():", "# a comment\n\ndef build():", None),
    ],
)
def test_a_class_whose_source_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, found: str | None
) -> None:
    """Also where the wiring rewrote nothing in it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    file, builder = tmp_path / "mine.py", f"{tmp_path / 'mine.py'}:build"
    file.write_text(DEEP)
    model = spec.build(builder)
    unskip.rewire(model, Decay(0.5), torch.ones(1, 8))
    unskip.save(model, tmp_path / "saved", builder=builder)
    assert old in DEEP
    file.write_text(DEEP.replace(old, new))
    monkeypatch.delitem(sys.modules, "mine")  # as if in another process
    linecache.checkcache()
    try:
        assert Wiring.of(unskip.load(tmp_path / "saved", check_source=False)).alphas == [0.5]
        if found is None:
            unskip.load(tmp_path / "saved")
        else:
            with pytest.raises(LoadError, match=rf"mine\.Att has changed \({found}\).*check_source=False"):
                unskip.load(tmp_path / "saved")
    finally:
        sys.modules.pop("mine", None)


def test_a_file_that_was_imported_by_another_name_loads_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))  # the name is taken
    (tmp_path / "mine.py").write_text(DEEP)
    builder = f"{tmp_path / 'mine.py'}:build"
    model = spec.build(builder)
    assert type(model).__module__ != "mine"
    unskip.save(model, tmp_path / "saved", builder=builder)
    monkeypatch.delitem(sys.modules, "mine")
    again = unskip.load(tmp_path / "saved")
    assert type(again).__module__ == "mine"
    assert torch.equal(again(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_an_edited_file_is_found_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(DEEP)
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    code = "import unskip, mine; unskip.save(mine.build(), 'saved', builder='mine.py:build')"
    subprocess.run([sys.executable, "-c", code], check=True, **run)
    file.write_text(DEEP.replace("* 1.25", "* 3.0"))
    done = subprocess.run([sys.executable, "-c", "import unskip; unskip.load('saved')"], check=False, **run)
    assert "LoadError: saved: the source of mine.Att has changed (mine.Att.forward)" in done.stderr


def test_source_under_the_wiring_must_be_the_same_whatever_is_asked(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, Decay(0.6))
    unskip.save(model, tmp_path, builder=VIT)
    edit(tmp_path, put(*PLACE, "hops", 0, "digest", value="0" * 16))
    with pytest.raises(LoadError, match=r"Block\.forward.*another version"):
        unskip.load(tmp_path, check_source=False)


def test_versions_are_named_where_the_source_changed(folder: Path) -> None:
    block = "timm.models.vision_transformer.Block"

    def change(record: dict[str, Any]) -> None:
        record["sources"][block][f"{block}.forward"] = "0" * 16
        record["versions"]["timm"] = "0.1"

    edit(folder, change)
    with pytest.raises(LoadError, match=rf"{block} has changed.*saved under timm 0\.1"):
        unskip.load(folder)
    assert unskip.load(folder, check_source=False) is not None


def test_a_setting_that_a_newer_library_has_can_be_passed_over(folder: Path) -> None:
    model = vit()
    vars(model.blocks[1].norm1)["added"] = 1
    with pytest.raises(LoadError, match=r"added of blocks\.1\.norm1 is 1 instead of not set"):
        unskip.load(folder, model=model)
    model.blocks[1].norm1.eps = 0.5
    with pytest.raises(LoadError, match=r"eps of blocks\.1\.norm1 is 0\.5"):
        unskip.load(folder, model=model, check_source=False)
    model.blocks[1].norm1.eps = model.blocks[0].norm1.eps
    unskip.load(folder, model=model, check_source=False)
