"""save and load restore a model with its builder, dtypes and attention implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from diffusers import DiTTransformer2DModel
from tests.anatomy import handmade as h
from tests.commands import python_in
from tests.wiring.folders import IMAGES, VIT, X, bert, gpt2, rope, vit
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    Mamba2Config,
    Mamba2Model,
)

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.wiring._builders import record_of


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
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "model.safetensors",
        "unskip.json",
        "config.json",
        "README.md",
    }
    if rule is not None:
        ours, theirs = Wiring.of(model), Wiring.of(again)
        assert theirs.alphas == ours.alphas
        assert theirs.sites == ours.sites
        assert str(theirs) == str(ours)
        theirs.undo()
        assert type(again.blocks[0]) is timm.models.vision_transformer.Block


def test_nonfinite_learned_weights_are_saved_as_valid_json(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, Learn(0.5))
    learned = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    with torch.no_grad():
        learned[0].fill_(torch.nan)
        learned[1].fill_(-torch.inf)
    unskip.save(model, tmp_path / "m", builder=VIT)
    json.loads((tmp_path / "m" / "unskip.json").read_text(), parse_constant=pytest.fail)
    assert str(Wiring.of(unskip.load(tmp_path / "m")).alphas) == "[nan, -inf, 0.5, 0.5]"


def test_infinite_branch_ratio_is_saved_as_valid_json(tmp_path: Path) -> None:
    """A stream of zeros, as from a zero-initialised embedding, gives an infinite ratio of branch to stream."""
    model = h.PreNorm()
    wiring = unskip.rewire(model, Decay(0.5), torch.zeros_like(X))
    assert wiring.sites[0].ratio == torch.inf
    unskip.save(model, tmp_path / "m")
    json.loads((tmp_path / "m" / "unskip.json").read_text(), parse_constant=pytest.fail)
    assert Wiring.of(unskip.load(tmp_path / "m", h.PreNorm())).sites == wiring.sites


def test_predicate_is_saved_as_its_sites(tmp_path: Path) -> None:
    model = vit()
    unskip.rewire(model, Cut(), where=lambda site: site.index in (0, 3))
    unskip.save(model, tmp_path, builder=VIT)
    assert Wiring.of(unskip.load(tmp_path)).alphas == [0.0, 1.0, 1.0, 0.0]


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
def test_configs_are_recorded(tmp_path: Path, build: Any) -> None:
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {"num_classes": 10, "img_size": 64, "in_chans": 1, "global_pool": "avg", "drop_path_rate": 0.1}),
        ("test_vit", {"img_size": [64, 32], "depth": 2, "init_values": 0.1, "qk_norm": True, "drop_rate": 0.1}),
        ("test_vit", {"num_classes": 0, "global_pool": "", "no_embed_class": True, "patch_drop_rate": 0.25}),
        ("test_resnet", {"num_classes": 3, "in_chans": 1, "drop_rate": 0.2, "drop_path_rate": 0.1}),
        ("test_convnext", {"num_classes": 0, "drop_path_rate": 0.2}),
    ],
    ids=str,
)
def test_timm_arguments_are_recorded(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = timm.create_model(name, **options)
    unskip.rewire(model, Learn(0.5))
    unskip.save(model, tmp_path)
    assert json.loads((tmp_path / "unskip.json").read_text())["builder"] == {"spec": f"timm:{name}", "kwargs": options}
    state = unskip.load(tmp_path).state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_torchvision_model_is_recorded_by_name(tmp_path: Path) -> None:
    model = torchvision.models.resnet34(num_classes=7).eval()  # not the first builder of its module
    unskip.rewire(model, Learn(0.5))  # adds weights that the builder does not
    state = torch.get_rng_state()
    unskip.save(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    again = unskip.load(tmp_path).eval()
    assert torch.equal(again(IMAGES), model(IMAGES))
    assert Wiring.of(again).alphas == Wiring.of(model).alphas


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_b_32", {"num_classes": 10, "image_size": 64}),
        ("swin_v2_t", {}),
        ("wide_resnet50_2", {"num_classes": 10}),
        ("convnext_tiny", {}),
    ],
)
def test_torchvision_names_and_arguments(name: str, kwargs: dict[str, int]) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, **kwargs)
    assert record_of(model, None) == {"spec": f"torchvision:{name}", "kwargs": kwargs}


def test_modified_library_model_is_saved_with_a_warning(tmp_path: Path) -> None:
    changed = torchvision.models.resnet18()
    changed.fc = nn.Sequential(nn.Linear(512, 16), nn.Linear(16, 10))
    with pytest.warns(UnskipWarning, match=r"ResNet.*model=") as said:
        unskip.save(changed, tmp_path)
    assert [Path(each.filename).name for each in said] == ["test_save.py"]
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)
    with torch.device("meta"):
        dropped = torchvision.models.vit_b_32(dropout=0.1)
    with pytest.warns(UnskipWarning, match=r"torchvision:vit_b_32.*dropout .* 0\.0"):
        assert record_of(dropped, None) is None


def test_load_without_a_builder_needs_a_model(tmp_path: Path) -> None:
    model = h.PreNorm()
    unskip.rewire(model, Cut(), X)
    unskip.save(model, tmp_path)
    with pytest.raises(LoadError, match="pass model="):
        unskip.load(tmp_path)
    again = unskip.load(tmp_path, model=h.PreNorm())
    assert torch.equal(again(X), model(X))


def test_builder_file_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.anatomy.handmade import Loop\n\ndef build(depth=2):\n    return Loop(depth)\n")
    model = h.Loop(4)
    unskip.rewire(model, Decay(0.5), X)
    unskip.save(model, tmp_path / "m", builder={"spec": f"{file}:build", "kwargs": {"depth": 4}})
    torch.save(X, tmp_path / "x.pt")
    code = 'import torch, unskip; print(unskip.load("m", trust=True)(torch.load("x.pt")).double().sum().item())'
    _, out, _ = python_in(tmp_path, code)
    assert float(out) == pytest.approx(model(X).double().sum().item(), rel=1e-5)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = gpt2()
    unskip.save(model, tmp_path)
    again = unskip.load(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_bad_builders_are_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not build this model"):
        unskip.save(vit(), tmp_path, builder="timm:vit_tiny_patch16_224")
    with pytest.raises(BadInput, match=r"does not build this model.*vit_tyni"):
        unskip.save(vit(), tmp_path, builder={**VIT, "spec": "timm:vit_tyni"})
    with pytest.raises(BadInput, match="cannot be written as JSON"):
        unskip.save(vit(), tmp_path, builder={**VIT, "kwargs": {"act_layer": nn.ReLU}})
    with pytest.raises(BadInput, match="with 'spec' and 'kwargs'"):
        unskip.save(vit(), tmp_path, builder={"name": "x"})
    assert list(tmp_path.iterdir()) == []


def test_no_pickle_is_written(folder: Path) -> None:
    assert (folder / "model.safetensors").read_bytes()[8:9] == b"{"  # the header of safetensors is JSON
    json.loads((folder / "unskip.json").read_text())


# --- Dtypes and implementations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, Decay(0.6), Learn(0.5), Anneal(Keep(), Cut(), steps=10)], ids=str)
@pytest.mark.parametrize("given_model", [False, True])
def test_dtypes_are_restored(tmp_path: Path, rule: Any, given_model: bool) -> None:
    model = vit()
    if rule is not None:
        unskip.rewire(model, rule).step(5)
    model.bfloat16()
    model.norm.float()  # a mixed-precision model
    unskip.save(model, tmp_path, builder=VIT)
    fresh = vit() if given_model else None
    parameters = list(fresh.parameters()) if fresh is not None else []
    again = unskip.load(tmp_path, model=fresh).eval()
    assert {k: v.dtype for k, v in again.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}
    assert {k: v.dtype for k, v in again.named_buffers()} == {k: v.dtype for k, v in model.named_buffers()}
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    names = {id(p) for p in again.parameters()}
    assert all(id(p) in names for p in parameters)  # an optimizer may already hold them
    model.norm.bfloat16()
    again.norm.bfloat16()
    assert torch.equal(again(IMAGES.bfloat16()), model(IMAGES.bfloat16()))


def test_nonpersistent_buffers_keep_their_dtype(tmp_path: Path) -> None:
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
    unskip.save(alias.double(), tmp_path / "alias")  # .double() separates tensors that only share memory
    alias = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    alias[1].weight.data = alias[0].weight.data
    with pytest.raises(LoadError, match="does not fit the weights"):
        unskip.load(tmp_path / "alias", model=alias)
    assert alias[0].weight.data_ptr() == alias[1].weight.data_ptr()
    assert alias[0].weight.dtype == torch.float32


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_is_restored(tmp_path: Path, implementation: str) -> None:
    model = gpt2()
    model.set_attn_implementation(implementation)
    unskip.save(model, tmp_path)
    assert unskip.load(tmp_path).config._attn_implementation == implementation


@pytest.mark.filterwarnings("error::unskip.errors.UnskipWarning")
def test_resized_vocabulary_is_restored(tmp_path: Path) -> None:
    model = gpt2()
    tokens = torch.tensor([[3, 59, 1]])
    unskip.rewire(model, Decay(0.6))
    model.resize_token_embeddings(60, mean_resizing=False)
    unskip.save(model, tmp_path)
    again = unskip.load(tmp_path)
    assert torch.equal(again.eval()(tokens)[0], model.eval()(tokens)[0])


def test_infinite_config_values_are_restored(tmp_path: Path) -> None:
    """transformers writes them as a mapping that it cannot read."""
    config = Mamba2Config(hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=4, vocab_size=50)
    assert config.time_step_limit[1] == float("inf")
    unskip.save(Mamba2Model(config), tmp_path)
    assert unskip.load(tmp_path).config.time_step_limit[1] == float("inf")


def test_attention_implementations_of_subconfigs_are_restored(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**small, "image_size": 16, "patch_size": 8}, projection_dim=8)
    config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    unskip.save(CLIPModel(config), tmp_path)
    again = unskip.load(tmp_path).config
    assert again.text_config._attn_implementation == "eager"
    assert again.vision_config._attn_implementation == "sdpa"


# --- Refused models and folders ---------------------------------------------------------------------------------------


def test_meta_models_are_refused(tmp_path: Path, folder: Path) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **VIT["kwargs"])
    with pytest.raises(BadInput, match="meta device"):
        unskip.save(model, tmp_path / "meta")
    with pytest.raises(BadInput, match="meta device"):
        unskip.load(folder, model=model)
    again = unskip.load(folder, model=model.to_empty(device="cpu"))
    assert torch.equal(again.eval()(IMAGES), unskip.load(folder).eval()(IMAGES))


def test_saving_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="is a file"):
        unskip.save(vit(), tmp_path / "file", builder=VIT)
    assert (tmp_path / "file").read_text() == "mine"


class ExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def test_non_tensor_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"_extra_state .* not a tensor"):
        unskip.save(ExtraState(2, 2), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_load_does_not_change_the_training_mode(folder: Path) -> None:
    assert unskip.load(folder).training
    assert not unskip.load(folder, model=vit().eval()).training
    assert unskip.load(folder, model=vit().train()).training


def test_negative_step_is_refused() -> None:
    wiring = unskip.rewire(vit(), Anneal(Keep(), Cut(), steps=10))
    with pytest.raises(BadInput, match="0 or more, got -1"):
        wiring.step(-1)
    assert wiring.at_step == 0
