"""`unskip measure`: what it prints, where, and with which exit code."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.cli.models import strict

import unskip
from unskip import spec
from unskip.cli import _say


@pytest.fixture
def name(models: str) -> str:
    return f"{models}:normed"


def test_the_table_is_the_text_of_the_measurement(run: Any, name: str) -> None:
    code, out, err = run("measure", name, "--data", "random:3")
    assert code == 0
    assert err == "a line of the model's own\n"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = spec.build(name)
    samples = unskip.data.batch("random:3", size=(4, 4))
    assert out == f"{unskip.measure(model, samples)}\n"
    assert "on 3 samples of 4 tokens" in out


def test_json_is_strict_and_alone(run: Any, name: str) -> None:
    code, out, _ = run("measure", name, "--data", "random:3", "--shortcut", "cut", "--json")
    data = strict(out)
    assert code == 0
    assert [row["alpha"] for row in data["sites"]] == [0.0, 0.0]
    assert [row["ratio"] for row in data["sites"]] == [None, None]
    assert data["samples"] == 3
    assert data["network"]["exact"]
    assert data["network"]["null"] == 8  # two directions of each of four tokens


def test_options_reach_the_measurement(run: Any, name: str) -> None:
    _, out, _ = run("measure", name, "--data", "random:2", "--jacobians", "off", "--json")
    assert strict(out)["network"] is None
    code, out, err = run("measure", name, "--data", "random:2", "--init", "zero", "--jacobians", "off", "--json")
    assert code == 0, err
    assert [row["ratio"] for row in strict(out)["sites"]] == [0.0, 0.0]
    code, out, err = run(
        "measure", name, "--data", "random:2", "--init", "skipless", "--shortcut", "decay:0.6", "--json"
    )
    assert code == 0, err
    assert [row["alpha"] for row in strict(out)["sites"]] == pytest.approx([1.0, 0.6])


def test_where_selects_the_sites_of_shortcut_and_init(run: Any) -> None:
    def rows(*options: str) -> Any:
        model = ("measure", "timm:test_vit", "--random", "--data", "random:2", "--jacobians", "off", "--json")
        code, out, err = run(*model, *options)
        assert code == 0, err
        return strict(out)["sites"]

    sites = rows("--shortcut", "cut", "--init", "skipless", "--where", "mlp")
    assert {(row["kind"], row["alpha"]) for row in sites} == {("attention", 1.0), ("mlp", 0.0)}
    zero = rows("--init", "zero", "--where", "attention")
    assert [row["ratio"] == 0 for row in zero] == [row["kind"] == "attention" for row in zero]
    code, out, err = run("measure", "timm:test_vit", "--random", "--where", "mlp")
    assert (code, out) == (2, "")
    assert "--where mlp selects sites for --shortcut and --init" in err


def test_a_folder_and_an_array_are_read_with_the_models_own_normalisation(run: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("L", (8, 8), 60 * number).save(tmp_path / "photos" / f"{number}.png")
    _, folder, _ = run("measure", name, "--data", "photos", "--jacobians", "off", "--json")
    values = numpy.stack([numpy.full((8, 8), 60 * number, dtype=numpy.uint8) for number in range(3)])
    numpy.save(tmp_path / "x.npy", values)
    _, array, _ = run("measure", name, "--data", "x.npy", "--jacobians", "off", "--json")
    assert strict(folder)["samples"] == 3
    norms = [[row["norm"] for row in strict(out)["blocks"]] for out in (folder, array)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    _, two, _ = run("measure", name, "--data", "photos", "--n", "2", "--jacobians", "off", "--json")
    assert strict(two)["samples"] == 2


def test_what_training_kept_is_printed_below(run: Any, tmp_path: Path) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=16, patch_size=8, embed_dim=16, num_heads=2)
    unskip.save(model, tmp_path / "saved")
    looks = [
        {"step": 3, "relative_step": {"q": 0.0123, "down": 0.0045}},
        {"step": 9, "token_cosine": [0.25, 0.75], "self_attention": [0.5, 0.125]},
    ]
    (tmp_path / "saved" / "health.jsonl").write_text("".join(json.dumps(row) + "\n" for row in looks))
    options = ("measure", str(tmp_path / "saved"), "--data", "random:2", "--jacobians", "off")
    assert strict(run(*options, "--json")[1])["training"] == looks
    header, _, first, last = run(*options)[1].splitlines()[-4:]
    assert header.split() == "step tok cos 0 tok cos 1 self-att 0 self-att 1 step q step down".split()
    assert first.split() == ["3", "0.0123", "0.0045"]
    assert last.split() == ["9", "0.25", "0.75", "0.5", "0.125"]


def test_token_ids_are_drawn_or_read(run: Any, name: str, tmp_path: Path) -> None:
    """As many as random:N says; a file whose name begins with random is a file."""
    text = (
        "import transformers as hf\n"
        "def gpt2():\n"
        "    sizes = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=40, bos_token_id=1, eos_token_id=2)\n"
        "    return hf.GPT2Model(hf.GPT2Config(**sizes))\n"
    )
    (tmp_path / "words_of_measure.py").write_text(text, encoding="utf-8")
    numpy.save(tmp_path / "random-ids.npy", numpy.arange(15).reshape(3, 5) + 4)
    options = ("words_of_measure.py:gpt2", "--random", "--jacobians", "off", "--json", "--data")
    drawn, read = (strict(run("measure", *options, data)[1]) for data in ("random:5", "random-ids.npy"))
    assert (drawn["samples"], read["samples"], read["tokens"]) == (5, 3, 5)
    assert drawn["blocks"][0]["echo"] is not None  # no two samples alike
    code, _, err = run("measure", *options, str(tmp_path))
    assert code == 2
    assert "the model takes no images; give an .npy file of its inputs, or random:8. Text is read for the run" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--data", "nowhere"], "nowhere: no such file or folder"),
        (["--data", "random:none"], "write random:N"),
        (["--data", "random:2", "--init", "best"], "init is 'best'; it can be default, zero, skipless"),
        (["--data", "models_of_cli.py"], "a source is a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run: Any, name: str, args: list[str], says: str) -> None:
    code, out, err = run("measure", name, *args)
    lines = [line for line in err.splitlines() if line != "a line of the model's own"]
    assert code == 2
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("unskip: ")
    assert says in lines[0]


def test_weights_that_cannot_be_had_are_one_line_and_random_goes_on_without(run: Any) -> None:
    code, out, err = run("measure", "timm:vit_tiny_patch16_224", "--data", "random:1")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("unskip: timm:vit_tiny_patch16_224: needs the internet")
    assert "--random" in err
    code, out, _ = run("measure", "timm:test_vit", "--data", "random:1", "--random", "--jacobians", "off")
    assert code == 0
    assert out.startswith("VisionTransformer on 1 sample of ")


def test_without_a_terminal_a_long_measurement_says_now_and_then_where_it_is(
    run: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def slow(*args: Any, progress: Any, **options: Any) -> Any:
        nonlocal now
        progress(2, 5, "too soon")
        now = 31.0
        progress(3, 5, "Jacobian of blocks.1")
        progress(4, 5, "too soon again")
        return measured(*args, **options)

    measured = unskip.measure
    monkeypatch.setattr(_say, "monotonic", lambda: now)
    monkeypatch.setattr(unskip, "measure", slow)
    code, out, err = run("measure", name, "--data", "random:2")
    assert code == 0
    assert out.startswith("Pictures on 2 samples")
    _, *lines = err.splitlines()
    assert lines == [f"measuring {name}: Jacobian of blocks.1, 3 of 5"]
