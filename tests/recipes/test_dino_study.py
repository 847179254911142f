"""The DINO study chooses learning rates on held-out training images, for each model and optimizer."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIELDS = {"data": "x-{split}.parquet+y-{split}.parquet", "model_args": "depth=12", "steps": 30}
OPTIONS = argparse.Namespace(lr=1.0, strong="soap", steps=30)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("dino")


def row(value: float) -> dict[str, Any]:
    return {"online": [[1, value, value]], "accuracy": [], "ranks": [], "warnings": {}}


def trial(name: str, way: str, times: float) -> str:
    return f"rate | {name} | {way} | x {times:.3g}"


def test_learning_rates_are_chosen_without_the_test_set(study: Any) -> None:
    jobs = study.jobs({}, FIELDS, OPTIONS)
    rates = {name: config for name, config in jobs if name.startswith("rate")}
    assert len(rates) == 18  # two models, three ways, three rates
    for config in rates.values():
        assert config["validate"]
        assert "{split}" not in config["data"]
        assert config["data"] == "x-train.parquet+y-train.parquet"
    assert not any(name.startswith(("main", "labels", "remedy", "depth")) for name, _ in jobs)


def test_the_best_rate_is_used_and_the_grid_is_extended_at_its_edge(study: Any) -> None:
    done = {trial("residual", "soap", times): row(0.5 - abs(times - 1)) for times in (1, 1 / 3, 3)}
    done |= {trial("skipless", "soap", times): row(times) for times in (1, 1 / 3, 3)}
    names = [name for name, _ in study.jobs(done, FIELDS, OPTIONS)]
    assert trial("skipless", "soap", 9) in names
    assert not any(name.startswith("main") for name in names)
    done[trial("skipless", "soap", 9)] = row(0.1)
    jobs = dict(study.jobs(done, FIELDS, OPTIONS))
    assert jobs["main | residual | soap | seed 1"]["lr"] == pytest.approx(1e-3)
    assert jobs["main | skipless | soap | seed 1"]["lr"] == pytest.approx(3e-3)
    assert jobs["main | skipless | soap | seed 1"]["data"] == FIELDS["data"]
    assert "main | skipless | adamw | seed 0" not in jobs


def test_a_run_that_diverged_is_not_chosen(study: Any) -> None:
    results = importlib.import_module("_dino_results")
    done = {trial("residual", "adamw", times): row(0.2) for times in (1, 1 / 3)}
    done[trial("residual", "adamw", 3)] = row(0.9) | {"diverged": "the loss is nan"}
    assert results.best_rate(done, "residual", "adamw") == 1
