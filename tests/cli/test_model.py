"""The MODEL of a command: a name, a folder of a run or of `unskip.save`; and inputs for one that does not say."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import timm
import torch
from PIL import Image

import unskip
from unskip import recipes
from unskip.errors import UnskipWarning


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mae"
    config = recipes.mae("digits", model_args="depth=2,embed_dim=16,num_heads=2", steps=2, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)  # two steps teach nothing, and it says so
        unskip.train(config, folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = timm.create_model("test_vit")
    unskip.rewire(model, "decay:0.5")
    unskip.save(model, folder)
    return folder


def test_a_saved_model_is_measured_with_its_own_weights_and_wiring(run: Any, saved: Path) -> None:
    code, out, _ = run("measure", str(saved), "--data", "random:2", "--jacobians", "off", "--json")
    record = json.loads(out)
    model = unskip.load(saved)
    assert code == 0
    assert [site["alpha"] for site in record["sites"]] == unskip.Wiring.of(model).alphas
    alone = unskip.measure(model, unskip.data.batch("random:2", size=160), jacobians="off")
    assert [block["norm"] for block in record["blocks"]] == pytest.approx([block.norm for block in alone.blocks])


def test_a_run_is_its_encoder_as_it_was_trained(run: Any, trained: Path) -> None:
    code, out, _ = run("measure", str(trained), "--data", "random:2", "--jacobians", "off", "--json")
    assert code == 0
    alphas = [site["alpha"] for site in json.loads(out)["sites"]]
    assert alphas == pytest.approx([1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6])
    code, out, _ = run("absorb", str(trained), "--json")
    assert code == 0
    assert json.loads(out)["verified"]


def test_an_audit_of_a_folder_says_when_its_strengths_were_taken(run: Any, trained: Path, saved: Path) -> None:
    for folder in (trained, saved):
        code, out, _ = run("audit", str(folder))
        assert code == 0
        assert "note: the model is rewired" in out
        code, out, _ = run("audit", str(folder), "--shortcut", "cut", "--json")
        data = json.loads(out)
        assert {site["alpha"] for site in data["shortcut"]["sites"]} == {0}
        assert len(data["notes"]) == 1


def test_an_audit_of_a_rewired_folder_shows_its_weights(run: Any, trained: Path, saved: Path) -> None:
    wiring = unskip.Wiring.of(unskip.load(saved))
    code, out, _ = run("audit", str(saved))
    assert code == 0
    assert out.endswith(f"\n\n{wiring}\n")
    shortcut = json.loads(run("audit", str(saved), "--json")[1])["shortcut"]
    assert [site["alpha"] for site in shortcut["sites"]] == wiring.alphas
    code, out, _ = run("audit", str(trained))
    assert code == 0
    assert "4 governed sites of 4" in out
    decay = (1 - 0.4 / 3) * (1 - 0.8 / 3) * 0.6
    assert f"effective decay {decay:.3g}, above the paper's band" in out


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # two steps teach nothing, and it says so
def test_a_run_needs_no_data_to_be_looked_into(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for number in range(100):
                Image.new("L", (8, 8), 2 * number).save(tmp_path / "photos" / split / label / f"{number}.png")
    common = "--preset digits --data photos --size 8 --batch 8 --steps 2 --device cpu --quiet".split()
    small = ["--model-args", "depth=1,embed_dim=16,num_heads=2", "--shortcut", "decay:0.5"]
    for command in (
        ["mae", *small, "--out", "encoder"],
        ["sit", "--model-args", "width=16,depth=1,heads=2", "--out", "sit"],
    ):
        code, _, err = run("train", *command, *common)
        assert code == 0, err
    shutil.rmtree(tmp_path / "photos")
    code, out, err = run("audit", "encoder", "--json")
    assert code == 0, err
    assert [site["alpha"] for site in json.loads(out)["shortcut"]["sites"]] == [1.0, 0.5]
    for command in (
        ["measure", "encoder", "--data", "random:2", "--jacobians", "off"],
        ["absorb", "encoder"],
        ["sample", "sit", "--n", "2", "--steps", "1"],
        ["report", "encoder", "sit", "--out", "page.html"],
    ):
        code, out, err = run(*command)
        assert code == 0, (command, err)
    assert "photos" in (tmp_path / "page.html").read_text()
    code, _, err = run("resume", "encoder")
    assert code == 2
    assert "photos" in err


def test_folders_that_are_no_models(run: Any, tmp_path: Path, saved: Path) -> None:
    code, _, err = run("audit", str(tmp_path))
    assert code == 2
    assert "is a folder of unknown kind" in err
    code, _, err = run("measure", str(saved), "--random")
    assert code == 2
    assert "--random is for named models" in err


def test_a_model_that_does_not_say_what_it_takes_is_told(run: Any, models: str) -> None:
    for command in ("measure", "absorb"):
        code, out, err = run(command, f"{models}:Reader")
        assert (code, out) == (2, "")
        assert "On the command line: --input 2,3,224,224 or --input int:2,16" in err
        code, _, err = run(command, f"{models}:Reader", "--input", "int:x")
        assert code == 2
        assert "is not a shape" in err


def test_measure_with_an_input(run: Any, models: str) -> None:
    shape = ("--input", "int:2,6", "--jacobians", "off")
    code, out, err = run("measure", f"{models}:Reader", *shape)
    assert code == 0, err
    assert out.startswith("Reader on 8 samples of 6 tokens")
    numpy.save("ids.npy", numpy.arange(15).reshape(3, 5))
    code, out, _ = run("measure", f"{models}:Reader", *shape, "--data", "ids.npy")
    assert code == 0
    assert out.startswith("Reader on 3 samples of 5 tokens")
    code, out, err = run("measure", f"{models}:bare", "--input", "4,6,8", "--jacobians", "off")
    assert code == 0, err
    assert out.startswith("Sequential on 8 samples of 6 tokens")  # as many as --data says


def test_absorb_with_an_input(run: Any, models: str) -> None:
    code, out, _ = run("absorb", f"{models}:Reader", "--input", "int:2,6", "--apply", "widen", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["verified"]
    assert data["applied"]["difference"] < 1e-5
