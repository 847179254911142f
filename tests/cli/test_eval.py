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
    assert "use no masks or boxes" in err
    dense = [name for name, each in PROTOCOLS.items() if each.truth != "labels"]
    assert f"--protocol {','.join(dense)}," in err


@pytest.mark.parametrize("option", [["--pool", "cls"], ["--split", "val"]], ids=str)
def test_what_is_of_no_use_to_dense_protocols_is_refused(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*NO_RUN, "--protocol", "segment-ridge-v1", *option]) == 2
    assert f"{' '.join(option)}: segment-ridge-v1" in capsys.readouterr().err
    assert cli.main([*NO_RUN, "--protocol", "segment-ridge-v1,rank-v1", *option]) == 2
    assert "no-such-run" in capsys.readouterr().err  # and not the option, nor the masks


def test_blocks_are_refused_where_the_whole_model_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for names in ("accuracy-v1", "quantised-accuracy-v1"):
        assert cli.main(["eval", "no-such-run", "--protocol", names, "--blocks", "0"]) == 2
        assert f"--blocks 0: {names} evaluate the whole model" in capsys.readouterr().err
    assert cli.main(["eval", "no-such-run", "--protocol", "accuracy-v1,rank-v1", "--blocks", "0"]) == 2
    assert "no-such-run" in capsys.readouterr().err


def test_text_is_for_runs_and_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a text")
    options = ["--random", "--data", ".", "--protocol", "bits-per-byte-v1", "--size", "32"]
    assert cli.main(["eval", "timm:test_vit", *options]) == 2
    err = capsys.readouterr().err
    assert "bits-per-byte-v1: evaluated for the run of a language model" in err
    assert "unskip.evals.evaluate(model, None, unskip.data.TextFeed(...)" in err
