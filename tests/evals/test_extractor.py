"""Extractors of every kind, and statistics cached by their hash."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evals.pixels import Doubled, Pixels, pictures
from torch import Tensor, nn

import unskip
from unskip.data import ImageSet, open_images
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.evals import Extractor, extractor, generation, precision_recall, statistics


def small_set(count: int, seed: int) -> ImageSet:
    images = pictures(count, seed)
    return ImageSet("made", "test", ("a", "b"), torch.arange(count) % 2, images)


def test_statistics_are_cached_by_images_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, real, fake = Pixels(), small_set(60, 0), pictures(50, 1, 60)
    first = generation(fake, real, module, cache=tmp_path)
    calls: list[int] = []
    forward = Pixels.forward

    def counted(self: Pixels, images: Tensor) -> Tensor:
        calls.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(Pixels, "forward", counted)
    assert generation(fake, real, module, cache=tmp_path) == pytest.approx(first)
    assert sum(calls) == 50  # only the samples
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


def test_modules_without_weights_have_different_keys(tmp_path: Path) -> None:
    real, fake = small_set(60, 0), pictures(50, 1, 60)
    for module in (Means(), Corners()):
        fresh = generation(fake, real, module)
        for _ in range(2):  # computed, then read from the cache
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
def test_shortcuts_change_the_key(inside: bool, tmp_path: Path) -> None:
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


def test_a_set_a_tensor_and_batches_give_the_same_metrics() -> None:
    module, real, fake = Pixels(), small_set(60, 0), pictures(50, 1, 60)
    assert real.images is not None
    expected = generation(fake, real, module)
    assert generation(iter(fake.split(7)), real.images, module, batch=16) == pytest.approx(expected, rel=1e-6)
    reference = statistics(real, module)
    assert generation(fake, reference, module) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(BadInput, match="another extractor"):
        generation(reference, fake, Doubled())


def test_single_features_are_a_random_subset_of_the_set() -> None:
    """Sets are often sorted by class, so the first images would be one class."""
    dark, bright = pictures(200, 0) // 8, 255 - pictures(200, 1) // 8
    both, module = torch.cat([dark, bright]), Pixels()
    for images in (both, ImageSet("made", "test", ("a", "b"), torch.arange(400) // 200, both)):
        result = statistics(images, module, manifold=100, batch=64)
        assert result.features.shape == (100, 6)
        whole = module(both).detach()
        indices = [(whole - each).abs().sum(1).argmin().item() for each in result.features]
        assert 30 < sum(index < 200 for index in indices) < 70
        assert sorted(set(indices)) == indices
    assert precision_recall(module(dark).detach(), result.features)[1] == pytest.approx(0.5, abs=0.2)
    assert torch.equal(statistics(both, module, manifold=400).features, whole)
    # The number of images in batches is not known beforehand, so the first are taken.
    assert torch.equal(statistics(iter(both.split(64)), module, manifold=100).features, whole[:100])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    out = tmp_path_factory.mktemp("classifier") / "small"
    config = unskip.recipes.supervised(
        "digits", steps=2, device="cpu", model_args="depth=2,embed_dim=16,num_heads=2", log_every=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)  # two steps learn nothing, which gives a warning
        unskip.train(config, out, quiet=True)
    return out


def test_a_run_folder_is_an_extractor_and_its_distance_is_not_fid(classifier: Path) -> None:
    real = open_images("digits", split="test")
    chosen = extractor(classifier)
    metrics = generation(real, real, chosen, size=8)
    assert set(metrics) == {"FD-small", "precision", "recall", "kid", "score"}
    assert metrics["FD-small"] == pytest.approx(0, abs=1e-6)
    assert (metrics["precision"], metrics["recall"]) == (1.0, 1.0)
    features, logits = chosen(real.load(range(5), 8))
    assert features.shape == (5, 16)
    model: Any = chosen.module
    from unskip.data import Feed

    batch = next(iter(Feed(real, 5, 8).evaluate()))[0]
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(batch))  # the images are preprocessed as in the run
    named = extractor(next((classifier / "checkpoints").glob("step-*")), name="twin")
    assert (named.key, named.distance) == (chosen.key, "FD-twin")


def test_the_extractor_of_a_run_uses_its_ema_weights(tmp_path: Path) -> None:
    from unskip.training._state import read_state

    config = unskip.recipes.supervised(
        "digits", steps=3, device="cpu", model_args="depth=1,embed_dim=16,num_heads=2", ema=0.9
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        unskip.train(config, tmp_path / "run", quiet=True)
    average = read_state(tmp_path / "run" / "checkpoints" / "step-3", "ema")
    state = extractor(tmp_path / "run").module.state_dict()
    plain = unskip.load(tmp_path / "run" / "checkpoints" / "step-3").state_dict()
    assert all(torch.equal(value, average[f"module.{name}"]) for name, value in state.items())
    assert any(not torch.equal(value, plain[name]) for name, value in state.items())


def test_missing_extractors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="not an extractor"):
        extractor(tmp_path / "nothing")
    with pytest.raises(LoadError, match="extractor"):
        extractor(tmp_path)
    import timm

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(LoadError, match=r"timm:resnet18: .*no network"):
        extractor("timm:resnet18")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises((BadInput, LoadError), match=r"torch-fidelity|weights are missing"):
        extractor("inception")


def test_only_the_distance_with_inception_weights_is_called_fid() -> None:
    module = Pixels()
    assert extractor(module).distance == "FD-Pixels"
    assert extractor(module, name="mine").distance == "FD-mine"
    assert Extractor("inception", module, lambda x: (x, None), "0").distance == "FID"


class Odd(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: Tensor) -> Any:
        return self.answer(images)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Odd(lambda images: (images.float().mean((2, 3)),)), "Odd: .* got tuple"),
        (Odd(lambda images: images.float().mean((1, 2, 3))), r"Odd: .* \(20,\)"),
        (nn.Conv2d(3, 2, 3), r"Conv2d: .* \(20, 3, 4, 4\) \(RuntimeError"),
    ],
)
def test_modules_that_are_not_extractors(module: nn.Module, text: str) -> None:
    real = pictures(20, 0)
    with pytest.raises(BadInput, match=text):
        generation(real, real, module)
