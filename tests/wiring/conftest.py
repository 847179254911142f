"""A small ViT, and a saved copy of a rewired one."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from tests.wiring import folders
from torch import nn

import unskip
from unskip import Learn


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=3)
    return model.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = folders.vit()
    unskip.rewire(model, Learn(0.5))
    return unskip.save(model, tmp_path / "m", builder=folders.VIT)
