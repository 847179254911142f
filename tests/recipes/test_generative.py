"""The recipes of SiT and U-ViT: runs on digits, resume, latents, samples, noise levels, and the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.evals.hosts import NoHost
from torch import Tensor

import unskip
from unskip import cli, recipes
from unskip.data import Feed, ImageSet, open_images
from unskip.data._latents import Autoencoder, LatentFeed, encode
from unskip.errors import BadInput, LoadError
from unskip.models import Sampling, SiT, UViT
from unskip.recipes._generate import Generative
from unskip.recipes._judge import open_run
from unskip.recipes._judge_generation import judge_samples, judge_times
from unskip.recipes._registry import RECIPES
from unskip.recipes._sample import grid_of
from unskip.training import RunFolder

# Runs of a few steps look unhealthy, and are told so.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")

TINY: dict[str, Any] = {
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "online_images": 300,
    "average": 0.5,
    "device": "cpu",
}
SIT = "width=16,depth=5,heads=2"


def tiny(recipe: str = "sit", **changes: Any) -> Any:
    return getattr(recipes, recipe)("digits", **{"model_args": SIT, **TINY, **changes})


@pytest.fixture(scope="module", params=["sit", "uvit"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that tests only read, or add results to."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    assert unskip.train(tiny(request.param), out, quiet=True).finished
    return out


CHOICES: dict[str, dict[str, Any]] = {
    "paper": {},
    "plain": {"shortcut": "keep", "long_skips": False},
    "ends in the middle": {"shortcut": "decay:0.8,until=0.5"},
    "and back": {"shortcut": "decay:0.8,until=0.5,back"},
    "by product": {"shortcut": "decay:product=0.2"},
    "attention only": {"where": "attention"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_the_paper_is_a_flag_away(name: str) -> None:
    task, _ = RECIPES["sit"].build(tiny(**CHOICES[name]))
    model: Any = task.model
    assert isinstance(model, SiT)
    assert len(model.mirrors) == (0 if name == "plain" else 2)
    if name == "plain":
        assert task.wiring is None
        return
    assert task.wiring is not None
    alphas = [alpha for alpha, site in zip(task.wiring.alphas, task.wiring.sites, strict=True) if not site.long]
    assert len(alphas) == 10
    line = [index / 9 for index in range(10)]
    if name == "by product":
        assert task.wiring.effective_decay == pytest.approx(0.2)
        return
    expected = {
        "paper": [1 - 0.2 * d for d in line],
        "ends in the middle": [1 - 0.2 * min(1, 2 * d) for d in line],
        "and back": [1 - 0.2 * min(2 * d, 2 - 2 * d) for d in line],
        "attention only": [1 - 0.2 * index / 8 if index % 2 == 0 else 1.0 for index in range(10)],
    }[name]
    assert alphas == pytest.approx(expected)


@pytest.mark.parametrize("choice", [
    {"interpolant": "gvp"}, {"target": "noise"}, {"target": "data", "times": "logit-normal"}, {"init": "zero"},
])  # fmt: skip
def test_a_step_of_every_objective_is_taken(choice: dict[str, Any]) -> None:
    task, _ = RECIPES["uvit"].build(tiny("uvit", **choice))
    assert isinstance(task.model, UViT)
    batch = next(task.feed.iterate(0, 1))
    torch.manual_seed(0)
    loss, _ = task.loss(task.model, batch)
    loss.backward()
    assert 0 < float(loss.detach()) < 10
    assert task.trivial is not None


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize("target", ["velocity", "noise", "data"])
def test_a_model_that_predicts_nothing_has_the_trivial_loss(interpolant: str, target: str) -> None:
    """SiT's output starts at zero: its loss is what flat-loss compares with."""
    task, _ = RECIPES["sit"].build(tiny(interpolant=interpolant, target=target, batch=1024))
    torch.manual_seed(0)
    found = float(task.loss(task.model, next(task.feed.iterate(0, 1)))[0].detach())
    assert found == pytest.approx(task.trivial, rel=0.03)
    if (interpolant, target) == ("linear", "velocity"):  # by all test images: a few say little of their mean square
        values = torch.cat([part[0] for part in Feed(open_images("digits", split="test"), 100, 8).evaluate()])
        assert task.trivial == pytest.approx(1 + float(values.double().square().mean()), rel=1e-6)


def test_a_run_says_what_it_learnt(run: Path) -> None:
    rows = RunFolder.open(run).read("evals.jsonl")
    last = [row for row in rows if row["step"] == 6]
    assert {"flow-loss-v1", "knn-dino-v1, rank-v1"} <= {row["evaluation"] for row in last}
    metrics = RunFolder.open(run).read("metrics.jsonl")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert 0.2 < metrics[-1]["effective_decay"] < 0.5


def test_stopped_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    whole = unskip.train(tiny(health=False), tmp_path / "whole", quiet=True)
    unskip.train(tiny(health=False), tmp_path / "cut", quiet=True)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-6")
    cut = unskip.resume(tmp_path / "cut", quiet=True)
    assert cut.evaluations == whole.evaluations
    for name in ("model", "average"):
        files = [tmp_path / each / "checkpoints" / "step-6" / f"{name}.safetensors" for each in ("whole", "cut")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_the_averaged_weights_are_sampled_and_sampling_does_not_depend_on_the_batch(run: Path) -> None:
    trained = open_run(run)
    state = RunFolder.open(run).last_checkpoint()
    assert state is not None
    from unskip.training._state import read_state

    average = read_state(state[1], "average")
    name = next(name for name, _ in trained.model.named_parameters() if "attn.qkv" in name)
    assert torch.equal(trained.model.get_parameter(name), average[f"module.{name}"])
    options: dict[str, Any] = {"steps": 4, "cfg": 1.5, "write": False}
    whole = unskip.sample(run, n=11, **options)
    parts = unskip.sample(trained, n=11, batch=3, **options)
    few = unskip.sample(trained, n=4, **options)
    assert whole.images.shape == (11, 1, 8, 8)
    assert whole.images.dtype == torch.uint8
    assert whole.labels.tolist() == [*range(10), 0]
    assert (whole.images.int() - parts.images.int()).abs().max() <= 1  # products of other sizes round otherwise
    assert (whole.images[:4].int() - few.images.int()).abs().max() <= 1
    assert whole.evaluations == 4 * 2 * 2
    assert not (run / "samples").exists()


def test_samples_are_written_as_pictures_and_a_grid(run: Path) -> None:
    found = unskip.sample(run, n=5, steps=2, sampler="euler", labels=[3, 3, 10, 0, 1])
    assert found.labels.tolist() == [3, 3, 10, 0, 1]
    assert found.grid is not None
    assert found.grid.parent == run / "samples"
    files = sorted(found.grid.with_suffix("").glob("*.png"))
    assert [file.name for file in files] == [f"{index:05d}.png" for index in range(5)]
    for file, image in zip(files, found.images, strict=True):
        assert numpy.array_equal(numpy.asarray(Image.open(file)), image[0].numpy())
    about = json.loads(found.grid.with_suffix(".json").read_text())
    assert (about["sampler"], about["steps"], about["evaluations"]) == ("euler", 2, 2.0)
    again = unskip.sample(run, n=3, steps=2, sampler="euler", labels=3)
    assert again.grid == found.grid
    assert len(list(found.grid.with_suffix("").glob("*.png"))) == 3
    shutil.rmtree(run / "samples")


def test_a_grid_is_rows_of_images() -> None:
    images = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 1, 40, 40) * 10
    grid = grid_of(images, gap=1)
    assert grid.shape == (1, 83, 83)
    assert [int(grid[0, y, x]) for y, x in ((1, 1), (1, 42), (42, 1), (42, 42), (0, 0))] == [0, 10, 20, 255, 255]
    assert grid_of(images[:1, :, :8, :8], gap=0).shape == (1, 32, 32)  # small ones are enlarged


def test_blocks_and_noise_levels_in_one_sweep(run: Path) -> None:
    _, found = judge_times(run, ["knn-dino-v1", "rank-v1"], (0.0, 0.9), blocks=[0, 4])
    assert list(found) == [0.0, 0.9]
    by = {(time, each.block): each.values for time, rows in found.items() for each in rows if "knn20" in each.values}
    assert set(by) == {(0.0, 0), (0.0, 4), (0.9, 0), (0.9, 4)}
    noise, image = ([by[time, block]["knn20"] for block in (0, 4)] for time in (0.0, 0.9))
    assert max(noise) < 0.17 < max(image)  # of noise alone nothing can be known: 0.1, and 0.016 is a standard error
    rows = [row for row in RunFolder.open(run).read("evals.jsonl") if "time" in row]
    assert {(row["time"], row["block"]) for row in rows} == set(by)


def test_noise_alone_and_data_alone(run: Path) -> None:
    """At time 1 features are those of the images themselves, which `unskip eval` judges; at 0 images do not count."""
    from unskip.evals import extract, noised_features

    trained = open_run(run)
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(6, dtype=torch.int64)
    flow, view = trained.config.flow, ("mean", "none")
    clean = noised_features(trained.model, [(images, labels)], flow, 1.0)
    plain = extract(trained.model, [(images, labels)])
    for block in range(5):
        torch.testing.assert_close(clean[view][block], plain[view][block])  # type: ignore[index]
    nothing = [noised_features(trained.model, [(each, labels)], flow, 0.0, "middle") for each in (images, -images)]
    torch.testing.assert_close(nothing[0][view][2], nothing[1][view][2])  # type: ignore[index]


def test_an_audit_takes_one_image_and_is_made_once_for_all_times(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.evals import _diffusion

    found: list[tuple[int, ...]] = []
    audited = _diffusion.block_axes

    def counted(network: Any, example: Any) -> Any:
        found.append(tuple(len(each) for each in example.args))
        return audited(network, example)

    monkeypatch.setattr(_diffusion, "block_axes", counted)
    _diffusion.diffusion(open_run(run).model, few(300), few(60), ["knn-dino-v1"], times=(0.5, 1.0), blocks=[1])
    assert found == [(1, 1)]


def test_samples_that_are_there_are_judged_as_they_are(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unskip.recipes import _judge_generation

    monkeypatch.setenv("HOME", str(tmp_path))
    config = recipes.supervised("digits", steps=2, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2")
    unskip.train(config, tmp_path / "judge", quiet=True)
    options: dict[str, Any] = {"sampling": Sampling("euler", 2)}
    drawn = judge_samples(run, tmp_path / "judge", 40, **options)
    monkeypatch.setattr(_judge_generation, "sampled", lambda *args, **kwargs: pytest.fail("drawn again"))
    there = unskip.sample(run, n=40, sampler="euler", steps=2, write=False)
    assert judge_samples(run, tmp_path / "judge", samples=there, **options) == pytest.approx(drawn, rel=1e-3)
    assert RunFolder.open(run).read("evals.jsonl")[-1]["n"] == 40
    told = ["sample", str(run), "--n", "40", "--sampler", "euler", "--steps", "2", "--judge", str(tmp_path / "judge")]
    assert cli.main(told) == 0
    assert "FD-judge" in capsys.readouterr().out
    assert len(list((tmp_path / ".cache" / "unskip" / "statistics").iterdir())) == 1  # what is compared with is kept
    # A judge that is not there is missed before anything is drawn.
    monkeypatch.setattr("unskip.cli._sample.draw", lambda *args, **kwargs: pytest.fail("drawn in vain"))
    assert cli.main(["sample", str(run), "--judge", "nowhere"]) == 2
    shutil.rmtree(run / "samples")


def test_what_a_run_draws_is_judged_by_a_classifier(run: Path, tmp_path: Path) -> None:
    config = recipes.supervised("digits", steps=3, device="cpu", model_args="depth=2,embed_dim=16,num_heads=2")
    unskip.train(config, tmp_path / "judge", quiet=True)
    found = judge_samples(run, tmp_path / "judge", 40, Sampling("euler", 3), cache=tmp_path / "cache")
    assert set(found) == {"FD-judge", "precision", "recall", "kid", "score", "evaluations"}
    assert found["FD-judge"] > 0
    assert found["evaluations"] == 3
    row = RunFolder.open(run).read("evals.jsonl")[-1]
    assert (row["evaluation"], row["n"], row["steps"]) == ("generation-v1", 40, 3)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", str(run), "--n", "3", "--steps", "2", "--cfg", "1.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["n"], data["evaluations"]) == (3, 8.0)
    assert Path(data["grid"]).is_file()
    assert cli.main(["sample", str(run), "--n", "2", "--steps", "1"]) == 0
    assert "2 evaluations of the network each" in capsys.readouterr().out
    assert cli.main(["eval", str(run), "--protocol", "knn-dino-v1", "--times", "0.5,1", "--blocks", "last"]) == 0
    assert "t = 0.5" in capsys.readouterr().out
    for wrong, text in (
        (["--n", "0"], "one sample or more"),
        (["--sampler", "ddim"], "euler, heun"),
        (["--label", "11"], "label 11 is out of range"),
        (["--precision", "int8"], "float32, bf16"),
        (["--judge", "nowhere"], "no extractor there"),
    ):
        assert cli.main(["sample", str(run), "--steps", "1", "--n", "2", *wrong][: 4 + 2 + len(wrong)]) == 2
        assert text in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--times", "soon"]) == 2
    shutil.rmtree(run / "samples")


def test_what_cannot_be_drawn(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="0 samples"):
        unskip.sample(run, n=0)
    with pytest.raises(BadInput, match="2 labels for 3 samples"):
        unskip.sample(run, n=3, labels=[1, 2])
    with pytest.raises(BadInput, match="label 12 is out of range"):
        unskip.sample(run, n=3, labels=12)
    with pytest.raises(BadInput, match="whole numbers"):
        unskip.sample(run, n=2, labels=[1.5, 2])  # type: ignore[list-item]
    number: Any = numpy.int64(3)
    assert unskip.sample(run, n=2, steps=1, labels=number, write=False).labels.tolist() == [3, 3]
    config = recipes.supervised("digits", steps=1, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2")
    unskip.train(config, tmp_path / "run", quiet=True)
    with pytest.raises(BadInput, match="does not draw"):
        unskip.sample(tmp_path / "run")
    with pytest.raises(BadInput, match="no noise levels"):
        judge_times(tmp_path / "run", ["knn-dino-v1"], (1.0,))
    with pytest.raises(BadInput, match=r"a time of 1\.5"):
        judge_times(run, ["knn-dino-v1"], (1.5,))


@pytest.mark.parametrize(("changes", "text"), [
    ({"model": "Q/2"}, "no size"),
    ({"model_args": "width=18,heads=4"}, "multiple"),
    ({"init": "skipless"}, "default or zero"),
    ({"betas": "0.9"}, "two numbers"),
    ({"steps": 0}, "0 steps"),
    ({"model_args": "width=16,depth=2,heads=2,classes=9"}, "9 classes, and digits has 10"),
    ({"interpolant": "cubic"}, "linear, gvp"),
    ({"online_time": 2.0}, "from noise"),
    ({"latents": "nowhere"}, "no autoencoder there"),
])  # fmt: skip
def test_configs_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        RECIPES["sit"].build(tiny(**changes))


def test_a_set_too_small_for_neighbours_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.recipes import _generate

    monkeypatch.setattr(_generate, "open_images", lambda *args, **kwargs: few())
    with pytest.raises(BadInput, match=r"48 training images .* online_images"):
        RECIPES["sit"].build(tiny())
    RECIPES["sit"].build(tiny(online_images=0))


def test_a_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    torch.save(SiT(size=8, patch=2, channels=1, width=32, depth=5, heads=2, classes=10).state_dict(), tmp_path / "x.pt")
    with pytest.raises(LoadError, match="does not fit the model"):
        RECIPES["sit"].build(tiny(weights=str(tmp_path / "x.pt")))
    with pytest.raises(BadInput, match="not loaded"):
        RECIPES["uvit"].build(tiny("uvit", weights=str(tmp_path / "x.pt")))


def test_a_model_that_knows_more_classes_has_its_own_label_for_none() -> None:
    """As published weights do: a label that is left out is the model's last row, not the class after the data's."""
    task, _ = RECIPES["sit"].build(tiny(model_args=f"{SIT},classes=25", label_dropout=0.5))
    seen: list[Tensor] = []

    class Watched(torch.nn.Module):
        def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            seen.append(labels)
            return images

    task.loss(Watched(), next(task.feed.iterate(0, 1)))
    assert set(seen[0].tolist()) <= {*range(10), 25}
    assert 25 in seen[0]


def test_how_a_run_is_carried_out_is_a_field_too() -> None:
    for recipe in ("sit", "uvit"):
        _, plan = RECIPES[recipe].build(tiny(recipe, graph=True, shard=True, tensorboard=True, accumulate=2, clip=3.0))
        assert (plan.graph, plan.shard, plan.tensorboard, plan.accumulate, plan.clip) == (True, True, True, 2, 3.0)


@pytest.mark.parametrize("recipe", ["sit", "uvit"])
@pytest.mark.parametrize("choice", [
    {}, {"interpolant": "gvp", "times": "logit-normal"}, {"target": "noise"}, {"shortcut": "keep", "precision": "bf16"},
])  # fmt: skip
def test_a_step_can_be_recorded(recipe: str, choice: dict[str, Any]) -> None:
    """Forward and backward on a device without values: nothing is read from it, and nothing brought to it."""
    task, _ = RECIPES[recipe].build(tiny(recipe, graph=True, **choice))
    batch = [each.to("meta") for each in next(task.feed.iterate(0, 1))]
    model = task.model.to("meta")
    with NoHost(), torch.autocast("cpu", torch.bfloat16, enabled="precision" in choice):
        loss, _ = task.loss(model, batch)
        loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


# --- Latents ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    module = diffusers.AutoencoderKL(
        **kinds, block_out_channels=[8, 8], layers_per_block=1, norm_num_groups=4, latent_channels=2, scaling_factor=0.5
    )
    folder = tmp_path_factory.mktemp("autoencoder") / "kl"
    module.save_pretrained(folder)
    return folder


def few(count: int = 48) -> ImageSet:
    return open_images("digits", split="test").select(range(count))


def test_latents_are_those_of_the_autoencoder_and_encoded_once(
    autoencoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers: Any = pytest.importorskip("diffusers", reason="diffusers is not installed")
    mine, theirs = Autoencoder.open(autoencoder), diffusers.AutoencoderKL.from_pretrained(autoencoder)
    images = few()
    held = encode(images, mine, 8, tmp_path)
    assert held.shape == (48, 2, 4, 4, 4)
    pixels = images.load(range(48), 8).float().expand(-1, 3, -1, -1) / 127.5 - 1
    with torch.no_grad():
        for index, shown in enumerate((pixels, pixels.flip(3))):
            found = theirs.encode(shown).latent_dist
            expected = torch.cat([found.mean, found.logvar], 1)
            torch.testing.assert_close(torch.from_numpy(held[:, index].copy()).float(), expected, rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(Autoencoder, "moments", lambda *args: pytest.fail("encoded again"))
    assert numpy.array_equal(encode(images, mine, 8, tmp_path), held)
    noise = torch.randn(3, 2, 4, 4)
    moments = torch.from_numpy(held[:3, 0].copy()).float()
    drawn = mine.latents(moments, noise)
    expected = 0.5 * (moments[:, :2] + torch.exp(0.5 * moments[:, 2:]) * noise)
    torch.testing.assert_close(drawn, expected)


def test_batches_of_latents_are_a_function_of_the_step(autoencoder: Path, tmp_path: Path) -> None:
    feed = LatentFeed(few(), Autoencoder.open(autoencoder), 16, 8, tmp_path, seed=3)
    whole = list(feed.iterate(0, 6))
    late = list(feed.iterate(4, 6))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(whole[4:], late, strict=True))
    halves = [next(feed.iterate(2, 3, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([half[0] for half in halves]), whole[2][0])
    # Every image, or its mirror image, once an epoch.
    rows = torch.cat([part[0] for part in whole[:3]]).flatten(1)
    either = torch.from_numpy(feed.moments[:].astype(numpy.float32)).flatten(2)
    apart = (rows[:, None, None] - either[None]).abs().amax(3)
    which, mirrored = apart.amin(2).argmin(1), apart.amin(1).argmin(1)
    assert sorted(which.tolist()) == list(range(48))
    assert 0 < int(mirrored.sum()) < 48
    assert sum(len(part[1]) for part in feed.evaluate()) == 48


def test_a_run_on_latents_learns_and_draws(
    autoencoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(latents=str(autoencoder), cache=str(tmp_path / "cache"), health=False)
    assert isinstance(config, Generative)
    unskip.train(config, tmp_path / "run", quiet=True)
    found = unskip.sample(tmp_path / "run", n=3, steps=2, write=False)
    assert found.images.shape == (3, 3, 8, 8)
    assert cli.main(["eval", str(tmp_path / "run")]) == 2
    assert "trained on latents" in capsys.readouterr().err
    with pytest.raises(BadInput, match="trained on latents"):
        judge_times(tmp_path / "run", ["knn-dino-v1"], (1.0,))


def test_latents_are_decoded_a_few_at_a_time(
    autoencoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unskip.train(
        tiny(latents=str(autoencoder), cache=str(tmp_path / "cache"), health=False), tmp_path / "run", quiet=True
    )
    sizes: list[int] = []
    decode = Autoencoder.decode

    def counted(self: Autoencoder, latents: Tensor) -> Tensor:
        sizes.append(len(latents))
        return decode(self, latents)

    monkeypatch.setattr(Autoencoder, "decode", counted)
    assert unskip.sample(tmp_path / "run", n=40, steps=1, write=False).images.shape == (40, 3, 8, 8)
    assert sizes == [16, 16, 8]


def test_latents_are_encoded_by_several_processes_at_once(
    autoencoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, moments = Autoencoder.open(autoencoder), Autoencoder.moments

    def overtaken(self: Autoencoder, images: Tensor) -> Tensor:
        with monkeypatch.context() as other:  # another process, which began later and ends first
            other.setattr(Autoencoder, "moments", moments)
            other.setattr(os, "getpid", lambda: -1)
            encode(few(), self, 8, tmp_path)
        return moments(self, images)

    with monkeypatch.context() as first:
        first.setattr(Autoencoder, "moments", overtaken)
        held = encode(few(), mine, 8, tmp_path)
    assert len(held) == 48
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".npy"]


def test_latents_that_cannot_be_had(autoencoder: Path, tmp_path: Path) -> None:
    mine = Autoencoder.open(autoencoder)
    with pytest.raises(BadInput, match="multiples of 2"):
        encode(few(), mine, 7, tmp_path)

    class Broken(Autoencoder):
        def moments(self, images: Tensor) -> Tensor:
            found = super().moments(images)
            found[5] = torch.nan
            return found

    broken = Broken(mine.module, "broken", mine.channels, mine.factor, mine.scale, mine.shift)
    with pytest.raises(BadInput, match=r"image 5: its latents are not finite"):
        encode(few(), broken, 8, tmp_path)
    assert not list(tmp_path.glob("*broken*.npy"))
    shutil.copytree(autoencoder, tmp_path / "kl")
    for file in (tmp_path / "kl").glob("*.safetensors"):
        file.write_bytes(b"nothing")
    with pytest.raises(LoadError, match="no AutoencoderKL"):
        Autoencoder.open(tmp_path / "kl")
