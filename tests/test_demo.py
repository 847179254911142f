"""The demo shows what it claims, and fails aloud where a claim does not hold."""

import pytest
import torch

from unskip import cli, demo
from unskip.wiring import Wiring


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    assert demo.run(lines.append)
    text = "\n".join(lines)
    assert "VisionTransformer: 8 residual sites" in text
    assert "VisionTransformer: 8 governed sites of 8" in text
    assert "effective decay 0.15, above the paper's band" in text
    assert "decay:product=0.005   last alpha 0.177" in text
    assert lines[-1] == "It is the same bit for bit."

    torch.manual_seed(2)  # the command shows the same, whatever the seed
    assert cli.main(["demo"]) == 0
    assert capsys.readouterr() == (f"{text}\n", "")


def test_undo_that_does_not_restore_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewire = demo.rewire

    def half(self: Wiring) -> None:
        self.set("scale:0.999999,1")

    # Without the check before rewiring, which would undo as well.
    monkeypatch.setattr(demo, "rewire", lambda model, rule: rewire(model, rule, verify=False))
    monkeypatch.setattr(Wiring, "undo", half)
    assert cli.main(["demo"]) == 1
    assert "NOT the same bit for bit" in capsys.readouterr().out


def test_rewiring_that_does_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_output", lambda model, images: torch.zeros(4, 10))
    assert demo.run(lambda line: None) is False
