"""Initialisations that only benchmarks/skipless_gap.py uses."""

from pathlib import Path
from typing import Any

import pytest
import torch

timm = pytest.importorskip("timm")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import _skipless_start

    return _skipless_start


@pytest.fixture
def vit() -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": 3}
    return (
        timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", num_classes=5, **shape)
        .eval()
        .requires_grad_(False)
    )


def images() -> torch.Tensor:
    smooth = torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return torch.nn.functional.interpolate(smooth, size=16, mode="bilinear")


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def test_half_whitened_patches_have_the_square_root_of_the_spectrum(starts: Any, vit: Any) -> None:
    patches = torch.nn.functional.unfold(images(), 4, stride=4).mT.flatten(0, 1).double()
    before = torch.linalg.eigvalsh(torch.cov(patches.T)).flip(0)
    starts.whiten_patches_(vit, images(), generator=draw())
    tokens = vit.patch_embed(images()).flatten(0, 1).double()
    after = torch.linalg.eigvalsh(torch.cov(tokens.T)).flip(0)
    assert torch.allclose(tokens.mean(0), torch.zeros(48).double(), atol=1e-4)
    assert torch.allclose((after / after[0])[:8], (before / before[0])[:8].sqrt(), rtol=0.02)
