"""Frozen heads: no optimizer changes them, all other weights are trained, and a resumed run keeps them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unskip
from unskip.errors import BadInput, InitError
from unskip.init import freeze_heads

timm = pytest.importorskip("timm")
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
WIDTH = 12  # of a head
NARROW = {"depth": 2, "embed_dim": 36, "num_heads": 3, "num_classes": 5}


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, **NARROW)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def heads(model: Any, first: int) -> list[torch.Tensor]:
    """Rows of q, k and v, their biases, and columns of the output, sliced by hand from timm's layout."""
    found = []
    for block in model.blocks:
        qkv, bias = block.attn.qkv.weight.view(3, 3, WIDTH, -1), block.attn.qkv.bias.view(3, 3, WIDTH)
        found += [qkv[:, :first], bias[:, :first], block.attn.proj.weight[:, : first * WIDTH]]
    return [each.detach().clone() for each in found]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(IMAGES).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "soap", "muon"])
def test_only_frozen_heads_are_constant(name: str) -> None:
    model = vit()
    optimizer = unskip.optim.build(model, name, lr=1e-2, weight_decay=0.3)
    before, all_before = heads(model, 2), [each.detach().clone() for each in model.parameters()]
    unfreeze = freeze_heads(model, optimizer, 2, IMAGES[:1])
    train(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, heads(model, 2), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(all_before, model.parameters(), strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(heads(vit(), 3), heads(model, 3), strict=True)]
    assert all(moved)  # the third head
    unfreeze()
    train(model, optimizer)
    assert not any(torch.equal(one, other) for one, other in zip(before, heads(model, 2), strict=True))


def test_weights_loaded_or_moved_before_the_first_step_are_kept() -> None:
    model = vit()
    optimizer = unskip.optim.build(model, "adamw", lr=1e-2, weight_decay=0.1)
    freeze_heads(model, optimizer, 1, IMAGES[:1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
            parameter.data = parameter.data.clone()  # as model.to(device) does
    loaded = heads(model, 1)
    train(model, optimizer, 1)
    assert all(torch.equal(one, other) for one, other in zip(loaded, heads(model, 1), strict=True))


def test_paired_units_and_values_move_by_a_share_of_each_step() -> None:
    """Against SGD: with a factor of 0.1 their steps are a tenth, and queries and keys are constant."""
    models = [vit(), vit()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if model is models[1]:
            freeze_heads(model, optimizer, 2, IMAGES[:1], pairs=True, rate=0.1)
        train(model, optimizer, 1)
    free, held = ([*unskip.parts(model, IMAGES[:1])] for model in models)
    for start, whole, share in zip(unskip.parts(vit(), IMAGES[:1]), free, held, strict=True):
        if isinstance(start, unskip.anatomy.AttentionParts):
            assert torch.equal(start.q[:2], share.q[:2])
            pairs = [(start.v[:2], whole.v[:2], share.v[:2]), (start.out[:, :24], whole.out[:, :24], share.out[:, :24])]
            assert torch.equal(whole.v[2:], share.v[2:])
        else:
            pairs = [(start.up[:72], whole.up[:72], share.up[:72])]
            pairs += [(start.up_bias[:72], whole.up_bias[:72], share.up_bias[:72])]
            pairs += [(start.down[:, :72], whole.down[:, :72], share.down[:, :72])]
            assert torch.equal(whole.up[72:], share.up[72:])
        for before, after, slow in pairs:
            assert not torch.equal(before, after)
            torch.testing.assert_close(slow - before, 0.1 * (after - before), atol=1e-7, rtol=1e-3)


def test_heads_that_cannot_be_frozen_are_refused() -> None:
    model = vit()
    optimizer = unskip.optim.build(model, "adamw", lr=1e-2, weight_decay=0.1)
    with pytest.raises(InitError, match="its heads are 3"):
        freeze_heads(model, optimizer, 4, IMAGES[:1])
    with pytest.raises(BadInput, match="heads"):
        freeze_heads(model, optimizer, 0, IMAGES[:1])
    with pytest.raises(BadInput, match="rate"):
        freeze_heads(model, optimizer, 1, IMAGES[:1], rate=1.5)
    with pytest.raises(InitError, match="no attention"):
        freeze_heads(timm.create_model("resnet18"), optimizer, 1, torch.randn(1, 3, 32, 32))


@pytest.mark.filterwarnings("ignore:flat-loss")
@pytest.mark.parametrize("words", ["skipless:shaped,carry=2", "skipless:paired,carry=2"])
def test_a_resumed_run_keeps_its_frozen_heads(tmp_path: Path, words: str) -> None:
    fields: dict[str, Any] = {"model_args": "depth=2,embed_dim=32,num_heads=4,attn_head_dim=16", "batch": 16}
    fields |= {"shortcut": "cut", "init": words, "optimizer": "soap", "device": "cpu"}
    fields |= {"freeze_heads": 2, "health": False, "checkpoint_every": 3, "steps": 6}
    unskip.train(unskip.recipes.supervised("digits", **fields), tmp_path / "run", quiet=True)
    whole = unskip.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    middle = unskip.load(tmp_path / "run")
    unskip.resume(tmp_path / "run", quiet=True)
    again = unskip.load(tmp_path / "run")
    for start, one, other in zip(*(unskip.parts(each).attentions() for each in (middle, whole, again)), strict=True):
        assert torch.equal(start.v[:2], other.v[:2])
        assert not torch.equal(start.v[2:], other.v[2:])
        assert torch.equal(one.v, other.v)
    for start, part in zip(*(unskip.parts(each).mlps() for each in (middle, again)), strict=True):
        assert torch.equal(start.up[:64], part.up[:64]) == ("paired" in words)
        assert not torch.equal(start.up[64:], part.up[64:])
    with pytest.raises(BadInput, match="fsdp"):
        unskip.train(unskip.recipes.supervised("digits", fsdp=True, **fields), tmp_path / "sharded")
    with pytest.raises(BadInput, match="give freeze_heads, too"):
        unskip.train(unskip.recipes.supervised("digits", carry_rate=0.1, device="cpu"), tmp_path / "rate")


def test_distillation_with_frozen_heads() -> None:
    fields: dict[str, Any] = {
        "model_args": "depth=2,embed_dim=32,num_heads=4",
        "batch": 16,
        "steps": 3,
        "health": False,
    }
    task, schedule = unskip.recipes.build_task(unskip.recipes.dino("digits", device="cpu", freeze_heads=1, **fields))
    model: Any = task.model
    before = [part.q.clone() for part in unskip.parts(model.student.backbone).attentions()]
    for step, batch in enumerate(task.feed.iterate(0, schedule.steps)):
        task.before_step(step)
        task.loss(model, batch)[0].backward()
        task.optimizer.step()
    for start, part in zip(before, unskip.parts(model.student.backbone).attentions(), strict=True):
        assert torch.equal(start[:1], part.q[:1])
        assert not torch.equal(start[1:], part.q[1:])
