"""Measurements of checkpoints: a masked autoencoder, a classifier, and checkpoints that cannot be measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.report.runs import folder

import unskip
from unskip.data import ImageSet, open_images
from unskip.report import Group, figures, read
from unskip.report._look import SHOWN, _some, look

SMALL = {"model_args": "depth=2,embed_dim=16,num_heads=2", "steps": 6, "batch": 16, "log_every": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    decoder = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
    config = unskip.recipes.mae("digits", shortcut="decay:0.5", health=False, **SMALL, **decoder)
    configs = {"mae": config, "classifier": unskip.recipes.supervised("digits", **SMALL)}
    for name, each in configs.items():
        with pytest.warns(unskip.errors.UnskipWarning):  # six steps are too few to learn
            unskip.train(each, place / name, quiet=True)
    return place


@pytest.fixture(scope="module")
def groups(runs: Path) -> list[Group]:
    return read([runs / "mae", runs / "classifier"], jacobians=True)


def test_weights_of_sites_are_read_without_a_model(runs: Path, groups: list[Group]) -> None:
    """They are read from the file of `unskip.save` and match the model."""
    decayed, plain = (group.runs[0] for group in read([runs / "mae", runs / "classifier"], look=False))
    assert [each.alpha for each in decayed.weights] == pytest.approx([1.0, 1 - 1 / 6, 1 - 2 / 6, 0.5])
    assert [(each.site, each.path, each.beta) for each in decayed.weights[:2]] == [
        (0, "blocks.0", 1.0),
        (1, "blocks.0", 1.0),
    ]
    assert (plain.weights, decayed.notes, plain.notes) == ((), (), ())
    seen = groups[0].runs[0].look
    assert [row["alpha"] for row in seen.measurement["sites"]] == pytest.approx([w.alpha for w in decayed.weights])


def test_patches_of_a_model_with_other_tokens(tmp_path: Path) -> None:
    """A U-ViT has time and class tokens before its patches."""
    small = {**SMALL, "model_args": "depth=1,width=16,heads=2", "log_every": 6}
    with pytest.warns(unskip.errors.UnskipWarning):  # too few steps to learn
        unskip.train(unskip.recipes.uvit("digits", **small), tmp_path / "uvit", quiet=True)
    (group,) = read([tmp_path / "uvit"])
    seen = group.runs[0].look
    assert seen.measurement is not None
    assert seen.measurement["blocks"][0]["high_frequency"] is not None
    (tiles,) = [each for each in seen.tiles if each.name == "patch-features"]
    assert tiles.images[0][1].shape == (4, 4, 3)
    assert all("singular" in note for note in seen.notes)  # the attention is untrained


def test_measurements_of_checkpoints(groups: list[Group]) -> None:
    for group in groups:
        seen = group.runs[0].look
        assert (seen.step, len(seen.measurement["blocks"]), len(seen.measurement["sites"])) == (6, 2, 4)
    (axes,) = figures.alphas(groups).axes
    lines = sorted(line.get_ydata().tolist() for line in axes.lines)
    assert lines == [pytest.approx([1.0, 1 - 1 / 6, 1 - 2 / 6, 0.5]), [1.0] * 4]  # alphas of the classifier
    for figure in (figures.measured(groups, "echo"), figures.spectra(groups), figures.conditions(groups)):
        assert len(figure.axes[0].lines) == 2


def test_reconstructions_show_masked_and_true_pixels(runs: Path, groups: list[Group]) -> None:
    seen = groups[0].runs[0].look
    tiles = {each.name: each for each in seen.tiles}
    true, visible, predicted = (np.stack(row) for row in tiles["reconstructions"].images)
    images = _some(open_images("digits", "test"), 16).load(range(SHOWN))[:, 0].numpy()
    assert np.array_equal(true[..., 0], images)
    grey = (visible == 128).all(-1)
    assert np.array_equal(visible[~grey], true[~grey])
    assert np.array_equal(predicted[~grey], true[~grey])
    assert grey.mean() == pytest.approx(0.5, abs=0.05)  # the mask ratio; a few true pixels may be equally grey
    assert len(tiles["reconstructions"].table) == SHOWN


@pytest.mark.parametrize("norm_pix", [True, False])
def test_a_perfect_decoder_reconstructs_the_image(runs: Path, norm_pix: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that predicts its target exactly reconstructs every pixel."""
    from unskip.models import MAE
    from unskip.models._mae import Reconstruction, _rows

    def perfect(self: MAE, images: torch.Tensor, noise: torch.Tensor) -> Reconstruction:
        self.norm_pix = norm_pix
        order = noise.argsort(1)
        target = self.target(_rows(self.patches(images), order[:, self.visible :]))
        return Reconstruction(torch.zeros(()), target, order, torch.zeros(()))

    monkeypatch.setattr(MAE, "forward", perfect)
    (group,) = read([runs / "mae"], look=False)
    tiles = {each.name: each for each in look(group.runs[0]).tiles}
    true, _, predicted = (np.stack(row).astype(int) for row in tiles["reconstructions"].images)
    assert abs(true - predicted).max() <= 1
    assert max(float(str(row[2])) for row in tiles["reconstructions"].table) < 0.01


def test_nearest_neighbours_and_patch_features(groups: list[Group]) -> None:
    for group in groups:
        seen = group.runs[0].look
        tiles = {each.name: each for each in seen.tiles}
        assert len(tiles["neighbours"].images) == SHOWN
        assert {len(row) for row in tiles["neighbours"].images} == {6}
        cosines = np.array([row[4] for row in tiles["neighbours"].table], dtype=float).reshape(SHOWN, 5)
        assert np.all(np.diff(cosines, axis=1) <= 0)
        marks = [text.endswith("✗") for row in tiles["neighbours"].captions for text in row[1:]]
        assert marks == [row[1] != row[3] for row in tiles["neighbours"].table]
        assert [len(row) for row in tiles["patch-features"].images] == [3] * SHOWN
        assert tiles["patch-features"].images[0][1].shape == (4, 4, 3)
    assert "reconstructions" not in {each.name for each in groups[1].runs[0].look.tiles}  # type: ignore[union-attr]


def test_class_names_with_the_same_prefix_are_distinguished(runs: Path, groups: list[Group]) -> None:
    def renamed(*given: Any, **options: Any) -> ImageSet:
        images = open_images(*given, **options)
        return replace(images, classes=tuple(f"{'a long name ' * 4}{name}" for name in images.classes))

    marks = []
    for run in (groups[0].runs[0], replace(groups[0].runs[0], look=look(groups[0].runs[0], opener=renamed))):
        (tiles,) = (each for each in run.look.tiles if each.name == "neighbours")
        marks.append([text.endswith("✗") for row in tiles.captions for text in row[1:]])
        assert f"; {marks[-1].count(False)} of {len(marks[-1])} neighbours" in tiles.description
    assert marks[0] == marks[1]
    assert any(marks[0])


def test_pictures_as_figures(groups: list[Group]) -> None:
    assert len(figures.reconstructions(groups).axes[0].images) == 3 * SHOWN
    assert len(figures.patch_features(groups, group=1).axes[0].images) == 3 * SHOWN
    assert len(figures.neighbours(groups, group=1).axes[0].images) == 6 * SHOWN
    with pytest.raises(unskip.errors.BadInput, match="no reconstructions"):
        figures.reconstructions(groups, group=1)
    with pytest.raises(unskip.errors.BadInput, match="group is 7"):
        figures.neighbours(groups, group=7)


def test_a_failed_part_does_not_affect_the_others(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.report import _look

    def broken(*given: object, **named: object) -> None:
        raise ValueError("no way <b>")

    monkeypatch.setattr(_look, "measure", broken)
    (group,) = read([runs / "classifier"], look=False)
    seen = look(group.runs[0])
    assert (seen.measurement, seen.notes) == (None, ["measurement: ValueError: no way <b>"])
    assert [each.name for each in seen.tiles] == ["patch-features", "neighbours"]


def test_checkpoints_that_cannot_be_measured_have_a_note(runs: Path, tmp_path: Path) -> None:
    (none,) = read([folder(tmp_path / "none")])
    assert none.runs[0].look.notes == ["not measured: it has no checkpoint yet"]

    with pytest.warns(unskip.errors.UnskipWarning, match=r"code: not measured: .*--trust"):
        (code,) = read([folder(tmp_path / "code", model="evil.py:make", weights=(1.0,))])
    assert "evil.py:make" in code.runs[0].look.notes[0]

    with pytest.warns(unskip.errors.UnskipWarning, match="gone: not measured"):
        (gone,) = read([folder(tmp_path / "gone", weights=(1.0,))])
    assert gone.runs[0].look.notes[0].startswith("not measured:")

    data = json.loads((runs / "mae" / "config.json").read_text())
    data["config"]["data"] = "gone-{split}.parquet"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.json").write_text(json.dumps(data))
    (tmp_path / "moved" / "checkpoints").symlink_to(runs / "mae" / "checkpoints")
    with pytest.warns(unskip.errors.UnskipWarning, match="gone-"):
        (moved,) = read([tmp_path / "moved"])
    assert "gone-" in moved.runs[0].look.notes[0]


def test_a_limited_number_of_runs_is_measured(tmp_path: Path) -> None:
    """First the first seed of each group, then the second seeds."""
    for name in "ab":
        for seed in (0, 1):
            folder(tmp_path / name / f"seed-{seed}", shortcut=f"decay:0.{ord(name) - 92}", seed=seed)
    groups = read([tmp_path / "a", tmp_path / "b"], look=3)
    assert [[run.look is not None for run in group.runs] for group in groups] == [[True, True], [True, False]]
