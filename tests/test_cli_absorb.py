"""`unskip absorb`: what it prints, where, and with which exit code."""

import json
from pathlib import Path

import pytest
import torch

import unskip
from unskip import cli

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Small(nn.Module):
    default_cfg = pretrained_cfg = {"input_size": (3, 4, 4), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}

    def __init__(self, norm=False):
        super().__init__()
        self.embed, self.blocks = nn.Linear(12, 8), nn.Sequential(Block(norm), Block(norm))

    def forward(self, x):
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.blocks(self.embed(patches))

def make():
    return Small()

def normed():
    return Small(True)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(SOURCE, encoding="utf-8")
    return str(tmp_path / "small.py")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["absorb", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{source}:make")
    assert code == 0
    assert "2 impossible" in out
    assert "verified" in out


def test_json_with_data(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{source}:normed", "--data", "random:40", "--n", "40", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["verified"] is True
    assert record["counts"]["impossible"] == 2
    assert record["rows"][0]["verdict"]["obstructions"][0]["kind"] == "growth"
    assert record["rows"][0]["bare"]["status"] == "impossible"
    assert record["rows"][0]["approximation"]["error"] > 0


def test_apply_and_save(source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    more = ("--data", "random:40", "--n", "40", "--apply", "approximate", "--out", str(folder))
    code, _, err = run(capsys, f"{source}:make", *more, "--max-error", "1e-6")
    assert code == 1
    assert "nothing is saved" in err
    assert not folder.exists()
    code, out, _ = run(capsys, f"{source}:make", *more, "--max-error", "2")
    assert code == 0
    assert "2 of 2 MLP sites rewritten" in out
    loaded = unskip.load(folder, trust=True)
    assert unskip.Wiring.of(loaded).alphas == [0.0, 0.0]
    code, out, _ = run(capsys, f"{source}:make", "--apply", "widen", "--json")
    assert json.loads(out)["applied"]["difference"] < 1e-5
    assert torch.isfinite(loaded(torch.zeros(1, 3, 4, 4))).all()


def test_a_saved_model_is_rewritten_and_still_says_how_to_build_it(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    unskip.save(unskip.spec.build(f"{source}:make"), first, f"{source}:make")
    more = ("--apply", "approximate", "--max-error", "2", "--out", second)
    code, _, err = run(capsys, first, "--data", "random:40", *more)
    assert (code, "trust" in err) == (2, True)
    code, _, err = run(capsys, first, "--data", "random:40", *more, "--trust")
    assert (code, err) == (0, "")
    assert unskip.Wiring.of(unskip.load(second, trust=True)).alphas == [0.0, 0.0]


def test_a_widened_model_is_other_than_its_function_builds(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, f"{source}:make", "--apply", "widen", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "builder" in err
    assert (tmp_path / "out" / "unskip.json").is_file()
    (tmp_path / "file").touch()
    code, _, err = run(capsys, f"{source}:make", "--apply", "widen", "--out", str(tmp_path / "file"))
    assert (code, "is a file" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--apply", "approximate"], "give --data"),
        (["--out", "x"], "give --apply"),
        (["--device", "nowhere"], "device is 'nowhere'"),
    ],
)
def test_bad_input(source: str, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    code, _, err = run(capsys, f"{source}:make", *args)
    assert code == 2
    assert message in err


def test_a_model_that_nothing_was_rewritten_in_is_not_saved(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, f"{source}:normed", "--apply", "exact", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "0 of 2" in out
    assert "saved" not in out
    assert "nothing is saved" in err
    assert not (tmp_path / "out").exists()


def test_data_of_vectors_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vectors.py").write_text(
        SOURCE + "\ndef vectors():\n    return nn.Sequential(Block(False), Block(True))\n", encoding="utf-8"
    )
    more = ("--input", "2,8", "--data", "random:512", "--json")
    code, out, _ = run(capsys, f"{tmp_path / 'vectors.py'}:vectors", *more)
    assert code == 0
    assert [row["approximation"]["held_out"] for row in json.loads(out)["rows"]] == [256, 256]
