"""load refuses a model that differs from the saved one, and runs code named in a folder only with trust=True."""

from __future__ import annotations

import json
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests.anatomy import handmade as h
from tests.commands import python_in
from tests.wiring.folders import IMAGES, PLACE, VIT, bert, edit, put, rope, snapshot, unchanged, vit
from torch import nn
from transformers import BloomConfig, BloomModel

import unskip
from unskip import Decay, spec
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


def test_wiring_survives_a_moved_definition(tmp_path: Path) -> None:
    """For save and pickle, each in its own process: lines above a function are not part of its source."""
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
    _, wanted, _ = python_in(tmp_path, first)
    file.write_text("# a line\n# and another\n" + SOURCE)
    _, found, _ = python_in(tmp_path, second)
    assert found == wanted * 2 != ""


# --- Different models with equal shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"act_layer": "relu"}, r"blocks\.0\.mlp\.act .*GELU .*ReLU"),
        ({"num_heads": 4}, r"blocks\.0\.attn is 8 instead of 4"),
        ({"global_pool": "avg"}, "global_pool of the model is 'token' instead of 'avg'|it has no module|is a "),
        ({"drop_path_rate": 0.2}, r"drop_path1 .*Identity .*DropPath"),
        ({"proj_drop_rate": 0.1}, "instead of 0.1"),
    ],
    ids=str,
)
def test_different_model_with_equal_shapes_is_refused(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT["kwargs"], **option}).eval()
    with pytest.raises(BadInput, match=message):
        unskip.save(model, tmp_path, builder=VIT)
    unskip.rewire(model, Decay(0.6))
    recorded = "act_layer" not in option  # a class is not a plain value
    with nullcontext() if recorded else pytest.warns(UnskipWarning, match=r"timm:vit_tiny_patch16_224, .*does not"):
        unskip.save(model, tmp_path)
    if recorded:
        assert torch.equal(unskip.load(tmp_path).eval()(IMAGES), model(IMAGES))
    other = vit()
    before = snapshot(other)
    with pytest.raises(LoadError, match=message):
        unskip.load(tmp_path, model=other)
    assert unchanged(other, before)
    unskip.save(model, tmp_path, builder={**VIT, "kwargs": {**VIT["kwargs"], **option}})
    assert torch.equal(unskip.load(tmp_path).eval()(IMAGES), model(IMAGES))


def test_name_of_a_different_model_is_not_recorded(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", act_layer="relu")
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in timm.create_model("test_vit").state_dict().items()
    }
    with pytest.warns(UnskipWarning, match="timm:test_vit does not"):
        unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] is None
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)


def test_config_of_a_modified_model_is_not_recorded(tmp_path: Path) -> None:
    """The configuration no longer builds a model that was modified by hand."""
    model = bert()
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
    with pytest.warns(UnskipWarning, match="its configuration does not"):
        unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] is None
    with pytest.raises(LoadError, match=r"intermediate_act_fn .*GELU.* instead .*ReLU"):
        unskip.load(tmp_path, model=bert())


def test_save_keeps_the_rng_state(tmp_path: Path) -> None:
    """Also with a builder that cannot run on the meta device."""
    file = tmp_path / "mine.py"
    body = "    torch.rand(2).tolist()\n    return Loop(2)\n"
    file.write_text(f"import torch\nfrom tests.anatomy.handmade import Loop\n\ndef build():\n{body}")
    model = h.Loop(2)
    state = torch.get_rng_state()
    unskip.save(model, tmp_path / "m", builder=f"{file}:build")
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(unskip.load(tmp_path / "m", trust=True), h.Loop)


def test_nonpersistent_buffers_are_compared(tmp_path: Path) -> None:
    """The RoPE base is in no weight and no attribute of a module."""
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
    unskip.load(tmp_path, model=other, strict=False)


def test_weights_tied_only_in_the_given_model_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    unskip.save(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    before = snapshot(tied)
    with pytest.raises(LoadError, match=r"weights: 0\.weight, 1\.weight"):
        unskip.load(tmp_path, model=tied)
    assert unchanged(tied, before)


# --- Source code and trust --------------------------------------------------------------------------------------------


def test_builder_file_imported_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))  # the name is taken
    (tmp_path / "mine.py").write_text(SOURCE)
    builder = f"{tmp_path / 'mine.py'}:build"
    model = spec.build(builder)
    assert type(model).__module__ != "mine"
    unskip.save(model, tmp_path / "saved", builder=builder)
    monkeypatch.delitem(sys.modules, "mine")
    again = unskip.load(tmp_path / "saved", trust=True)
    assert type(again).__module__ == "mine"
    assert torch.equal(again(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_changed_source_is_refused_even_with_strict_false(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, Decay(0.6))
    unskip.save(model, tmp_path, builder=VIT)
    edit(tmp_path, put(*PLACE, "hops", 0, "digest", value="0" * 16))
    with pytest.raises(LoadError, match=r"Block\.forward.*another version"):
        unskip.load(tmp_path, strict=False)


def test_strict_false_accepts_a_library_version_difference(folder: Path) -> None:
    edit(folder, put("versions", "timm", value="0.1"))
    model = vit()
    vars(model.blocks[1].norm1)["added"] = 1
    with pytest.raises(LoadError, match=r"blocks\.1\.norm1.* timm 0\.1.*strict=False"):
        unskip.load(folder, model=model)
    unskip.load(folder, model=model, strict=False)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"checkpoint_path": "theirs.pth"}, "checkpoint_path.*trust=True"),
        ({"pretrained": True}, "pretrained.*trust=True"),
    ],
    ids=str,
)
def test_builder_that_reads_other_files_is_refused(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    unskip.save(timm.create_model("test_vit"), tmp_path)
    edit(tmp_path, put("builder", "kwargs", value=kwargs))
    with pytest.raises(LoadError, match=message):
        unskip.load(tmp_path)


@pytest.mark.parametrize(
    ("keys", "value", "named"),
    [
        (("model_args",), {"checkpoint_path": "theirs.pth"}, "checkpoint_path"),
        (("vision_config", "model_args"), {"pretrained": True}, "pretrained"),
        (("backbone_config", "use_pretrained_backbone"), True, "use_pretrained_backbone"),
        (("quantization_config",), {"quant_method": "mxfp4"}, "quantization_config"),
    ],
    ids=str,
)
def test_config_that_reads_other_files_is_refused(
    tmp_path: Path, keys: tuple[str, ...], value: object, named: str
) -> None:
    unskip.save(bert(), tmp_path)
    for key in reversed(keys[1:]):
        value = {key: value}
    edit(tmp_path, put("builder", "config", keys[0], value=value))
    with pytest.raises(LoadError, match=f"{named}.*trust=True"):
        unskip.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("attn_implementation", "theirs/kernel"), ("model_args", {"checkpoint_path": "theirs.pth"})]
)
def test_config_in_a_referenced_folder_is_checked(tmp_path: Path, field: str, value: object) -> None:
    unskip.save(bert(), tmp_path / "m")
    config = json.loads(bert().config.to_json_string()) | {"model_type": "bert", field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit(tmp_path / "m", put("builder", value={"spec": f"hf:{tmp_path}", "kwargs": {}}))
    with pytest.raises(LoadError, match=r"config\.json names (theirs/kernel|checkpoint_path)"):
        unskip.load(tmp_path / "m")


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_only_model_classes_are_built(tmp_path: Path, library: str) -> None:
    unskip.save(timm.create_model("test_vit"), tmp_path)
    edit(tmp_path, put("builder", value={library: "logging", "config": {}}))
    with pytest.raises(LoadError, match=r"is not a model"):
        unskip.load(tmp_path)


def test_load_imports_no_module_named_in_a_wiring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = BloomModel(config)  # adds in a module-level function
    unskip.rewire(model, Decay(0.6))
    unskip.save(model, tmp_path / "m")
    edit(tmp_path / "m", put(*PLACE, "hops", 1, "module", value="theirs"))
    with pytest.raises(LoadError, match=r"theirs\.dropout_add.*not in sys\.modules"):
        unskip.load(tmp_path / "m")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keys", [("implementations", "_attn_implementation"), ("config", "attn_implementation")])
def test_hub_kernels_need_trust(tmp_path: Path, keys: tuple[str, str]) -> None:
    unskip.save(bert(), tmp_path)
    edit(tmp_path, put("builder", *keys, value="theirs/kernel"))
    with pytest.raises(LoadError, match=r"theirs/kernel.*trust=True"):
        unskip.load(tmp_path)


def test_invalid_config_raises_load_error(tmp_path: Path) -> None:
    unskip.save(bert(), tmp_path)
    edit(tmp_path, put("builder", "config", "hidden_size", value="wide"))
    with pytest.raises(LoadError, match=r"building the .*BertModel failed"):
        unskip.load(tmp_path)


def test_builder_files_need_trust(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(SOURCE)
    unskip.save(spec.build(f"{file}:build"), tmp_path / "m", builder=f"{file}:build")
    file.write_text(SOURCE + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    sys.modules.pop("theirs", None)
    with pytest.raises(LoadError, match=r"theirs\.py.*trust=True"):
        unskip.load(tmp_path / "m")
    assert not (tmp_path / "ran").exists()
    assert unskip.load(tmp_path / "m", trust=True) is not None
    assert (tmp_path / "ran").exists()
    sys.modules.pop("theirs", None)
