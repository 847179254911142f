"""Run folders in any state are read, with a note on what is damaged."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.runs import folder

from unskip import report
from unskip.errors import BadInput
from unskip.report._read import read_groups, read_run


def test_run(tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "a", weights=(1.0, 0.6), evals=[{"step": 30, "evaluation": "x", "knn20": 0.5}]))
    assert (run.name, run.recipe, run.seed, run.step, run.steps) == ("a", "mae", 0, 30, 100)
    assert [row["loss"] for row in run.metrics] == [1.0, 0.5, 0.25]
    assert [(each.site, each.alpha) for each in run.weights] == [(0, 1.0), (1, 0.6)]
    assert run.state == "at step 30 of 100"
    assert run.notes == ()


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"steps": 30}, "finished, 30 steps"),
        ({"steps": None}, "at step 30"),
        ({"losses": ()}, "no step logged yet"),
        ({"warnings": [{"step": 30, "warning": "non-finite-loss", "text": ""}]}, "stopped at step 30: the loss"),
    ],
)
def test_state(tmp_path: Path, change: dict[str, object], state: str) -> None:
    assert read_run(folder(tmp_path / "a", **change)).state.startswith(state)  # type: ignore[arg-type]


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 40, "loss": 0.1}\n[1, 2]\n{"loss": 3}\n\xff\xfe\n{"step": 50, "lo')
    run = read_run(path)
    assert [row["step"] for row in run.metrics] == [10, 20, 30, 40]
    assert run.notes == ("metrics.jsonl: 4 lines, from line 5, skipped, not readable",)


def test_non_finite_numbers(tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "a", losses=(1.0, "nan", float("inf"), 0.5)))
    assert [math.isfinite(row["loss"]) for row in run.metrics] == [True, False, False, True]
    assert run.notes == ("the loss is not finite at step 20, 2 logged steps in total",)


def test_a_step_logged_again_counts_once(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "loss": 0.75}\n')
    assert [(row["step"], row["loss"]) for row in read_run(path).metrics] == [(10, 1.0), (20, 0.75), (30, 0.25)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"config": 3}', "[" * 100_000])
def test_a_damaged_config_does_not_affect_the_rest(tmp_path: Path, text: str) -> None:
    path = folder(tmp_path / "a")
    (path / "config.json").write_text(text)
    run = read_run(path)
    assert (run.config, len(run.metrics), run.recipe) == ({}, 3, "unknown")


def test_long_skips_are_not_shortcuts(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", weights=(1.0, 1.0, 0.5))
    record = path / "checkpoints" / "step-30" / "encoder" / "unskip.json"
    data = json.loads(record.read_text())
    data["wiring"]["sites"][1]["long"] = True
    record.write_text(json.dumps(data))
    assert [(each.site, each.alpha) for each in read_run(path).weights] == [(0, 1.0), (2, 0.5)]


def test_a_damaged_checkpoint_is_noted(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", weights=(1.0,))
    (path / "checkpoints" / "step-30" / "encoder" / "unskip.json").write_text('{"wiring": {"sites": [{"index": 0}]}}')
    run = read_run(path)
    assert run.weights == ()
    assert run.notes == ("unskip.json of step 30: damaged, so the weights of its sites are unknown",)


def test_groups(tmp_path: Path) -> None:
    for seed in (0, 1, 10):
        folder(tmp_path / "decayed" / f"seed-{seed}", shortcut="decay:0.6", seed=seed)
    folder(tmp_path / "plain")
    groups = read_groups([tmp_path / "plain", tmp_path / "decayed", tmp_path / "plain"])
    assert [(group.label, [run.seed for run in group.runs], group.place) for group in groups] == [
        ("plain", [0], 0),
        ("decayed", [0, 1, 10], 1),
    ]


def test_equal_names_and_equal_configs(tmp_path: Path) -> None:
    folder(tmp_path / "one" / "x", shortcut="cut")
    folder(tmp_path / "two" / "x")
    folder(tmp_path / "x-seed1", seed=1)
    groups = read_groups([tmp_path / "one" / "x", tmp_path / "two" / "x", tmp_path / "x-seed1"])
    assert [(group.label, len(group.runs)) for group in groups] == [("x", 1), ("x (2)", 2)]


def test_runs_without_a_config_are_not_grouped(tmp_path: Path) -> None:
    for name in "ab":
        folder(tmp_path / name)
        (tmp_path / name / "config.json").unlink()
    groups = read_groups([tmp_path])
    assert [group.label for group in groups] == ["a", "b"]
    assert groups[0].runs[0].notes == ("config.json: missing",)


def test_a_run_that_is_passed_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    (group,) = read_groups(["a", tmp_path / "a", "link", "../" + tmp_path.name])
    assert (len(group.runs), group.repeats, group.label) == (1, False, "a")


def test_measurements_with_other_settings_have_other_names(tmp_path: Path) -> None:
    row = {"step": 30, "evaluation": "x", "block": 1, "pool": "mean", "split": "test", "precision": "float32"}
    rows = [row, {**row, "pool": "cls"}, {**row, "split": "val"}, {**row, "precision": "bf16"}]
    run = read_run(folder(tmp_path / "a", evals=[{**each, "knn20": 0.5} for each in rows]))
    names = [next(name for name in row if name.startswith("knn20")) for row in run.evals]
    assert names == ["knn20", "knn20 of class tokens", "knn20 on the validation split", "knn20 in bf16"]
    held = read_run(folder(tmp_path / "b", evals=[{**row, "split": "val", "knn20": 0.5}], validate=True))
    assert "knn20" in held.evals[0]


def test_a_metric_of_two_protocols_is_not_joined(tmp_path: Path) -> None:
    row = {"step": 30, "block": 1, "n": 24, "mean_iou": 0.5, "rank": 2.0, "intervals": {"mean_iou": [0.4, 0.6]}}
    for name, protocol in (("a", "segment-ridge-v1"), ("b", "segment-linear-v1")):
        folder(tmp_path / name, evals=[{**row, "evaluation": protocol}], lr=0.1 if name == "a" else 0.2)
    folder(tmp_path / "c", evals=[{**row, "evaluation": "segment-ridge-v1"}], recipe="dino")
    runs = [run for group in read_groups([tmp_path]) for run in group.runs]
    titles = ["mean_iou (segment-ridge-v1)", "mean_iou (segment-linear-v1)", "mean_iou"]
    assert [next(name for name in run.evals[0] if name.startswith("mean_iou")) for run in runs] == titles
    assert [list(run.evals[0]["intervals"]) for run in runs] == [[title] for title in titles]
    page = report.write([tmp_path], tmp_path / "page.html", look=False).read_text()
    assert "mean_iou (segment-ridge-v1), n = 24" in page


def test_several_blocks_in_one_row_of_the_log(tmp_path: Path) -> None:
    row = {"step": 30, "evaluation": "x", "rank": 3.0, "cls_knn20": 0.5, "rank_block_0": 2.0, "rank_block_1": 3.0}
    run = read_run(folder(tmp_path / "a", evals=[row]))
    labels = {"step": 30, "evaluation": "x", "block": None, "intervals": {}}
    assert run.evals == (
        {**labels, "rank": 3.0, "knn20 of class tokens": 0.5},
        {**labels, "block": 0, "rank": 2.0},
        {**labels, "block": 1, "rank": 3.0},
    )


def test_folders_of_folders_of_runs(tmp_path: Path) -> None:
    """Folders of `--seeds` beside a run. Deeper folders and folders in a run are not read."""
    folder(tmp_path / "b")
    for seed in (10, 9):
        folder(tmp_path / "a" / f"seed-{seed}", seed=seed, shortcut="cut")
    folder(tmp_path / "b" / "copy", shortcut="decay:0.6")
    folder(tmp_path / "c" / "d" / "e", shortcut="decay:0.7")
    groups = read_groups([tmp_path])
    assert [[run.path.name for run in group.runs] for group in groups] == [["seed-9", "seed-10"], ["b"]]


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no run to report on"):
        read_groups([])
    with pytest.raises(BadInput, match="no such folder"):
        read_groups([tmp_path / "x"])
    with pytest.raises(BadInput, match=r"no config.json"):
        read_groups([tmp_path])
    for name in ("config.json", "model.safetensors"):  # a folder of transformers, or of unskip.save
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match=r"no config.json of a run"):
        read_groups([tmp_path])


@given(
    metrics=st.binary(max_size=200),
    evals=st.lists(
        st.dictionaries(
            st.sampled_from(["step", "block", "knn20", "evaluation", "<b>"]),
            st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
        ),
        max_size=4,
    ),
)
def test_logs_of_any_content(metrics: bytes, evals: list[dict[str, object]]) -> None:
    from unskip.report._page import page

    with tempfile.TemporaryDirectory() as place:
        path = folder(Path(place) / "run")
        (path / "metrics.jsonl").write_bytes(metrics)
        (path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
        text = page(read_groups([path]))
    assert text.endswith("</html>\n")
