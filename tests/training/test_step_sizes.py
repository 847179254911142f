"""Relative step sizes, and the rows and warnings of health checks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tasks import new, task
from torch import nn

from unskip.errors import UnskipWarning
from unskip.training import Schedule
from unskip.training._health import Watch
from unskip.training._step_sizes import StepSizes

timm = pytest.importorskip("timm")


def vit() -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", **shape)


def test_relative_steps_by_role() -> None:
    one = task()
    one.model = vit()
    one.sample = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    sizes = StepSizes(one, 50, rows.append)
    for step in range(50):
        sizes.hold(step)
        with torch.no_grad():
            for name, weight in one.model.named_parameters():
                weight.mul_(0.75 if "fc2" in name else 0.9)
        sizes.compare(step)
    assert [row["step"] for row in rows] == [2, 6, 16, 31, 46]
    expected = {"q": 0.1, "k": 0.1, "v": 0.1, "out": 0.1, "up": 0.1, "down": 0.25}
    for row in rows:
        assert row["relative_step"] == pytest.approx(expected, rel=1e-3)


def test_frozen_weights_have_no_step() -> None:
    one = task()
    one.model = vit().requires_grad_(False)
    one.sample = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows: list[dict[str, Any]] = []
    sizes = StepSizes(one, 50, rows.append)
    sizes.hold(1)
    sizes.compare(1)
    assert rows == []


def test_rank_collapse_warning_names_a_remedy(tmp_path: Path) -> None:
    one = task()
    one.model = vit()
    one.sample = torch.randn(4, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(4, 3, 16, 16)
    folder = new(tmp_path / "run")
    watch = Watch(one, Schedule(steps=100), folder)
    nn.init.orthogonal_(one.model.pos_embed[0], generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(action="ignore", category=UnskipWarning):
        watch.look(1)
        nn.init.zeros_(one.model.pos_embed)  # now all patches are equal
        watch.look(2)
    ((step, text),) = [
        (row["step"], row["text"]) for row in folder.read("warnings.jsonl") if row["warning"] == "collapsed-tokens"
    ]
    assert step == 2
    assert "rank collapse" in text
    assert "skipless:shaped" in text
    first, second = folder.read("health.jsonl")
    assert max(first["token_cosine"]) < 0.9
    assert second["token_cosine"] == pytest.approx([1, 1])
    assert second["self_attention"] == pytest.approx([1 / 16, 1 / 16], abs=1e-4)
