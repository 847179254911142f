"""`unskip absorb`: what it prints, where, and with which exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unskip


def test_the_table(run: Any, models: str) -> None:
    code, out, _ = run("absorb", f"{models}:pictures")
    assert code == 0
    assert "2 impossible" in out
    assert "verified" in out


def test_json_with_data(run: Any, models: str) -> None:
    code, out, _ = run("absorb", f"{models}:normed", "--data", "random:40", "--n", "40", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["verified"] is True
    assert record["counts"]["impossible"] == 2
    assert record["rows"][0]["verdict"]["obstructions"][0]["kind"] == "growth"
    assert record["rows"][0]["bare"]["status"] == "impossible"
    assert record["rows"][0]["approximation"]["error"] > 0


def test_apply_and_save(run: Any, models: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    more = ("--data", "random:40", "--n", "40", "--apply", "approximate", "--out", str(folder))
    code, _, err = run("absorb", f"{models}:pictures", *more, "--max-error", "1e-6")
    assert code == 1
    assert "nothing is saved" in err
    assert not folder.exists()
    code, out, _ = run("absorb", f"{models}:pictures", *more, "--max-error", "2")
    assert code == 0
    assert "2 of 2 MLP sites rewritten" in out
    loaded = unskip.load(folder, trust=True)
    assert unskip.Wiring.of(loaded).alphas == [0.0, 0.0]
    code, out, _ = run("absorb", f"{models}:pictures", "--apply", "widen", "--json")
    assert json.loads(out)["applied"]["difference"] < 1e-5
    assert torch.isfinite(loaded(torch.zeros(1, 3, 4, 4))).all()


def test_a_saved_model_is_rewritten_and_still_says_how_to_build_it(run: Any, models: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    unskip.save(unskip.spec.build(f"{models}:pictures"), first, f"{models}:pictures")
    more = ("--apply", "approximate", "--max-error", "2", "--out", second)
    code, _, err = run("absorb", first, "--data", "random:40", *more)
    assert (code, "trust" in err) == (2, True)
    code, _, err = run("absorb", first, "--data", "random:40", *more, "--trust")
    assert code == 0, err
    assert unskip.Wiring.of(unskip.load(second, trust=True)).alphas == [0.0, 0.0]


def test_a_widened_model_is_other_than_its_function_builds(run: Any, models: str, tmp_path: Path) -> None:
    code, _, err = run("absorb", f"{models}:pictures", "--apply", "widen", "--out", str(tmp_path / "out"))
    assert code == 0
    assert "builder" in err
    assert (tmp_path / "out" / "unskip.json").is_file()
    (tmp_path / "file").touch()
    code, _, err = run("absorb", f"{models}:pictures", "--apply", "widen", "--out", str(tmp_path / "file"))
    assert (code, "is a file" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--apply", "approximate"], "give --data"),
        (["--out", "x"], "give --apply"),
        (["--apply", "widen", "--distil", "3"], "--distil"),
        (["--n", "5"], "give --data, too"),
        (["--data", "random:40", "--n", "5"], "write --data random:5, without --n"),
        (["--apply", "widen", "--out", "/proc/nowhere"], "--out /proc/nowhere"),
        (["--device", "nowhere"], "device is 'nowhere'"),
    ],
)
def test_bad_input(run: Any, models: str, args: list[str], message: str) -> None:
    code, _, err = run("absorb", f"{models}:pictures", *args)
    assert code == 2
    assert message in err


def test_a_model_whose_certificate_fails_is_not_saved(
    run: Any, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unskip.absorption.Scan, "verify", lambda self: False)
    code, out, err = run("absorb", f"{models}:pictures", "--apply", "widen", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "saved to" not in out
    assert "a certificate failed verification" in err
    assert not (tmp_path / "out").exists()


def test_a_model_that_nothing_was_rewritten_in_is_not_saved(run: Any, models: str, tmp_path: Path) -> None:
    code, out, err = run("absorb", f"{models}:normed", "--apply", "exact", "--out", str(tmp_path / "out"))
    assert code == 1
    assert "0 of 2" in out
    assert "saved" not in out
    assert "nothing is saved" in err
    assert not (tmp_path / "out").exists()


def test_data_of_vectors_is_used(run: Any, models: str) -> None:
    code, out, _ = run("absorb", f"{models}:bare", "--input", "2,8", "--data", "random:512", "--json")
    assert code == 0
    assert [row["approximation"]["held_out"] for row in json.loads(out)["rows"]] == [256, 256]
    code, _, err = run("absorb", f"{models}:bare", "--input", "8", "--data", "random:512")
    assert code == 2
    assert "write 2,8" in err


def test_a_model_with_a_shortcut_rule_is_not_rewritten(run: Any, models: str, tmp_path: Path) -> None:
    """Its wiring cannot be undone on the command line."""
    model = unskip.spec.build(f"{models}:pictures")
    unskip.rewire(model, "decay:0.6")
    unskip.save(model, tmp_path / "decayed", f"{models}:pictures")
    code, _, err = run("absorb", str(tmp_path / "decayed"), "--trust", "--apply", "widen")
    assert code == 2
    assert "leave --apply out for the verdicts alone" in err
