"""The data of the figures, compared with numpy and by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.runs import by_block, folder

from unskip.report import _charts as charts
from unskip.report import _names as names_of
from unskip.report._look import Look
from unskip.report._read import Group, Run, read_groups

FINITE = st.floats(-1e300, 1e300)


@given(st.lists(FINITE, min_size=2, max_size=6), st.integers(0, 3))
def test_mean_and_std(values: list[float], broken: int) -> None:
    mean, std, count = charts.mean_and_std([*values, *[math.nan] * broken])
    scaled = np.array(values) / 1e300
    assert count == len(values)
    assert mean / 1e300 == pytest.approx(scaled.mean(), rel=1e-9, abs=1e-12)
    assert std is not None
    assert std / 1e300 == pytest.approx(scaled.std(ddof=1), rel=1e-6, abs=1e-12)


def test_mean_and_std_of_no_value_and_of_one() -> None:
    assert charts.mean_and_std([3.0]) == (3.0, None, 1)
    mean, std, count = charts.mean_and_std([math.nan])
    assert (math.isnan(mean), std, count) == (True, None, 0)


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    for seed, losses in ((0, (4.0, 2.0, 1.0)), (1, (2.0, "nan"))):
        folder(tmp_path / "a" / f"seed-{seed}", losses=losses, seed=seed, evals=by_block((0.2, 0.4 + seed / 10)))
    folder(tmp_path / "b", losses=(9.0,), shortcut="decay:0.5", weights=(1.0, 0.75, 0.5))
    return read_groups([tmp_path / "a", tmp_path / "b"])


def test_curve(groups: list[Group]) -> None:
    first, second = charts.over_steps(groups, "loss").lines
    assert (first.x, first.y, first.count) == ((10, 20, 30), (3.0, 2.0, 1.0), (2, 1, 1))
    assert first.std == (pytest.approx(math.sqrt(2)), None, None)
    assert (second.label, second.group, second.y) == ("b", 1, (9.0,))


def test_depth(groups: list[Group]) -> None:
    chart = charts.over_depth(groups, "knn20")
    assert (chart.lines[0].x, chart.lines[0].y) == ((0.0, 1.0), (0.2, pytest.approx(0.45)))
    assert len(chart.lines) == 1
    assert charts.over_depth(groups, "rank").missing.startswith("no run has this evaluation")
    assert chart.note.endswith(": b.")


def test_only_the_newest_step_counts_over_depth(tmp_path: Path) -> None:
    folder(tmp_path / "a", evals=by_block((0.9, 0.9, 0.9), step=10) + by_block((0.1, 0.2)) + by_block((0.3,)))
    (line,) = charts.over_depth(read_groups([tmp_path]), "knn20").lines
    assert line.y == (0.3, 0.2)


def newest(run: Run) -> dict[str, float]:
    return {name: row[name] for name, row in names_of.newest_rows(run).items()}


def test_latest_values_are_those_of_the_last_block(tmp_path: Path) -> None:
    rows = by_block((0.1, 0.2, 0.3), "rank") + by_block((0.5, 0.6), "knn20")
    whole = [{"step": 20, "evaluation": "o", "rank": 9.0}, {"step": 30, "evaluation": "f", "finetune": 0.9}]
    folder(tmp_path / "a", evals=[*rows, *whole])
    (group,) = read_groups([tmp_path])
    assert newest(group.runs[0]) == {"rank": 0.3, "knn20": 0.6, "finetune": 0.9}


def test_identical_lines_are_named(tmp_path: Path) -> None:
    for name, losses in {"a": (1.0, 2.0), "b": (1.0, 2.0, 3.0), "c": (1.0, 2.5)}.items():
        folder(tmp_path / name, losses=losses, shortcut=name)
    assert charts.over_steps(read_groups([tmp_path]), "loss").note.endswith("on one line: a and b.")


def test_a_value_that_is_missing_for_some_blocks(tmp_path: Path) -> None:
    run = read_groups([folder(tmp_path / "a")])[0].runs[0]
    blocks = [{"index": index, "high_frequency": value} for index, value in enumerate((0.5, None, math.nan))]
    seen = Look(30, {"blocks": blocks, "sites": []})
    chart = charts.measured([Group("a", (replace(run, look=seen),))], "high_frequency")
    assert chart.lines[0].x == (0.0,)
    assert chart.note.endswith("a at block 1 and 2.")


def test_a_single_evaluation_has_no_curve(tmp_path: Path) -> None:
    folder(tmp_path / "a", evals=[{"step": 30, "evaluation": "o", "knn20": 0.1}])
    chart = charts.evaluated(read_groups([tmp_path]), "knn20")
    assert (chart.lines, "once" in chart.missing) == ((), True)


def test_only_one_k_of_knn_is_drawn(tmp_path: Path) -> None:
    row = {"step": 30, "evaluation": "o", "knn10": 0.1, "knn20": 0.2, "knn200": 0.3, "rank": 3.0, "rank_entropy": 1.1}
    folder(tmp_path / "a", evals=[row])
    assert names_of.evaluations(read_groups([tmp_path]), by_block=False) == ["knn20", "rank"]


def test_results_with_other_settings_have_other_names(tmp_path: Path) -> None:
    rows = by_block((0.1, 0.2), "knn20") + by_block((0.5,), "knn10")
    rows += [{**row, "time": 0.5} for row in by_block((0.3, 0.4))] + [
        {**row, "changes": {"k": 1}} for row in by_block((0.9,))
    ]
    folder(tmp_path / "a", evals=rows)
    groups = read_groups([tmp_path])
    names = names_of.evaluations(groups, by_block=True)
    assert names == ["knn20", "knn20 at time 0.5", "knn20 (changed)"]
    assert [charts.over_depth(groups, name).lines[0].y for name in names] == [(0.1, 0.2), (0.3, 0.4), (0.9,)]
    assert names_of.title_and_unit("knn20 at time 0.5") == ("kNN accuracy, k = 20 at time 0.5", "accuracy (fraction)")
    assert names_of.title_and_unit("rank (changed)")[0] == "Effective rank of the features (changed)"


def test_sampling_settings_are_not_drawn_as_results(tmp_path: Path) -> None:
    how = {"n": 1000, "split": "train", "precision": "float32", "extractor": "0f", "sampler": "heun", "steps": 50}
    how |= {"cfg": 1.0, "tolerance": 1e-5, "seed": 3}
    rows = [{"step": 30, "evaluation": "generation-v1", "FD-x": 2.0, **how, **more} for more in ({}, {"cfg": 1.5})]
    others: list[dict[str, Any]] = [{"steps": 25}, {"sampler": "euler"}, {"sampler": "dopri5", "cfg": 2.0}]
    rows += [{"step": 30, "evaluation": "generation-v1", "FD-x": 9.0, **how, **more} for more in others]
    rows.append({"step": 30, "evaluation": "segment-ridge-v1", "mean_iou": 0.5, "data": "x.parquet", "size": 32})
    groups = read_groups([folder(tmp_path / "a", evals=rows)])
    ways = ("", " with cfg 1.5", " in 25 steps", " by euler in 50 steps", " by dopri5 with cfg 2")
    names = [*(f"FD-x of 1000 samples{way}" for way in ways), "mean_iou"]
    assert names_of.evaluations(groups, by_block=False) == names
    assert [*newest(groups[0].runs[0])] == names
    assert newest(groups[0].runs[0])[names[0]] == 2.0  # not the later result with fewer sampling steps


def test_long_curves_are_subsampled_and_keep_their_ends(tmp_path: Path) -> None:
    folder(tmp_path / "a", losses=[1 / (1 + i) for i in range(1000)])
    chart = charts.over_steps(read_groups([tmp_path]), "loss")
    (line,) = chart.lines
    assert 150 < len(line.x) <= charts.POINTS + 1
    assert (line.x[0], line.x[-1], line.y[-1]) == (10, 10_000, 1 / 1000)
    assert "thinned to 300" in chart.note


def test_wide_ranges_have_a_logarithmic_axis(tmp_path: Path) -> None:
    folder(tmp_path / "a", losses=(1e6, 1.0))
    folder(tmp_path / "b", losses=(1e6, -1.0), shortcut="cut")
    assert charts.over_steps(read_groups([tmp_path / "a"]), "loss").log
    assert not charts.over_steps(read_groups([tmp_path / "a", tmp_path / "b"]), "loss").log
    # Ranges within a decade and fractions close to 0 have a linear axis.
    folder(tmp_path / "c", losses=(4.0, 2.0), evals=by_block((0.9, 1e-4)))
    (near,) = read_groups([tmp_path / "c"])
    assert not charts.over_steps([near], "loss").log
    assert not charts.over_depth([near], "knn20").log
