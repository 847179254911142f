"""Common code of recipes: devices, model arguments, config fields, CUDA graphs and baseline losses."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import unskip
from unskip import recipes
from unskip.data import Feed, ImageSet, open_images
from unskip.errors import BadInput
from unskip.models import DINO, contrast
from unskip.recipes import _run
from unskip.training import RunFolder, device_of

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # short runs give health warnings

VIT = "depth=1,embed_dim=16,num_heads=2"


# --- Devices ----------------------------------------------------------------------------------------------------------


def test_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == torch.device("cuda:1")
    with pytest.raises(BadInput, match="cuda:0 to cuda:1"):
        device_of("cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of("cuda") == device_of("auto") == torch.device("cuda:1")
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES"):
        device_of("cuda:1")


# --- Arguments of models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("sit", "hidden_size=32", r"SiT \(S/2\) .* 'hidden_size'; it has"),
        ("sit", "depth=two", "model_args 'depth=two': S/2: "),
        ("mae", "dept=3", r"\(timm:vit_tiny_patch16_224\) .* 'dept'; it has depth,"),
        ("supervised", "nm_heads=3", "'nm_heads'; it has num_heads,"),
    ],
)
def test_an_unknown_model_argument_is_reported_with_the_valid_ones(recipe: str, arguments: str, message: str) -> None:
    config = getattr(recipes, recipe)("digits", model_args=arguments, device="cpu")
    with pytest.raises(BadInput, match=message):
        unskip.recipes.build_task(config)


# --- Fields of a config in Python -------------------------------------------------------------------------------------


def test_rules_paths_and_numpy_numbers_are_converted_to_plain_values(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "shortcut": unskip.Anneal(unskip.Keep(), unskip.Cut(), steps=2),
        "data": Path("digits"),
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
        "seed": numpy.int64(3),
    }
    config = recipes.mae("digits", **given, steps=2, device="cpu", health=False)
    text = {"shortcut": "anneal:keep>cut@2", "data": "digits", "model_args": VIT, "seed": 3}
    assert config == recipes.mae("digits", **text, steps=2, device="cpu", health=False)
    assert unskip.train(config, tmp_path / "run", quiet=True).finished
    assert recipes.from_dict(RunFolder.open(tmp_path / "run").config) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "20", "steps is '20', .* a number"),
        ("lr", "1e-3", "lr is '1e-3', .* a number"),
        ("flip", "no", "flip is 'no', .* True or False"),
        ("where", len, "where is <built-in .* text"),
        ("model_args", {"act_layer": len}, "model_args is {.*}; .* text"),
        ("shortcut", {"mlp": "cut"}, "single rule; select its sites with where="),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        recipes.mae("digits", **{field: value})


@pytest.mark.parametrize(("recipe", "preset", "changes", "message"), [
    ("sit", "cifar", {"epochs": 3}, "epochs is 3, .* 15000"),
    ("supervised", "digits", {"temperature": 3.0}, "temperature is 3.0, .* no teacher"),
    ("supervised", "digits", {"weights": "x", "teacher": "original", "smoothing": 0.3}, "not part of the loss"),
    ("supervised", "digits", {"model": "torchvision:vit_b_16", "drop_path": 0.1}, "is no model of timm"),
    ("mae", "digits", {"scale": 0.5}, "crop is none; use resized"),
    ("dino", "digits", {"balance": "sinkhorn", "centre_momentum": 0.5}, "balance is sinkhorn"),
    ("sit", "digits", {"cache": "elsewhere"}, "it is for latents"),
    ("dino", "digits", {"weight_decay": 0.0, "weight_decay_end": 0.4}, "weight_decay is 0, so that nothing decays"),
])  # fmt: skip
def test_a_field_without_effect_is_refused(
    tmp_path: Path, recipe: str, preset: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        unskip.train(getattr(recipes, recipe)(preset, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_non_finite_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"clip is inf; .* finite"):
        unskip.train(recipes.supervised("digits", clip=math.inf), tmp_path / "run")


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_a_preset_field_that_becomes_unused_is_allowed(recipe: str) -> None:
    """For example `steps` may replace the epochs of a preset."""
    for preset in recipes.RECIPES[recipe].presets:
        _run._refuse_unused(getattr(recipes, recipe)(preset, steps=3), recipes.RECIPES[recipe])


# --- Graphs -----------------------------------------------------------------------------------------------------------


def test_a_requested_cuda_graph_that_is_impossible_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipes.supervised("digits", graph=True, device="cpu", steps=2, model_args=VIT)
    with pytest.raises(BadInput, match=r"on cpu\. Leave graph out"):
        unskip.train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BadInput, match="gradients are accumulated over 4"):
        unskip.train(recipes.mae("digits", graph=True, accumulate=4, device="cuda"), tmp_path / "run", quiet=True)


def test_a_cuda_graph_of_a_preset_is_dropped_if_impossible(tmp_path: Path) -> None:
    small: dict[str, Any] = {"data": "digits", "size": 8, "patch": 4, "batch": 32, "steps": 1, "compile": False}
    config = recipes.supervised("cifar", **small, device="cpu", model_args=VIT)
    assert config.graph
    assert unskip.train(config, tmp_path / "run", quiet=True).finished
    notes = [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl") if row["warning"] == "note"]
    assert any(note.startswith("graph is off: ") for note in notes)


# --- Baseline losses --------------------------------------------------------------------------------------------------


def objective(recipe: str, **fields: Any) -> Any:
    return recipes.RECIPES[recipe].objective(getattr(recipes, recipe)("digits", **fields))


def baseline(labels: Tensor, classes: int, smoothing: float) -> float:
    images = ImageSet("made", "train", tuple("abcdefghij"[:classes]), labels, torch.zeros(len(labels), 1, 1, 1).byte())
    value: float = objective("supervised", smoothing=smoothing).baseline_loss(None, images, None)
    return value


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.sampled_from([0.0, 0.1, 0.5]))
@settings(deadline=None, max_examples=40)
def test_no_constant_prediction_is_better_than_the_baseline(labels: list[int], smoothing: float) -> None:
    """The best constant logits in closed form: the log of the mean smoothed label."""
    targets = torch.tensor(labels)
    frequent = (1 - smoothing) * F.one_hot(targets, 4).double().mean(0) + smoothing / 4
    logits = frequent.clamp_min(1e-300).log().expand(len(labels), 4)
    best = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert baseline(targets, 4, smoothing) == pytest.approx(float(best), abs=1e-9)


def test_baseline_of_a_masked_autoencoder() -> None:
    for norm_pix in (True, False):
        task, _ = recipes.build_task(recipes.mae("digits", norm_pix=norm_pix, device="cpu", model_args=VIT, batch=512))
        losses = []
        for step, batch in enumerate(task.feed.iterate(0, 4)):
            torch.manual_seed(step)
            losses.append(float(task.loss(task.model, batch)[0].detach()))  # the zero start predicts zero
        assert sum(losses) / 4 == pytest.approx(task.baseline_loss, rel=0.02)
        model: Any = task.model  # over all test images, because the mean square of a few is noisy
        wanted = [
            model.target(model.patches(images)) for images, _ in Feed(open_images("digits", "test"), 7, 8).evaluate()
        ]
        assert task.baseline_loss == pytest.approx(float(torch.cat(wanted).double().square().mean()), rel=1e-6)


@pytest.mark.parametrize(("out", "bottleneck", "temperature"), [(256, 64, 0.1), (1024, 128, 0.1), (512, 32, 0.2)])
def test_baseline_of_a_student_that_is_independent_of_the_teacher(
    out: int, bottleneck: int, temperature: float
) -> None:
    """Prototypes are fixed and spread evenly, bottleneck directions are random, and targets are independent of them."""
    torch.manual_seed(0)
    backbone: Any = torch.nn.Linear(4, 8)
    backbone.num_features = 8
    model = DINO(backbone, out=out, hidden=8, bottleneck=bottleneck, student_temperature=temperature)
    model.spread_(torch.Generator().manual_seed(0))
    z = F.normalize(torch.randn(2000, bottleneck), dim=1)
    p = torch.randn(2000, out).mul(3).softmax(1)
    q = (F.linear(z, model.last_layer().detach()) / temperature).log_softmax(1)
    loss = float(-(p * q).sum(1).mean())
    distillation = objective("dino", projection=out, bottleneck=bottleneck, student_temperature=temperature)
    assert distillation.config.freeze_last is None
    assert distillation.baseline_loss(None, None, None) == pytest.approx(loss, rel=0.01)
    assert loss > 1.02 * math.log(out)  # a healthy run starts above log(out) and falls below it


def test_baseline_of_a_trainable_last_layer_is_uniform() -> None:
    distillation = objective("dino", freeze_last=1.0)
    assert distillation.baseline_loss(None, None, None) == pytest.approx(math.log(distillation.config.projection))


def views(count: int, spread: float, near: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features of two views of each image: the sum of a common, an image-specific and a view-specific direction."""
    common, own, one, two = (torch.randn(size, 16, generator=generator) for size in (1, count, count, count))
    return tuple(F.normalize(common + spread * (near * own + (1 - near) * each), dim=1) for each in (one, two))  # type: ignore[return-value]


def test_equal_views_give_a_warning_for_any_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = views(64, 0.01, 0.5, generator)
    flat = contrast(one, two, 0.2)
    assert float(flat.loss) == pytest.approx(math.log(127), rel=1e-2)
    row = {"aligned": float(flat.aligned), "apart": float(flat.apart)}
    warnings = objective("simclr").warnings
    assert [name for name, _ in warnings(row, 0.5)] == ["flat-loss"]
    assert [*warnings(row, 0.1)] == []
    learning = {"aligned": 0.2, "apart": 0.0, "loss": math.log(127)}  # spread over 32 dimensions, with a falling loss
    assert [*warnings(learning, 0.5)] == []
    assert [name for name, _ in warnings({"rank_block_0": 1.5}, 0.5)] == ["collapsed-blocks"]
    task, _ = recipes.build_task(recipes.simclr("digits", device="cpu", model_args=VIT))
    assert task.baseline_loss is None


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_no_field_has_the_name_of_a_command_option(name: str) -> None:
    """`unskip train` takes --out, --seeds and --quiet for itself: a field of that name could not be set there."""
    assert not {"out", "seeds", "quiet"} & {field.name for field in fields(recipes.RECIPES[name].config)}
