"""A trained run opens from its folder without its data, and a resumed run detects changed data."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import unskip
from unskip import cli, recipes
from unskip.data import Preprocess, preprocess_of, set_preprocess
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.recipes import evaluate_run, open_run
from unskip.training import RunFolder
from unskip.wiring import find_wiring

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # short runs give health warnings

VIT = "depth=2,embed_dim=16,num_heads=2"
RUNS: dict[str, dict[str, Any]] = {
    "supervised": {"model_args": VIT, "shortcut": "decay:0.5", "ema": 0.9},
    "mae": {"model_args": VIT, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2},
    "dino": {"model_args": VIT, "shortcut": "cut", "init": "skipless", "local_crops": 1, "projection": 16, "source": 8},
    "simclr": {"model_args": VIT, "shortcut": "cut", "hidden": 8, "projection": 4, "source": 8},
    "sit": {"model_args": "width=16,depth=2,heads=2"},
    "uvit": {"model_args": "width=16,depth=3,heads=2"},
}


def folder_of_images(folder: Path, count: int) -> Path:
    """Noise images in two classes and two splits."""
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / split / label / f"{index}.png")
    return folder


def trained(recipe: str, out: Path, data: Path, **changes: Any) -> Any:
    fields = {"data": str(data), "steps": 2, "batch": 16, "online_images": 300, "device": "cpu", "health": False}
    if recipe == "supervised":
        del fields["online_images"]
    config = getattr(recipes, recipe)("digits", **{**fields, **RUNS[recipe], **changes})
    return unskip.train(config, out, quiet=True)


@pytest.mark.parametrize("recipe", RUNS)
def test_a_run_opens_without_its_data(recipe: str, tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 150)
    outcome = trained(recipe, tmp_path / "run", data)
    (tmp_path / "data").rename(tmp_path / "gone")
    run = open_run(tmp_path / "run")
    assert run.step == outcome.step == 2
    assert run.facts.channels == 3
    loaded = unskip.load(tmp_path / "run")
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    encoder = run.objective.encoder(loaded)
    wiring = find_wiring(encoder)
    assert wiring is not None
    assert wiring.alphas == pytest.approx(unskip.Wiring.of(run.encoder).alphas)
    assert cli.main(["audit", str(tmp_path / "run")]) == 0
    # Size, crop, interpolation, mean and std are recorded with the run, and with the folder that is saved from it.
    kept = Preprocess(**run.folder.preprocess or {})
    assert (kept.size, kept.crop, kept.interpolation, kept.source) == (8, 1.0, "bilinear", "the run")
    saved = [each.parent for each in (tmp_path / "run" / "checkpoints" / "step-2").rglob("unskip.json")]
    assert len(saved) == (recipe not in ("sit", "uvit"))  # their models cannot be built by name
    alone = [unskip.load(each) for each in saved]
    for model in (loaded, encoder, run.encoder, *alone):
        assert preprocess_of(model) == kept
    for model in alone if "ema" not in RUNS[recipe] else ():
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in run.encoder.state_dict().items())


@pytest.mark.parametrize("recipe", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 150)
    for name in ("whole", "stopped"):
        trained(recipe, tmp_path / name, data, steps=3, checkpoint_every=2, ema=0.9, optimizer="soap")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-3")  # as if it had been killed after step 2
    outcome = unskip.resume(tmp_path / "stopped", quiet=True)
    assert outcome.evaluations
    for file in ("model.safetensors", "ema.safetensors"):
        one, other = (tmp_path / name / "checkpoints" / "step-3" / file for name in ("whole", "stopped"))
        assert one.read_bytes() == other.read_bytes()


def test_eval_and_measure_use_the_preprocessing_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "run", data)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    record["preprocess"] |= {"mean": [0.0] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop": 0.75}
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    message = "size 8, crop 0.75, bicubic, mean 0, 0, 0, std 0.5, 0.5, 0.5 (from the run)"
    for command in (["eval", "--protocol", "accuracy-v1"], ["measure", "--data", str(data), "--jacobians", "off"]):
        assert cli.main([command[0], str(tmp_path / "run"), *command[1:]]) == 0
        assert message in capsys.readouterr().out
    images = unskip.data.batch(data, 8, 8, mean=[0] * 3, std=[0.5] * 3, interpolation="bicubic", crop=0.75)
    cli.main(["measure", str(tmp_path / "run"), "--data", str(data), "--jacobians", "off", "--json"])
    expected = unskip.measure(unskip.load(tmp_path / "run"), images, jacobians="off").to_dict()
    assert json.loads(capsys.readouterr().out)["blocks"] == expected["blocks"]


def test_initial_weights_do_not_change_the_preprocessing_of_the_run(tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "first", data)
    model = unskip.load(tmp_path / "first")
    set_preprocess(model, Preprocess((0.3,) * 3, (0.3,) * 3, 8))
    unskip.save(model, tmp_path / "saved")
    trained("supervised", tmp_path / "second", data, weights=str(tmp_path / "saved"))
    checkpoint = unskip.load(tmp_path / "second" / "checkpoints" / "step-2")
    assert preprocess_of(checkpoint) == preprocess_of(unskip.load(tmp_path / "first"))


def test_ema_weights_are_loaded(tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "run", data, ema=0.5, steps=4)
    loaded = unskip.load(tmp_path / "run").state_dict()
    plain = unskip.load(tmp_path / "run" / "checkpoints" / "step-4").state_dict()
    assert not torch.equal(loaded["head.weight"], plain["head.weight"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "train" / "a" / "3.png").unlink(), "train data .* 40 images, now 39"),
        (
            lambda folder: Image.new("RGB", (8, 8)).save(folder / "train" / "b" / "0.png"),
            "train data .* other content",
        ),
        (
            lambda folder: (folder / "train" / "a" / "3.png").rename(folder / "train" / "b" / "99.png"),
            "train data .* other labels",
        ),
        (lambda folder: folder.rename(folder.parent / "elsewhere"), "was moved, give its path: --data"),
    ],
    ids=["an image less", "another image", "another label", "elsewhere"],
)
def test_data_that_changed_is_refused(change: Any, named: str, tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "run", data, checkpoint_every=1)
    (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "away")
    change(data)
    with pytest.raises(BadInput, match=named):
        unskip.resume(tmp_path / "run", quiet=True)


def test_results_are_returned_where_the_run_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, or in a run of another user."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trained("supervised", tmp_path / "run", folder_of_images(tmp_path / "data", 20))
    monkeypatch.setattr(RunFolder, "append", full)
    with pytest.warns(UnskipWarning, match=r"results were not added to evals.jsonl \(No space left on device\)"):
        _, results = evaluate_run(tmp_path / "run", ["accuracy-v1"])
    assert results[0].n == 40


def test_a_run_continues_with_changed_data_if_allowed(tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "run", data, checkpoint_every=1)
    (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "away")
    (data / "train" / "a" / "3.png").unlink()
    assert cli.main(["resume", str(tmp_path / "run"), "--quiet"]) == 2
    with pytest.warns(UnskipWarning, match="40 images, now 39"):
        evaluate_run(tmp_path / "run", ["accuracy-v1"])
    assert RunFolder(tmp_path / "run").read("evals.jsonl")[-1]["data"].startswith("changed")
    assert cli.main(["resume", str(tmp_path / "run"), "--quiet", "--changed-data"]) == 0
    assert any(row["warning"] == "changed-data" for row in RunFolder(tmp_path / "run").read("warnings.jsonl"))
    assert cli.main(["resume", str(tmp_path / "run"), "--quiet"]) == 0  # the new fingerprint is recorded


def test_a_model_from_a_python_file_is_imported_only_with_trust(tmp_path: Path) -> None:
    source = "import timm\n\ndef model():\n    return timm.create_model('vit_tiny_patch16_224', img_size=8, "
    source += "patch_size=4, in_chans=3, num_classes=2, depth=1, embed_dim=16, num_heads=2)\n"
    (tmp_path / "mine.py").write_text(source)
    data = folder_of_images(tmp_path / "data", 20)
    model = f"{tmp_path / 'mine.py'}:model"
    trained("supervised", tmp_path / "run", data, model=model, model_args="", patch=2, shortcut="keep", ema=None)
    with pytest.raises(BadInput, match=r"mine\.py.*trust"):
        unskip.load(tmp_path / "run")
    assert isinstance(unskip.load(tmp_path / "run", trust=True), nn.Module)


def test_a_run_of_another_version_is_refused(tmp_path: Path) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "run", data)
    file = tmp_path / "run" / "config.json"
    record = json.loads(file.read_text())
    del record["facts"]
    file.write_text(json.dumps(record))
    with pytest.raises(LoadError, match="facts"):
        unskip.load(tmp_path / "run")


def test_a_run_of_relative_paths_resumes_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of_images(tmp_path / "data", 20)
    monkeypatch.chdir(tmp_path)
    trained("supervised", Path("run"), Path("data"), checkpoint_every=1)
    (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "away")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert unskip.resume("../run", quiet=True).finished
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "run" / "checkpoints" / "step-2").rename(tmp_path / "away again")
    assert cli.main(["resume", "../run", "--quiet", "--data", "../moved"]) == 0
    evaluate_run("../run", ["accuracy-v1"])  # the path is recorded as an absolute one


def test_a_folder_of_several_runs_is_not_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder_of_images(tmp_path / "data", 20)
    trained("supervised", tmp_path / "runs" / "seed-0", data)
    assert cli.main(["audit", str(tmp_path / "runs")]) == 2
    assert "seed-0" in capsys.readouterr().err


def test_audit_of_a_run_uses_its_trained_weights(tmp_path: Path) -> None:
    trained("supervised", tmp_path / "run", folder_of_images(tmp_path / "data", 20))
    model = unskip.load(tmp_path / "run")
    wiring = unskip.Wiring.of(model)
    described = [site.ratio for site in wiring.sites]
    wiring.undo()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))  # as the run is opened with
    assert described == pytest.approx([site.ratio for site in unskip.audit(model, images).sites], rel=1e-5)
