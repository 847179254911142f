"""The recipe lm: all model types train, resume, open from their folder, and sample with and without a cache."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import on_ranks, unskip_in
from torch import nn

import unskip
from unskip.errors import BadInput, UnskipWarning
from unskip.recipes import build_task, evaluate_run, lm, sample_text, text_batch
from unskip.training import RunFolder

pytest.importorskip("transformers")
SMALL = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4"
TEXT = "".join(f"the number {i} and its square {i * i}\n" for i in range(400))


def config(folder: Path, **fields: Any) -> Any:
    """The config of a small model, trained on a text of 15 kB."""
    (folder / "text.txt").write_text(TEXT)
    usual = {"data": str(folder / "text.txt"), "cache": str(folder / "cache"), "model_args": SMALL, "context": 32}
    usual |= {"batch": 8, "steps": 6, "log_every": 1, "device": "cpu", "health": False, "online_sequences": 8}
    return lm("stdlib-tiny", **(usual | fields))


def train(folder: Path, name: str = "run", **fields: Any) -> Any:
    return unskip.train(config(folder, **fields), folder / name, quiet=True)


def last_checkpoint(run: Path) -> Path:
    last = RunFolder(run).last_checkpoint()
    assert last is not None
    return last[1]


def weights(run: Path) -> dict[str, Any]:
    return dict(unskip.load(run).state_dict())


KINDS = {
    "gpt2": "",
    "llama": ",num_key_value_heads=2",
    "mistral": "",
    "qwen3": ",num_key_value_heads=2",
}


MORE = [pytest.param(kind, marks=pytest.mark.full) for kind in ("mistral", "qwen3")]


@pytest.mark.parametrize("kind", ["gpt2", "llama", *MORE])
def test_every_kind_learns_and_opens_from_its_folder_alone(tmp_path: Path, kind: str) -> None:
    fields: dict[str, Any] = {"shortcut": "decay:0.6", "steps": 40, "lr": 1e-2, "ema": 0.5}
    with warnings.catch_warnings(
        action="ignore", category=UnskipWarning
    ):  # in so few steps the model learns only frequencies
        outcome = train(tmp_path, model=kind, model_args=SMALL + KINDS[kind], **fields)
    rows = RunFolder(outcome.folder).read("metrics.jsonl")
    assert rows[0]["loss"] == pytest.approx(math.log(320), rel=0.1)
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    (tmp_path / "text.txt").unlink()
    model: Any = unskip.load(outcome.folder)
    assert model.config.model_type == kind
    assert unskip.Wiring.of(model).alphas[-1] == pytest.approx(0.6)
    ids = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits
    later = ids.clone()
    later[:, 20] = (later[:, 20] + 1) % 257
    assert torch.equal(model(later).logits[:, :20], logits[:, :20])  # causal
    again: Any = unskip.load(last_checkpoint(outcome.folder))
    assert type(again) is type(model)


def test_a_run_resumes_bit_for_bit_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", optimizer="soap", checkpoint_every=3)
    (tmp_path / "half").mkdir()
    stopped = config(tmp_path, optimizer="soap", checkpoint_every=3)
    torch.manual_seed(stopped.seed)  # as `train` does
    task, schedule = build_task(stopped)
    assert task.feed.steps_per_epoch > 6

    def stop(step: int) -> None:
        if step == 4:
            raise RuntimeError("stopped")

    task.after_step = stop
    folder = RunFolder.create(
        tmp_path / "half", unskip.recipes.to_dict(stopped), "cpu", steps=6, plugins=[], **task.record
    )
    with pytest.raises(RuntimeError, match="stopped"):
        unskip.training.run_task(task, schedule, folder, quiet=True)
    assert folder.last_checkpoint()[0] == 3  # type: ignore[index]
    unskip.resume(tmp_path / "half", quiet=True)
    one, two = weights(whole.folder), weights(tmp_path / "half")
    assert all(torch.equal(one[name], two[name]) for name in one)
    (tmp_path / "text.txt").write_text(TEXT.replace("square", "SQUARE"))
    with pytest.raises(BadInput, match="as many tokens, but of other content or file names"):
        unskip.resume(tmp_path / "half", quiet=True)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_two_processes_match_one(tmp_path: Path) -> None:
    one = train(tmp_path, "one", accumulate=2)
    for name, fields in (("two", {}), ("sharded", {"fsdp": True})):
        on_ranks(2, tmp_path, lambda name=name, fields=fields: train(tmp_path, name, **fields) and None)
        evaluated = RunFolder(tmp_path / name).read("evals.jsonl")[-1]
        assert evaluated["test_loss"] == pytest.approx(one.evaluations["test_loss"], rel=1e-4)
        assert evaluated["n"] == 8
        losses = [[row["loss"] for row in RunFolder(tmp_path / run).read("metrics.jsonl")] for run in ("one", name)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_samples_are_the_same_with_and_without_a_cache(tmp_path: Path, kind: str) -> None:
    run = train(tmp_path, model=kind, shortcut="decay:0.5", steps=2).folder
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 40}):
        # The samples are longer than two contexts.
        result = [sample_text(run, "the number", 2, length=60, cache=c, **options).texts for c in (True, False)]
        assert result[0] == result[1]
    assert sample_text(run, "the number", 1, length=60, top_k=40, temperature=1.0).texts == result[0][:1]
    assert (tmp_path / "run" / "samples" / "step-2-text-seed0.txt").read_text().startswith('{"step": 2')
    long = sample_text(run, TEXT[:100], 1, length=3, write=False)  # a prompt longer than the context
    assert long.tokens == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_compiled_bf16_on_cuda_matches_float32(tmp_path: Path, kind: str) -> None:
    fields = {"model": kind, "shortcut": "decay:0.6", "device": "cuda", "steps": 20}
    ways: dict[str, Any] = {"plain": {}, "fast": {"compile": True, "precision": "bf16"}}
    losses = {}
    for name, more in ways.items():
        run = train(tmp_path, name, **fields, **more).folder
        losses[name] = [row["loss"] for row in RunFolder(run).read("metrics.jsonl")]
        texts = [
            sample_text(run, "the", 2, length=60, cache=c, temperature=0, write=False).texts for c in (True, False)
        ]
        assert texts[0] == texts[1]
    assert losses["fast"] == pytest.approx(losses["plain"], rel=2e-2)


def test_kinds_with_a_padding_token_or_without_heads_are_built(tmp_path: Path) -> None:
    for kind in (
        "gemma",
        "opt",
        "phi3",
        "nemotron",
    ):  # their default padding tokens are 0, 1 and 32000, or they lack num_heads
        task, _ = build_task(config(tmp_path, model=kind))
        assert all(each.padding_idx is None for each in task.model.modules() if isinstance(each, nn.Embedding))
    task, _ = build_task(config(tmp_path, model="modernbert-decoder"))  # has a padding token, beyond those of the text
    assert task.model.config.pad_token_id >= 257
    build_task(config(tmp_path, model="gpt_neox"))  # is_decoder=False, and causal
    task, _ = build_task(config(tmp_path, model="mamba", model_args="hidden_size=32,num_hidden_layers=1"))
    assert type(task.model).__name__ == "MambaForCausalLM"


def test_presets_have_the_same_size_for_every_kind() -> None:
    sizes = lm("stdlib-tiny").model_args
    assert sizes.startswith("hidden_size=128")
    assert lm("stdlib-tiny", model="llama").model_args == sizes
    assert lm("stdlib-tiny", model="llama", model_args=SMALL).model_args == SMALL
    assert lm("stdlib-tiny", model="hf:some/model").model_args == lm("stdlib-tiny", model="a.py:model").model_args == ""


def test_invalid_options_of_sampling_are_named(tmp_path: Path) -> None:
    run = train(tmp_path, steps=1).folder
    for options in ({"n": 1.5}, {"length": 0}, {"top_k": 0}, {"temperature": math.inf}, {"prompt": "\udce9"}):
        with pytest.raises(BadInput, match=f"sample: (the )?{next(iter(options))} "):
            sample_text(run, **{"length": 2, "write": False, **options})


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    plain, again = (train(tmp_path, name, grad_checkpointing=name == "b", optimizer="muon") for name in "ab")
    assert plain.evaluations["test_loss"] == pytest.approx(again.evaluations["test_loss"], rel=1e-5)


FILE = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, width), nn.Linear(width, 257)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tiny(width=16):
    return Tiny(width)
"""


def test_a_model_from_a_python_file_trains_and_samples(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(FILE)
    fields = {"model": f"{tmp_path / 'tiny.py'}:tiny", "model_args": "width=8"}
    run = train(tmp_path, "kept", **fields).folder
    assert len(unskip.audit(unskip.load(run, trust=True))) == 2
    assert len(unskip.audit(unskip.load(last_checkpoint(run), trust=True))) == 2
    for command in (["audit"], ["measure", "--jacobians", "off"], ["absorb"]):
        code, _, errors = unskip_in(tmp_path, command[0], str(run), "--trust", *command[1:])
        assert code == 0, errors
    run = train(tmp_path, **fields, shortcut="cut").folder
    with pytest.raises(BadInput, match="trust=True"):
        unskip.load(run)
    model = unskip.load(run, trust=True)
    assert unskip.Wiring.of(model).alphas == [0.0, 0.0]
    trained = unskip.recipes.open_run(run, trust=True)
    assert len(sample_text(trained, "the", length=5, write=False, temperature=0).texts[0]) <= 5


MIXED = """
import torch
from torch import nn


class Mixed(nn.Module):
    def __init__(self, left, start):
        super().__init__()
        self.left = left
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)
        self.conv, self.gate = nn.Conv1d(16, 16, 3), nn.Parameter(torch.tensor(float(start)))

    def forward(self, ids):
        x = self.embed(ids)
        padded = nn.functional.pad(x.mT, (self.left, 2 - self.left))
        return self.head(x + self.gate * self.conv(padded).mT)


def same():
    return Mixed(1, 1)


def hidden():
    return Mixed(1, 0)


def causal():
    return Mixed(2, 0)
"""


def tokenizer(file: Path, words: str) -> Path:
    """A tokenizer of the words of TEXT, with ids in the order of `words`, and spaces as in SentencePiece."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate([*(f"\u2581{word}" for word in words.split()), "<unk>", "</s>"])}
    made = tokenizers.Tokenizer(models.WordLevel(ids, "<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.save(str(file))
    return file


def test_a_run_uses_its_own_copy_of_the_tokenizer(tmp_path: Path) -> None:
    file = tokenizer(tmp_path / "words.json", "the number and its square")
    run = train(tmp_path, tokenizer=str(file), checkpoint_every=3, batch=4, context=16).folder
    bits = unskip.recipes.evaluate_run(run, ["bits-per-byte-v1"])[1][0].values["bits_per_byte"]
    tokenizer(file, "square its and number the")  # other ids
    assert unskip.recipes.evaluate_run(run, ["bits-per-byte-v1"])[1][0].values["bits_per_byte"] == bits
    file.unlink()
    assert unskip.recipes.evaluate_run(run, ["bits-per-byte-v1"])[1][0].values["bits_per_byte"] == bits
    shutil.rmtree(last_checkpoint(run))
    assert unskip.resume(run, quiet=True).step == 6


def test_a_continuation_keeps_the_space_after_its_prompt(tmp_path: Path) -> None:
    words = "the number and its square "
    (tmp_path / "words.txt").write_text(words * 400)
    file = tokenizer(tmp_path / "words.json", words)
    fields = {"data": str(tmp_path / "words.txt"), "tokenizer": str(file), "steps": 30, "lr": 1e-2}
    run = train(tmp_path, **fields).folder
    assert sample_text(run, "the number", length=3, temperature=0, write=False).texts == [" and its square"]


def test_samples_of_other_settings_are_kept(tmp_path: Path) -> None:
    run = train(tmp_path, steps=1).folder
    again = [sample_text(run, prompt, length=2).file for prompt in ("the", "number", "the")]
    assert [file.name for file in again if file] == [f"step-1-text-seed0{end}.txt" for end in ("", "-2", "")]
    assert sample_text(run, "the", length=3).file == tmp_path / "run" / "samples" / "step-1-text-seed0-3.txt"


def test_a_model_with_too_few_ids_is_refused_by_the_name_of_its_embedding(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(FILE.replace("nn.Embedding(257", "nn.Embedding(256"))  # no end of a document
    with pytest.raises(BadInput, match=r"few.py:tiny: embed has 256 embeddings and gets id 256: .* has 257 ids"):
        train(tmp_path, model=f"{tmp_path / 'few.py'}:tiny", model_args="")
    (tmp_path / "rows.py").write_text(FILE.replace("self.embed(ids)", "self.embed.weight[ids + 1]"))
    with pytest.raises(BadInput, match=r"its forward fails: IndexError: .*; change its model_args"):
        train(tmp_path, model=f"{tmp_path / 'rows.py'}:tiny", model_args="")


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(MIXED)
    for name in ("same", "hidden"):  # the branch of the second starts at zero
        with pytest.raises(BadInput, match=r"Mixed is not causal: its logits at token 30 .* from token 31 on"):
            train(tmp_path, model=f"{tmp_path / 'mixed.py'}:{name}", model_args="")
    task, _ = build_task(config(tmp_path, model=f"{tmp_path / 'mixed.py'}:causal", model_args=""))
    assert not task.model.gate.any()  # restored after the check
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(vocab_size=300, hidden_size=16, **sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(BadInput, match=r"BertLMHeadModel is not causal.*add is_decoder=true to model_args"):
        train(tmp_path, model=f"hf:{tmp_path / 'bert'}", model_args="")
    build_task(config(tmp_path, model=f"hf:{tmp_path / 'bert'}", model_args="is_decoder=true"))


def test_training_starts_from_the_weights_of_another_run(tmp_path: Path) -> None:
    first = train(tmp_path, "first", shortcut="cut").folder
    task, _ = build_task(config(tmp_path, weights=str(first)))
    before = weights(first)
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    with pytest.raises(BadInput, match="its weights are of another model"):
        build_task(config(tmp_path, weights=str(first), model_args=SMALL.replace("32", "64")))


def test_a_model_from_a_folder_keeps_its_vocabulary(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "intermediate_size": 32}
    saved = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=16, **options))
    saved.save_pretrained(tmp_path / "llama")
    fields = {"model": f"hf:{tmp_path / 'llama'}", "model_args": ""}
    task, _ = build_task(config(tmp_path, **fields, pretrained=True))
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in task.model.state_dict().items())
    with pytest.raises(BadInput, match="it has 64 positions, and the context is 65"):
        build_task(config(tmp_path, **fields, context=65))
    LlamaForCausalLM(LlamaConfig(vocab_size=200, hidden_size=16, **options)).save_pretrained(tmp_path / "few")
    with pytest.raises(BadInput, match="its vocabulary is 200, and the tokenizer has 257 ids"):
        build_task(config(tmp_path, model=f"hf:{tmp_path / 'few'}", model_args=""))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gtp2"}, "nearest: gpt2"),
        ({"model": "bert-base"}, "it is a kind of language model"),
        ({"model": "bert"}, "bert is an encoder: add is_decoder=true to model_args, or take a decoder-only kind"),
        ({"model": "roberta", "model_args": ""}, "roberta is an encoder: add is_decoder=true"),
        ({"model": "bart"}, "bart is an encoder with a decoder; take a decoder-only kind"),
        ({"model": "mamba"}, "no field 'num_attention_heads'.*by default the sizes of the preset"),
        ({"model_args": "hidden_sice=3"}, "nearest: hidden_size"),
        ({"model_args": "hidden_size=30,num_attention_heads=4"}, "not divided evenly by 4 heads"),
        ({"context": 0}, "at least one token"),
        ({"context": 10**6}, "use a context of at most"),
        ({"pretrained": True}, "a kind of model without weights"),
        ({"size": 64}, "it is about images"),
        ({"where": "mlp"}, "it chooses sites for a shortcut or an init"),
        ({"data": "stdlib", "column": "body"}, "it is for parquet files, and data is stdlib"),
        ({"data": "no-such-folder"}, "no such text; a text is stdlib"),
        ({"context": 2000}, "do not fill one batch of 8; take a batch of at most 6, or a shorter context"),
        ({"model": "gptj"}, "gptj: its forward fails: .*; change its model_args"),
    ],
)
def test_invalid_configs_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        train(tmp_path, **fields)
    assert not (tmp_path / "run").exists()


def test_the_command_line_from_training_to_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(TEXT.upper())
    options = ["--model-args", SMALL, "--context", "32", "--batch", "8", "--steps", "4", "--no-health", "--cache", "c"]
    code, _, errors = unskip_in(
        tmp_path, "train", "lm", "--data", "text.txt", *options, "--out", "run", "--device", "cpu", "--shortcut", "cut"
    )
    assert code == 0, errors
    assert "sequences of 32 tokens (bytes) from" in errors
    code, out, errors = unskip_in(tmp_path, "eval", "run")
    assert code == 0, errors
    assert all(name in out for name in ("bits_per_byte", "perplexity_context_16", "next_token_accuracy"))
    assert max(map(len, out.splitlines())) < 120  # one number per line
    for command in (["eval", "run"], ["measure", "run", "--jacobians", "off"], ["absorb", "run"]):
        code, out, errors = unskip_in(tmp_path, *command, "--data", "other.txt")
        assert code == 0, (command, errors)
    assert len((tmp_path / "run" / "evals.jsonl").read_text().splitlines()) == 4  # none for the other text
    assert "8 samples of 32 tokens" in unskip_in(tmp_path, "measure", "run", "--jacobians", "off")[1]
    wired = ["--jacobians", "off", "--shortcut", "decay:0.6", "--where", "mlp"]
    code, out, errors = unskip_in(tmp_path, "measure", "run", *wired)
    assert code == 0, errors
    assert "8 samples of 32 tokens" in out
    assert (
        "8 samples of 8 tokens" in unskip_in(tmp_path, "measure", "run", "--jacobians", "off", "--data", "random:8")[1]
    )
    assert "a part of its training data" in unskip_in(tmp_path, "eval", "run", "--split", "val")[2]
    code, out, _ = unskip_in(tmp_path, "sample", "run", "--prompt", "the number", "--length", "5")
    assert code == 0
    assert out.startswith("the number")
    for option in ("--cfg", "--batch"):
        assert "are for images" in unskip_in(tmp_path, "sample", "run", option, "2")[2]
    assert (
        "--pool cls: next-token-v1 use no pooled features"
        in unskip_in(tmp_path, "eval", "run", "--protocol", "next-token-v1", "--pool", "cls")[2]
    )
    assert "train one without --shortcut" in unskip_in(tmp_path, "absorb", "run", "--apply", "widen")[2]
    for command in (["audit", "run"], ["measure", "run", "--jacobians", "off"], ["absorb", "run"], ["report", "run"]):
        code, out, errors = unskip_in(tmp_path, *command)
        assert code == 0, (command, errors)
    assert isinstance(unskip.load(tmp_path / "run"), nn.Module)


def test_a_text_becomes_tokens_by_the_tokenizer_of_the_checkpoint(tmp_path: Path) -> None:
    """So a run can be judged on any text, after its own tokenizer and text are gone."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "number": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    train(tmp_path, tokenizer=str(tmp_path / "words.json"), context=8)
    (tmp_path / "other.txt").write_text("the number the " * 100)
    (tmp_path / "words.json").unlink()
    (tmp_path / "text.txt").unlink()
    ids = text_batch(tmp_path / "run", 3, str(tmp_path / "other.txt"))
    assert ids.shape == (3, 8)
    assert set(ids.flatten().tolist()) <= {0, 1, 3}  # 3 ends the document
    _, (result,) = evaluate_run(tmp_path / "run", ["next-token-v1"], data=str(tmp_path / "other.txt"))
    assert result.n == 3
    with pytest.raises(BadInput, match=r"text\.txt: no such text"):
        text_batch(tmp_path / "run")


def test_a_validation_split_of_its_own_needs_no_holding_out(tmp_path: Path) -> None:
    """Only a split that was cut from the training text is a part of it."""
    for split in ("train", "val", "test"):
        (tmp_path / "notes" / split).mkdir(parents=True)
        (tmp_path / "notes" / split / "a.txt").write_text(TEXT)
    train(tmp_path, data=str(tmp_path / "notes"))
    _, (result,) = evaluate_run(tmp_path / "run", ["next-token-v1"], split="val")
    assert result.split == "val"
