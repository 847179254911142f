"""The starts that benchmarks/skipless_gap.py compares, on a small ViT: what each promises, measured."""

from pathlib import Path
from typing import Any

import pytest
import torch

import unskip

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


def test_position_code_is_orthogonal_and_as_long_as_patches(starts: Any, vit: Any) -> None:
    length = starts.position_code_(vit, images(), generator=draw())
    rows = vit.pos_embed[0].double()
    assert torch.allclose(rows @ rows.T, length**2 * torch.eye(16).double(), atol=1e-4 * length**2)
    assert length == pytest.approx(float(vit.patch_embed(images()).norm(dim=-1).mean()))


def test_half_whitened_patches_have_the_square_root_of_the_spectrum(starts: Any, vit: Any) -> None:
    patches = torch.nn.functional.unfold(images(), 4, stride=4).mT.flatten(0, 1).double()
    before = torch.linalg.eigvalsh(torch.cov(patches.T)).flip(0)
    starts.whiten_patches_(vit, images(), generator=draw())
    tokens = vit.patch_embed(images()).flatten(0, 1).double()
    after = torch.linalg.eigvalsh(torch.cov(tokens.T)).flip(0)
    assert torch.allclose(tokens.mean(0), torch.zeros(48).double(), atol=1e-4)
    assert torch.allclose((after / after[0])[:8], (before / before[0])[:8].sqrt(), rtol=0.02)


def test_shaped_mlp_is_centred_and_keeps_angles(starts: Any, vit: Any) -> None:
    starts.shaped_(vit, images(), generator=draw())
    mlp = vit.blocks[0].mlp
    z = torch.randn(4000, 48, generator=draw())
    near = 0.9 * z + (1 - 0.9**2) ** 0.5 * torch.randn(4000, 48, generator=torch.Generator().manual_seed(3))
    out, moved = (mlp(torch.nn.functional.layer_norm(x, (48,))) for x in (z, near))
    assert out.mean(0).norm() < 0.03 * out.norm(dim=1).mean()
    cosine = torch.nn.functional.cosine_similarity(out, moved).mean()
    assert float(cosine) == pytest.approx(0.897, abs=0.012)  # E over Gaussians; 0.872 with no bias, 0.967 not centred


def test_calibrated_attention_reaches_its_target(starts: Any, vit: Any) -> None:
    starts.position_code_(vit, images(), generator=draw())
    starts.shaped_(vit, images(), generator=draw())
    unskip.rewire(vit, unskip.Cut(), images()[:1])
    starts.calibrate_(vit, images(), 0.6, even=1, generator=draw())
    parts = unskip.parts(vit, images()[:1])
    for part in parts.attentions():
        found = starts.self_attention(part, starts._output(vit, part.norm.path, images()))
        assert float(found[:2].mean()) == pytest.approx(0.6, abs=0.02)
        assert float(found[2]) < 0.1  # near-uniform: 1/16


def test_carriers_pass_tokens_on_and_too_few_are_refused(starts: Any, vit: Any) -> None:
    starts.carry_(vit, images(), 3, c=2.0, generator=draw())
    part = next(iter(unskip.parts(vit, images()[:1]).attentions()))
    product = part.value_output()
    assert torch.allclose(product @ product.T, 16 * torch.eye(48).double(), atol=1e-3)
    with pytest.raises(ValueError, match="48"):
        starts.carry_(vit, images(), 2, generator=draw())
