"""Fine-tuning: results, an unchanged model, layer decay, drop path and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from tests.evals.digits import digits, vit
from torch import nn

import unskip
from unskip import evals
from unskip.errors import BadInput, TrainingError, UnskipWarning
from unskip.evals._finetune import Classifier

SHORT: dict[str, Any] = {
    "epochs": 15,
    "warmup": 1,
    "batch": 32,
    "lr_256": 4e-2,
    "layer_decay": 1.0,
    "crop": "none",
    "flip": False,
}
SHORT |= {"drop_path": 0.0, "mixup": 0.0, "cutmix": 0.0, "erase": 0.0}


def test_drop_path_is_off_if_a_skip_is_cut() -> None:
    model, changes = vit(), SHORT | {"epochs": 2}
    unskip.rewire(model, {"attention": "keep", "mlp": "cut"})
    without = evals.finetune(model, digits(), digits("test"), size=8, changes=changes)
    with pytest.warns(UnskipWarning, match="drop path, 0.9"):
        accuracy = evals.finetune(model, digits(), digits("test"), size=8, changes=changes | {"drop_path": 0.9})
    assert accuracy == without


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fine_tuning_with_a_cuda_graph_reaches_the_same() -> None:
    model = vit().cuda()
    result = [
        evals.finetune(model, digits(count=800), digits("test", 200), size=8, graph=graph, changes=SHORT)
        for graph in (False, True)
    ]
    assert result[1] == pytest.approx(result[0], abs=0.05)
    assert result[1] > 0.3


@pytest.mark.full
def test_fine_tuning_learns_and_does_not_change_the_model() -> None:
    model = vit()
    unskip.rewire(model, "decay:0.8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    result = [evals.finetune(model, digits(count=800), digits("test", 200), size=8, changes=SHORT) for _ in range(2)]
    assert result[0] == result[1] > 0.3  # chance is 0.1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model.norm, nn.LayerNorm)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_copy_keeps_the_wiring_and_pools_only_patches() -> None:
    model = vit().eval()
    wiring = unskip.rewire(model, "decay:0.5")
    network = Classifier(model, 10, 0.02).eval()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    tokens = unskip.features(model, x, -1, pool=None)[2]
    expected = network.head(network.norm(tokens[:, 1:].mean(1)))
    assert torch.allclose(network(x), expected, atol=1e-5)
    wiring.undo()
    assert not torch.allclose(network(x), expected, atol=1e-3)


def test_layer_decay_and_drop_path_reach_the_optimizer_and_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.evals import _finetune

    seen: dict[str, Any] = {}

    def train(network: nn.Module, *rest: Any) -> float:
        seen["rates"] = [getattr(block.drop_path1, "drop_prob", None) for block in network.encoder.blocks]  # type: ignore[union-attr]
        seen["lr"] = {row.name: row.lr for row in unskip.optim.groups(network, layer_decay=0.65)}
        return 0.0

    monkeypatch.setattr(_finetune, "_train", train)
    evals.finetune(vit(), digits(), digits("test"), size=8)
    assert seen["rates"] == pytest.approx([0, 0.05, 0.1])
    lr = seen["lr"]
    assert lr["head.weight"] == 1
    assert lr["encoder.blocks.2.attn.qkv.weight"] == pytest.approx(0.65)
    assert lr["encoder.blocks.0.mlp.fc1.bias"] == pytest.approx(0.65**3)
    assert lr["encoder.pos_embed"] == lr["encoder.patch_embed.proj.weight"] == pytest.approx(0.65**4)


def test_bad_input_is_refused() -> None:
    with pytest.raises(BadInput, match="has no forward_features"):
        evals.finetune(nn.Linear(2, 2), digits(), digits("test"))
    convolutions = timm.create_model("resnet18", num_classes=0, in_chans=1)
    with pytest.raises(BadInput, match=r"\(32, 512, 1, 1\)"):
        evals.finetune(convolutions, digits(), digits("test"), size=8, changes=SHORT)
    some = digits().select((digits().labels != 3).nonzero().flatten())
    with pytest.raises(BadInput, match="class 3"):
        evals.finetune(vit(), some, digits("test"), size=8)
    broken = vit()
    nn.init.constant_(broken.blocks[0].attn.qkv.weight, torch.nan)  # type: ignore[index,union-attr,arg-type]
    with pytest.raises(TrainingError, match="nan after 10 steps"):
        evals.finetune(broken, digits(count=160), digits("test"), size=8, changes=SHORT | {"epochs": 2})
    with pytest.raises(BadInput, match="the warm-up alone takes"):
        evals.finetune(vit(), digits(), digits("test"), size=8, changes=SHORT | {"epochs": 1})


def test_fine_tuning_in_evaluate_is_a_result_of_the_whole_model() -> None:
    changes = {"finetune-mae-v1": SHORT | {"epochs": 2}}
    model, train, test = vit(), digits(), digits("test", 50)
    results = evals.evaluate(model, train, test, ["finetune-mae-v1"], size=8, seed=3, changes=changes)
    expected = evals.finetune(model, train, test, size=8, seed=3, changes=changes["finetune-mae-v1"])
    assert [(each.block, each.pool, each.values) for each in results] == [(None, None, {"finetune": expected})]
    assert results[0].changes == changes["finetune-mae-v1"]
    assert "all" in evals.by_depth(results)
    assert (results[0].n, *results[0].intervals) == (50, "finetune")
