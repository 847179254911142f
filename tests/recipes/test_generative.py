"""The recipes sit and uvit: options, objectives, and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evals.hosts import NoHost
from tests.recipes.generative import SIT, few, tiny
from torch import Tensor

import unskip
from unskip.data import Feed, ImageSet, open_images
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.models import SiT

# Short runs give health warnings.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")


def test_the_shortcut_governs_the_sites_that_where_selects() -> None:
    alphas = {}
    for where in (None, "attention"):
        task, _ = unskip.recipes.build_task(tiny(where=where))
        assert len(task.model.mirrors) == 2
        pairs = zip(task.wirings[0].alphas, task.wirings[0].sites, strict=True)
        alphas[where] = [alpha for alpha, site in pairs if not site.long]
    assert alphas[None] == pytest.approx([1 - 0.2 * index / 9 for index in range(10)])
    assert alphas["attention"] == pytest.approx([1 - 0.2 * i / 8 if i % 2 == 0 else 1.0 for i in range(10)])
    task, _ = unskip.recipes.build_task(tiny(shortcut="keep", long_skips=False))
    assert not task.wirings
    assert not task.model.mirrors


def test_a_zero_start_covers_all_branches_for_any_where() -> None:
    task, _ = unskip.recipes.build_task(tiny("uvit", init="zero", where="attention"))
    assert task.wirings
    assert {
        site.kind for site, alpha in zip(task.wirings[0].sites, task.wirings[0].alphas, strict=True) if alpha < 1
    } == {"attention"}
    result = unskip.init.verify_zero_branches(task.model, task.sample)
    assert {row.site.kind for row in result.rows} == {"attention", "mlp"}


LATE: dict[str, Any] = {
    "times": "logit-normal",
    "time_mean": 2.0,
}  # late times, at which the data have a small weight in the velocity


@pytest.mark.full
@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize("target", ["velocity", "noise", "data"])
@pytest.mark.parametrize("times", [{}, LATE], ids=["uniform", "late"])
def test_a_model_that_predicts_zero_has_the_baseline_loss(interpolant: str, target: str, times: dict[str, Any]) -> None:
    """SiT predicts zero at the start. Its loss then is the baseline of the flat-loss warning."""
    task, _ = unskip.recipes.build_task(tiny(interpolant=interpolant, target=target, batch=1024, **times))
    torch.manual_seed(0)
    result = float(task.loss(task.model, next(task.feed.iterate(0, 1)))[0].detach())
    assert result == pytest.approx(task.baseline_loss, rel=0.03)
    if (interpolant, target) == (
        "linear",
        "velocity",
    ):  # over all test images, because the mean square of a few is noisy
        values = torch.cat([part[0] for part in Feed(open_images("digits", split="test"), 100, 8).evaluate()])
        assert task.baseline_loss == pytest.approx(1 + float(values.double().square().mean()), rel=1e-6)


@pytest.mark.parametrize(("optimizer", "betas"), [("AdamW", (0.99, 0.999)), ("soap", (0.95, 0.95))])
def test_the_betas_of_the_paper_are_those_of_adamw(optimizer: str, betas: tuple[float, float]) -> None:
    task, _ = unskip.recipes.build_task(tiny("uvit", optimizer=optimizer))
    assert {group["betas"] for group in task.optimizer.param_groups} == {betas}


@pytest.mark.parametrize(("changes", "text"), [
    ({"model": "Q/2"}, "no size"),
    ({"model_args": "width=18,heads=4"}, "multiple"),
    ({"init": "skipless"}, "default or zero"),
    ({"steps": 0}, "0 steps"),
    ({"model_args": "width=16,depth=2,heads=2,classes=9"}, "9 classes, .* 10"),
    ({"interpolant": "cubic"}, "linear, gvp"),
    ({"online_time": 2.0}, "between 0 \\(noise"),
    ({"latents": "nowhere"}, "no config.json"),
])  # fmt: skip
def test_invalid_configs_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        unskip.recipes.build_task(tiny(**changes))


def test_a_set_that_is_too_small_for_knn_is_trained_without_it() -> None:
    def small(*args: Any, **options: Any) -> ImageSet:
        return few()

    with pytest.warns(UnskipWarning, match="48 training images"):
        task, _ = unskip.recipes.build_task(tiny(), small)
    with torch.no_grad():
        keys = [key for evaluation in task.evaluations.values() for key in evaluation(task.model)]
    assert "rank" in keys
    assert not any(key.startswith("knn") for key in keys)


def test_an_invalid_initial_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save(SiT(size=8, patch=2, channels=1, width=32, depth=5, heads=2, classes=10).state_dict(), tmp_path / "x.pt")
    with pytest.raises(LoadError, match="does not fit the model"):
        unskip.recipes.build_task(tiny(weights=str(tmp_path / "x.pt")))
    torch.save(unskip.recipes.build_task(tiny())[0].model.state_dict(), tmp_path / "x.pt")
    with pytest.raises(BadInput, match="overwrite the weights"):
        unskip.recipes.build_task(tiny(weights=str(tmp_path / "x.pt"), init="zero"))
    with pytest.raises(BadInput, match="not loaded"):
        unskip.recipes.build_task(tiny("uvit", weights=str(tmp_path / "x.pt")))


def test_the_null_label_of_a_model_with_more_classes_than_the_data() -> None:
    """As with published weights: dropped labels use the last row of the model's embedding."""
    task, _ = unskip.recipes.build_task(tiny(model_args=f"{SIT},classes=25", label_dropout=0.5))
    seen: list[Tensor] = []

    class Watched(torch.nn.Module):
        def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            seen.append(labels)
            return images

    task.loss(Watched(), next(task.feed.iterate(0, 1)))
    assert set(seen[0].tolist()) <= {*range(10), 25}
    assert 25 in seen[0]


def test_fields_of_the_training_loop_reach_the_plan() -> None:
    for recipe in ("sit", "uvit"):
        how = {"graph": True, "fsdp": True, "tracker": "tensorboard", "accumulate": 2, "clip": 3.0}
        _, plan = unskip.recipes.build_task(tiny(recipe, **how))
        assert {name: getattr(plan, name) for name in how} == how


@pytest.mark.parametrize("recipe", ["sit", "uvit"])
@pytest.mark.parametrize("choice", [
    {}, {"interpolant": "gvp", "times": "logit-normal"}, {"target": "noise"}, {"shortcut": "keep", "precision": "bf16"},
])  # fmt: skip
def test_a_step_runs_on_the_meta_device(recipe: str, choice: dict[str, Any]) -> None:
    """Forward and backward on the meta device: no values are read by the host or copied from it, as in a CUDA graph."""
    task, _ = unskip.recipes.build_task(tiny(recipe, graph=True, **choice))
    batch = [each.to("meta") for each in next(task.feed.iterate(0, 1))]
    model = task.model.to("meta")
    with NoHost(), torch.autocast("cpu", torch.bfloat16, enabled="precision" in choice):
        loss, _ = task.loss(model, batch)
        loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())
