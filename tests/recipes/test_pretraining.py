"""The recipe mae: options for all ablations, runs on digits, resume, the encoder, and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evals.hosts import NoHost

import unskip
from unskip import cli, recipes
from unskip.data import ImageSet, subset
from unskip.errors import BadInput, UnskipError
from unskip.models import MAE
from unskip.recipes import build_task, open_run
from unskip.training import RunFolder

# Short runs give health warnings.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")

TINY: dict[str, Any] = {
    "model_args": "depth=2,embed_dim=16,num_heads=2",
    "decoder_width": 8,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "online_images": 300,
    "device": "cpu",
}
DECAY = 1 * (13 / 15) * (11 / 15) * 0.6  # the effective decay of decay:0.6 over four sites
ABLATIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "standard": {"shortcut": "keep"},
    "both branches": {"shortcut": "scale:0.7071,0.7071"},
    "branch only": {"shortcut": "scale:1,0.7071"},
    "attention only": {"where": "attention"},
    "mlp only": {"where": "mlp"},
    "without long skips": {"long_skips": False},
    "learnable": {"shortcut": "learn:1.0"},
    "without zero start": {"init": "default"},
    "by product": {"shortcut": "decay:product=0.2"},
    "plain": {"shortcut": "keep", "long_skips": False, "init": "default"},
}


def tiny(**changes: Any) -> recipes.Mae:
    return recipes.mae("digits", **{**TINY, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Tests only read it or add results."""
    out = tmp_path_factory.mktemp("mae") / "run"
    assert unskip.train(tiny(), out, quiet=True).finished
    return out


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_is_an_option(name: str) -> None:
    config = tiny(**ABLATIONS[name])
    task, _ = build_task(config)
    assert isinstance(task.model, MAE)
    rule = {
        "both branches": ([0.7071] * 4, [0.7071] * 4),
        "branch only": ([1.0] * 4, [0.7071] * 4),
        "attention only": ([1.0, 1.0, 0.6, 1.0], [1.0] * 4),
        "mlp only": ([1.0, 1.0, 1.0, 0.6], [1.0] * 4),
        "learnable": ([1.0] * 4, [1.0] * 4),
    }.get(name, ([1 - 0.4 * i / 3 for i in range(4)], [1.0] * 4))
    if config.shortcut == "keep":
        assert not task.wirings
    elif name == "by product":
        assert task.wirings
        assert task.wirings[0].effective_decay == pytest.approx(0.2)
    else:
        assert task.wirings
        assert task.wirings[0].alphas == pytest.approx(rule[0])
        assert task.wirings[0].betas == pytest.approx(rule[1])
    learned = [] if not task.wirings else list(task.wirings[0].parameters.values())
    held = {id(p) for group in task.optimizer.param_groups for p in group["params"]}
    assert len(learned) == (4 if name == "learnable" else 0)
    assert {id(p) for p in learned} <= held
    assert bool(task.model.decoder.skips) == config.long_skips
    starts = [block.attn.proj.weight for block in (*task.model.encoder.blocks, *task.model.decoder.blocks)]  # type: ignore[misc,union-attr]
    assert all(bool((weight == 0).all()) == (config.init == "zero") for weight in starts)
    assert bool((task.model.decoder.head.weight == 0).all()) == (config.init == "zero")
    # In one step all parameters get a gradient, as DistributedDataParallel requires.
    loss, numbers = task.loss(task.model, next(task.feed.iterate(0, 1)))
    loss.backward()
    assert all(p.grad is not None for p in task.model.parameters() if p.requires_grad)
    assert float(numbers["feature_norm"]) > 0


def test_a_run_records_its_results(run: Path) -> None:
    folder = RunFolder(run)
    rows = folder.read("evals.jsonl")
    names = [row["evaluation"] for row in rows[:2]]
    assert names == ["reconstruction-v1", "features"]
    assert 0 <= rows[1]["knn20"] <= 1
    metrics = folder.read("metrics.jsonl")
    assert all(row["feature_norm"] > 0 and row["effective_decay"] == pytest.approx(DECAY) for row in metrics)


@pytest.mark.full
def test_training_learns_to_reconstruct(tmp_path: Path) -> None:
    outcome = unskip.train(tiny(steps=120, lr=5e-3, checkpoint_every=1000, decoder_depth=2), tmp_path / "x", quiet=True)
    rows = RunFolder(tmp_path / "x").read("metrics.jsonl")
    baseline = build_task(tiny())[0].baseline_loss
    assert baseline is not None
    assert rows[0]["loss"] == pytest.approx(baseline, rel=0.1)  # with the zero start it predicts zero
    assert rows[-1]["loss"] < 0.85 * baseline
    assert outcome.evaluations["test_loss"] < 0.85 * baseline


def test_training_from_a_published_checkpoint(tmp_path: Path) -> None:
    from tests.models.small_mae import made_up

    changes = {"weights": str(tmp_path / "mae.pth"), "shortcut": "keep", "long_skips": False, "init": "default"}
    state = made_up(2, 1, 16, 8)
    torch.save({"model": state}, tmp_path / "mae.pth")
    with pytest.raises(UnskipError, match=r"does not fit.*\(1, 17, 16\)|does not fit.*patch_embed"):
        build_task(tiny(**changes))
    state["patch_embed.proj.weight"] = torch.randn(16, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    state["decoder_pred.weight"], state["decoder_pred.bias"] = torch.randn(4, 8), torch.randn(4)
    torch.save({"model": state}, tmp_path / "mae.pth")
    model: Any = build_task(tiny(**changes))[0].model
    assert torch.equal(model.encoder.patch_embed.proj.weight, state["patch_embed.proj.weight"])
    assert torch.equal(model.encoder.blocks[1].mlp.fc2.bias, state["blocks.1.mlp.fc2.bias"])
    assert torch.equal(model.decoder.blocks[0].attn.qkv.weight, state["decoder_blocks.0.attn.qkv.weight"])
    assert torch.equal(model.decoder.head.bias, state["decoder_pred.bias"])


@pytest.mark.parametrize("name", ["paper", "plain", "learnable", "both branches"])
def test_a_step_does_not_synchronise_with_the_host(name: str) -> None:
    """So it can be captured as a CUDA graph: masks are drawn and sorted on the device."""
    task, schedule = build_task(tiny(graph=True, precision="bf16", **ABLATIONS[name]))
    assert schedule.graph
    batch = next(task.feed.iterate(0, 1))
    with NoHost() as host, torch.autocast("cpu", torch.bfloat16):
        loss, numbers = task.loss(task.model, batch)
        loss.backward()
    assert host.operations > 100
    assert torch.isfinite(loss)
    assert torch.isfinite(numbers["feature_norm"])
    model, elsewhere = task.model.to("meta"), tuple(each.to("meta") for each in batch)
    with NoHost():  # also no copies from the host
        loss, _ = task.loss(model, elsewhere)
        loss.backward()
    assert loss.device.type == "meta"


def test_online_evaluation_uses_equally_many_images_of_each_class() -> None:
    labels = torch.tensor([0] * 500 + [1] * 30 + [2] * 5 + [3] * 400)
    images = ImageSet("made", "train", tuple("abcd"), labels, torch.zeros(935, 1, 2, 2, dtype=torch.uint8))
    assert subset(images, 935) is images
    assert subset(images, 100).labels.bincount().tolist() == [33, 30, 5, 32]
    assert subset(images, 2).labels.tolist() == [0, 1]  # both classes are in both splits
    assert torch.equal(subset(images, 100).labels, subset(images, 100).labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": 1.0}, "nothing to encode"),
        ({"patch": 3}, "patches of 3 .* size 8"),
        ({"model": "timm:resnet18", "model_args": ""}, "no ViT|no patch tokens"),
        ({"model": "torchvision:vit_b_16"}, "ViT of timm"),
        ({"model": "timm:swin_tiny_patch4_window7_224", "model_args": ""}, "no ViT|no patch tokens"),
        ({"model": "timm:no_such_model"}, "no model of this name"),
        ({"init": "skipless"}, "init is 'skipless'"),
        ({"where": "attn"}, "where is 'attn'"),
        ({"steps": None, "epochs": 0.0}, "0 steps"),
        ({"batch": 2000}, "1438 images .* 2000"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build_task(tiny(**changes))


def test_a_missing_device_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="no GPU; use auto"):
        build_task(tiny(device="cuda"))
    with pytest.raises(BadInput, match=r"device is 'gpu'; .* auto"):
        open_run(run, device="gpu")


# --- unskip eval ------------------------------------------------------------------------------------------------------


def test_eval_prints_and_records_results_by_block(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(run), "--protocol", "knn-dino-v1,probe-lbfgs-v1,rank-v1"]) == 0
    out = capsys.readouterr().out
    assert "step 6: knn-dino-v1, probe-lbfgs-v1, rank-v1" in out
    assert "n = 359, test split" in out
    table = out.strip().partition("\n\n")[2].splitlines()
    assert table[0].split()[:3] == ["block", "path", "knn10"]
    assert [line.split()[0] for line in table[2:]] == ["0", "1"]
    rows = [row for row in RunFolder(run).read("evals.jsonl") if row["evaluation"] == "probe-lbfgs-v1"]
    assert [row["block"] for row in rows[-2:]] == [0, 1]
    about = {"step": 6, "block": 1, "pool": "mean", "n": 359, "split": "test", "seed": 0, "precision": "float32"}
    assert {name: rows[-1][name] for name in about} == about
    assert rows[-1]["preprocess"]["source"] == "the run"
    assert rows[-1]["intervals"]["probe_lbfgs"] == [*unskip.evals.wilson(rows[-1]["probe_lbfgs"], 359)]
    (online,) = (row for row in RunFolder(run).read("evals.jsonl") if row["evaluation"] == "features")
    assert (online["n"], online["split"]) == (300, "test")  # online_images
    assert online["intervals"]["knn20"] == [*unskip.evals.wilson(online["knn20"], 300)]
    # A run with added results can be resumed.
    assert unskip.resume(run, quiet=True).finished


def test_eval_prints_json_with_the_protocol(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--protocol", "probe-decayed-v1", "--blocks", "last", "--pool", "cls", "--split", "test", "--json"]
    change = ["--change", "probe-decayed-v1.epochs=3"]
    assert cli.main(["eval", str(run), *arguments, *change]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["protocols"]["probe-decayed-v1"]["settings"]["lr"] == 0.01
    assert [row["block"] for row in data["results"]] == [1]
    assert data["results"][0]["pool"] == "cls"
    assert data["results"][0]["changes"] == {"epochs": 3}
    assert cli.main(["eval", str(run), *arguments[:-1], *change]) == 0
    assert "step 6: probe-decayed-v1 with epochs=3\n" in capsys.readouterr().out
    for value in ("[1,7]", "1,7"):
        change = [
            "--protocol",
            "knn-dino-v1",
            "--blocks",
            "last",
            "--json",
            "--change",
            f"knn-dino-v1.k={value}",
        ]
        assert cli.main(["eval", str(run), *change]) == 0
        row = json.loads(capsys.readouterr().out)["results"][0]
        assert {key for key in row if key.startswith("knn")} == {"knn1", "knn7"}


@pytest.mark.parametrize("word", [["--change"], []], ids=["said twice", "said once"])
def test_several_settings_can_be_changed_at_once(
    word: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--change", "knn-dino-v1.k=3", *word, "knn-dino-v1.temperature=0.1"]
    assert cli.main(["eval", str(run), "--protocol", "knn-dino-v1", "--blocks", "last", *changes, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["results"][0]
    assert row["changes"] == {"k": [3], "temperature": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protocol", "knn-dino"], "nearest: knn-dino-v1"),
        (["--protocol", ","], "protocol is empty"),
        (["--blocks", "first"], "first"),
        (["--blocks", "7"], "not among the model's 2 blocks"),
        (["--pool", "max"], "'mean'"),
        (["--split", "train"], "'val'"),
        (["--split", "val"], "evaluate on --split test, or train with --validate"),
        (["--precision", "int8"], "bf16"),
        (["--change", "knn-dino-v1.neighbours=3"], "k, temperature"),
        (["--change", "knn-dino-v1.k=few"], "whole numbers above 0"),
        (["--change", "probe-lbfgs-v1.c=3"], "with a protocol of --protocol"),
    ],
)
def test_eval_refuses_bad_input(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_eval_needs_a_run_with_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "no run there" in capsys.readouterr().err
    RunFolder.create(tmp_path / "x", {"recipe": "mae", **vars(tiny())}, "cpu", plugins=[])
    assert cli.main(["eval", str(tmp_path / "x")]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err
