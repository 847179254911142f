"""The command line: what it prints, where, and with which exit code."""

import dataclasses
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.models import strict
from tests.commands import python_in
from torch import nn

import unskip
from unskip import cli, spec
from unskip.cli import _audit
from unskip.wiring import parse


def seeded(name: str) -> nn.Module:
    """The model with the weights that the command line gives it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return spec.build(name, light=True)


# --- audit ---


def test_piped_audit_is_the_text_of_the_audit(run: Any) -> None:
    code, out, err = run("audit", "timm:test_vit")
    assert (code, err) == (0, "")
    assert out == f"{unskip.audit(seeded('timm:test_vit'))}\n"


@pytest.mark.parametrize("where", [None, "mlp"])
def test_shortcut_adds_the_text_of_the_wiring(where: str | None, run: Any) -> None:
    options = [] if where is None else ["--where", where]
    code, out, err = run("audit", "timm:test_vit", "--shortcut", "decay:0.6", *options)
    model = seeded("timm:test_vit")
    expected = f"{unskip.audit(model)}\n\n{unskip.rewire(model, 'decay:0.6', where=where)}\n"
    assert (code, out, err) == (0, expected, "")
    assert "the paper's band" in out


def test_where_without_a_rule_is_refused(run: Any) -> None:
    code, _, err = run("audit", "timm:test_vit", "--where", "mlp")
    assert code == 2
    assert "--shortcut" in err


def test_json(run: Any, models: str) -> None:
    command = ("audit", f"{models}:make", "--input", "2,4,8", "--json")
    code, out, err = run(*command)
    data = strict(out)
    assert (code, err) == (0, "a line of the model's own\n")
    assert data["spec"] == f"{models}:make"
    assert [site["path"] for site in data["sites"]] == ["0", "1", "2"]
    assert data["unknown"] == []
    assert "shortcut" not in data
    shortcut = strict(run(*command, "--shortcut", "decay:product=5e-3")[1])["shortcut"]
    assert [(site["alpha"], site["beta"]) for site in shortcut["sites"]] == parse("decay:product=5e-3").weights(3)
    assert shortcut["effective_decay"] == pytest.approx(5e-3)
    assert shortcut["band"] == "in the paper's band [1e-3, 1e-2)"
    assert "end" not in shortcut


def test_annealed_rule_shows_where_it_ends(run: Any, models: str) -> None:
    arguments = ("audit", f"{models}:make", "--input", "2,4,8", "--shortcut", "anneal:keep>decay:0.5@70")
    _, out, _ = run(*arguments)
    assert "effective decay 1, above" in out
    assert out.endswith("after step 70: effective decay 0.375, above the paper's band [1e-3, 1e-2)\n")
    _, out, _ = run(*arguments, "--json")
    shortcut = strict(out)["shortcut"]
    assert [site["alpha"] for site in shortcut["sites"]] == [1, 1, 1]
    assert [site["alpha"] for site in shortcut["end"]["sites"]] == [1, 0.75, 0.5]


def test_what_json_cannot_hold_is_null(run: Any, models: str) -> None:
    _, out, _ = run("audit", f"{models}:Empty", "--input", "2,4,8", "--json")
    assert [site["ratio"] for site in strict(out)["sites"]] == [None]
    assert unskip.audit(seeded(f"{models}:Empty"), torch.randn(2, 4, 8))[0].ratio == float("inf")


@pytest.mark.parametrize("options", [["--input", "int:2,5", "2,5,8"], ["--input", "int:2,5", "--input", "2,5,8"]])
def test_several_inputs_and_token_ids(run: Any, models: str, options: list[str]) -> None:
    code, out, _ = run("audit", f"{models}:Reader", *options, "--json")
    assert code == 0
    assert [site["path"] for site in strict(out)["sites"]] == ["blocks.0", "blocks.1"]


def test_large_model_is_audited_without_values(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "LARGE", 0)
    code, out, err = run("audit", "timm:test_vit", "--json", "--shortcut", "cut")
    assert code == 0
    assert err.startswith("note: ")
    assert err.count("\n") == 1
    assert {site["ratio"] for site in strict(out)["sites"]} == {None}
    assert {site["alpha"] for site in strict(out)["shortcut"]["sites"]} == {0}


def test_large_model_whose_forward_needs_values(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.f(x) * float(x.mean())

    monkeypatch.setattr(spec, "LARGE", 0)
    monkeypatch.setattr(spec, "_from_timm", lambda name, pretrained: Needs())
    code, out, err = run("audit", "timm:test_vit", "--input", "2,8", "--json")
    assert (code, err) == (0, "")
    assert [site["ratio"] is None for site in strict(out)["sites"]] == [False]


# --- Bad input ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["timm:vit_bas_patch16_224"], "vit_base_patch16_224"),
        (["nothing"], "timm:NAME"),
        (["timm:test_vit", "--shortcut", "decai:0.6"], "decay"),
        (["timm:test_vit", "--shortcut", "decay:nan"], "alpha_min"),
        (["timm:test_vit", "--input", "2,x"], "'2,x' is not a shape"),
        (["timm:test_vit", "--input", "1,2,3,4"], "--input 2,3,224,224"),
        (["hf:unskip/no-such-model"], "needs the internet"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, run: Any) -> None:
    code, out, err = run("audit", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("unskip: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("mak", [], "nearest: make"),
        ("make", [], "--input"),
        ("make", ["--input", "2,4,9"], "forward failed"),
        ("plain", ["--shortcut", "cut"], "no residual additions"),
    ],
)
def test_bad_input_of_a_file(function: str, options: list[str], words: str, run: Any, models: str) -> None:
    code, out, err = run("audit", f"{models}:{function}", *options)
    first, *rest = err.splitlines()
    assert (code, out, first, len(rest)) == (2, "", "a line of the model's own", 1)
    assert words in rest[0]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["adit"],
        ["audit"],
        ["audit", "timm:test_vit", "--shortcutt", "cut"],
        ["audit", "a", "b"],
        ["demo", "--fast"],
    ],
)
def test_unknown_commands_and_flags(arguments: list[str], run: Any) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "--help" in err


# --- The other exits ---


LIGHT = ["--help", "--version", *(f"{name} --help" for name in cli.COMMANDS if name != "eval")]
WITHOUT_TORCH = """
import sys
from unskip import cli
codes = [cli.main(arguments.split()) for arguments in sys.argv[1:]]
assert "torch" not in sys.modules
sys.exit(max(codes))
"""


def test_help_and_version_do_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *LIGHT], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: unskip") == len(LIGHT) - 1
    assert unskip.__version__ in done.stdout


def test_help_lists_every_command_and_the_version(run: Any) -> None:
    _, out, _ = run("--help")
    lines = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert {*cli.COMMANDS, "--version", "--plugin"} <= {*lines}
    assert run("--version") == (0, f"{unskip.__version__}\n", "")
    _, out, _ = run("audit", "--help")
    assert all(word in out for word in ("MODEL", "--shortcut", "--input", "--json", "Example"))


FAULT = """
import sys
from unskip import cli, spec
from unskip.cli import _audit

def build(*args, **options):
    raise RuntimeError("broken inside")

spec.build = build
sys.exit(cli.main(["audit", "timm:test_vit"]))
"""


def test_a_fault_exits_with_1_and_its_traceback(tmp_path: Path) -> None:
    code, out, err = python_in(tmp_path, FAULT)
    assert (code, out) == (1, "")
    assert "Traceback" in err
    assert "broken inside" in err


@pytest.mark.parametrize("module", ["unskip.errors", "tyro.conf", "torch.types", "timm.layers"])
def test_an_interrupt_is_one_line(module: str) -> None:
    """Python lists each module on stderr once it is imported; others, and the audit, are then still to come."""
    command = [sys.executable, "-X", "importtime", "-m", "unskip", "audit", "timm:test_vit"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a process in the background ignores it otherwise
    with subprocess.Popen(command, preexec_fn=heard, **pipes) as process:
        assert any(line.rstrip().endswith(f" {module}") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    message = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert message == ["unskip: interrupted"]


GONE = """
import os, sys
from unskip import cli
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 1)
sys.exit(cli.main(["audit", "timm:test_vit"]))
"""


def test_reader_that_goes_away(tmp_path: Path) -> None:
    assert python_in(tmp_path, GONE) == (141, "", "")


# --- Warnings ---


def test_our_warning_is_one_line(run: Any, models: str) -> None:
    code, out, err = run("audit", f"{models}:silent", "--input", "2,4,8", "--shortcut", "cut")
    assert code == 0
    assert "effective decay 0" in out
    _, warning = err.splitlines()
    assert warning.startswith("warning: 0 [mlp], 1 [mlp]: near-zero branch")


# --- On a terminal ---


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(width: int, *args: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        for stream in (sys.stdout, sys.stderr):  # the second shows that work is going on
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        assert cli.main(list(args)) == 0
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)  # without colours

    monkeypatch.setenv("TERM", "xterm")
    return call


def test_terminal_shows_the_weights_in_the_table(terminal: Any, models: str) -> None:
    out = terminal(160, "audit", f"{models}:make", "--input", "2,4,8", "--shortcut", "scale:0.125,0.375")
    header = next(line for line in out.splitlines() if "path" in line).split()
    assert header == ["site", "path", "kind", "norm", "alpha", "beta", "|f|/|x|", "branch", "source"]
    assert sum("0.125" in line and "0.375" in line for line in out.splitlines()) == 3
    assert "effective decay 0.00195, in the paper's band [1e-3, 1e-2)" in out


def test_narrow_terminal_says_what_it_leaves_out(terminal: Any) -> None:
    out = terminal(60, "audit", "timm:test_vit")
    assert max(len(line) for line in out.splitlines()) <= 60
    assert "too wide for the terminal: source" in out
    assert "vision_transformer.py" not in out
    assert "vision_transformer.py" in terminal(200, "audit", "timm:test_vit")


def test_terminal_shows_long_skips_unknowns_and_notes(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = unskip.audit(seeded("timm:test_vit"))
    first, *rest = audit.sites
    audit.sites = (dataclasses.replace(first, long=True), *rest)
    audit.unknown = (unskip.anatomy.Unknown("blocks.0[odd]", "file.py:3", "a reason"),)
    audit.notes = ("something [to] know",)
    monkeypatch.setattr(_audit, "_audit_model", lambda *args: (audit, None))
    out = terminal(200, "audit", "timm:test_vit")
    assert "long skip, kept by default" in out
    assert "1 addition not decided, and left alone:\n  blocks.0[odd] (file.py:3): a reason" in out
    assert "note: something [to] know" in out
