"""transformers.Trainer: train, stop, resume and load with the wiring, equal bit for bit to an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tools.models import gpt2, ids, vit
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.integrations.transformers import WiringCallback

STEPS = 4
DATA = [{"input_ids": text, "labels": text} for text in ids(batch=2 * STEPS)]
EXAMPLE = {"input_ids": ids(), "use_cache": False}
RULES = [Decay(0.3), Anneal(Keep(), Cut(), steps=6), Learn(0.5)]


def trainer(model: nn.Module, folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    data = {"train_dataset": DATA, "eval_dataset": DATA}
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, save_steps=2, per_device_train_batch_size=2, learning_rate=0.01, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="steps", **options,
    )  # fmt: skip
    return Trainer(model, arguments, callbacks=callbacks, **data)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(**EXAMPLE).logits


def equal(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, rule: Any) -> None:
    whole = gpt2()
    unskip.rewire(whole, rule, EXAMPLE)
    trainer(whole, tmp_path, [WiringCallback()]).train()

    # The parameters of Learn must exist when the optimizer is built; other rules are restored in a plain model.
    again = unskip.load(tmp_path / "checkpoint-2") if isinstance(rule, Learn) else gpt2()
    trainer(again, tmp_path / "again", [WiringCallback()]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert Wiring.of(again).alphas == Wiring.of(whole).alphas
    assert equal(again, whole)
    assert torch.equal(logits(again), logits(whole))

    # Each checkpoint loads with its own step. Only unskip.json is read, not other files of an untrusted checkpoint.
    (tmp_path / "checkpoint-4" / "config.json").write_text(
        '{"model_type": "gpt2", "attn_implementation": "their/code"}'
    )
    assert torch.equal(logits(unskip.load(tmp_path / "checkpoint-4")), logits(whole))
    assert Wiring.of(unskip.load(tmp_path / "checkpoint-2")).at_step == 2
    (tmp_path / "checkpoint-2" / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="adapter"):
        unskip.load(tmp_path / "checkpoint-2")


def test_resuming_with_a_rule_that_differs_from_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    unskip.rewire(model, Decay(0.3), EXAMPLE)
    trainer(model, tmp_path, [WiringCallback()]).train()
    other = gpt2()
    unskip.rewire(other, Decay(0.6), EXAMPLE)
    with pytest.raises(BadInput, match=r"decay:0\.3 .* decay:0\.6"):
        trainer(other, tmp_path, [WiringCallback()]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_best_model_is_loaded_with_the_alphas_of_its_step(tmp_path: Path) -> None:
    model = gpt2()
    unskip.rewire(model, Anneal(Keep(), Decay(0.2), steps=8), EXAMPLE)
    run = trainer(
        model, tmp_path, [WiringCallback()], eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    run.train()
    best = unskip.load(tmp_path / "checkpoint-2")  # the loss falls, and the greatest counts as best here
    assert Wiring.of(model).alphas == Wiring.of(best).alphas
    assert torch.equal(logits(model), logits(best))


def test_a_model_that_is_not_from_transformers(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        """A model that returns its loss, as Trainer requires."""

        def __init__(self) -> None:
            super().__init__()
            self.body = vit()

        def forward(self, pixels: Tensor, labels: Tensor) -> Any:
            scores = self.body(pixels)
            return nn.functional.cross_entropy(scores, labels), scores

    whole, again = WithLoss(), WithLoss()
    unskip.rewire(whole.body, Anneal(Keep(), Cut(), steps=6))
    data = [{"pixels": torch.randn(3, 16, 16), "labels": torch.tensor(i % 5)} for i in range(8)]
    for model, folder, start in ((whole, "a", None), (again, "b", str(tmp_path / "a/checkpoint-2"))):
        run = trainer(model, tmp_path / folder, [WiringCallback()])
        run.train_dataset = data
        run.train(resume_from_checkpoint=start)
    assert Wiring.of(again.body).alphas == Wiring.of(whole.body).alphas
    assert equal(again, whole)


# --- Checkpoints without a wiring -------------------------------------------------------------------------------------


def test_files_without_the_wiring_give_a_warning(tmp_path: Path) -> None:
    model = gpt2()
    wiring = unskip.rewire(model, Decay(0.3), EXAMPLE)
    run = trainer(model, tmp_path, [])
    with pytest.warns(UnskipWarning, match="WiringCallback"):
        run.train()
    with pytest.raises(LoadError, match="WiringCallback"):
        unskip.load(tmp_path / "checkpoint-2")
    with pytest.warns(UnskipWarning, match=r"save_pretrained.*unskip\.save"):
        model.save_pretrained(tmp_path / "plain")
    with pytest.warns(UnskipWarning, match=r"save_model.*unskip\.save"):
        run.save_model(str(tmp_path / "model"))
    unskip.save(model, tmp_path / "saved")  # warnings are errors in the tests: these two give none
    model.state_dict()
    wiring.undo()
    model.save_pretrained(tmp_path / "plain")
    assert not model._state_dict_pre_hooks


def test_the_callback_without_a_wiring_does_nothing(tmp_path: Path) -> None:
    trainer(gpt2(), tmp_path, []).train()
    model = gpt2()
    run = trainer(model, tmp_path, [WiringCallback()])
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # this checkpoint was saved without the callback
    assert not (tmp_path / "checkpoint-4" / "unskip.json").exists()
