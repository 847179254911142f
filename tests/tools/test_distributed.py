"""Data-parallel training of rewired models: two processes match one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.commands import on_ranks
from tests.tools.models import images, labels, vit
from tests.tools.ranks import BATCH, RULES, main, optimizer_of, single, train
from torch import Tensor
from torch.nn.functional import cross_entropy

import unskip
from unskip import Cut, Decay
from unskip.errors import UnskipError

CLOSE = 1e-5

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the two ranks, computed once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, folder, lambda: main(folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("rule", RULES)
def test_ddp_matches_one_process(ranks: list[dict[str, Any]], rule: str) -> None:
    first, second = (found["ddp"][rule] for found in ranks)
    assert same(first, second)
    assert distance(first, single(RULES[rule])) < CLOSE
    if "learn" not in rule:  # Learn adds keys
        assert distance(first, vit().state_dict()) > 1e-2
    if rule in ("decay", "cut", "anneal"):
        assert distance(first, ranks[0]["ddp"]["keep"]) > 1e-2


def test_ddp_trains_learned_weights(ranks: list[dict[str, Any]]) -> None:
    alphas = [value for name, value in ranks[0]["ddp"]["learn"].items() if "unskip_alpha" in name]
    assert len(alphas) == 4
    assert all(abs(alpha - 0.5) > 1e-4 for alpha in alphas)


@pytest.mark.parametrize("rule", ["decay", "cut"])
def test_accelerate_on_two_processes_matches_one(ranks: list[dict[str, Any]], rule: str) -> None:
    first, second = (found["accelerate"][rule] for found in ranks)
    assert same(first, second)
    assert distance(first, single(RULES[rule])) < CLOSE
    assert distance(first, ranks[0]["ddp"]["keep"]) > 1e-2


@pytest.mark.parametrize("rule", ["keep", "decay", "cut", "learn channel"])
def test_fully_shard_computes_and_trains_the_rewired_model(ranks: list[dict[str, Any]], rule: str) -> None:
    model = vit()
    plain = model(images(BATCH))
    unskip.rewire(model, RULES[rule])
    wanted = model(images(BATCH))
    assert (torch.dist(wanted, plain) > 1e-2) == (rule != "keep")
    for found in ranks:
        assert torch.allclose(found["fsdp"][rule]["output"], wanted, atol=CLOSE)
        assert distance(found["fsdp"][rule]["weights"], single(RULES[rule])) < CLOSE


def test_a_sharded_model_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all(
        "Rewire the plain model first, then call fully_shard" in found["rewire_after_sharding"] for found in ranks
    )


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_the_wiring_of_a_sharded_model_works_or_refuses(ranks: list[dict[str, Any]], way: str) -> None:
    model = vit()
    outputs = {"plain": model(images(BATCH))}
    wiring = unskip.rewire(model, Decay(0.3))
    alphas, outputs["decay"] = wiring.alphas, model(images(BATCH))
    wiring.set(Cut())
    outputs["cut"] = model(images(BATCH))
    for found in ranks:
        told = found["handle_of_a_sharded_model"][way]
        assert told["alphas"] == alphas
        before = "decay"
        for action, after in (("set", "cut"), ("undo", "plain")):
            if told[action] == "done":
                before = after
            else:  # refused with a reason, and the model is unchanged
                assert "FSDP" in told[action] or "fully_shard" in told[action]
            assert torch.allclose(told[f"{action}: output"], outputs[before], atol=CLOSE)
        if way == "whole":  # the blocks keep their classes
            assert (told["set"], told["undo"]) == ("done", "done")


# --- accelerate, in one process ---------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An Accelerator on the CPU. Its shared state is reset afterwards."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(os, "environ", os.environ.copy())
    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, **getattr(request, "param", {}))
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("rule", ["decay", "cut", "anneal"])
def test_accelerate_trains_a_rewired_model(accelerator: Any, rule: str) -> None:
    model = vit()
    wiring = unskip.rewire(model, RULES[rule])
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    train(prepared, wiring, images(BATCH), labels(BATCH), optimizer, accelerator.backward)
    trained = accelerator.unwrap_model(prepared).state_dict()
    assert distance(trained, single(RULES[rule])) < CLOSE
    assert distance(trained, single(RULES["keep"])) > 1e-2


@pytest.mark.parametrize("accelerator", [{"gradient_accumulation_steps": 2}], indirect=True)
def test_accelerate_accumulates_gradients(accelerator: Any) -> None:
    def step(pieces: int, backward: Any, model: Any, optimizer: Any) -> None:
        for x, y in zip(images(BATCH).chunk(pieces), labels(BATCH).chunk(pieces), strict=True):
            with accelerator.accumulate(model):
                backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    whole = vit()
    unskip.rewire(whole, Decay(0.3))
    plain = optimizer_of(whole)
    cross_entropy(whole(images(BATCH)), labels(BATCH)).backward()
    plain.step()
    model = vit()
    unskip.rewire(model, Decay(0.3))
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    step(2, accelerator.backward, prepared, optimizer)
    assert distance(model.state_dict(), whole.state_dict()) < CLOSE
    assert distance(model.state_dict(), vit().state_dict()) > 1e-3


# accelerate sets an instance attribute `forward` that wraps the forward of the current class.
@pytest.mark.parametrize("accelerator", [{"mixed_precision": "bf16"}], indirect=True)
def test_undo_after_mixed_precision_of_a_model_with_an_addition_in_its_own_forward(accelerator: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 4, 16)
    plain = layer(x)  # with autograd, since in inference torch uses a fused kernel and does not call the forward
    wiring = unskip.rewire(layer, Cut(), x)
    prepared = accelerator.prepare(layer)
    assert not torch.allclose(prepared(x), plain, atol=0.1)
    try:
        wiring.undo()
    except UnskipError:
        return  # refused
    assert torch.allclose(prepared(x), plain, atol=0.1)
