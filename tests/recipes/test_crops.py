"""The recipes dino and simclr: options, runs on digits, resume, schedules, warnings of collapse."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evals.hosts import NoHost

import unskip
from unskip import recipes
from unskip.errors import BadInput, UnskipError, UnskipWarning
from unskip.models import DINO, SimCLR
from unskip.optim import schedules
from unskip.recipes import open_run
from unskip.training import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # short runs give health warnings

TINY: dict[str, Any] = {
    "model_args": "depth=2,embed_dim=16,num_heads=2",
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "online_images": 300,
    "hidden": 24,
    "health": False,
    "device": "cpu",
}
DINO_TINY = {"local_crops": 2, "projection": 32, "bottleneck": 8, **TINY}


def dino(**changes: Any) -> recipes.Dino:
    return recipes.dino("digits", **{**DINO_TINY, **changes})


def simclr(**changes: Any) -> recipes.Simclr:
    return recipes.simclr("digits", **{**TINY, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shortcut": "cut", "init": "skipless:vit-small"},
        {"shortcut": "decay:0.6", "init": "zero"},
        {"shortcut": "learn:1.0"},
        {"shortcut": "anneal:keep>cut@4", "where": "mlp"},
        {"balance": "sinkhorn", "head_norm": False, "local_crops": 0},
        {"freeze_last": 1.0, "bottleneck_norm": False},
        {"optimizer": "soap"},
        {"optimizer": "muon", "shortcut": "cut", "init": "skipless"},
    ],
    ids=str,
)
def test_any_shortcut_init_and_optimizer(changes: dict[str, Any]) -> None:
    task, _ = recipes.build_task(dino(**changes))
    model = task.model
    assert isinstance(model, DINO)
    trained = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.student.parameters() if p.requires_grad}
    assert model.last_layer().requires_grad == (changes.get("freeze_last") is not None)
    assert not any(p.requires_grad for p in model.teacher.parameters())
    assert [*model.student.state_dict()] == [*model.teacher.state_dict()]
    assert task.before_step is not None
    assert task.after_step is not None
    teacher = {name: value.clone() for name, value in model.teacher.state_dict().items()}
    for step, batch in enumerate(task.feed.iterate(0, 2)):
        task.before_step(step)
        loss, numbers = task.loss(model, batch)
        loss.backward()
        assert all(p.grad is not None for p in model.student.parameters() if p.requires_grad)
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.after_step(step)
        assert set(numbers) == {"teacher_entropy", "teacher_spread", "divergence"}
    assert any(not torch.equal(value, teacher[name]) for name, value in model.teacher.state_dict().items())
    if task.wirings:
        mine, theirs = (unskip.Wiring.of(tower.backbone) for tower in (model.student, model.teacher))
        assert mine.betas == pytest.approx(theirs.betas)
        if "anneal" in str(changes):
            for wiring in task.wirings:
                wiring.step(3)
            assert mine.alphas == theirs.alphas
            assert mine.alphas[1] == pytest.approx(0.25)


def test_schedules_and_the_frozen_last_layer() -> None:
    task, _ = recipes.build_task(dino(steps=100, teacher_temperature=0.07, teacher_warmup=0.3, freeze_last=2 / 40))
    model: Any = task.model
    assert task.before_step is not None
    assert task.after_step is not None
    schedules.apply(task.optimizer, lr=1.0)  # as the loop does before before_step
    task.before_step(0)
    assert float(model.temperature) == pytest.approx(0.04)

    def decays() -> list[float]:
        return sorted({round(group["weight_decay"], 9) for group in task.optimizer.param_groups})

    assert decays() == [0.0, 0.04]
    task.before_step(15)
    assert float(model.temperature) == pytest.approx(0.055)
    task.before_step(99)
    assert float(model.temperature) == pytest.approx(0.07)
    assert decays() == [0.0, 0.2]
    before = {name: value.clone() for name, value in model.teacher.state_dict().items()}
    model.student.head.last.weight.data.add_(1)
    task.after_step(99)  # at the last step the EMA decay is 1
    assert all(torch.equal(before[name], value) for name, value in model.teacher.state_dict().items())
    last = model.last_layer()
    held = []
    for step, batch in enumerate(task.feed.iterate(0, 4)):
        schedules.apply(task.optimizer, lr=1.0)
        task.before_step(step)
        now = last.detach().clone()
        task.loss(model, batch)[0].backward()
        gradient = last.grad
        task.optimizer.step()
        assert last.grad is gradient  # a CUDA graph writes to this tensor in every step
        task.optimizer.zero_grad()
        held.append(torch.equal(now, last))
    per_epoch = task.feed.steps_per_epoch
    frozen = round(2 / 40 * per_epoch)
    assert held == [step < frozen for step in range(4)]
    assert 0 < frozen < 4


@pytest.mark.parametrize(("fade", "left"), [(4, 0.0), (10, 0.5)])
def test_a_teacher_has_the_annealed_alphas_of_the_end(tmp_path: Path, fade: int, left: float) -> None:
    """Its alphas are annealed with the student's, and an opened run has those of the last step."""
    unskip.train(dino(shortcut=f"anneal:keep>cut@{fade}"), tmp_path / "x", quiet=True)  # the last step is number 5
    loaded: Any = open_run(tmp_path / "x")
    for tower in (loaded.model.student, loaded.model.teacher):
        assert unskip.Wiring.of(tower.backbone).alphas == pytest.approx([left] * 4)
    x = torch.randn(2, 1, 8, 8)
    encoder = unskip.load(tmp_path / "x" / "checkpoints" / "step-6" / "encoder").eval()
    with torch.no_grad():
        assert torch.allclose(encoder(x), loaded.encoder.eval()(x), atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [dino(device="meta"), dino(device="meta", balance="sinkhorn", freeze_last=1.0), simclr(device="meta")],
    ids=["dino", "sinkhorn", "simclr"],
)
def test_a_step_runs_on_the_meta_device(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    autocast: Any = torch.autocast  # torch.autocast does not support the meta device
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **rest: nullcontext() if kind == "meta" else autocast(kind, **rest)
    )
    task, _ = recipes.build_task(config)
    batch = next(task.feed.iterate(0, 1))
    with NoHost():
        loss, numbers = task.loss(task.model, batch)
        loss.backward()
    assert loss.is_meta
    assert all(value.is_meta for value in numbers.values())


SMALL: dict[str, Any] = {"model_args": "depth=2,embed_dim=32,num_heads=2", "steps": 150, "log_every": 10, "batch": 64}
OLD: dict[str, Any] = {"bottleneck_norm": False, "freeze_last": 1.0}  # settings that collapse on small sets


@pytest.mark.full
@pytest.mark.parametrize(("changes", "collapses"), [({}, False), (OLD, True)], ids=["preset", "as published"])
def test_the_digits_preset_prevents_collapse(changes: dict[str, Any], collapses: bool, tmp_path: Path) -> None:
    unskip.train(recipes.dino("digits", health=False, device="cpu", **SMALL, **changes), tmp_path / "x", quiet=True)
    last = RunFolder(tmp_path / "x").read("metrics.jsonl")[-1]
    most = math.log(recipes.dino("digits").projection)
    assert (last["teacher_entropy"] > 0.95 * most) == collapses
    assert (last["divergence"] < 0.3) == collapses
    record = {row["warning"] for row in RunFolder(tmp_path / "x").read("warnings.jsonl")}
    assert ("flat-loss" in record) == collapses


def test_warnings_of_collapse() -> None:
    look = recipes.RECIPES["dino"].objective(dino(projection=1024, batch=64)).warnings

    def names(share: float = 0.5, **row: float) -> list[str]:
        return [name for name, _ in look(row, share)]

    healthy = {"teacher_entropy": 3.0, "teacher_spread": 4.0, "divergence": 1.0}
    assert names(**healthy) == []
    assert names(**{**healthy, "teacher_entropy": math.log(1024)}) == ["uniform-teacher"]
    assert names(**{**healthy, "teacher_spread": 0.01}) == ["one-answer"]
    assert names(**{**healthy, "divergence": 1e-5}) == ["nothing-to-learn"]
    assert names(share=0.01, **{**healthy, "teacher_spread": 0.01}) == []
    assert names(rank_block_0=9.0, rank_block_1=1.3, rank_block_11=1.1) == ["collapsed-blocks"]
    assert "blocks [1, 11]" in next(look({"rank_block_1": 1.3, "rank_block_11": 1.1}, 0.5))[1]
    assert names(rank_block_0=9.0, patchrank_block_0=7.0, patchrank_block_1=1.2) == ["collapsed-patches"]


def test_online_evaluation_is_checked_before_training() -> None:
    images = unskip.data.open_images("digits")
    low = images.select((images.labels < 5).nonzero()[:, 0])

    def without_high_digits(source: str, split: str, **options: Any) -> unskip.data.ImageSet:
        return low if split == "train" else images

    with pytest.raises(BadInput, match="class 5"):
        recipes.build_task(dino(), without_high_digits)


def test_a_batch_without_negatives_is_refused() -> None:
    with pytest.raises(BadInput, match="no negatives"):
        recipes.build_task(simclr(batch=4, accumulate=4))


def test_decay_with_a_contrastive_loss_gives_a_warning() -> None:
    for shortcut in ("decay:0.6", "anneal:keep>decay:0.5@10"):
        with pytest.warns(UnskipWarning, match="contrastive"):
            task, _ = recipes.build_task(simclr(shortcut=shortcut))
        assert any("contrastive" in note for note in task.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task, _ = recipes.build_task(simclr(shortcut="cut", init="skipless"))
    assert isinstance(task.model, SimCLR)


def test_training_from_a_published_checkpoint(tmp_path: Path) -> None:
    from tests.models.test_dino import made_up

    model: Any = recipes.build_task(dino())[0].model
    theirs = made_up(model)
    torch.save(theirs, tmp_path / "dino.pth")
    again: Any = recipes.build_task(dino(weights=str(tmp_path / "dino.pth")))[0].model
    assert torch.equal(again.student.head.last.weight, theirs["student"]["module.head.last_layer.weight_v"])
    with pytest.raises(UnskipError, match="does not fit"):
        recipes.build_task(dino(weights=str(tmp_path / "dino.pth"), projection=16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_size": 5}, "do not divide local_size 5"),
        ({"model": "torchvision:vit_b_16"}, "ViT of timm"),
        ({"balance": "mean"}, "balance"),
        ({"student_temperature": 0.0}, "student_temperature is 0.0"),
        ({"momentum": 2.0}, "momentum is 2.0; .* 0 to 1"),
        ({"freeze_last": -1.0}, "freeze_last is -1.0"),
        ({"local_scale": 0.9}, "local_scale is 0.9"),
        ({"batch": 1, "local_crops": 1}, "needs two samples"),
        ({"batch": 4, "accumulate": 4, "local_crops": 1}, "needs two samples"),
        ({"model": "timm:beit_base_patch16_224"}, "Beit has no dynamic_img_size"),
        ({"model": "timm:swin_tiny_patch4_window7_224", "model_args": ""}, "has no dynamic_img_size"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        recipes.build_task(dino(**changes))


@pytest.mark.parametrize(
    ("more", "evaluated"), [("", True), (",class_token=false,global_pool=avg,reg_tokens=2", False)]
)
def test_knn_of_the_class_token_needs_a_class_token(more: str, evaluated: bool) -> None:
    task, _ = recipes.build_task(dino(model_args=TINY["model_args"] + more))
    (evaluation,) = task.evaluations.values()
    result = evaluation(task.model)
    assert "knn20" in result
    assert ("cls_knn20" in result) == evaluated


def test_a_model_that_accepts_any_size_without_an_option() -> None:
    """NaFlexVit has no dynamic_img_size. This one has registers and no class token."""
    task, _ = recipes.build_task(dino(model="timm:naflexvit_base_patch16_gap", model_args=TINY["model_args"], patch=2))
    model: Any = task.model
    assert [model.teacher(torch.randn(2, 1, size, size)).shape[0] for size in (8, 4)] == [2, 2]
    (evaluation,) = task.evaluations.values()
    assert "cls_knn20" not in evaluation(model)
