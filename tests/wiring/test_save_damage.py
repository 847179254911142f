"""load refuses a damaged folder with a specific error and leaves the given model unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from tests.wiring.folders import PLACE, SITE, VIT, damage_weights, edit, put, snapshot, unchanged, vit
from torch import nn

import unskip
from unskip import Cut, Wiring
from unskip.errors import BadInput, LoadError


@pytest.mark.parametrize("place", ["saved", "checkpoints/step-40", "checkpoints/step-40/encoder"])
def test_load_error_suggests_a_saved_subfolder(tmp_path: Path, place: str) -> None:
    unskip.save(nn.Linear(2, 2), tmp_path / place)
    with pytest.raises(LoadError, match=f"no unskip.json.*such as .*{place}"):
        unskip.load(tmp_path)


def test_a_missing_folder_is_named_as_missing(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nowhere: no such folder\. Check the path"):
        unskip.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "unskip.json").unlink(), "no unskip.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "unskip.json").write_text('{"format": 1'), "damaged, it is not a record"),
        (lambda f: (f / "unskip.json").write_text("[]"), "damaged, it is not a record"),
        (lambda f: edit(f, put("format", value=3)), "format 3; .* Update unskip"),
        (lambda f: edit(f, put("format", value=1)), "format 1.*save it again"),
        (lambda f: edit(f, put("format", value=0)), "format 0.*save it again"),
        (lambda f: edit(f, put("format", value=True)), "damaged, its format is True"),
        (lambda f: edit(f, put("format", value="2")), "damaged, its format is '2'"),
        (lambda f: edit(f, lambda r: r.pop("wiring")), "damaged, wiring is missing"),
        (lambda f: edit(f, put("sha256", value=None)), "damaged, sha256 holds a NoneType"),
        (lambda f: edit(f, put("sha256", value="abc")), "damaged, sha256 holds a str"),
        (lambda f: edit(f, put("sha256", value={})), "checksum"),
        (lambda f: edit(f, put("structure", value={})), "structure or buffers"),
        (lambda f: edit(f, put("structure", "modules", value={"": 99})), "structure or buffers"),
        (lambda f: edit(f, put("buffers", value={"a": {"dtype": "manual_seed"}})), "the buffer a is missing"),
        (lambda f: edit(f, lambda r: r["wiring"]["sites"][0].pop("path")), "its wiring is invalid"),
        (lambda f: edit(f, put(*SITE, "path", value="blocks.7")), "its wiring does not fit"),
        (lambda f: edit(f, put(*SITE, "path", value="blocks.0.attn")), "its wiring does not fit"),
        (lambda f: edit(f, put(*SITE, "path", value=7)), "its wiring is invalid"),
        (lambda f: edit(f, put(*SITE, "index", value=9)), "not numbered in order"),
        (lambda f: edit(f, put(*SITE, "axis", value="x")), "its wiring is invalid"),
        (lambda f: edit(f, put(*SITE, "more", value=1)), "its wiring is invalid"),
        (lambda f: edit(f, put(*SITE, "places", value=["a"])), "its wiring is invalid"),
        (lambda f: edit(f, put(*PLACE, "hops", 0, "digest", value="0" * 16)), r"Block\.forward.*another version"),
        (lambda f: edit(f, put(*PLACE, "hops", 0, "position", value=[1, 2, 3, 4])), "its wiring does not fit"),
        (lambda f: edit(f, put(*PLACE, "hops", value=[])), "its wiring does not fit"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[0, 9])), "its wiring is invalid"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[-1])), "its wiring is invalid"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[0, 0])), "a site has two rules"),
        (lambda f: edit(f, put("wiring", "plan", 0, "rule", value={"rule": "cutt"})), r"'cutt'.* not registered"),
        (lambda f: edit(f, put("wiring", "plan", 0, "rule", value={"rule": "cut"})), "its wiring does not fit"),
        (lambda f: edit(f, put("wiring", "step", value=-5)), "its wiring is invalid"),
        (lambda f: edit(f, put("wiring", "step", value="x")), "its wiring is invalid"),
        (lambda f: edit(f, put("wiring", "alphas", value=[1.0])), "its wiring is invalid"),
        (lambda f: edit(f, put("wiring", value=None)), "does not fit the weights"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-10]), "checksum"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\0" + (f / "model.safetensors").read_bytes()[1:]),
            "checksum",
        ),
        (lambda f: damage_weights(f, b"garbage" * 10), "is not a safetensors file"),
        (lambda f: damage_weights(f, b""), "is not a safetensors file"),
        (lambda f: edit(f, put("class", value="a.B")), "a.B, but .* timm"),
        (lambda f: edit(f, put("class", value=None)), "damaged, class holds a NoneType"),
    ],
)
def test_damaged_folders_are_refused_without_a_partial_load(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(LoadError, match=message):
        unskip.load(folder)
    model = vit()
    before = snapshot(model)
    with pytest.raises(LoadError, match=message):
        unskip.load(folder, model=model)
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ({**VIT, "kwargs": {**VIT["kwargs"], "depth": 3}}, "depth of the model is 3 instead of 2|an extra module"),
        ({**VIT, "kwargs": {**VIT["kwargs"], "num_heads": 4}}, r"blocks\.0\.attn is 4 instead of 8"),
        ({**VIT, "spec": "timm:vit_tyni"}, "building the .*nearest"),
        ({**VIT, "kwargs": {"foo": 1}}, "building the .*failed"),
        ({**VIT, "kwargs": [1]}, "no known builder"),
        ({"spec": None, "kwargs": {}}, "no known builder"),
        ({"transformers": "NoSuchModel", "config": {}}, "building the .*failed"),
        ({"diffusers": "DiTTransformer2DModel", "config": None}, "no known builder"),
        ({}, "no known builder"),
    ],
)
def test_bad_recorded_builder_needs_a_given_model(folder: Path, builder: Any, message: str) -> None:
    edit(folder, put("builder", value=builder))
    with pytest.raises(LoadError, match=message):
        unskip.load(folder)
    assert Wiring.of(unskip.load(folder, model=vit())).alphas == [0.5] * 4


def test_model_with_other_shapes_is_unchanged(folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT["kwargs"], "embed_dim": 32})
    before = snapshot(model)
    with pytest.raises(LoadError, match="is 32 instead of 16"):
        unskip.load(folder, model=model)
    assert unchanged(model, before)


@pytest.mark.parametrize("drop", ["head.bias", "blocks.1.unskip_alpha0"])
def test_missing_weight_leaves_the_model_unchanged(folder: Path, drop: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    damage_weights(folder, to_bytes({name: value.bfloat16() for name, value in tensors.items()}))
    model = vit()
    before = snapshot(model)
    with pytest.raises(LoadError, match=f"weights: {drop}"):
        unskip.load(folder, model=model)
    assert unchanged(model, before)


def test_malformed_buffers_are_refused_with_strict_false(folder: Path) -> None:
    edit(folder, put("buffers", value={"a": {"dtype": "manual_seed"}}))
    model = vit()
    before = snapshot(model)
    with pytest.raises(LoadError, match="its buffers are invalid"):
        unskip.load(folder, model=model, strict=False)
    assert unchanged(model, before)


class Vector(nn.Module):
    """No attribute records its size."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_shape_mismatch_restores_the_dtypes(tmp_path: Path) -> None:
    unskip.save(Vector(3, torch.bfloat16), tmp_path)
    model = Vector(4)
    before = snapshot(model)
    with pytest.raises(LoadError, match="weights: scale"):
        unskip.load(tmp_path, model=model)
    assert unchanged(model, before)


def test_loading_into_a_rewired_model_is_refused(folder: Path) -> None:
    model = vit()
    unskip.rewire(model, Cut())
    with pytest.raises(BadInput, match="already rewired"):
        unskip.load(folder, model=model)
