"""Image sets of runs: common fields of all recipes, broken images, and sets shared by several runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.data.files import encoded, picture, write_parquet

import unskip
from unskip import cli, recipes
from unskip.data import ImageSet, open_images
from unskip.errors import BadInput
from unskip.recipes import _data

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # runs of a few steps look unhealthy

SMALL: dict[str, Any] = {"steps": 2, "batch": 16, "device": "cpu", "model_args": "depth=1,embed_dim=16,num_heads=2"}


def small(recipe: str, **changes: Any) -> Any:
    given = {**SMALL, **changes}
    if recipe in ("sit", "uvit"):
        given["model_args"] = "width=16,depth=3,heads=2"
    return getattr(recipes, recipe)("digits", **given)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images of several sizes, gray in training and coloured in testing, one of them broken."""
    folder = tmp_path_factory.mktemp("broken")
    for split, mode in (("train", "L"), ("test", "RGB")):
        images: list[bytes | None] = [encoded(picture(index, 8 + index % 2, 8, mode)) for index in range(208)]
        images[7] = b"broken"
        write_parquet(folder / f"a-{split}.parquet", images, [0, 1] * 104)
    return str(folder / "a-*.parquet")


# The other recipes open images and build feeds as one of these three does.
@pytest.mark.parametrize("recipe", ["supervised", "dino", "sit"])
def test_broken_images_are_left_out(recipe: str, broken: str) -> None:
    task, _ = unskip.recipes.build_task(small(recipe, data=broken))
    assert sum("left out 1 of 208" in note for note in task.notes) == 2
    assert sum("stored as central squares of 8 pixels" in note for note in task.notes) == 2
    task.loss(task.model, next(task.feed.iterate(0, 1)))


def test_evaluation_leaves_out_broken_images_if_training_did(broken: str, tmp_path: Path) -> None:
    config = small("supervised", data=broken)
    unskip.train(config, tmp_path / "run", quiet=True)
    assert recipes.evaluate_run(tmp_path / "run", ["rank-v1"])[1]
    (group,) = unskip.report.read([tmp_path / "run"])
    assert group.runs[0].look is not None
    assert group.runs[0].look.measurement is not None, group.runs[0].look.notes


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the splits that are opened."""
    result: list[str] = []

    def counted(source: str, split: Any, **options: Any) -> ImageSet:
        result.append(split)
        return open_images(source, split, **options)

    monkeypatch.setattr(_data, "open_images", counted)
    return result


def test_an_opener_opens_a_set_once_for_several_runs(splits: list[str], tmp_path: Path) -> None:
    opener = _data.cached_opener()
    unskip.train(small("mae"), tmp_path / "a", quiet=True, opener=opener)
    unskip.train(small("supervised", seed=1), tmp_path / "b", quiet=True, opener=opener)
    unskip.resume(tmp_path / "b", quiet=True, opener=opener)
    recipes.evaluate_run(tmp_path / "a", ["rank-v1"], opener=opener)
    assert splits == ["train", "test"]
    recipes.evaluate_run(tmp_path / "a", ["rank-v1"])  # without one, both splits are opened
    assert splits == ["train", "test"] * 2


def test_an_existing_run_folder_is_refused_before_images_are_opened(splits: list[str], tmp_path: Path) -> None:
    unskip.train(small("supervised"), tmp_path / "a", quiet=True)
    assert splits == ["train", "test"]
    with pytest.raises(BadInput, match=r"already has a run.*--out"):
        unskip.train(small("supervised"), tmp_path / "a", quiet=True)
    assert splits == ["train", "test"]
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.raises(BadInput, match="remove the folder"):
        unskip.train(small("supervised"), tmp_path / "a", quiet=True)


def test_a_run_that_fails_before_its_first_step_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no gradient")

    with monkeypatch.context() as broken:
        broken.setattr("torch.Tensor.backward", fail)
        with pytest.raises(RuntimeError, match="no gradient"):
            unskip.train(small("supervised"), tmp_path / "a", quiet=True)
    assert unskip.train(small("supervised"), tmp_path / "a", quiet=True).finished


def test_seeds_open_their_images_once(splits: list[str], tmp_path: Path) -> None:
    words = ["--steps", "1", "--device", "cpu", "--quiet", "--model-args", SMALL["model_args"]]
    assert cli.main(["train", "supervised", *words, "--seeds", "0,1,2", "--out", str(tmp_path / "runs")]) == 0
    assert splits == ["train", "test"]
    assert json.loads((tmp_path / "runs" / "seeds.json").read_text())["seeds"] == [0, 1, 2]
