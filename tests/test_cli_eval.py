"""`unskip eval`: options that nothing would read are refused before a run is opened."""

from pathlib import Path

import pytest

from unskip import cli
from unskip.evals import PROTOCOLS

NO_RUN = ["eval", "no-such-run", "--dense", "pets-{split}.parquet"]


@pytest.mark.parametrize("named", [[], ["--protocol", "rank-v1"], ["--times", "0.5,1"]], ids=str)
def test_masks_that_no_protocol_looks_at_are_refused(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*NO_RUN, *named]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("unskip: --dense pets-{split}.parquet: ")
    assert "look at no masks or boxes" in err
    dense = [name for name, each in PROTOCOLS.items() if each.truth != "labels"]
    assert f"--protocol {','.join(dense)}," in err


@pytest.mark.parametrize("named", [["--protocol", "rank-v1,segment-ridge-v1"], ["--pictures", "x.png"]], ids=str)
def test_masks_that_are_looked_at_are_taken(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*NO_RUN, *named]) == 2
    assert "no-such-run" in capsys.readouterr().err  # and not the masks


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--pool", "cls"], "--pool cls: segment-ridge-v1 look at patches"),
        (["--split", "val"], "--split val: segment-ridge-v1 look at patches"),
        (["--pictures", "sheet"], "end it in .png"),
    ],
    ids=str,
)
def test_what_is_of_no_use_to_dense_protocols_is_refused(
    option: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*NO_RUN, "--protocol", "segment-ridge-v1", *option]) == 2
    assert message in capsys.readouterr().err
    both = ["--protocol", "segment-ridge-v1,rank-v1"]
    assert cli.main([*NO_RUN, *both, *option[:1], option[1] + ".png" * (option[0] == "--pictures")]) == 2
    assert "no-such-run" in capsys.readouterr().err
