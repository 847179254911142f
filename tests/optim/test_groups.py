"""Parameter groups: the role of each parameter in models of several libraries; and `build`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import unskip
from unskip import Learn
from unskip.errors import BadInput
from unskip.optim import SOAP, Muon, build, groups


def vit(**options: Any) -> nn.Module:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **options})


def roles(model: nn.Module) -> dict[str, str]:
    return {row.name: row.role for row in groups(model)}


def test_the_roles_of_a_vit() -> None:
    model = vit()
    result = roles(model)
    assert {name for name, role in result.items() if role == "token"} == {"cls_token", "pos_embed"}
    assert {name for name, role in result.items() if role == "input"} == {"patch_embed.proj.weight"}
    assert {name for name, role in result.items() if role == "head"} == {"head.weight"}
    hidden = {f"blocks.{i}.{part}.weight" for i in range(3) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert {name for name, role in result.items() if role == "hidden"} == hidden
    assert all(role == "vector" for name, role in result.items() if name.endswith("bias") or "norm" in name)
    assert {row.name for row in groups(model) if row.decays} == hidden | {"patch_embed.proj.weight", "head.weight"}


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_decays_blocks_includes_biases_but_no_norms(library: str) -> None:
    model = vit() if library == "timm" else torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5)
    results = {row.name for row in groups(model, decays="blocks") if row.decays}
    blocks = [name for name, _ in model.named_parameters() if name.startswith(("blocks.", "encoder.layers."))]
    norms = ("norm1", "norm2", "ln_1", "ln_2")
    assert results == {name for name in blocks if not any(norm in name for norm in norms)}
    assert any(name.endswith("bias") for name in results)


def test_decays_blocks_decays_biases_as_weights() -> None:
    model = vit()
    optimizer = build(model, "adamw", 0.1, 0.5, decays="blocks")
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.bias.fill_(2.0)  # type: ignore[index, union-attr]
    optimizer.step()
    assert model.get_parameter("blocks.0.mlp.fc1.bias")[0].item() == pytest.approx(2 * 0.95)
    torch.testing.assert_close(model.get_parameter("blocks.1.mlp.fc2.weight"), 0.95 * before["blocks.1.mlp.fc2.weight"])
    assert torch.equal(model.get_parameter("head.weight"), before["head.weight"])
    with pytest.raises(BadInput, match="no repeated blocks"):
        groups(nn.Linear(2, 2), decays="blocks")


MODELS: dict[str, Any] = {
    "swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 2, 1), embed_dim=12),
    "convnext": lambda: timm.create_model("convnext_atto"),
    "deit3": lambda: timm.create_model("deit3_small_patch16_224", depth=2),
    "resnet": lambda: timm.create_model("resnet18"),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_exactly_one_group(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    table = groups(model)
    assert [row.name for row in table] == [key for key, _ in model.named_parameters()]
    count = Counter(row.role for row in table)
    assert count["input"] == count["head"] == 1
    assert count["hidden"] >= 8
    for row in table:
        assert row.decays == (row.role in ("hidden", "input", "head"))
        assert row.param.ndim > 1 or row.role == "vector"
        assert row.name in str(table)


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

    table = groups(Tied())
    row = next(row for row in table if row.name == "embed.weight")
    assert (row.role, row.tied, row.decays) == ("embedding", ("out.weight",), False)
    assert "also out.weight" in str(table)
    optimizer = build(Tied(), "muon", lr=1e-3)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(table)


def test_a_head_tied_to_an_embedding_has_the_same_role_in_any_order() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 7, bias=False)
            self.embed = nn.Embedding(7, 4)
            self.embed.weight = self.out.weight

    (row,) = groups(Tied())
    assert (row.name, row.role, row.tied, row.decays) == ("out.weight", "embedding", ("embed.weight",), False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))


def test_each_expert_is_a_separate_matrix() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(Experts() for _ in range(2)), "head": nn.Linear(6, 3)})
    result = {row.name: (row.role, row.blocks) for row in groups(model) if row.param.ndim == 3}
    assert set(result.values()) == {("hidden", 4)}
    for name in ("soap", "muon"):
        optimizer = build(model, name, lr=1e-3)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
        if name == "soap":
            assert optimizer.state[model["blocks"][0].up]["left"].shape == (4, 6, 6)


def test_frozen_parameters_are_left_out_and_listed() -> None:
    model = vit()
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    table = groups(model)
    assert "blocks.0.attn.qkv.weight" in table.frozen
    assert "frozen, excluded: blocks.0.norm1.weight" in str(table)
    optimizer = build(model, "soap", lr=1e-3)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in model.parameters() if param.requires_grad}
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(BadInput, match="nothing to optimize"):
        groups(model)


@pytest.mark.parametrize("per", ["site", "channel"])
def test_learned_shortcut_weights_do_not_decay(per: Any) -> None:
    model = vit()
    unskip.rewire(model, Learn(0.5, per=per))
    result = {row.name: row for row in groups(model) if "unskip_" in row.name}
    assert result
    assert all(row.role == "vector" and not row.decays for row in result.values())


def test_layer_wise_decay_follows_depth() -> None:
    rates = {row.name: row.lr for row in groups(vit(), layer_decay=0.5)}
    ours = [rates[f"blocks.{i}.mlp.fc1.weight"] for i in range(3)]
    assert ours == [rates["blocks.0.norm1.bias"], 2 * ours[0], 4 * ours[0]]
    assert rates["patch_embed.proj.weight"] == rates["pos_embed"] == ours[0] / 2
    assert rates["head.weight"] == 1

    class Plain(nn.Module):  # without timm's group_matcher
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
            self.head = nn.Linear(4, 2)

    plain = {row.name: row.lr for row in groups(Plain(), layer_decay=0.5)}
    assert plain["stem.weight"] == 0.5**4
    assert [plain[f"layers.{i}.0.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert plain["head.bias"] == 1


def test_layer_wise_decay_needs_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    with pytest.raises(BadInput, match=r"no repeated blocks.*layer_decay"):
        groups(model, layer_decay=0.5)
    assert {row.lr for row in groups(model, layer_decay=1.0)} == {1.0}


def test_layer_wise_decay_if_timm_has_no_layer_numbers() -> None:
    with torch.device("meta"):
        model = timm.create_model("levit_128s")  # its group_matcher expects blocks, but it has stages
    rates = {row.name: row.lr for row in groups(model, layer_decay=0.5)}
    assert rates["stem.conv1.linear.weight"] < rates["stages.0.blocks.0.attn.qkv.linear.weight"]
    assert rates["stages.0.blocks.0.attn.qkv.linear.weight"] < rates["stages.2.blocks.0.attn.qkv.linear.weight"]
    assert rates["stages.2.blocks.0.attn.qkv.linear.weight"] < rates["head.linear.weight"] == 1


def test_layer_wise_decay_matches_timm() -> None:
    from timm.optim._param_groups import param_groups_layer_decay

    model = vit()
    theirs = {}
    for group in param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.7):
        for param in group["params"]:
            theirs[id(param)] = group["lr_scale"]
    for row in groups(model, layer_decay=0.7):
        assert row.lr == pytest.approx(theirs[id(row.param)]), row.name


def test_qkv_is_split_by_its_sibling_modules() -> None:
    model = vit()
    assert [row.name for row in groups(model, split_qkv=True) if row.blocks == 3] == [
        f"blocks.{i}.attn.qkv.weight" for i in range(3)
    ]
    # an MLP of ratio 3 has the same shape and is not split
    assert not any("fc1" in row.name for row in groups(vit(mlp_ratio=3), split_qkv=True) if row.blocks > 1)
    other = torchvision.models.VisionTransformer(32, 8, 1, 2, 24, 48)
    assert [row.name for row in groups(other, split_qkv=True) if row.blocks == 3] == [
        "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"
    ]
    for name in ("soap", "muon"):
        optimizer = build(model, name, lr=1e-3, split_qkv=True)
        assert sorted(blocks for group in optimizer.param_groups for blocks in group["blocks"])[-3:] == [3, 3, 3]


@pytest.mark.parametrize("name", ["adamw", "soap", "muon", "lion"])
def test_build_trains(name: str) -> None:
    torch.manual_seed(0)
    model = vit()
    rate = 3e-4 if name == "lion" else 3e-3
    optimizer = build(model, name, lr=rate, weight_decay=0.05, layer_decay=0.9, split_qkv=True)
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 5
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g.get("param_names", [])}
    if decays:
        assert decays["pos_embed"] == decays["norm.weight"] == 0
        assert decays["head.weight"] == 0.05


def test_build_returns_the_named_optimizer() -> None:
    model = vit()
    assert type(build(model, "AdamW", lr=1e-3)) is torch.optim.AdamW
    assert type(build(model, "soap", lr=1e-3, refresh_every=5)) is SOAP
    muon = build(model, "muon", lr=1e-3, momentum=0.9)
    assert type(muon) is Muon
    used = {n: g["use"] for g in muon.param_groups for n in g["param_names"]}
    assert {n for n, use in used.items() if use == "muon"} == {n for n, r in roles(model).items() if r == "hidden"}
    with pytest.raises(BadInput, match=r"'soup'.*soap"):
        build(model, "soup", lr=1e-3)
    with pytest.raises(BadInput, match="lr must be"):
        build(model, "soap", lr=-1)


@pytest.mark.parametrize("name", ["soap", "muon"])
def test_the_learning_rate_may_be_a_tensor(name: str) -> None:
    plain, tensor = (build(vit(), name, lr=lr, layer_decay=0.5) for lr in (1e-3, torch.tensor(1e-3)))
    assert len(plain.param_groups) == len(tensor.param_groups)
    for one, other in zip(plain.param_groups, tensor.param_groups, strict=True):
        assert one["param_names"] == other["param_names"]
        assert one["lr"] == pytest.approx(float(other["lr"]))


def test_wrapped_models_have_the_groups_of_the_inner_model() -> None:
    model = vit()
    names = [row.name for row in groups(model)]
    assert [row.name for row in groups(torch.compile(model))] == names  # type: ignore[arg-type]
    assert [row.name for row in groups(nn.DataParallel(model))] == names


def test_muon_uses_adamw_for_a_weight_of_one_row() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = build(model, "muon", lr=1e-2)
    used = {id(param): group["use"] for group in optimizer.param_groups for param in group["params"]}
    assert used[id(model[0].weight)] == "muon"
    assert used[id(model[2].weight)] == "adamw"


def test_a_registered_optimizer_gets_the_groups() -> None:
    class Plain(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float = 0.0) -> None:
            super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=momentum)

    assert unskip.optim.register("plain-sgd")(Plain) is Plain
    found = build(vit(), "Plain-SGD", lr=0.1, weight_decay=0.3, momentum=0.9, layer_decay=0.5)
    expected = build(vit(), "sgd", lr=0.1, weight_decay=0.3, momentum=0.9, layer_decay=0.5)
    assert type(found) is Plain
    for group, other in zip(found.param_groups, expected.param_groups, strict=True):
        keys = ("lr", "weight_decay", "momentum", "param_names")
        assert [group[key] for key in keys] == [other[key] for key in keys]
    with pytest.raises(BadInput, match="cannot be called 'soap'"):
        unskip.optim.register("soap")
    with pytest.raises(BadInput, match="plain-sgd"):
        build(vit(), "plain-sdg", lr=0.1)
