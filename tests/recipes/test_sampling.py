"""Evaluation of generative runs: samples, metrics, features by noise level, and the command line."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.recipes.generative import SIT, tiny, trained

import unskip
from unskip import cli, recipes
from unskip.errors import BadInput, UnskipWarning
from unskip.evals import extract, noised
from unskip.models import Sampling
from unskip.recipes import evaluate_run, evaluate_samples, open_run
from unskip.recipes._sample import grid_of
from unskip.training import RunFolder

# Short runs give health warnings.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")


@pytest.fixture(scope="module", params=["sit", pytest.param("uvit", marks=pytest.mark.full)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Tests only read it or add results."""
    return trained(request.param, tmp_path_factory.mktemp(request.param) / "run")


def test_a_run_records_its_results(run: Path) -> None:
    rows = RunFolder.open(run).read("evals.jsonl")
    last = [row for row in rows if row["step"] == 6]
    assert {"flow-loss-v1", "features"} <= {row["evaluation"] for row in last}
    metrics = RunFolder.open(run).read("metrics.jsonl")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert 0.2 < metrics[-1]["effective_decay"] < 0.5


def test_samples_use_ema_weights_and_do_not_depend_on_the_batch_size(run: Path) -> None:
    trained = open_run(run)
    state = RunFolder.open(run).last_checkpoint()
    assert state is not None
    from unskip.training._state import read_state

    average = read_state(state[1], "ema")
    name = next(name for name, _ in trained.model.named_parameters() if "attn.qkv" in name)
    assert torch.equal(trained.model.get_parameter(name), average[f"module.{name}"])
    options: dict[str, Any] = {"steps": 4, "cfg": 1.5, "write": False}
    whole = unskip.sample(run, n=11, **options)
    parts = unskip.sample(trained, n=11, batch=3, **options)
    few = unskip.sample(trained, n=4, **options)
    assert whole.images.shape == (11, 1, 8, 8)
    assert whole.images.dtype == torch.uint8
    assert whole.labels.tolist() == [*range(10), 0]
    assert (
        whole.images.int() - parts.images.int()
    ).abs().max() <= 1  # matrix products of other sizes round differently
    assert (whole.images[:4].int() - few.images.int()).abs().max() <= 1
    assert whole.evaluations == 4 * 2 * 2
    assert not (run / "samples").exists()


@pytest.mark.full
def test_a_compiled_network_gives_the_same_samples(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, graphs = partial(torch.compile, backend="aot_eager", fullgraph=True), list[Any]()  # no toolchain

    def compiled(model: Any) -> Any:
        graphs.append(model)
        return compiler(model)

    monkeypatch.setattr(torch, "compile", compiled)
    trained = open_run(run)
    options: dict[str, Any] = {"n": 5, "steps": 3, "cfg": 1.5, "batch": 3, "write": False}
    plain = unskip.sample(trained, **options)
    assert not graphs
    again = unskip.sample(trained, compile=True, **options)
    assert graphs == [trained.model]
    assert (plain.images.int() - again.images.int()).abs().max() <= 1


def test_samples_are_written_as_images_and_a_grid(run: Path) -> None:
    result = unskip.sample(run, n=5, steps=2, sampler="euler", labels=[3, 3, 10, 0, 1])
    assert result.labels.tolist() == [3, 3, 10, 0, 1]
    assert result.grid is not None
    assert result.grid.parent == run / "samples"
    files = sorted(result.grid.with_suffix("").glob("*.png"))
    assert [file.name for file in files] == [f"{index:05d}.png" for index in range(5)]
    for file, image in zip(files, result.images, strict=True):
        assert numpy.array_equal(numpy.asarray(Image.open(file)), image[0].numpy())
    about = json.loads(result.grid.with_suffix(".json").read_text())
    assert (about["sampler"], about["steps"], about["evaluations"]) == ("euler", 2, 2.0)
    again = unskip.sample(run, n=3, steps=2, sampler="euler", labels=3)
    assert again.grid == result.grid
    assert len(list(result.grid.with_suffix("").glob("*.png"))) == 3
    shutil.rmtree(run / "samples")


def test_a_grid_has_rows_of_images() -> None:
    images = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 1, 40, 40) * 10
    grid = grid_of(images)
    assert grid.shape == (1, 86, 86)
    assert [int(grid[0, y, x]) for y, x in ((2, 2), (2, 44), (44, 2), (44, 44), (0, 0))] == [0, 10, 20, 255, 255]
    assert grid_of(images[:1, :, :8, :8]).shape == (1, 36, 36)  # small images are enlarged


@pytest.mark.full
def test_evaluation_by_block_and_noise_level(run: Path) -> None:
    _, result = evaluate_run(run, ["knn-dino-v1", "rank-v1"], times=(0.0, 0.9), blocks=[0, 4])
    by = {(each.time, each.block): each.values for each in result if "knn20" in each.values}
    assert set(by) == {(0.0, 0), (0.0, 4), (0.9, 0), (0.9, 4)}
    noise, image = ([by[time, block]["knn20"] for block in (0, 4)] for time in (0.0, 0.9))
    assert max(noise) < 0.17 < max(image)  # pure noise gives chance, 0.1, with a standard error of 0.016
    rows = [row for row in RunFolder.open(run).read("evals.jsonl") if "time" in row]
    assert {(row["time"], row["block"]) for row in rows} == set(by)
    evaluate_run(run, ["rank-v1"], times=(0.9,), blocks=[0], precision="bf16")
    assert RunFolder.open(run).read("evals.jsonl")[-1]["precision"] == "bf16"  # reports separate results by precision


def test_features_at_the_ends_of_the_noise_schedule(run: Path) -> None:
    """At time 1 the input is the image, and at time 0 it does not depend on the image."""
    trained = open_run(run)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(6, dtype=torch.int64)
    flow, view = trained.config.flow, ("mean", "none")
    clean = extract(trained.model, [(images, labels)], inputs=noised(flow, 1.0))
    plain = extract(trained.model, [(images, labels)])
    for block in range(5):
        torch.testing.assert_close(clean[view][block], plain[view][block])  # type: ignore[index]
    hook = noised(flow, 0.0)
    nothing = [extract(trained.model, [(each, labels)], "middle", inputs=hook) for each in (images, -images)]
    torch.testing.assert_close(nothing[0][view][2], nothing[1][view][2])  # type: ignore[index]


def test_samples_are_compared_with_data_over_an_extractor(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unskip.recipes import _evaluate

    monkeypatch.setenv("HOME", str(tmp_path))
    config = recipes.supervised("digits", steps=2, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2")
    unskip.train(config, tmp_path / "classifier", quiet=True)
    extractor, sampling = tmp_path / "classifier", Sampling("euler", 2)
    drawn = evaluate_samples(run, extractor, 40, sampling)
    assert set(drawn) == {"FD-classifier", "precision", "recall", "kid", "score", "evaluations"}
    assert drawn["evaluations"] == 2
    row = RunFolder.open(run).read("evals.jsonl")[-1]
    assert (row["evaluation"], row["n"], row["steps"], row["precision"]) == ("generation-v1", 40, 2, "float32")
    assert row["sample_precision"] == drawn["precision"]
    monkeypatch.setattr(_evaluate, "sampled", lambda *args, **kwargs: pytest.fail("drawn again"))
    samples = unskip.sample(run, n=40, sampler="euler", steps=2, write=False)
    assert evaluate_samples(run, extractor, 40, sampling, samples=samples) == pytest.approx(drawn, rel=1e-3)
    command = ["sample", str(run), "--n", "40", "--sampler", "euler", "--steps", "2", "--evaluate", str(extractor)]
    assert cli.main(command) == 0
    assert "FD-classifier" in capsys.readouterr().out
    assert len(list((tmp_path / ".cache" / "unskip" / "statistics").iterdir())) == 1  # reference statistics are cached
    # A missing extractor is refused before sampling.
    monkeypatch.setattr(unskip.recipes, "sample", lambda *args, **kwargs: pytest.fail("drawn in vain"))
    assert cli.main(["sample", str(run), "--evaluate", "nowhere"]) == 2
    shutil.rmtree(run / "samples")


def test_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(run), "--n", "3", "--steps", "2", "--cfg", "1.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["n"], data["evaluations"]) == (3, 8.0)
    assert Path(data["grid"]).is_file()
    assert cli.main(["sample", str(run), "--n", "2", "--steps", "1"]) == 0
    assert "2 evaluations of the network each" in capsys.readouterr().out
    assert cli.main(["eval", str(run), "--protocol", "knn-dino-v1", "--times", "0.5,1", "--blocks", "last"]) == 0
    table = capsys.readouterr().out.strip().partition("\n\n")[2].splitlines()
    assert [line.split()[:2] for line in (table[0], *table[2:])] == [["time", "block"], ["0.5", "4"], ["1", "4"]]
    for wrong, text in (
        (["--n", "0"], "draw one or more"),
        (["--sampler", "ddim"], "heun"),
        (["--label", "11"], "label 11 is out of range"),
        (["--precision", "int8"], "bf16"),
        (["--evaluate", "nowhere"], "not an extractor"),
        (["--evaluate", "nowhere", "--label", "3"], "leave --label out"),
    ):
        assert cli.main(["sample", str(run), "--steps", "1", "--n", "2", *wrong][: 4 + 2 + len(wrong)]) == 2
        assert text in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--times", "soon"]) == 2
    shutil.rmtree(run / "samples")


def test_invalid_sampling_options_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="0 samples"):
        unskip.sample(run, n=0)
    with pytest.raises(BadInput, match="2 labels for 3 samples"):
        unskip.sample(run, n=3, labels=[1, 2])
    with pytest.raises(BadInput, match="label 12"):
        unskip.sample(run, n=3, labels=12)
    with pytest.raises(BadInput, match="whole numbers"):
        unskip.sample(run, n=2, labels=[1.5, 2])  # type: ignore[list-item]
    number: Any = numpy.int64(3)
    assert unskip.sample(run, n=2, steps=1, labels=number, write=False).labels.tolist() == [3, 3]
    config = recipes.supervised("digits", steps=1, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2")
    unskip.train(config, tmp_path / "run", quiet=True)
    with pytest.raises(BadInput, match="does not generate"):
        unskip.sample(tmp_path / "run")
    with pytest.raises(BadInput, match="no noise levels"):
        evaluate_run(tmp_path / "run", ["knn-dino-v1"], times=(1.0,))
    with pytest.raises(BadInput, match=r"time is 1\.5"):
        evaluate_run(run, ["knn-dino-v1"], times=(1.5,))
    with pytest.raises(BadInput, match="rank-v1"):
        evaluate_run(run, ["knn-dino-v1"], times=(1.0,), changes={"rank-v1": {"images": 10}})


@pytest.mark.full
def test_a_model_with_more_classes_than_its_data_samples_only_classes_of_the_data(tmp_path: Path) -> None:
    """As in a run from published weights. The reference images have no other classes."""
    unskip.train(tiny(model_args=f"{SIT},classes=25"), tmp_path / "run", quiet=True)
    drawn = unskip.sample(tmp_path / "run", n=12, steps=1, write=False)
    assert drawn.labels.tolist() == [*range(10), 0, 1]
    assert unskip.sample(tmp_path / "run", n=2, steps=1, labels=25, write=False).labels.tolist() == [25, 25]


@pytest.mark.full
def test_guidance_needs_label_dropout_in_training(tmp_path: Path) -> None:
    unskip.train(tiny(label_dropout=0.0), tmp_path / "run", quiet=True)
    trained = open_run(tmp_path / "run")
    options: dict[str, Any] = {"n": 2, "steps": 1, "write": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnskipWarning)
        unskip.sample(trained, **options)
    for wrong in ({"cfg": 1.5}, {"cfg": 0.0}, {"labels": [3, 10]}):
        with pytest.warns(UnskipWarning, match="without label dropout"):
            unskip.sample(trained, **options, **wrong)
