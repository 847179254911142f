"""The rank of the patches within an image, which self-supervised runs watch."""

from __future__ import annotations

import pytest
import torch

import unskip
from unskip.recipes._views import patch_ranks


def test_the_rank_of_patches_is_that_of_each_image_on_its_own() -> None:
    """Images that differ, with patches that are alike but for rounding, have a high rank together and none within."""
    draw = torch.Generator().manual_seed(0)
    images, patches, dim, prefix = 8, 9, 12, 1

    class Told(torch.nn.Module):
        num_prefix_tokens = prefix

        def __init__(self) -> None:
            super().__init__()
            self.alike, self.apart = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.alike(x[:, 1:2] * (1 + 3e-7 * torch.randn(x.shape, generator=draw)))
            out: torch.Tensor = self.apart(x @ torch.eye(dim))  # in bfloat16 where that is allowed
            return out

    x = 1 + 1e-3 * torch.randn(images, prefix + patches, dim, generator=draw)
    with torch.autocast("cpu", torch.bfloat16):  # as a run may be within
        alike, apart = patch_ranks(Told(), x, {"alike": -1, "apart": -1})
    expected = [unskip.measures.effective_rank(each[prefix:].double()) for each in x]
    assert alike == 0
    assert apart == pytest.approx(sum(expected) / images, rel=1e-6)
