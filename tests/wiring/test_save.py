"""save and load: equal models back, and a specific error with nothing half loaded otherwise."""

from __future__ import annotations

import hashlib
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
from diffusers import DiTTransformer2DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from tests.anatomy import handmade as h
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    Mamba2Config,
    Mamba2Model,
)

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring, spec
from unskip.errors import BadInput, LoadError
from unskip.wiring._record import seal

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


def edit(folder: Path, change: Any, sealed: bool = True) -> None:
    """Changes the record; with a new seal it is as if it had been written so."""
    path = folder / "unskip.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps({**record, "seal": seal(record)} if sealed else record))


def put(*keys: str | int, value: Any) -> Any:
    def change(record: Any) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


def damage_weights(folder: Path, data: bytes) -> None:
    """Weights that are none, with a record that vouches for them."""
    (folder / "model.safetensors").write_bytes(data)
    edit(folder, put("sha256", "model.safetensors", value=hashlib.sha256(data).hexdigest()))


def snapshot(model: nn.Module) -> Any:
    """All that loading could change in a model."""
    modules = [(path, type(module), dict(vars(module))) for path, module in model.named_modules()]
    attributes = [(path, cls, {k: v for k, v in data.items() if not k.startswith("_")}) for path, cls, data in modules]
    names = [(path, sorted(data)) for path, _, data in modules]
    values = [(name, value.dtype, value.clone()) for name, value in model.state_dict().items()]
    return attributes, names, values, [id(value) for value in (*model.parameters(), *model.buffers())]


def unchanged(model: nn.Module, before: Any) -> bool:
    attributes, names, values, identities = snapshot(model)
    return (
        attributes == before[0]
        and names == before[1]
        and identities == before[3]
        and [value[:2] for value in values] == [value[:2] for value in before[2]]
        and all(torch.equal(a[2], b[2]) for a, b in zip(values, before[2], strict=True))
    )


SITE, PLACE = ("wiring", "sites", -1), ("wiring", "sites", -1, "places", 0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "unskip.json").unlink(), "no unskip.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda f: (f / "unskip.json").write_text('{"format": 1'), "damaged, it does not read"),
        (lambda f: (f / "unskip.json").write_text("[]"), "damaged, it does not read"),
        (lambda f: edit(f, put("format", value=3)), "written in format 3; this unskip reads format 2. Update unskip"),
        (lambda f: edit(f, put("format", value=1)), "earlier version of unskip, in format 1.*save it again"),
        (lambda f: edit(f, put("format", value=0)), "earlier version of unskip, in format 0.*save it again"),
        (lambda f: edit(f, put("format", value=True)), "damaged, its format is True"),
        (lambda f: edit(f, put("format", value="2")), "damaged, its format is '2'"),
        (lambda f: edit(f, lambda r: r.pop("wiring")), "damaged, wiring is missing"),
        (lambda f: edit(f, lambda r: r.pop("seal"), sealed=False), "damaged, seal is missing"),
        (lambda f: edit(f, put("sha256", value=None)), "damaged, sha256 holds a NoneType"),
        (lambda f: edit(f, put("sha256", value="abc")), "damaged, sha256 holds a str"),
        (lambda f: edit(f, put("sha256", value={})), "checksum"),
        (lambda f: edit(f, put("structure", value={})), "its structure does not read"),
        (lambda f: edit(f, put("structure", "modules", value={"": 99})), "its structure does not read"),
        (lambda f: edit(f, put("sources", value={"a": 1})), "its sources or buffers do not read"),
        (lambda f: edit(f, put("buffers", value={"a": {"dtype": "manual_seed"}})), "the buffer a is missing"),
        (lambda f: edit(f, lambda r: r["wiring"]["sites"][0].pop("path")), "its wiring does not read"),
        (lambda f: edit(f, put(*SITE, "path", value="blocks.7")), "its wiring does not fit"),
        (lambda f: edit(f, put(*SITE, "path", value="blocks.0.attn")), "its wiring does not fit"),
        (lambda f: edit(f, put(*SITE, "path", value=7)), "its wiring does not read"),
        (lambda f: edit(f, put(*SITE, "index", value=9)), "not numbered in order"),
        (lambda f: edit(f, put(*SITE, "axis", value="x")), "its wiring does not read"),
        (lambda f: edit(f, put(*SITE, "more", value=1)), "its wiring does not read"),
        (lambda f: edit(f, put(*SITE, "places", value=["a"])), "its wiring does not read"),
        (lambda f: edit(f, put(*PLACE, "hops", 0, "digest", value="0" * 16)), r"Block\.forward.*another version"),
        (lambda f: edit(f, put(*PLACE, "hops", 0, "position", value=[1, 2, 3, 4])), "its wiring does not fit"),
        (lambda f: edit(f, put(*PLACE, "hops", value=[])), "its wiring does not fit"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[0, 9])), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[-1])), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", "plan", 0, "sites", value=[0, 0])), "a site has two rules"),
        (lambda f: edit(f, put("wiring", "plan", 0, "rule", value={"rule": "cutt"})), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", "plan", 0, "rule", value={"rule": "cut"})), "its wiring does not fit"),
        (lambda f: edit(f, put("wiring", "step", value=-5)), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", "step", value="x")), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", "alphas", value=[1.0])), "its wiring does not read"),
        (lambda f: edit(f, put("wiring", value=None)), "does not fit the weights"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-10]), "checksum"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\0" + (f / "model.safetensors").read_bytes()[1:]),
            "checksum",
        ),
        (lambda f: damage_weights(f, b"garbage" * 10), "does not read as safetensors"),
        (lambda f: damage_weights(f, b""), "does not read as safetensors"),
        (lambda f: edit(f, put("class", value="a.B")), "holds a a.B, but the model is a timm"),
        (lambda f: edit(f, put("class", value=None)), "damaged, class holds a NoneType"),
    ],
)
def test_a_bad_folder_is_refused_and_nothing_is_half_loaded(folder: Path, damage: Any, message: str) -> None:
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
        ({**VIT, "kwargs": {**VIT["kwargs"], "depth": 3}}, "depth of the model is 3 instead of 2|one module more"),
        ({**VIT, "kwargs": {**VIT["kwargs"], "num_heads": 4}}, r"head_dim of blocks\.0\.attn is 4 instead of 8"),
        ({**VIT, "spec": "timm:vit_tyni"}, "building the .*nearest"),
        ({**VIT, "kwargs": {"foo": 1}}, "building the .*failed"),
        ({**VIT, "kwargs": [1]}, "no builder that is known"),
        ({"spec": None, "kwargs": {}}, "no builder that is known"),
        ({"transformers": "NoSuchModel", "config": {}}, "building the .*failed"),
        ({"diffusers": "DiTTransformer2DModel", "config": None}, "no builder that is known"),
        ({}, "no builder that is known"),
    ],
)
def test_a_bad_builder_in_the_record_is_refused_and_a_given_model_still_loads(
    folder: Path, builder: Any, message: str
) -> None:
    edit(folder, put("builder", value=builder))
    with pytest.raises(LoadError, match=message):
        unskip.load(folder)
    assert Wiring.of(unskip.load(folder, model=vit())).alphas == [0.5] * 4


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(tree, dict | list) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in items for leaf in leaves(value, (*path, key))]
    return [path]


def test_every_edited_field_is_found(folder: Path) -> None:
    text = (folder / "unskip.json").read_text()
    every = [leaf for leaf in leaves(json.loads(text)) if leaf != ("format",)]
    assert len(every) > 200
    for leaf in every[:: max(1, len(every) // 150)]:
        edit(folder, put(*leaf, value="edited"), sealed=False)
        with pytest.raises(LoadError, match=r"changed after it was written|damaged"):
            unskip.load(folder)
        (folder / "unskip.json").write_text(text)
    unskip.load(folder)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_record_never_loads_another_model(tmp_path: Path, position: int, bit: int) -> None:
    saved = tmp_path / "m"
    if not saved.exists():
        torch.manual_seed(0)
        model = vit()
        unskip.rewire(model, Decay(0.6))
        unskip.save(model, saved, builder=VIT)
        (tmp_path / "whole.json").write_bytes((saved / "unskip.json").read_bytes())
    data = bytearray((tmp_path / "whole.json").read_bytes())
    data[position % len(data)] ^= 1 << bit
    (saved / "unskip.json").write_bytes(bytes(data))
    try:
        again = unskip.load(saved, model=vit())
    except LoadError:
        return
    # A space for a line break, for instance: the content is the same.
    assert json.loads(bytes(data)) == json.loads((tmp_path / "whole.json").read_bytes())
    assert Wiring.of(again).alphas == pytest.approx([1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6])


def test_a_model_of_other_shapes_is_left_as_it_was(folder: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **{**VIT["kwargs"], "embed_dim": 32})
    before = snapshot(model)
    with pytest.raises(LoadError, match="is 32 instead of 16"):
        unskip.load(folder, model=model)
    assert unchanged(model, before)


@pytest.mark.parametrize("drop", ["head.bias", "blocks.1.unskip_alpha0"])
def test_weights_that_lack_one_leave_a_model_without_its_wiring(folder: Path, drop: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    damage_weights(folder, to_bytes({name: value.bfloat16() for name, value in tensors.items()}))
    model = vit()
    before = snapshot(model)
    with pytest.raises(LoadError, match=f"does not fit the weights: {drop}"):
        unskip.load(folder, model=model)
    assert unchanged(model, before)


def test_malformed_buffers_are_refused_also_where_they_are_not_compared(folder: Path) -> None:
    edit(folder, put("buffers", value={"a": {"dtype": "manual_seed"}}))
    model = vit()
    before = snapshot(model)
    with pytest.raises(LoadError, match="its buffers do not read"):
        unskip.load(folder, model=model, check_source=False)
    assert unchanged(model, before)


class Vector(nn.Module):
    """Its only size is one that no setting tells."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_weights_of_another_shape_are_refused_and_dtypes_put_back(tmp_path: Path) -> None:
    unskip.save(Vector(3, torch.bfloat16), tmp_path)
    model = Vector(4)
    before = snapshot(model)
    with pytest.raises(LoadError, match="does not fit the weights: scale"):
        unskip.load(tmp_path, model=model)
    assert unchanged(model, before)


def test_bad_builders_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not build this model"):
        unskip.save(vit(), tmp_path, builder="timm:vit_tiny_patch16_224")
    with pytest.raises(BadInput, match="does not build this model: BadInput: timm:vit_tyni"):
        unskip.save(vit(), tmp_path, builder={**VIT, "spec": "timm:vit_tyni"})
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        unskip.save(vit(), tmp_path, builder={**VIT, "kwargs": {"act_layer": nn.ReLU}})
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
    unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] is None
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)


def test_a_module_of_another_librarys_inside_is_asked_for(tmp_path: Path) -> None:
    """A configuration that does not build the model any more, because the model was changed by hand."""
    model = bert()
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()
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


def rope(theta: float) -> nn.Module:
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        rope_parameters=parameters, pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaModel(config).eval()


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


# --- Dtypes and implementations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, Decay(0.6), Learn(0.5), Anneal(Keep(), Cut(), steps=10)], ids=str)
@pytest.mark.parametrize("given_model", [False, True])
def test_dtypes_come_back(tmp_path: Path, rule: Any, given_model: bool) -> None:
    model = vit()
    if rule is not None:
        unskip.rewire(model, rule).step(5)
    model.bfloat16()
    model.norm.float()  # as in mixed models
    unskip.save(model, tmp_path, builder=VIT)
    fresh = vit() if given_model else None
    parameters = list(fresh.parameters()) if fresh is not None else []
    again = unskip.load(tmp_path, model=fresh).eval()
    assert {k: v.dtype for k, v in again.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    assert {k: v.dtype for k, v in again.named_buffers()} == {k: v.dtype for k, v in model.named_buffers()}
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    names = {id(p) for p in again.parameters()}
    assert all(id(p) in names for p in parameters)  # an optimizer may hold them
    model.norm.bfloat16()
    again.norm.bfloat16()
    assert torch.equal(again(IMAGES.bfloat16()), model(IMAGES.bfloat16()))


def test_buffers_that_are_no_weights_come_back_in_their_dtype(tmp_path: Path) -> None:
    ids = torch.arange(12)[None]
    model = rope(100.0).bfloat16()
    unskip.save(model, tmp_path)
    again = unskip.load(tmp_path).eval()
    assert again.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert torch.equal(again(ids)[0], model(ids)[0])


def test_tied_weights_stay_tied_in_another_dtype(tmp_path: Path) -> None:
    unskip.save(gpt2().bfloat16(), tmp_path)
    again = unskip.load(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert again.lm_head.weight.dtype == torch.bfloat16
    alias = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    alias[1].weight.data = alias[0].weight.data
    unskip.save(alias.double(), tmp_path / "alias")  # .double() unties what only shares memory
    alias = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    alias[1].weight.data = alias[0].weight.data
    with pytest.raises(LoadError, match="does not fit the weights"):
        unskip.load(tmp_path / "alias", model=alias)
    assert alias[0].weight.data_ptr() == alias[1].weight.data_ptr()
    assert alias[0].weight.dtype == torch.float32


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_implementation_comes_back(tmp_path: Path, implementation: str) -> None:
    model = gpt2()
    model.set_attn_implementation(implementation)
    unskip.save(model, tmp_path)
    assert unskip.load(tmp_path).config._attn_implementation == implementation


def test_infinities_of_a_configuration_come_back(tmp_path: Path) -> None:
    """transformers writes them as a mapping, and does not read that."""
    config = Mamba2Config(hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=4, vocab_size=50)
    assert config.time_step_limit[1] == float("inf")
    unskip.save(Mamba2Model(config), tmp_path)
    assert unskip.load(tmp_path).config.time_step_limit[1] == float("inf")


def test_the_attention_implementations_of_inner_configurations_come_back(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 16, "patch_size": 8}, projection_dim=8)
    config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    unskip.save(CLIPModel(config), tmp_path)
    again = unskip.load(tmp_path).config
    assert again.text_config._attn_implementation == "eager"
    assert again.vision_config._attn_implementation == "sdpa"


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


# --- What cannot be saved or loaded into ------------------------------------------------------------------------------


def test_a_model_without_values_is_refused(tmp_path: Path, folder: Path) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **VIT["kwargs"])
    with pytest.raises(BadInput, match="meta device"):
        unskip.save(model, tmp_path / "meta")
    with pytest.raises(BadInput, match="meta device"):
        unskip.load(folder, model=model)
    again = unskip.load(folder, model=model.to_empty(device="cpu"))
    assert torch.equal(again.eval()(IMAGES), unskip.load(folder).eval()(IMAGES))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="is a file"):
        unskip.save(vit(), tmp_path / "file", builder=VIT)
    assert (tmp_path / "file").read_text() == "mine"


class Counting(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="_extra_state of the state_dict is no tensor"):
        unskip.save(Counting(2, 2), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_train_and_eval_are_left_to_the_caller(folder: Path) -> None:
    assert unskip.load(folder).training
    assert not unskip.load(folder, model=vit().eval()).training
    assert unskip.load(folder, model=vit().train()).training


def test_a_step_before_the_first_is_refused() -> None:
    wiring = unskip.rewire(vit(), Anneal(Keep(), Cut(), steps=10))
    with pytest.raises(BadInput, match="0 or more, got -1"):
        wiring.step(-1)
    assert wiring.at_step == 0
