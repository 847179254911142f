"""The demo shows what it claims, says what its runs showed, and fails aloud where a claim does not hold."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from unskip import cli, demo
from unskip.demo import Scale, _absorb, _knob
from unskip.demo._compare import compared, ranked
from unskip.errors import BadInput
from unskip.report import read
from unskip.wiring import Wiring

SMALL = {"model_args": "depth=2,embed_dim=16,num_heads=2", "log_every": 4, "device": "cpu"}
TINY = Scale("digits", {"steps": 8, **SMALL}, {"steps": 8, **SMALL})


def test_knob() -> None:
    lines: list[str] = []
    assert _knob.turn(lines.append)
    text = "\n".join(lines)
    assert "VisionTransformer: 8 residual sites" in text
    assert "VisionTransformer: 8 governed sites of 8" in text
    assert "effective decay 0.15, above the paper's band" in text
    assert "decay:product=0.005   last alpha 0.177" in text
    assert lines[-1] == "It is the same bit for bit."

    torch.manual_seed(2)  # it shows the same, whatever the seed
    again: list[str] = []
    assert _knob.turn(again.append)
    assert again == lines


def test_undo_that_does_not_restore_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    rewire = _knob.rewire

    def half(self: Wiring) -> None:
        self.set("scale:0.999999,1")

    # Without the check before rewiring, which would undo as well.
    monkeypatch.setattr(_knob, "rewire", lambda model, rule: rewire(model, rule, verify=False))
    monkeypatch.setattr(Wiring, "undo", half)
    lines: list[str] = []
    assert not _knob.turn(lines.append)
    assert "NOT the same bit for bit" in lines[-1]


def test_rewiring_that_does_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_knob, "_output", lambda model, images: torch.zeros(4, 10))
    assert _knob.turn(lambda line: None) is False


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # after eight steps nothing has been learnt
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "chosen", lambda data, quick: TINY)
    out = tmp_path / "a folder" / "demo"
    assert cli.main(["demo", "--out", str(out), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert [line[3:9] for line in text.splitlines() if line.startswith("== ")] == [f"{n} of 5" for n in range(1, 6)]
    groups = {group.label: group.runs[0] for group in read([out], look=False)}
    assert {name: run.config["shortcut"] for name, run in groups.items()} == {
        "mae-plain": "keep",
        "mae-decayed": "decay:0.6",
        "skips-kept": "keep",
        "skips-cut": "cut",
        "skips-cut-initialised": "cut",
    }
    assert len({run.seed for run in groups.values()}) == 1
    assert {run.state for run in groups.values()} == {"finished, 8 steps"}
    # The numbers of the text are those of the runs.
    for name in ("skips-kept", "skips-cut", "skips-cut-initialised"):
        assert f"{groups[name].evals[-1]['test_accuracy']:.4g}" in text
    last = [row["knn20"] for row in groups["mae-decayed"].evals if row.get("block") == 1 and "knn20" in row]
    assert f"{last[0]:.3f} with" in text
    assert text.count("it holds.") == 2
    page = out / "report.html"
    assert f"Open {page.resolve()} in a browser" in text
    assert page.read_text().count('class="chart"') > 10


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")
def test_stopped(tmp_path: Path) -> None:
    """Ctrl-C in a run: the run is left with a checkpoint, and the demo says where."""
    out, lines = tmp_path / "demo", list[str]()
    endless = Scale("digits", {**TINY.mae, "steps": 10**6, "log_every": 1}, TINY.supervised)
    log = out / "mae-plain" / "metrics.jsonl"
    done = threading.Event()

    def interrupt() -> None:
        while not log.exists() and not done.wait(0.05):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run(out, lines.append, endless, quiet=True)
    finally:
        done.set()
    assert f"What was done is in {out}" in lines[-1]
    (group,) = read([out], look=False)
    assert group.runs[0].checkpoint == group.runs[0].step > 0


def test_the_page_is_opened_where_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    shown = demo.Shown(True, tmp_path / "report.html")
    monkeypatch.setattr(demo, "run", lambda *given: shown)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert cli.main(["demo"]) == 0
    assert opened == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["demo"]) == 0
    assert opened == [shown.page.as_uri()]
    shown = demo.Shown(False, tmp_path / "report.html")
    assert cli.main(["demo"]) == 1


def test_a_verdict_that_does_not_hold_is_a_fault() -> None:
    lines: list[str] = []
    assert _absorb._checked(False, lines.append) is False
    assert "does NOT hold" in lines[0]


def test_what_is_said_of_two_accuracies() -> None:
    assert compared("KNN", 0.5, 0.6, 10_000) == ("KNN: 0.500 without, 0.600 with, which is higher by 0.100 (±0.014).")
    assert compared("KNN", 0.6, 0.5, 10_000).endswith("lower by 0.100 (±0.014).")
    assert "The difference, +0.010, may be chance: 100 test images give ±0.141." in compared("KNN", 0.5, 0.51, 100)
    assert "may be chance" in compared("KNN", 1.0, 1.0, 10)
    assert [ranked(10, value).rpartition(" ")[2] for value in (10.1, 12, 8)] == ["same.", "higher.", "lower."]


def test_scales() -> None:
    assert demo.chosen() is demo.SMALL
    assert demo.chosen(quick=True) is demo.QUICK
    large = demo.chosen("cifar10", device="cuda")
    assert (large.preset, large.mae["data"], large.mae["steps"]) == ("cifar", "cifar10", demo.LARGE.mae["steps"])
    assert demo.chosen("cifar10", quick=True, device="cpu").mae == {
        **demo.LARGE.mae,
        "data": "cifar10",
        "steps": demo.LARGE.mae["steps"] // 6,
        "device": "cpu",
    }
    if not torch.cuda.is_available():
        with pytest.raises(BadInput, match="takes a GPU, and there is none here"):
            demo.chosen("cifar10")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert demo._free(tmp_path / "demo") == tmp_path / "demo"
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir()
    assert demo._free(tmp_path / "demo") == tmp_path / "demo-3"
