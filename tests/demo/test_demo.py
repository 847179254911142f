"""The demo: its text matches its runs, it can be interrupted, and a failed check gives exit code 1."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import python_in
from tests.report.runs import folder

from unskip import cli, demo
from unskip.demo import Scale, _knob, _train
from unskip.demo._compare import compare
from unskip.errors import TrainingError
from unskip.recipes import cached_opener
from unskip.report import read

SMALL = {"model_args": "depth=2,embed_dim=16,num_heads=2", "log_every": 4, "device": "cpu"}
TINY = Scale({"steps": 8, **SMALL}, (0, 1))


def test_rewiring_the_small_vit() -> None:
    lines: list[str] = []
    assert _knob.rewire_small_vit(lines.append)
    text = "\n".join(lines)
    assert "VisionTransformer: 8 residual sites" in text
    assert "VisionTransformer: 8 governed sites of 8" in text
    assert "effective decay 0.15, above the paper's band" in text
    assert "decay:product=0.005   last alpha 0.177" in text
    assert lines[-1] == "It is equal bit for bit."

    torch.manual_seed(2)  # the global seed has no effect
    again: list[str] = []
    assert _knob.rewire_small_vit(again.append)
    assert again == lines


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # eight steps are too few to learn
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUICK", TINY)
    out = tmp_path / "a folder" / "demo"
    assert cli.main(["demo", "--quick", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert [line[3:9] for line in text.splitlines() if line.startswith("== ")] == [f"{n} of 4" for n in range(1, 5)]
    groups = {group.label: group for group in read([out], look=False)}
    assert {name: group.config["shortcut"] for name, group in groups.items()} == {
        "skips-kept": "keep",
        "skips-cut": "cut",
        "skips-cut-initialised": "cut",
    }
    assert {tuple(run.seed for run in group.runs) for group in groups.values()} == {(0, 1)}
    assert {run.state for group in groups.values() for run in group.runs} == {"finished, 8 steps"}
    # The accuracies in the text are those of the runs.
    for group in groups.values():
        mean = sum(run.evals[-1]["test_accuracy"] for run in group.runs) / 2
        assert f"{mean:.3f} ± " in text
    assert text.count("Verified from the weights") == 2
    page = out / "report.html"
    assert f"Open {page.resolve()} in a browser" in text
    assert page.read_text().count('class="chart"') > 10


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")
def test_an_interrupted_run_keeps_a_checkpoint_and_the_demo_prints_how_to_resume(tmp_path: Path) -> None:

    out, lines = tmp_path / "demo", list[str]()
    endless = Scale({**TINY.fields, "steps": 10**6, "log_every": 1}, (0, 1))
    log = out / "skips-kept" / "seed-0" / "metrics.jsonl"
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(0.05):
            if log.exists():
                os.kill(os.getpid(), signal.SIGINT)
                return

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run(out, lines.append, endless)
    finally:
        done.set()
    assert "1 of 6 runs" in lines[-1]
    assert f"unskip resume {out / 'skips-kept' / 'seed-0'}" in lines[-1]
    (group,) = read([out], look=False)
    assert group.runs[0].checkpoint == group.runs[0].step > 0


def test_interrupted_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(write: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(_knob, "rewire_small_vit", interrupted)
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        demo.run(tmp_path / "demo", lines.append, TINY)
    assert lines[-1] == "\nStopped before the first run."
    with pytest.raises(KeyboardInterrupt):  # the empty folder is used again
        demo.run(tmp_path / "demo", lines.append, TINY)
    assert [each.name for each in tmp_path.iterdir()] == ["demo"]


def test_interrupted_between_runs(tmp_path: Path) -> None:
    """A finished run has no resume command, and a path with a space is quoted."""
    out = tmp_path / "a b"
    folder(out / "skips-kept", steps=30, weights=(1.0,))
    assert demo._stopped_message(out, demo.SMALL.runs) == (
        f"Stopped. {out} has 1 of 9 runs; `unskip report '{out}'` shows them. `unskip demo` starts from the beginning."
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")
def test_a_failed_run_is_reported_and_the_others_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = _train.train

    def failing(config: Any, out: Path, quiet: bool, opener: Any) -> Any:
        if out.parent.name == "skips-kept":
            raise TrainingError(f"{out.parent.name}: the loss is nan at step 4.")
        return train(config, out, quiet, opener)

    monkeypatch.setattr(_train, "train", failing)
    lines: list[str] = []
    runs = _train.classify(TINY, tmp_path, lines.append, True, cached_opener())
    text = "\n".join(lines)
    assert "the loss is nan at step 4" in text
    assert "With its skips: training failed" in text
    assert "With and without skips" not in text
    assert not any((runs[0] / "checkpoints").glob("*"))
    assert demo._absorb.decide(None, lines.append)


def test_the_report_is_opened_in_a_browser_only_from_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import webbrowser

    pages: list[str] = []
    shown = demo.Shown(True, tmp_path / "report.html")
    monkeypatch.setattr(demo, "run", lambda *given, **named: shown)
    monkeypatch.setattr(webbrowser, "open", pages.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert cli.main(["demo"]) == 0
    assert pages == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["demo"]) == 0
    assert pages == [shown.page.as_uri()]
    shown = demo.Shown(False, tmp_path / "report.html")
    assert cli.main(["demo"]) == 1


def test_compare_two_accuracies() -> None:
    assert compare("kNN", [0.5], [0.6], 10_000) == "kNN: 0.500 without, 0.600 with, which is higher by 0.100 (±0.014)."
    assert compare("kNN", [0.6], [0.5], 10_000).endswith("lower by 0.100 (±0.014).")
    assert "The difference, +0.010, may be chance: 100 test images give ±0.141." in compare("kNN", [0.5], [0.51], 100)
    assert "may be chance" in compare("kNN", [1.0], [1.0], 10)


@pytest.mark.parametrize(
    ("accuracies", "expected", "absent"),
    [
        ((0.9, 0.1, 0.8), ["higher by 0.700", "Cut, default initialisation: the model is", "lower by 0.100"], []),
        ((0.9, 0.8, 0.1), ["lower by 0.700", "`skipless` initialisation: the model is at"], ["default initialisation"]),
        ((0.1, 0.1, 0.1), ["may be chance", "With its skips: the model is at chance"], ["higher", "lower"]),
        ((0.5, 0.5, 0.5), ["The difference, +0.000, may be chance"], ["higher", "lower"]),
        ((0.5, None, 0.5), ["Cut, default initialisation: training failed"], ["Test accuracy", "higher"]),
        ((None, None, None), ["With its skips: training failed"], ["chance", "higher"]),
    ],
)
def test_describe_skips(accuracies: tuple[float | None, ...], expected: list[str], absent: list[str]) -> None:
    kept, cut, initialised = ([] if value is None else [value] for value in accuracies)
    text = "\n".join(_train.describe_skips(kept, cut, initialised, classes=10, images=10_000))
    assert [words for words in expected if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_an_existing_demo_is_not_overwritten(tmp_path: Path) -> None:
    assert demo._new_folder(tmp_path / "demo") == tmp_path / "demo"
    assert demo._new_folder(tmp_path / "demo") == tmp_path / "demo"  # it is empty
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "something").touch()
    assert demo._new_folder(tmp_path / "demo") == tmp_path / "demo-3"


@pytest.mark.parametrize("name", ["file/demo", "/proc/demo"])
def test_an_unwritable_folder_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "--out", name]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "choose another folder with --out" in shown.err


def test_missing_matplotlib_is_reported_before_any_run(tmp_path: Path) -> None:
    broken = "import sys; sys.modules['matplotlib'] = None; from unskip import cli; sys.exit(cli.main(['demo']))"
    code, out, err = python_in(tmp_path, broken)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "matplotlib" in err
