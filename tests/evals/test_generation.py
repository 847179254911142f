"""Generation metrics: closed forms for Gaussians, torchmetrics as a peer, statistics that stream and are kept."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg
from torch import Tensor, nn

import unskip
from unskip.data import ImageSet, open_images
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.evals import (
    Extractor,
    Moments,
    extractor,
    frechet,
    generation,
    kid,
    precision_recall,
    score,
    statistics,
)


def gaussian(count: int, dim: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return shift + scale * torch.randn(count, dim, generator=draw, dtype=torch.float64)


def exact(count: int, mean: Tensor, covariance: Tensor, seed: int = 0) -> Tensor:
    """Samples whose mean and covariance are exactly these."""
    x = gaussian(count, len(mean), seed)
    x = x - x.mean(0)
    root = torch.linalg.cholesky(x.T @ x / (count - 1))
    wanted = torch.from_numpy(linalg.sqrtm(covariance.numpy()).real)
    return torch.linalg.solve_triangular(root, x.T, upper=False).T @ wanted + mean


def textbook(m1: Tensor, c1: Tensor, m2: Tensor, c2: Tensor) -> float:
    root = linalg.sqrtm((c1 @ c2).numpy())
    return float((m1 - m2) @ (m1 - m2) + c1.trace() + c2.trace() - 2 * numpy.trace(root).real)


# --- Fréchet distance -------------------------------------------------------------------------------------------------


def test_frechet_of_gaussians_in_closed_form() -> None:
    mean, other = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.0, 1.0, 0.5]).double()
    # Diagonal: |m - n|^2 + sum (a - b)^2.
    a, b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 4.0, 0.25]).double()
    x, y = exact(50, mean, a.diag()), exact(60, other, b.diag(), 1)
    assert frechet(x, y) == pytest.approx(10 + 1 + 0 + 2.5**2, rel=1e-10)
    # Any two: the textbook's formula.
    draw = gaussian(2, 9, 5).reshape(2, 3, 3)
    c, d = (each @ each.T + 0.1 * torch.eye(3) for each in draw)
    found = frechet(exact(50, mean, c), exact(60, other, d, 1))
    assert found == pytest.approx(textbook(mean, c, other, d), rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000), st.floats(0.1, 5), st.floats(-3, 3))
def test_frechet_is_symmetric_zero_for_the_same_and_follows_scale_and_shift(
    dim: int, seed: int, scale: float, shift: float
) -> None:
    x, y = gaussian(30, dim, seed), gaussian(30, dim, seed + 1, 2.0, 1.0)
    assert frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet(x, y) == pytest.approx(frechet(y, x), rel=1e-8)
    assert frechet(x, x + shift) == pytest.approx(dim * shift**2, rel=1e-8, abs=1e-9)
    spread = float(torch.cov(x.T).trace()) if dim > 1 else float(x.var())
    mean = float(x.mean(0).square().sum())
    assert frechet(x, scale * x) == pytest.approx((1 - scale) ** 2 * (spread + mean), rel=1e-6, abs=1e-8)


def test_a_singular_covariance_is_answered() -> None:
    x, y = gaussian(40, 3, 0), gaussian(40, 3, 1, 2.0)
    flat = frechet(x, y)
    # A feature that never varies, and one that repeats another, add their own distance and nothing else.
    more = [torch.cat([each, torch.full((40, 1), value)], 1) for each, value in ((x, 1.0), (y, 3.0))]
    assert frechet(*more) == pytest.approx(flat + 4, rel=1e-7)
    constant = torch.ones(10, 4)
    assert frechet(constant, 3 * constant) == pytest.approx(16)


def test_few_samples_are_judged_with_a_warning_that_explains() -> None:
    few, many = gaussian(10, 20, 0), gaussian(400, 20, 1)
    with pytest.warns(UnskipWarning, match="10 samples of 20 features.*no full rank.*bias"):
        small = frechet(few, many)
    assert small > frechet(gaussian(300, 20, 2), many)  # the bias it speaks of


def test_moments_stream() -> None:
    x = gaussian(101, 5, 0, 3.0, 1000.0)  # far from zero, where a sum of squares would lose its digits
    whole, parts = Moments(), Moments()
    whole.update(x)
    for part in x.split([1, 40, 0, 37, 23]):
        parts.update(part)
    assert parts.count == 101
    assert parts.mean is not None
    torch.testing.assert_close(parts.mean, x.mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(parts.covariance, torch.cov(x.T), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole.covariance, parts.covariance, rtol=1e-10, atol=1e-12)


class Pixels(nn.Module):
    """An extractor of a few features, and one that torchmetrics can use."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3 * size * size, generator=draw) / 10)
        self.num_features = 6

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(images.float().flatten(1) / 64 @ self.weight.T)


class Doubled(Pixels):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * self.weight.detach())


def pictures(count: int, seed: int, low: int = 0, size: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, 256, (count, 3, size, size), generator=draw, dtype=torch.uint8)


@pytest.mark.filterwarnings("ignore:Metric `.*:UserWarning")
def test_frechet_and_kid_are_those_of_torchmetrics() -> None:
    peers: Any = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")
    from torchmetrics.image.kid import poly_mmd

    module = Pixels()
    real, fake = pictures(300, 0), pictures(200, 1, 60)
    metric = peers.FrechetInceptionDistance(feature=module, input_img_size=(3, 4, 4))
    metric.update(real, real=True)
    metric.update(fake, real=False)
    found = generation(fake, real, module)
    assert found["FD-Pixels"] == pytest.approx(float(metric.compute()), rel=1e-4)
    a, b = module(fake).detach().double(), module(real).detach().double()
    a, b = a[:200], b[:200]  # the peer takes sets of one size
    assert kid(a, b) == pytest.approx(float(poly_mmd(a, b)), rel=1e-6)


# --- Precision, recall, score -----------------------------------------------------------------------------------------


def brute(samples: Tensor, reference: Tensor, k: int) -> float:
    inside = 0
    for x in samples:
        for index, centre in enumerate(reference):
            others = [float((centre - y).norm()) for j, y in enumerate(reference) if j != index]
            inside += float((x - centre).norm()) <= sorted(others)[k - 1]
            if float((x - centre).norm()) <= sorted(others)[k - 1]:
                break
    return inside / len(samples)


def test_precision_and_recall_are_their_definition() -> None:
    fake, real = gaussian(25, 2, 0, 0.6, 0.5).float(), gaussian(30, 2, 1).float()
    for k in (1, 3):
        found = precision_recall(fake, real, k)
        assert found == pytest.approx((brute(fake, real, k), brute(real, fake, k)))
    assert 0 < found[1] < found[0]  # narrow samples: good, and not varied


def test_precision_and_recall_at_their_ends() -> None:
    x = gaussian(50, 3, 0).float()
    assert precision_recall(x, x) == (1.0, 1.0)
    assert precision_recall(x, x + 100) == (0.0, 0.0)
    # One mode of two: all samples are good, half of the reference is reached.
    two = torch.cat([x, x + 100])
    assert precision_recall(x, two) == (1.0, 0.5)
    assert precision_recall(two, x) == (0.5, 1.0)


def test_score_in_closed_form() -> None:
    sure = 100.0 * torch.eye(5).repeat(4, 1)
    assert score(sure) == pytest.approx(5)  # certain, and every class as often
    assert score(sure[:1].repeat(7, 1)) == pytest.approx(1)  # one class
    assert score(torch.zeros(7, 5)) == pytest.approx(1)  # no idea
    assert score(100 * sure) == pytest.approx(5)  # so certain that other classes have a probability of exactly 0
    assert score(100 * sure[:1].repeat(7, 1)) == pytest.approx(1)
    p = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).double()
    middle = p.mean(0)
    expected = math.exp(float((p * (p / middle).log()).sum(1).mean()))
    assert score(p.log()) == pytest.approx(expected)


# --- Extractors and statistics ----------------------------------------------------------------------------------------


def small_set(count: int, seed: int) -> ImageSet:
    images = pictures(count, seed)
    return ImageSet("made", "test", ("a", "b"), torch.arange(count) % 2, images)


def test_statistics_are_kept_under_the_hash_of_images_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, real, fake = Pixels(), small_set(60, 0), pictures(50, 1, 60)
    first = generation(fake, real, module, cache=tmp_path)
    calls: list[int] = []
    forward = Pixels.forward

    def counted(self: Pixels, images: Tensor) -> Tensor:
        calls.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Pixels, "forward", counted)
    assert generation(fake, real, module, cache=tmp_path) == pytest.approx(first)
    assert sum(calls) == 50  # the samples alone
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    statistics(small_set(60, 7), module, cache=tmp_path)  # other images
    with torch.no_grad():
        module.weight.mul_(2)
    changed = generation(fake, real, module, cache=tmp_path)  # other weights
    assert changed != pytest.approx(first)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"broken")
    with pytest.raises(LoadError, match="delete it"):
        generation(fake, real, module, cache=tmp_path)


class Means(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean((2, 3))


class Corners(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images[:, :, 0, 0].float()


def test_modules_without_weights_are_told_apart(tmp_path: Path) -> None:
    real, fake = small_set(60, 0), pictures(50, 1, 60)
    for module in (Means(), Corners()):
        fresh = generation(fake, real, module)
        for _ in range(2):  # made, and read
            assert generation(fake, real, module, cache=tmp_path) == pytest.approx(fresh)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


class Stream(nn.Module):
    """Two residual additions over means of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().mean((2, 3)) / 255
        x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.parametrize("inside", [False, True])
def test_the_same_weights_with_other_shortcuts_are_another_extractor(inside: bool, tmp_path: Path) -> None:
    real, fake = small_set(60, 0), pictures(50, 1, 60)
    torch.manual_seed(0)
    stream = Stream()
    module = nn.Sequential(stream) if inside else stream
    plain, fresh = extractor(module).key, generation(fake, real, module, cache=tmp_path)
    wiring = unskip.rewire(stream, "decay:0.5", pictures(2, 0))
    assert generation(fake, real, module, cache=tmp_path) == pytest.approx(generation(fake, real, module))
    keys = {plain, extractor(module).key}
    wiring.set("decay:0.25")
    assert len(keys | {extractor(module).key}) == 3
    wiring.undo()
    assert extractor(module).key == plain
    assert generation(fake, real, module, cache=tmp_path) == pytest.approx(fresh)


def test_a_set_a_tensor_and_batches_are_judged_alike() -> None:
    module, real, fake = Pixels(), small_set(60, 0), pictures(50, 1, 60)
    assert real.images is not None
    expected = generation(fake, real, module)
    assert generation(iter(fake.split(7)), real.images, module, batch=16) == pytest.approx(expected, rel=1e-6)
    held = statistics(real, module)
    assert generation(fake, held, module) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(BadInput, match="another extractor"):
        generation(held, fake, Doubled())


def test_statistics_are_written_by_several_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    module, real = Pixels(), small_set(60, 0)
    write = safetensors.torch.save_file

    def overtaken(tensors: Any, file: Any) -> None:
        write(tensors, file)
        with monkeypatch.context() as other:  # another process, which ends first
            other.setattr(safetensors.torch, "save_file", write)
            other.setattr(os, "getpid", lambda: -1)
            statistics(real, module, cache=tmp_path)

    with monkeypatch.context() as first:
        first.setattr(safetensors.torch, "save_file", overtaken)
        found = statistics(real, module, cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".safetensors"
    assert torch.equal(statistics(real, module, cache=tmp_path).features, found.features)


def test_single_features_are_of_the_whole_set_even_where_it_is_sorted() -> None:
    """Sets come class by class: the first images would be one class."""
    dark, bright = pictures(200, 0) // 8, 255 - pictures(200, 1) // 8
    both, module = torch.cat([dark, bright]), Pixels()
    for images in (both, ImageSet("made", "test", ("a", "b"), torch.arange(400) // 200, both)):
        held = statistics(images, module, manifold=100, batch=64)
        assert held.features.shape == (100, 6)
        whole = module(both).detach()
        places = [(whole - each).abs().sum(1).argmin().item() for each in held.features]
        assert 30 < sum(place < 200 for place in places) < 70
        assert sorted(set(places)) == places
    assert precision_recall(module(dark).detach(), held.features)[1] == pytest.approx(0.5, abs=0.2)
    assert torch.equal(statistics(both, module, manifold=400).features, whole)
    # How many come in batches is not known beforehand: the first.
    assert torch.equal(statistics(iter(both.split(64)), module, manifold=100).features, whole[:100])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and a folder of its model."""
    out = tmp_path_factory.mktemp("classifier") / "judge"
    config = unskip.recipes.supervised(
        "digits", steps=2, device="cpu", model_args="depth=2,embed_dim=16,num_heads=2", log_every=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)  # two steps teach nothing, and it says so
        unskip.train(config, out, quiet=True)
    return out


def test_a_run_folder_is_an_extractor_and_its_distance_no_fid(classifier: Path) -> None:
    real = open_images("digits", split="test")
    chosen = extractor(classifier)
    found = generation(real, real, chosen, size=8)
    assert set(found) == {"FD-judge", "precision", "recall", "kid", "score"}
    assert found["FD-judge"] == pytest.approx(0, abs=1e-6)
    assert (found["precision"], found["recall"]) == (1.0, 1.0)
    features, logits = chosen(real.load(range(5), 8))
    assert features.shape == (5, 16)
    assert logits is not None
    model: Any = chosen.module
    from unskip.data import Feed

    batch = next(iter(Feed(real, 5, 8).evaluate()))[0]
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(batch))  # the images as the run itself saw them
    named = extractor(next((classifier / "checkpoints").glob("step-*")), name="twin")
    assert (named.key, named.distance) == (chosen.key, "FD-twin")


def test_a_run_with_averaged_weights_judges_by_them(tmp_path: Path) -> None:
    from unskip.training._state import read_state

    config = unskip.recipes.supervised(
        "digits", steps=3, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2", average=0.9
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        unskip.train(config, tmp_path / "run", quiet=True)
    average = read_state(tmp_path / "run" / "checkpoints" / "step-3", "average")
    state = extractor(tmp_path / "run").module.state_dict()
    plain = unskip.load(tmp_path / "run" / "checkpoints" / "step-3").state_dict()
    assert all(torch.equal(value, average[f"module.{name}"]) for name, value in state.items())
    assert any(not torch.equal(value, plain[name]) for name, value in state.items())


def test_extractors_that_are_not_there(tmp_path: Path, classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="no extractor there"):
        extractor(tmp_path / "nothing")
    with pytest.raises(LoadError, match="no model that could be an extractor"):
        extractor(tmp_path)
    import timm

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(LoadError, match=r"timm:resnet18: its pretrained weights cannot be had \(no network\)"):
        extractor("timm:resnet18")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises((BadInput, LoadError), match=r"torch-fidelity|weights are missing"):
        extractor("inception")


def test_only_the_inception_weights_make_an_fid() -> None:
    module = Pixels()
    assert extractor(module).distance == "FD-Pixels"
    assert extractor(module, name="mine").distance == "FD-mine"
    assert Extractor("inception", module, lambda x: (x, None), "0").distance == "FID"


def test_samples_that_cannot_be_judged() -> None:
    module, real = Pixels(), pictures(20, 0)
    with pytest.raises(BadInput, match="no image to judge"):
        generation(real[:0], real, module)
    with pytest.raises(BadInput, match="images are bytes"):
        generation(real.float(), real, module)
    with pytest.raises(BadInput, match="two samples or more, got 1"):
        frechet(gaussian(1, 2, 0), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="of 2 and of 3 numbers"):
        frechet(gaussian(5, 2, 0), gaussian(5, 3, 0))
    with pytest.raises(BadInput, match="features"):
        frechet(torch.full((5, 2), math.nan), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="3 neighbours and 3 samples"):
        precision_recall(gaussian(3, 2, 0), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="one extractor"):
        precision_recall(gaussian(9, 2, 0), gaussian(9, 3, 0))
    with pytest.raises(BadInput, match="logits are floating"):
        score(torch.zeros(0, 3))
    with pytest.raises(BadInput, match="0 neighbours"):
        generation(real, real, module, k=0)
    for wrong in ({"batch": 0}, {"manifold": 0}):
        with pytest.raises(BadInput, match="each is 1 or more"):
            generation(real, real, module, **wrong)
    with torch.no_grad():
        module.weight.fill_(math.nan)
    with pytest.raises(BadInput, match="finite"):
        generation(real, real, module)


class Odd(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: Tensor) -> Any:
        return self.answer(images)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Odd(lambda images: (images.float().mean((2, 3)),)), "Odd: .* a tensor .* got tuple"),
        (Odd(lambda images: images.float().mean((1, 2, 3))), r"Odd: .* \(n, dim\), got \(20,\)"),
        (nn.Conv2d(3, 2, 3), r"Conv2d: it makes no features of bytes \(20, 3, 4, 4\) \(RuntimeError"),
    ],
)
def test_a_module_that_is_no_extractor(module: nn.Module, text: str) -> None:
    real = pictures(20, 0)
    with pytest.raises(BadInput, match=text):
        generation(real, real, module)
