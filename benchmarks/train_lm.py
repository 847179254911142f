"""Compares the speed of a GPT-2 training step (124 million parameters) of the recipe with that of transformers.

    python benchmarks/train_lm.py                          # one CUDA device, 32 sequences of 1024 tokens
    python benchmarks/train_lm.py --small --device cpu     # smoke test at a size for a CPU

    published        transformers' GPT2LMHeadModel and loss, with its vocabulary of 50,257
    published, 64    the same with the vocabulary padded to a multiple of 64, as in the recipe
    ours             model and loss of the recipe lm as in its training loop
    ours, decayed    the same with shortcuts decayed to an effective decay of 1e-2

All are compiled: the published model and loss as one graph, ours as one graph each. All get the same ids, predict the
token after each of them, and have torch's fused attention, bf16 autocast and fused AdamW. They alternate, and ratios
are of adjacent measurements. First, the losses for the same weights and tokens are compared. "Images" in the record are
sequences here.
The JSON is written to docs/results/train-lm-gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _turns import Step, arguments, attention, turns, write
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import unskip
from unskip.recipes import Facts, lm, recipe_of
from unskip.recipes._causal import architecture

ROOT = Path(__file__).resolve().parent.parent
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = lm("gpt2-124m")
OBJECTIVE = recipe_of(CONFIG).objective(CONFIG)
Loss = Callable[[Any, Tensor, Tensor], Tensor]
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def published(sizes: dict[str, int], vocabulary: int, context: int) -> Any:
    config = GPT2Config(vocab_size=vocabulary, max_position_embeddings=context, use_cache=False, **sizes, **DROPOUT)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # without it a warning breaks the compiled graph before the loss
    return model


def ours(sizes: dict[str, int], vocabulary: int, context: int, shortcut: str = "keep") -> Any:
    described = architecture("gpt2", dict(sizes), vocabulary, context, vocabulary - 1)
    config = replace(CONFIG, context=context)
    model = recipe_of(config).build_model(config, Facts(vocabulary=vocabulary, context=context, architecture=described))
    if shortcut != "keep":
        unskip.rewire(model, shortcut, torch.zeros(1, 8, dtype=torch.int64))
    return model


def reference_loss(model: Any, ids: Tensor, following: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=following, shift_labels=following).loss
    return loss


def our_loss(model: Any, ids: Tensor, following: Tensor) -> Tensor:
    return OBJECTIVE.loss(model, (ids, following))[0]


def tokens(vocabulary: int, batch: int, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Ids and the next ones, (batch, context) each."""
    ids = torch.randint(vocabulary, (batch, context + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_difference(sizes: dict[str, int], vocabulary: int, context: int, device: str) -> float:
    """Absolute difference of the two losses for the same weights and tokens, in float32."""
    torch.manual_seed(0)
    reference, own = (
        published(sizes, -(-vocabulary // 64) * 64, context).to(device),
        ours(sizes, vocabulary, context).to(device),
    )
    own.load_state_dict(reference.state_dict())
    batch = tokens(vocabulary, 2, context, device)
    with torch.no_grad():
        return abs(float(reference_loss(reference, *batch) - our_loss(own, *batch)))


def stepper(model: Any, loss: Loss, batch: tuple[Tensor, Tensor], mode: str) -> Step:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = partial(torch.compile, mode=None if mode == "default" else mode)
    forward = compiled(partial(loss, model)) if loss is reference_loss else partial(loss, compiled(model))

    def step() -> None:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            value = forward(*batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    options = arguments(__doc__, 32, 20, ROOT / "docs" / "results" / "train-lm-gpu.json")
    sizes, vocabulary, context = (SMALL, 257, 32) if options.small else (BASE, 50_257, 1024)
    batch, steps = (4, 2) if options.small else (options.batch, options.steps)
    apart = loss_difference(sizes, vocabulary, context, options.device)
    print(f"losses differ by {apart:.2g}")
    assert apart < 1e-4, "the losses differ"
    full = -(-vocabulary // 64) * 64
    makers: dict[str, tuple[Callable[[], Any], Loss]] = {
        "published": (lambda: published(sizes, vocabulary, context), reference_loss),
        "published, 64": (lambda: published(sizes, full, context), reference_loss),
        "ours": (lambda: ours(sizes, vocabulary, context), our_loss),
        "ours, decayed": (lambda: ours(sizes, vocabulary, context, "decay:product=0.01"), our_loss),
    }
    drawn = tokens(vocabulary, batch, context, options.device)

    def prepared(make: Callable[[], Any], loss: Loss) -> Step:
        return stepper(make().to(options.device), loss, drawn, options.mode)

    chosen = {name: partial(prepared, *each) for name, each in makers.items() if options.only in name}
    with attention(options.attention):
        results = turns(chosen, drawn[0], steps, options.rounds)
    settings = {"batch": batch, "steps": steps, "vocabulary": vocabulary, "context": context, **sizes}
    write(__file__, options, settings, **{"losses apart": apart, "results": results})


if __name__ == "__main__":
    main()
