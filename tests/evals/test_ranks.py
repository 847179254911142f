"""Evaluation by several processes: each uses its share of the images, and all get the results of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests.commands import on_ranks
from torch import distributed as dist

from unskip import evals
from unskip.data import open_images, subset

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def results() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    options = {"img_size": 8, "patch_size": 4, "in_chans": 1, "depth": 2, "embed_dim": 16, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **options)
    train, test = subset(open_images("digits", "train"), 301), subset(open_images("digits", "test"), 101)
    names = ["knn-dino-v1", "rank-v1", "accuracy-v1", "probe-lbfgs-v1"]
    result = evals.evaluate(model, train, test, names, size=8, normalise=((0.5,), (0.5,)), batch=24)
    return [each.to_dict() for each in result]


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_get_the_results_of_one(tmp_path: Path, count: int) -> None:
    def run() -> None:
        dist.init_process_group("gloo")
        (tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps(results()))
        dist.destroy_process_group()

    on_ranks(count, tmp_path, run)
    one = results()
    for rank in range(count):
        for wanted, result in zip(one, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            numbers = {key: value for key, value in wanted.items() if isinstance(value, float)}
            assert numbers
            assert {key: result[key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
            assert result["n"] == wanted["n"]
