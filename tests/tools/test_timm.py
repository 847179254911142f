"""timm's feature interfaces, state dicts, gradient checkpointing and accumulation with rewired models."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from tests.tools.models import images, labels, vit
from tests.zoo.families import randomise_
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn

CLOSE = 1e-5
RULES = [Decay(0.3), Cut()]
SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2}


def differ(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) > 1e-2


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=CLOSE)


# --- Features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@torch.no_grad()
def test_forward_features_matches_the_rewired_forward(rule: Any) -> None:
    model, x = vit(), images()
    plain = model.forward_features(x)
    wiring = unskip.rewire(model, rule)
    found = model.forward_features(x)
    assert close(found, model.norm(unskip.features(model, x, blocks=-1, pool=None)[1]))
    assert torch.equal(model.forward_head(found), model(x))
    assert differ(found, plain)
    wiring.undo()
    assert torch.equal(model.forward_features(x), plain)


@pytest.mark.parametrize("rule", RULES, ids=str)
@torch.no_grad()
def test_forward_intermediates_match_the_features_of_the_blocks(rule: Any) -> None:
    model, x = vit(depth=3), images()
    asked: dict[str, Any] = {"output_fmt": "NLC", "return_prefix_tokens": True}
    _, plain = model.forward_intermediates(x, **asked)
    unskip.rewire(model, rule)
    final, found = model.forward_intermediates(x, **asked)
    blocks = unskip.features(model, x, pool=None)
    assert len(found) == len(blocks) == 3
    for i, (patches, prefix) in enumerate(found):
        assert close(torch.cat([prefix, patches], dim=1), blocks[i])
        assert differ(patches, plain[i][0])
    assert close(final, model.forward_features(x))
    _, last = model.forward_intermediates(x, indices=[2], **asked)
    assert torch.equal(last[0][0], found[2][0])


@torch.no_grad()
def test_features_only_models_return_rewired_features() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(0, 1), **SIZES).eval()
        randomise_(model)
    x = images()
    plain = model(x)
    wiring = unskip.rewire(model, Cut(), x)
    blocks = unskip.features(model, x, pool=None)
    for i, found in enumerate(model(x)):  # (images, dim, rows, columns), without the class token
        assert close(found.flatten(2).transpose(1, 2), blocks[i][:, 1:])
        assert differ(found, plain[i])
    wiring.undo()
    assert all(torch.equal(a, b) for a, b in zip(model(x), plain, strict=True))


@torch.no_grad()
def test_a_new_head_keeps_the_wiring() -> None:
    model, x = vit(depth=3), images()
    wiring = unskip.rewire(model, Decay(0.3))
    wanted = unskip.features(model, x, pool=None)[2]
    model.reset_classifier(7)
    assert model(x).shape == (4, 7)
    assert close(unskip.features(model, x, pool=None)[2], wanted)
    assert wiring.alphas[-1] == 0.3


# --- State dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@torch.no_grad()
def test_state_dicts_load_into_plain_and_rewired_models(rule: Any) -> None:
    model, x = vit(), images()
    plain = model(x)
    unskip.rewire(model, rule)
    fresh = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=5).eval()
    assert differ(fresh(x), plain)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(x), plain)  # state dicts do not contain the wiring
    unskip.rewire(fresh, rule)
    assert torch.equal(fresh(x), model(x))
    assert differ(fresh(x), plain)
    model.load_state_dict(vit().state_dict(), strict=True)  # into the rewired one
    assert torch.equal(fresh(x), model(x))


@torch.no_grad()
def test_learned_weights_are_in_the_state_dict() -> None:
    model, x = vit(), images()
    wiring = unskip.rewire(model, Learn(0.5))
    for i, alpha in enumerate(wiring.parameters.values()):
        alpha.fill_(0.2 * i)
    fresh = timm.create_model("vit_tiny_patch16_224", **SIZES, num_classes=5).eval()
    again = unskip.rewire(fresh, Learn(0.5))
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert again.alphas == wiring.alphas == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert torch.equal(fresh(x), model(x))


# --- Training ---------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, pieces: int = 1) -> dict[str, Tensor]:
    """Gradients of the mean loss of a batch, optionally accumulated over pieces."""
    model.zero_grad(set_to_none=True)
    for x, y in zip(images().chunk(pieces), labels().chunk(pieces), strict=True):
        (cross_entropy(model(x), y) / pieces).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys() != set()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class Recomputed(nn.Module):
    """A block with gradient checkpointing."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def counted(model: nn.Module) -> list[int]:
    """A list with one entry per call of the last block's MLP. Recomputation stops after the last saved tensor."""
    runs: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(("blocks.1.mlp", "blocks.1.block.mlp")):
            module.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


TRAINED = [*RULES, Anneal(Keep(), Cut(), steps=4), Learn(0.5)]


@pytest.mark.parametrize("rule", TRAINED, ids=str)
def test_set_grad_checkpointing_does_not_change_gradients(rule: Any) -> None:
    model = vit().train()
    wiring = unskip.rewire(model, rule)
    wiring.step(2)
    wanted = gradients(model)
    runs = counted(model)
    model.set_grad_checkpointing()
    assert distance(gradients(model), wanted) < CLOSE
    assert len(runs) == 2
    assert set(wiring.parameters) <= wanted.keys()
    wiring.undo()
    plain = gradients(model)
    assert max(float((plain[name] - wanted[name]).abs().max()) for name in plain) > 1e-3


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_checkpoint_does_not_change_gradients(rule: Any, reentrant: bool) -> None:
    model = vit().train()
    unskip.rewire(model, rule)
    wanted = gradients(model)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Recomputed(block, reentrant)
    runs = counted(model)
    got = {name.replace(".block.", "."): grad for name, grad in gradients(model).items()}
    assert len(runs) == 2
    assert distance(got, wanted) < CLOSE


def test_a_model_of_checkpointed_blocks_can_be_rewired() -> None:
    wanted, model = vit().train(), vit().train()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Recomputed(block, False)
    plain = gradients(model)
    unskip.rewire(wanted, Decay(0.3))
    unskip.rewire(model, Decay(0.3), images())
    got = gradients(model)
    assert distance({name.replace(".block.", "."): grad for name, grad in got.items()}, gradients(wanted)) < CLOSE
    assert distance(got, plain) > 1e-3


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_accumulate(rule: Any) -> None:
    model = vit().train()
    plain = gradients(model)
    unskip.rewire(model, rule)
    whole = gradients(model)
    assert distance(gradients(model, pieces=2), whole) < CLOSE
    assert distance(gradients(model, pieces=4), whole) < CLOSE
    assert distance(whole, plain) > 1e-3
