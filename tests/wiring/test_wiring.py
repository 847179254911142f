"""The Wiring handle: the sites it governs, its report, set, step and undo."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from tests.anatomy import handmade as h
from tests.wiring.folders import IMAGES, X
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unskip
from unskip import Anneal, Cut, Decay, Keep, Scale, Wiring
from unskip.errors import BadInput, RewireError


def test_weights_follow_the_rule_in_execution_order(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Decay(0.5))
    assert wiring.alphas == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], abs=1e-15)
    assert wiring.betas == [1.0] * 6
    assert wiring.effective_decay == pytest.approx(0.9 * 0.8 * 0.7 * 0.6 * 0.5)
    assert wiring.verified


def test_rule_counts_only_the_sites_it_governs(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, {"attention": Cut(), "mlp": Decay(0.6)})
    assert wiring.alphas == pytest.approx([0.0, 1.0, 0.0, 0.8, 0.0, 0.6])
    wiring = unskip.rewire(vit, Decay(0.6), where="attention")
    assert wiring.alphas == pytest.approx([1.0, 1.0, 0.8, 1.0, 0.6, 1.0])
    wiring = unskip.rewire(vit, Cut(), where=lambda site: site.path == "blocks.1")
    assert wiring.alphas == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    wiring = unskip.rewire(vit, {lambda site: site.index == 0: Keep(), "attention": Cut()})
    assert wiring.alphas == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_rules_may_be_text(vit: nn.Module) -> None:
    assert unskip.rewire(vit, "decay:0.6").alphas[-1] == 0.6
    assert unskip.rewire(vit, {"mlp": "cut"}).alphas == [1.0, 0.0] * 3


def test_set_keeps_the_selection_and_rewire_does_not(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Decay(0.6), where="mlp")
    wiring.set(Cut())
    assert wiring.alphas == [1.0, 0.0] * 3
    wiring.set(Cut(), where="attention")
    assert wiring.alphas == [0.0, 1.0] * 3
    again = unskip.rewire(vit, Scale(0.5, 0.7))
    assert again is wiring
    assert again.alphas == [0.5] * 6
    assert again.betas == [0.7] * 6


def test_blocks_with_unit_weights_are_not_patched(vit: nn.Module) -> None:
    plain = type(vit.blocks[0])
    wiring = unskip.rewire(vit, Cut(), where=lambda site: site.path == "blocks.1")
    assert [type(block) is plain for block in vit.blocks] == [True, False, True]
    wiring.set(Keep())
    assert all(type(block) is plain for block in vit.blocks)
    assert not any("unskip" in name for block in vit.blocks for name in vars(block))


def test_long_skips_are_kept_unless_selected() -> None:
    model = h.UNet()
    wiring = unskip.rewire(model, Cut(), X)
    assert [wiring.alphas[site.index] for site in wiring.sites if site.long] == [1.0, 1.0]
    wiring = unskip.rewire(model, Cut(), where=lambda site: site.long)
    assert [alpha for alpha, site in zip(wiring.alphas, wiring.sites, strict=True) if site.long] == [0.0, 0.0]
    assert "kept" in str(wiring)


def test_str_shows_the_rules_and_effective_decay(vit: nn.Module) -> None:
    text = str(unskip.rewire(vit, Decay.to_product(5e-3)))
    assert "effective decay 0.005, in the paper's band [1e-3, 1e-2)" in text
    assert text.count("decay:product=0.005") == 6
    assert "above the paper's band" in str(unskip.rewire(vit, Decay(0.9)))
    assert "below the paper's band" in str(unskip.rewire(vit, Cut()))


def test_to_dict_is_json(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, {"mlp": Decay(0.6), lambda site: site.index == 0: Cut()})
    data = json.loads(json.dumps(wiring.to_dict()))
    assert data["rules"] == [{"where": "mlp", "rule": "decay:0.6"}, {"where": "<lambda>", "rule": "cut"}]
    assert [site["alpha"] for site in data["sites"]] == wiring.alphas


def test_repeated_site_decays_once_per_run() -> None:
    model = h.SameBranchLoop()
    wiring = unskip.rewire(model, Scale(0.5), X)
    assert wiring.alphas == [0.5]
    assert wiring.effective_decay == 0.125
    expected = X
    for _ in range(3):
        expected = 0.5 * expected + model.f(expected)
    assert torch.allclose(model(X), expected, atol=1e-6)


def test_each_loop_iteration_has_its_own_weights() -> None:
    model = h.Loop()
    wiring = unskip.rewire(model, Decay(0.5), X)
    expected = X
    for (attn, feed_forward), a, b in zip(model.layers, wiring.alphas[::2], wiring.alphas[1::2], strict=True):
        expected = attn(expected, expected, expected, need_weights=False)[0] + a * expected
        expected = feed_forward(expected) + b * expected
    assert torch.allclose(model(X), expected, atol=1e-6)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(X), model(X))
    model.layers.append(copy.deepcopy(model.layers[0]))
    with pytest.raises(unskip.errors.RewireError, match="more than the 3 turns"):
        model(X)


def test_parallel_branches_scale_the_stream_once() -> None:
    model = h.Parallel()
    unskip.rewire(model, Scale(0.5, 0.7), X)
    normed = model.norm(X)
    attended = model.attn(normed, normed, normed, need_weights=False)[0]
    assert torch.allclose(model(X), 0.5 * X + 0.7 * attended + 0.7 * model.f(normed), atol=1e-6)


def test_training_only_lines_are_rewired() -> None:
    model = h.TrainingArm()
    unskip.rewire(model, Cut(), X, where=lambda site: site.index == 0)
    for training in (True, False):
        model.train(training)
        stream = X.clone().requires_grad_()
        torch.manual_seed(0)
        out = model(stream)
        torch.manual_seed(0)
        inner = torch.nn.functional.dropout(model.f(X), 0.5) if training else model.f(X)
        assert torch.allclose(out, inner + model.g(inner), atol=1e-6)


def test_copies_have_their_own_wiring(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Decay(0.6), where=lambda site: True)
    for copied in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        other = Wiring.of(copied)
        assert other.model is copied
        assert other.alphas == wiring.alphas
        other.set(Cut())
        assert wiring.alphas[-1] == 0.6
        other.undo()
        assert type(copied.blocks[1]) is not type(vit.blocks[1])
    with pytest.raises(BadInput, match="not rewired"):
        Wiring.of(h.PreNorm())


def test_rewired_restores_the_previous_wiring(vit: nn.Module) -> None:
    plain = vit(IMAGES)
    with unskip.rewired(vit, Cut()) as wiring:
        assert wiring.alphas == [0.0] * 6
        assert not torch.equal(vit(IMAGES), plain)
    assert torch.equal(vit(IMAGES), plain)
    outer = unskip.rewire(vit, Anneal(Keep(), Decay(0.6), steps=10))
    outer.step(5)
    half = vit(IMAGES)
    with pytest.raises(RuntimeError, match="inside"), unskip.rewired(vit, Cut()):
        raise RuntimeError("inside")
    assert torch.equal(vit(IMAGES), half)


def test_undo_twice_then_rewire(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Cut())
    wiring.undo()
    wiring.undo()
    assert wiring.alphas == [1.0] * 6
    again = unskip.rewire(vit, Cut())
    assert again.alphas == [0.0] * 6


def test_blocks_share_one_patched_class(vit: nn.Module) -> None:
    unskip.rewire(vit, Cut())
    assert len({type(block) for block in vit.blocks}) == 1
    assert type(vit.blocks[0]).__name__ == "Block"
    assert isinstance(vit.blocks[0], timm.models.vision_transformer.Block)


class OtherNames(nn.Module):
    """`forward` is another name of `run`, and the additions are in a static and a class method."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h = (nn.Linear(4, 4) for _ in range(3))

    @staticmethod
    def join(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @classmethod
    def joined(cls, x: Tensor, y: Tensor) -> Tensor:
        return cls.join(y, x)

    def run(self, x: Tensor) -> Tensor:
        x = self.join(x, self.f(x))
        x = self.joined(self.g(x), x)
        return x + self.h(x)

    forward = run


def test_other_names_of_a_method_and_static_helpers_are_rewired() -> None:
    model, x = OtherNames(), torch.randn(2, 4)
    plain = model(x)
    wiring = unskip.rewire(model, Scale(0.5, 0.7), x)
    expected = x
    for f in (model.f, model.g, model.h):
        expected = 0.5 * expected + 0.7 * f(expected)
    assert torch.allclose(model(x), expected)
    assert torch.allclose(model.run(x), expected)
    wiring.undo()
    assert torch.equal(model(x), plain)


class NamesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def branch(self, x: Tensor) -> Tensor:
        return self.f(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + NamesItself.branch(self, x)


def test_a_method_that_names_its_class_is_rewired() -> None:
    model, x = NamesItself(), torch.randn(2, 4)
    unskip.rewire(model, Scale(0.5, 0.7), x)
    assert torch.allclose(model(x), 0.5 * x + 0.7 * model.f(x))


class CompiledMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def add(self, x: Tensor) -> Tensor:
        return x + self.f(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x)


def test_a_compiled_method_keeps_its_weights_in_a_compiled_model() -> None:
    model, x = CompiledMethod(), torch.randn(2, 4)
    unskip.rewire(model, Scale(0.5, 0.7), x)
    expected = 0.5 * x + 0.7 * model.f(x)
    assert torch.allclose(model(x), expected)
    assert torch.allclose(torch.compile(model, backend="eager")(x), expected)
    torch._dynamo.reset()


def test_an_addition_in_a_lambda_has_the_reason() -> None:
    class Lambda(nn.Module):
        f, add = None, lambda self, x, y: x + y

        def forward(self, x: Tensor) -> Tensor:
            return self.add(x, x @ torch.ones(4, 4))

    (site,) = unskip.audit(Lambda(), torch.randn(2, 4))
    assert site.problem is not None
    assert "adds in a lambda" in site.problem


def test_shared_helper_uses_the_rule_of_each_site() -> None:
    model = h.HelperMethod()
    unskip.rewire(model, {"attention": Cut(), "mlp": Scale(0.5, 0.7)}, X)
    attended = model.attn(X, X, X, need_weights=False)[0]
    assert torch.allclose(model(X), 0.5 * attended + 0.7 * model.f(attended), atol=1e-6)


def test_in_place_write_to_a_cut_sum_keeps_the_branch() -> None:
    model = h.WritesIntoTheSum()
    unskip.rewire(model, Cut(), X)
    total, branch = model(X)
    assert torch.equal(branch, model.f(X))
    assert torch.equal(total, 2 * branch)


def test_branch_equal_to_the_number_zero() -> None:
    model = h.OptionalBranch()
    wiring = unskip.rewire(model, Cut(), X)
    assert torch.equal(model(X, on=False), torch.zeros_like(X))
    wiring.set(Scale(0.5))
    assert torch.equal(model(X, on=False), 0.5 * X)


def test_stale_handle_does_not_change_a_newer_wiring(vit: nn.Module) -> None:
    old = unskip.rewire(vit, Cut())
    old.undo()
    old.step(5)
    assert old.alphas == [1.0] * 6
    unskip.rewire(vit, Decay(0.5))
    out = vit(IMAGES)
    old.undo()
    with pytest.raises(BadInput, match="replaced by a newer one"):
        old.set(Cut())
    assert torch.equal(vit(IMAGES), out)


@pytest.mark.parametrize("change", ["replaced", "dropped"])
def test_set_and_save_refuse_a_removed_block(vit: nn.Module, change: str, tmp_path: Path) -> None:
    wiring = unskip.rewire(vit, Decay(0.5))
    if change == "replaced":
        vit.blocks[1] = nn.Identity()
    else:
        vit.blocks = vit.blocks[:1]
    message = r"blocks\.1 was removed or replaced after VisionTransformer was rewired"
    with pytest.raises(BadInput, match=message):
        wiring.set(Cut())
    with pytest.raises(BadInput, match=message):
        unskip.rewire(vit, Cut())
    with pytest.raises(BadInput, match=message):
        unskip.save(vit, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    wiring.undo()
    assert {site.path for site in unskip.rewire(vit, Cut()).sites} == (
        {"blocks.0", "blocks.2"} if change == "replaced" else {"blocks.0"}
    )


def test_set_reaches_a_compiled_block(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Decay(0.5))
    vit.blocks[1] = torch.compile(vit.blocks[1], backend="eager")
    wiring.set(Cut())
    assert wiring.alphas == [0.0] * 6


def test_undo_refuses_under_a_later_subclass(vit: nn.Module) -> None:
    plain = vit(IMAGES)
    wiring = unskip.rewire(vit, Decay(0.5))
    block = vit.blocks[1]
    patched = type(block)
    block.__class__ = type("OnTop", (patched,), {})
    assert wiring.alphas == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    wiring.set(Cut())
    assert wiring.alphas == [0.0] * 6
    with pytest.raises(unskip.errors.WrappedError, match=r"blocks\.1 .*OnTop"):
        wiring.undo()
    assert wiring.alphas == [0.0] * 6
    block.__class__ = patched
    wiring.undo()
    assert torch.equal(vit(IMAGES), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes_are_verified(vit: nn.Module, dtype: torch.dtype) -> None:
    wiring = unskip.rewire(vit.to(dtype), Decay(0.5))
    assert wiring.verified
    assert vit(IMAGES.to(dtype)).dtype == dtype


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _peft(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["f.0"]))  # type: ignore[arg-type]


WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    "peft": _peft,
    "DDP of compile": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS)
@torch.no_grad()
def test_wiring_of_a_wrapped_model(wrap: str) -> None:
    model = h.PreNorm()
    x = torch.randn(2, 5, h.DIM, generator=torch.Generator().manual_seed(0))
    wiring = unskip.rewire(model, Cut(), x)
    wanted = model(x)
    wrapped = WRAPPERS[wrap](model)
    assert Wiring.of(wrapped) is wiring
    assert [site.path for site in unskip.audit(wrapped)] == [site.path for site in wiring.sites]
    torch.testing.assert_close(wrapped(x), wanted)


def test_set_applies_to_the_governed_sites(vit: nn.Module) -> None:
    wiring = unskip.rewire(vit, Scale(0.5), where="mlp")
    wiring.set(Decay(0.6))
    assert wiring.alphas == [1, 1, 1, 0.8, 1, 0.6]
    wiring.set(Cut(), where="attention")
    assert wiring.alphas == [0, 1] * 3
    wiring.set({"attention": Scale(0.9), lambda site: site.index == 1: Scale(0.8)})
    wiring.set(Cut())  # every site that one of the rules governs
    assert wiring.alphas == [0, 0, 0, 1, 0, 1]


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(h.DIM, h.DIM) for _ in range(3))

    def forward(self, x: torch.Tensor, turns: int = 1) -> torch.Tensor:
        for layer in self.layers[:turns]:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("turns", [1, 2])
def test_more_loop_iterations_than_in_the_example_are_refused(turns: int) -> None:
    model, x = Turns(), torch.ones(2, h.DIM)
    wiring = unskip.rewire(model, Scale(0.5, 1.0), (x, turns))
    assert wiring.alphas == [0.5] * turns
    wanted = x
    for layer in model.layers[:turns]:
        wanted = 0.5 * wanted + layer(wanted)
    torch.testing.assert_close(model(x, turns), wanted)
    with pytest.raises(RewireError, match=f"{turns} turn"):
        model(x, turns + 1)
