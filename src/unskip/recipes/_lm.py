"""Language models: decoder-only transformers trained to predict the next token, with any shortcut and initialisation.

"Cutting the Skip" (arXiv 2510.00345) trains vision transformers without residual connections and names language as the
next step. Here models such as GPT-2, Llama, Mistral and Qwen train on the user's text or Python's standard library.

    loss = mean over tokens of -log p(next token | the tokens before it in the sequence)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._words import brief
from unskip.data import TextFeed, TextSet, Tokenizer, open_text, open_tokenizer
from unskip.errors import BadInput, UnskipError
from unskip.evals import token_logits
from unskip.recipes._causal import architecture, build_causal, check_kind, pretrained_weights
from unskip.recipes._config import Config
from unskip.recipes._data import evaluated_split
from unskip.recipes._lm_causal import check_causal
from unskip.recipes._models import arguments_of, built
from unskip.recipes._objective import Facts, Objective
from unskip.recipes._online import Online
from unskip.recipes._registry import Preset, Recipe, register
from unskip.recipes._saved import load
from unskip.spec import is_file
from unskip.training import Evaluation, RunFolder
from unskip.wiring import about, find_wiring, save

_TOKENIZER = "tokenizer.json"  # in a checkpoint, unless tokens are bytes
_FOR_BASELINE = 2**24  # number of tokens for counting frequencies


@dataclass(frozen=True)
class Lm(Config):
    """The config of a language model."""

    no_use = dict.fromkeys(
        ("data_root", "download", "size", "interpolation", "workers", "online_images"),
        "it is about images; leave it out",
    )

    preset: str = "stdlib-tiny"  # source of the other defaults
    data: str = "stdlib"  # stdlib, a folder or glob of text files, parquet files with {split} in the path, hf:NAME
    tokenizer: str = "bytes"  # bytes, a tokenizer.json, its folder, or a name of the Hugging Face hub
    column: str = "text"  # text column of parquet files
    context: int = 256  # tokens in a sequence
    cache: str = "~/.cache/unskip/text"  # folder of encoded tokens
    model: str = "gpt2"  # a kind of model of transformers (gpt2, llama, qwen3), hf:NAME-or-FOLDER or file.py:FUNCTION
    model_args: str = ""  # fields of its config: "hidden_size=256,num_hidden_layers=8,num_attention_heads=8"
    pretrained: bool = False  # start from the weights of hf:NAME-or-FOLDER
    weights: str | None = None  # a run, or a folder of unskip.save, to start from
    weight_decay: float = 0.1
    batch: int = 64  # sequences per step, over all processes
    epochs: float = 1  # passes over the text
    warmup: float = 0.05  # fraction of the steps
    clip: float | None = 1.0  # largest norm of the gradient
    online_sequences: int = 512  # evenly spaced sequences for evaluation during training

    @property
    def inputs(self) -> str:
        return f"sequences of {self.context} tokens ({self.tokenizer}) from {self.data}"

    def unused(self) -> dict[str, str]:
        reasons = super().unused()
        if self.data == "stdlib":
            reasons["column"] = "it is for parquet files, and data is stdlib; give parquet files"
        return reasons

    def sizes_fit(self, model: str) -> bool:
        return not model.startswith("hf:") and not is_file(model)  # without them some kinds have 7 billion parameters

    def resumed(self, run: RunFolder) -> Lm:
        """With the tokenizer in the last checkpoint: the original file may have changed."""
        last = run.last_checkpoint()
        return replace(self, tokenizer=str(last[1])) if last is not None and (last[1] / _TOKENIZER).is_file() else self


_SMALL = "hidden_size=384,num_hidden_layers=6,num_attention_heads=6"
_PRESETS = {
    "stdlib-tiny": Preset(
        {"model_args": "hidden_size=128,num_hidden_layers=4,num_attention_heads=4", "context": 128, "batch": 32}
        | {"steps": 600, "lr": 2e-3},
        "four minutes on one CPU core",
        "2.48 ± 0.03 bits per byte (three seeds)",
    ),
    "stdlib-small": Preset(
        {"model_args": _SMALL, "context": 256, "batch": 128, "steps": 3000, "lr": 1e-3, "precision": "bf16"}
        | {"compile": True, "evaluate_every": 500},
        "minutes on one H200; 10.8 million parameters",
        "not measured",
    ),
    "gpt2-124m": Preset(
        {"data": "hf:HuggingFaceFW/fineweb-edu:sample-10BT", "tokenizer": "gpt2", "context": 1024, "batch": 512}
        | {"steps": 19_000, "lr": 6e-4, "precision": "bf16", "compile": True, "accumulate": 16, "warmup": 0.02}
        | {"evaluate_every": 1000},
        "10 billion tokens, 8e18 operations: about 6 hours on one H200 at 40% of its peak; not run here",
        "not measured",
    ),
}


def build_model(config: Lm, facts: Facts) -> nn.Module:
    """The language model: from ids (n, tokens) to logits, or to an output with logits."""
    if is_file(config.model):
        return built(config, arguments_of(config.model_args))
    assert facts.architecture is not None
    return build_causal(facts.architecture)


def _cross_entropy(model: nn.Module, ids: Tensor, following: Tensor) -> Tensor:
    logits = token_logits(model, model(ids))
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


class NextToken(Objective):
    """Cross entropy of the next token."""

    config: Lm
    tokenizer: Tokenizer
    adamw_betas = (0.9, 0.95)  # those of GPT-3
    protocols = ("bits-per-byte-v1", "bits-per-byte-by-context-v1", "next-token-v1")

    def __init__(self, config: Lm) -> None:
        super().__init__(config)
        # One graph of model and loss: with a large vocabulary the loss alone, not compiled, takes as long as the model.
        self.cross_entropy = torch.compile(_cross_entropy) if config.compile else _cross_entropy

    def check(self) -> None:
        config = self.config
        if config.context < 1:
            raise BadInput(f"context is {config.context!r}; a sequence has at least one token")
        if config.online_sequences < 1:
            raise BadInput(f"online_sequences is {config.online_sequences!r}; give at least 1")
        if not is_file(config.model):
            check_kind(config.model, arguments_of(config.model_args))
        if config.pretrained and config.weights is not None:
            raise BadInput("pretrained and weights both set the initial weights; leave one of them out")

    # --- Data ---------------------------------------------------------------------------------------------------------

    def open_splits(self, opener: Any = None, split: Any = None) -> tuple[Any, Any]:
        config, split = self.config, split or evaluated_split(self.config)
        options: dict[str, Any] = {"tokenizer": config.tokenizer, "column": config.column, "cache": config.cache}
        train = open_text(config.data, "train", hold_out=split == "val", **options)
        return train, open_text(config.data, split, **options)

    def facts(self, images: TextSet) -> Facts:
        config, self.tokenizer = self.config, images.tokenizer
        model_config, size = None, images.tokenizer.size
        if not is_file(config.model):
            arguments = arguments_of(config.model_args)
            model_config = architecture(config.model, arguments, size, config.context, images.tokenizer.end)
        return Facts(vocabulary=size, context=config.context, architecture=model_config)

    def preprocess(self, channels: int) -> None:
        return None  # for images only

    def example(self, facts: Facts) -> Tensor:
        return torch.randint(facts.vocabulary, (2, facts.context), generator=torch.Generator().manual_seed(0))

    def feed(self, images: TextSet, device: torch.device) -> TextFeed:
        return TextFeed(images, self.config.batch, self.config.context, seed=self.config.seed, device=device)

    def evaluation_feed(self, images: TextSet, device: torch.device) -> TextFeed:
        config = self.config
        batch = max(1, config.batch // config.accumulate)
        return TextFeed(images, batch, config.context, device=device, most=config.online_sequences)

    def evaluated(self, images: TextSet, device: torch.device, batch: int) -> TextFeed:
        return TextFeed(images, batch, self.config.context, device=device)

    # --- Model --------------------------------------------------------------------------------------------------------

    def builder(self, facts: Facts) -> dict[str, Any] | None:
        config = self.config
        return {"spec": config.model, "kwargs": arguments_of(config.model_args)} if is_file(config.model) else None

    def save(self, model: nn.Module, facts: Facts, folder: Path) -> None:
        save(model, folder, self.builder(facts), about(model) | {"tokens": facts.tokens})
        self.tokenizer.save(folder)

    def start(self, model: nn.Module, sample: Tensor) -> list[str]:
        config = self.config
        if config.pretrained:
            _copy(model, pretrained_weights(config.model), config.model)
        if config.weights is not None:
            other = load(config.weights)
            if (wiring := find_wiring(other)) is not None:
                wiring.undo()  # the skips follow from the config, not from the weights
            _copy(model, other.state_dict(), config.weights)
        largest = sample[:1].clone()
        largest[:, -1] = self.tokenizer.size - 1
        sizes = f"the tokenizer has {self.tokenizer.size} ids, the context {config.context} tokens"
        try:
            with torch.no_grad(), _checked_embeddings(model, sizes):
                shape = token_logits(model, model(largest)).shape
        except UnskipError as error:
            raise BadInput(f"{config.model}: {error}") from error
        except Exception as error:  # inconsistent sizes, and whatever a forward raises
            what = f"{type(error).__name__}: {brief(error)}"
            raise BadInput(f"{config.model}: its forward fails: {what}; change its model_args ({sizes})") from error
        if shape[-1] < self.tokenizer.size:
            raise BadInput(f"{config.model}: {shape[-1]} logits, and the tokenizer has {self.tokenizer.size} ids")
        check_causal(model, config.model, sample[:1], self.tokenizer.size)
        self.initialise(model, sample[:8])
        return []

    # --- Training -----------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        ids, following = batch
        return self.cross_entropy(model, ids, following), {}

    def baseline_loss(self, model: nn.Module, train: TextSet, test: TextFeed) -> float:
        """The entropy of the token frequencies: the loss of the best constant prediction."""
        counts = numpy.bincount(train.tokens[:_FOR_BASELINE])
        return float(torch.special.entr(torch.from_numpy(counts / counts.sum())).sum())

    def evaluations(self, model: nn.Module, train: TextFeed, test: TextFeed, split: str) -> dict[str, Evaluation]:
        options = {"precision": self.config.precision}
        return {"text": Online(["bits-per-byte-v1", "next-token-v1"], None, test, split, options)}


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint."""
    return open_tokenizer(checkpoint if (checkpoint / _TOKENIZER).is_file() else "bytes")


@contextlib.contextmanager
def _checked_embeddings(model: nn.Module, sizes: str) -> Iterator[None]:
    """Raises BadInput where an embedding has too few rows; a GPU would stop with an error that names no module."""

    def check(path: str, module: nn.Embedding, ids: Tensor) -> None:
        if ids.numel() and (most := int(ids.max())) >= module.num_embeddings:
            raise BadInput(f"{path} has {module.num_embeddings} embeddings and gets id {most}: give it more ({sizes})")

    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, path=path: check(path, module, (*args, *kwargs.values())[0]), with_kwargs=True
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _copy(model: nn.Module, weights: dict[str, Any], source: str) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise BadInput(f"{source}: its weights are of another model: {brief(error)}; use its model_args") from error


# A config of the recipe lm (language models: the next token): `unskip.recipes.lm(preset, **fields)`.
lm = register(Recipe("lm", Lm, _PRESETS, build_model, NextToken))
