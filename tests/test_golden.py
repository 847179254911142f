"""Every recipe still trains as it did: ten steps of its run on record, at a tolerance that other CPUs keep."""

from __future__ import annotations

import json

import pytest
from tests import golden


@pytest.mark.parametrize("name", golden.RUNS)
def test_losses_are_those_on_record(name: str) -> None:
    known = json.loads(golden.FILE.read_text())[name]
    assert golden.first_losses(name, 10) == pytest.approx(known["loss"][:10], rel=1e-3)
