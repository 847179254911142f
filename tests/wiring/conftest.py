"""What the tests of saved folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.wiring.folders import VIT, vit

import unskip
from unskip import Learn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = vit()
    unskip.rewire(model, Learn(0.5))
    return unskip.save(model, tmp_path / "m", builder=VIT)
