"""The supervised recipe: configs, runs on digits with all shortcuts, resume, seeds, two processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.commands import on_ranks

import unskip
from unskip import cli, recipes
from unskip.errors import BadInput, TrainingError, UnskipWarning
from unskip.training import RunFolder
from unskip.wiring import find_wiring

# Short runs give health warnings.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")

TINY: dict[str, Any] = {
    "model_args": "depth=2,embed_dim=16,num_heads=2",
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "device": "cpu",
}


def tiny(**changes: Any) -> recipes.Supervised:
    return recipes.supervised("digits", **{**TINY, **changes})


def test_an_unknown_field_or_preset_is_refused_with_similar_names() -> None:
    with pytest.raises(BadInput, match="nearest: optimizer"):
        recipes.supervised("digits", optimiser="soap")
    with pytest.raises(BadInput, match=r"nearest: cifar; .* digits"):
        recipes.supervised("cifa")
    with pytest.raises(BadInput, match="no config of a recipe"):
        unskip.train(object(), "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "skiples"}, "init is 'skiples'"),
        ({"teacher": "original"}, "give --weights"),
        ({"model_args": "depth"}, "name=value"),
        ({"data": "nosuch"}, "nosuch"),
        ({"steps": 0}, "0 steps"),
        ({"accumulate": 3}, "batch of 32 .* into 3"),
        ({"smoothing": 2.0}, "smoothing is 2.0"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"size": 8, "patch": 3}, "patches of 3 .* size 8"),
        ({"model": "timm:swin_tiny_patch4_window7_224"}, "num_heads=2. Change model_args"),
    ],
)
def test_bad_fields_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        unskip.train(tiny(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shortcut": "cut", "init": "skipless", "optimizer": "soap"},
        {"shortcut": "decay:0.6", "init": "zero", "optimizer": "muon", "ema": 0.9},
        {"shortcut": "anneal:keep>cut@4", "mixup": 0.5, "crop": "pad"},
    ],
    ids=["residual", "skipless", "decayed", "annealed"],
)
def test_a_run_folder_is_complete_and_can_be_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    outcome = unskip.train(tiny(**changes), tmp_path / "run", quiet=True)
    assert outcome.finished
    assert 0 <= outcome.evaluations["test_accuracy"] <= 1
    folder = RunFolder.open(tmp_path / "run")
    assert [row["step"] for row in folder.read("metrics.jsonl")] == [2, 4, 6]
    looks = folder.read("health.jsonl")
    assert [row["step"] for row in looks if "relative_step" in row] == [1, 2, 4, 6]
    assert len(looks[-1]["token_cosine"]) == len(looks[-1]["self_attention"]) == 2
    data = json.loads((tmp_path / "run" / "config.json").read_text())
    assert data["config"]["recipe"] == "supervised"
    assert recipes.from_dict(data["config"]) == tiny(**changes)
    model = unskip.load(tmp_path / "run" / "checkpoints" / "step-6")
    alphas = unskip.Wiring.of(model).alphas if "shortcut" in changes else [1.0] * 4
    if changes.get("shortcut") in ("cut", "anneal:keep>cut@4"):
        assert alphas == [0.0] * 4
    if changes.get("shortcut") == "decay:0.6":
        assert alphas == pytest.approx([1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6])


def test_the_preset_without_skips_uses_shaped_mlps_and_decays_all_block_parameters() -> None:
    preset = recipes.supervised("cifar-skipless")
    names = ("shortcut", "init", "freeze_heads", "optimizer", "weight_decay", "decays")
    shape = "class_token=false,global_pool=avg,depth=2,embed_dim=36,num_heads=6,attn_head_dim=12"
    with pytest.warns(UnskipWarning, match="below its target"):  # heads of width 12 reach less than heads of width 64
        task, _ = recipes.build_task(tiny(**{name: getattr(preset, name) for name in names}, model_args=shape))
    same = {"vo_gain": 1, "carry": 3, "mix": 0.3, "mlp_gain": 9, "mlp_bias": 1.5, "centre": True}
    unskip.init.verify_skipless(task.model, task.sample, **same)
    rows = task.model.pos_embed[0].detach()
    torch.testing.assert_close(rows @ rows.T / rows[0].square().sum(), torch.eye(16), rtol=0, atol=1e-4)
    names_of = {group["weight_decay"]: group["param_names"] for group in task.optimizer.param_groups}
    assert "blocks.0.mlp.fc2.bias" in names_of[0.3]
    assert "head.weight" in names_of[0.0]


def test_attention_is_calibrated_after_skips_are_cut() -> None:
    shape = "class_token=false,global_pool=avg,depth=2,embed_dim=32,num_heads=2"
    init = "skipless:shaped,position_code=orthogonal,self_attention=0.5"
    task, _ = recipes.build_task(tiny(shortcut="cut", init=init, model_args=shape, health=False))
    images = next(iter(task.feed.iterate(0, 1)))[0]
    result = unskip.measure(task.model, images[:8], jacobians="off").sites
    for row in (row for row in result if row.self_attention is not None):
        assert sum(row.self_attention) / 2 == pytest.approx(0.5, abs=0.1)


@pytest.mark.full
def test_it_learns(tmp_path: Path) -> None:
    config = recipes.supervised("digits", device="cpu", epochs=3, optimizer="soap")
    outcome = unskip.train(config, tmp_path / "run", quiet=True)
    assert outcome.evaluations["test_accuracy"] > 0.2  # chance is 0.1


def test_skips_are_removed_from_a_trained_model_by_distillation_from_itself(tmp_path: Path) -> None:
    unskip.train(tiny(), tmp_path / "first", quiet=True)
    saved = tmp_path / "first" / "checkpoints" / "step-6"
    config = tiny(weights=str(saved), teacher="original", shortcut="anneal:keep>cut@5", optimizer="soap")
    outcome = unskip.train(config, tmp_path / "second", quiet=True)
    assert outcome.finished
    assert RunFolder.open(tmp_path / "second").read("metrics.jsonl")[-1]["effective_decay"] == 0


def notes(run: Path) -> str:
    return "; ".join(row["text"] for row in RunFolder(run).read("warnings.jsonl") if row["warning"] == "note")


def alphas(run: Path) -> list[float]:
    return unskip.Wiring.of(unskip.load(run / "checkpoints" / "step-6")).alphas


def test_the_shortcut_of_the_config_overrides_that_of_the_weights(tmp_path: Path) -> None:
    unskip.train(tiny(shortcut="cut"), tmp_path / "cut", quiet=True)
    unskip.train(tiny(weights=str(tmp_path / "cut")), tmp_path / "kept", quiet=True)  # a run: its last checkpoint
    assert alphas(tmp_path / "cut") == [0.0] * 4
    assert find_wiring(unskip.load(tmp_path / "kept")) is None
    assert "saved with other skips" in notes(tmp_path / "kept")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pretrained") / "mae"
    small = {"model_args": TINY["model_args"], "steps": 2, "device": "cpu"}
    unskip.train(recipes.mae("digits", shortcut="learn:0.5", **small), run, quiet=True)
    return run


@pytest.mark.parametrize("given", ["", "checkpoints/step-2", "checkpoints/step-2/encoder"])
def test_a_pretrained_encoder_is_finetuned_as_a_classifier(pretrained: Path, given: str, tmp_path: Path) -> None:
    changes = {"weights": str(pretrained / given), "shortcut": "decay:0.5", "lr": 0.0, "weight_decay": 0.0, "steps": 1}
    unskip.train(tiny(**changes), tmp_path / "run", quiet=True)
    encoder = unskip.load(pretrained / "checkpoints" / "step-2" / "encoder")
    ours, theirs = (model.state_dict() for model in (unskip.load(tmp_path / "run" / "checkpoints" / "step-1"), encoder))
    shared = [name for name in theirs if "unskip" not in name]  # without learned shortcut weights
    assert ours.keys() - shared == {"head.weight", "head.bias", "norm.weight", "norm.bias"}
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert "not in the encoder" in notes(tmp_path / "run")
    assert "head, norm" in notes(tmp_path / "run")


def test_mean_pooling_of_an_encoder_with_a_final_norm(tmp_path: Path) -> None:
    small = {"model_args": TINY["model_args"], "steps": 1, "device": "cpu"}
    plain = recipes.mae("digits", shortcut="keep", long_skips=False, init="default", **small)
    unskip.train(plain, tmp_path / "mae", quiet=True)
    averaged = tiny(weights=str(tmp_path / "mae"), model_args=TINY["model_args"] + ",global_pool=avg")
    task, _ = unskip.recipes.build_task(averaged)
    assert "fc_norm, head" in "; ".join(task.notes)


def test_an_encoder_of_another_shape_is_refused(pretrained: Path) -> None:
    for arguments in ("depth=2,embed_dim=32,num_heads=2", "depth=3,embed_dim=16,num_heads=2"):
        with pytest.raises(BadInput, match=r"use the model"):
            unskip.recipes.build_task(tiny(weights=str(pretrained), model_args=arguments))


def test_weights_of_another_model_are_refused_with_advice_for_a_run(tmp_path: Path) -> None:
    """That of unskip.load, model= and strict=, is not for a run."""
    task, _ = recipes.build_task(tiny())
    unskip.save(task.model, tmp_path / "mine")
    other = tiny(weights=str(tmp_path / "mine"), model_args="depth=2,embed_dim=32,num_heads=2")
    with pytest.raises(BadInput, match=r"mine: the model differs .* is 32 .*; use the model, model_args, size") as said:
        recipes.build_task(other)
    assert "model=" not in str(said.value)
    assert "strict" not in str(said.value)


def test_an_encoder_without_a_head_cannot_be_a_teacher(pretrained: Path) -> None:
    with pytest.raises(BadInput, match="an encoder without a classifier"):
        unskip.recipes.build_task(tiny(weights=str(pretrained), teacher="original"))


def test_a_folder_without_a_test_split_has_a_part_held_out(tmp_path: Path) -> None:
    for index in range(30):
        place = tmp_path / "photos" / "ab"[index % 2] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 8 * index).save(place)
    config = tiny(data=str(tmp_path / "photos"), batch=8, steps=1)
    with pytest.raises(BadInput, match=r"no test split .*--validate"):
        unskip.train(config, tmp_path / "run", quiet=True)
    held = unskip.train(replace(config, validate=True), tmp_path / "run", quiet=True)
    assert set(held.evaluations) == {"val_accuracy", "val_loss"}


def test_a_run_that_ends_before_its_anneal_gives_a_warning(tmp_path: Path) -> None:
    unskip.train(tiny(shortcut="anneal:keep>cut@6"), tmp_path / "short", quiet=True)
    assert alphas(tmp_path / "short") == pytest.approx([1 / 6] * 4)
    assert "before anneal:keep>cut@6 does" in notes(tmp_path / "short")
    unskip.train(tiny(shortcut="anneal:keep>cut@5"), tmp_path / "whole", quiet=True)
    assert alphas(tmp_path / "whole") == [0.0] * 4
    assert not notes(tmp_path / "whole")


def test_frozen_heads_that_do_not_carry_are_noted() -> None:
    def said(heads: int, init: str) -> str:
        wide = "depth=2,embed_dim=16,num_heads=3,attn_head_dim=16"
        return "; ".join(recipes.build_task(tiny(freeze_heads=heads, init=init, model_args=wide))[0].notes)

    assert "freeze_heads is 1, but init default has no carry=" in said(1, "default")
    assert "freeze_heads is 2, but init skipless:carry=1 has carry=1" in said(2, "skipless:carry=1")
    assert not said(1, "skipless:carry=1")


def test_a_model_that_does_not_fit_the_data_is_refused_before_the_first_step() -> None:
    """On a GPU a label without a logit would stop with an error that names neither."""
    for arguments, message in {
        "num_classes=4": r"returns torch.float32 \(2, 4\) for 2 images, and the data has 10 classes",
        "in_chans=3": "does not take images of 1 x 8 x 8: RuntimeError",
    }.items():
        with pytest.raises(BadInput, match=message):
            recipes.build_task(tiny(model_args=f"{TINY['model_args']},{arguments}"))
    task, _ = recipes.build_task(tiny(model_args=f"{TINY['model_args']},num_classes=20"))
    assert any("has 20 logits, and the data has 10 classes" in note for note in task.notes)


def test_drop_path_is_off_where_skips_are_cut(tmp_path: Path) -> None:
    def rates(**changes: Any) -> set[float]:
        task, _ = unskip.recipes.build_task(tiny(drop_path=0.5, **changes))
        return {module.drop_prob for module in task.model.modules() if hasattr(module, "drop_prob")}

    assert max(rates()) == 0.5
    assert not rates(shortcut="cut")
    assert not rates(shortcut="cut", where="mlp")
    assert max(rates(shortcut="decay:0.5")) == 0.5
    unskip.train(tiny(drop_path=0.5, shortcut="anneal:keep>cut@3"), tmp_path / "run", quiet=True)
    assert "drop path is off" in notes(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("model", ["timm:resnet10t", "timm:cait_xxs24_224"])
def test_models_with_and_without_a_fixed_image_size(tmp_path: Path, model: str) -> None:
    small = "" if "resnet" in model else "depth=2,embed_dim=16,num_heads=2"
    config = tiny(model=model, model_args=small, size=16, patch=4, steps=1, shortcut="decay:0.5")
    assert unskip.train(config, tmp_path / "run", quiet=True).finished


def test_a_run_continues_after_a_broken_image_and_names_it(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "test/a", "test/b"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for index in range(16):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / "pets" / name / f"{index}.png")
    (tmp_path / "pets" / "train" / "a" / "3.png").write_bytes(b"broken")
    config = tiny(data=str(tmp_path / "pets"), randaugment="2,9", batch=16, steps=4)
    with pytest.warns(UnskipWarning, match=r"broken-image: .*3\.png"):
        assert unskip.train(config, tmp_path / "run", quiet=True).finished
    (row,) = [row for row in RunFolder(tmp_path / "run").read("warnings.jsonl") if row["warning"] == "broken-image"]
    assert "train/a/3.png" in row["text"]
    (tmp_path / "pets" / "train" / "b" / "5.png").write_bytes(b"broken")
    with pytest.raises(TrainingError, match=r"png.* 2 of 32 images.*the same command"):
        unskip.train(config, tmp_path / "other", quiet=True)


@pytest.mark.parametrize("others", [["two"], pytest.param(["sharded", "resumed"], marks=pytest.mark.full)])
def test_two_processes_match_one(tmp_path: Path, others: list[str]) -> None:
    # No dropout, float32: only the order of sums differs.
    fields = {key: value for key, value in TINY.items() if key != "device"} | {"steps": 3, "checkpoint_every": 2}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in fields.items()]
    train = ["train", "supervised", "--preset", "digits", *words, "--device=cpu", "--quiet", "--out"]
    runs = {
        "one": (1, [*train, "one"]),
        "two": (2, [*train, "two"]),
        "sharded": (2, [*train, "sharded", "--fsdp"]),
        "resumed": (2, ["resume", "resumed", "--quiet"]),
    }
    runs = {name: runs[name] for name in ["one", *others]}
    for name, (processes, command) in runs.items():
        if name == "resumed":  # the sharded run again, from its checkpoint of step 2
            shutil.copytree(tmp_path / "sharded", tmp_path / "resumed")
            shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-3")
        on_ranks(processes, tmp_path, partial(cli.main, command))
    result = {name: load_file(tmp_path / name / "checkpoints" / "step-3" / "model.safetensors") for name in runs}
    for key, value in result["one"].items():
        for name in runs:
            assert torch.allclose(result[name][key], value, atol=1e-5), (name, key)
    accuracies = [RunFolder.open(tmp_path / name).read("evals.jsonl")[-1]["test_accuracy"] for name in runs]
    assert max(accuracies) - min(accuracies) < 0.01
    text = {name: [row["warning"] for row in RunFolder.open(tmp_path / name).read("warnings.jsonl")] for name in runs}
    assert {names.count("flat-loss") for names in text.values()} == {2}  # only the first process logs


def test_a_run_that_does_not_learn_gives_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UnskipWarning, match="flat-loss"):
        unskip.train(tiny(lr=1e-9), tmp_path / "run", quiet=True)
    assert "flat-loss" in {row["warning"] for row in RunFolder.open(tmp_path / "run").read("warnings.jsonl")}


def test_health_is_checked_early_in_a_run(tmp_path: Path) -> None:
    unskip.train(tiny(init="zero", shortcut="cut", steps=10), tmp_path / "run", quiet=True)
    assert 2 in {row["step"] for row in RunFolder.open(tmp_path / "run").read("warnings.jsonl")}
