"""Lightning: train, stop, resume and load with the wiring, equal bit for bit to an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tools.models import images, labels, vit
from torch import Tensor, nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring
from unskip.errors import UnskipWarning

pl = pytest.importorskip("pytorch_lightning")

from unskip.integrations.lightning import WiringCallback, restore  # noqa: E402  (after the library that it looks for)

RULES = [Decay(0.3), Anneal(Keep(), Cut(), steps=6), Learn(0.5)]


class Classifier(pl.LightningModule):
    """A LightningModule around a ViT that may be rewired; its code does not mention the wiring."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit().train()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.vit(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Restoring(Classifier):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        restore(self, checkpoint)


def fit(module: nn.Module, folder: Path, callbacks: list[Any], start: Path | None = None) -> Any:
    keep = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=4, callbacks=[*callbacks, keep], default_root_dir=folder, devices=1, **quiet)
    data = torch.utils.data.TensorDataset(images(8), labels(8))  # two steps per epoch
    trainer.fit(module, torch.utils.data.DataLoader(data, 4), ckpt_path=start)
    return trainer


def equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, rule: Any) -> None:
    whole = Classifier()
    unskip.rewire(whole.vit, rule)
    fit(whole, tmp_path, [WiringCallback()])
    # The parameters of Learn must exist before the state dict is loaded.
    again = Restoring() if isinstance(rule, Learn) else Classifier()
    fit(again, tmp_path, [WiringCallback()], tmp_path / "step=2.ckpt")
    assert Wiring.of(again.vit).alphas == Wiring.of(whole.vit).alphas
    assert equal(again, whole)
    assert torch.equal(again.vit(images()), whole.vit(images()))

    loaded = Restoring.load_from_checkpoint(tmp_path / "step=4.ckpt").eval()
    assert torch.equal(loaded.vit(images()), whole.eval().vit(images()))
    assert Wiring.of(Restoring.load_from_checkpoint(tmp_path / "step=2.ckpt").vit).at_step == 2


def test_checkpoints_without_the_wiring_give_a_warning(tmp_path: Path) -> None:
    module = Classifier()
    unskip.rewire(module.vit, Decay(0.3))
    with pytest.warns(UnskipWarning, match="WiringCallback"):
        fit(module, tmp_path, [])
    trainer = fit(module, tmp_path / "carried", [WiringCallback()])
    trainer.save_checkpoint(tmp_path / "whole.ckpt", weights_only=False)
    with pytest.warns(UnskipWarning, match="dump_checkpoint"):
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)  # calls no callback
