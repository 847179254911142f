"""Gradient checkpointing does not change losses and gradients of any recipe, and blocks run twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unskip import recipes
from unskip.errors import BadInput
from unskip.recipes import build_task

SMALL = "depth=2,embed_dim=16,num_heads=2"
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised": ("supervised", {"model_args": f"{SMALL},proj_drop_rate=0.2", "drop_path": 0.3}),
    "supervised, rewired": ("supervised", {"model_args": SMALL, "drop_path": 0.3, "shortcut": "anneal:keep>cut@9"}),
    "mae": ("mae", {"model_args": SMALL, "shortcut": "decay:0.6"}),
    "dino": ("dino", {"model_args": SMALL, "local_crops": 1, "shortcut": "cut"}),
    "simclr": ("simclr", {"model_args": SMALL}),
    "sit": ("sit", {"model_args": "width=16,depth=3,heads=2", "shortcut": "decay:0.8"}),
    "uvit": ("uvit", {"model_args": "width=16,depth=3,heads=2", "shortcut": "decay:0.8"}),
}


def passed(recipe: str, fields: dict[str, Any], on: bool) -> tuple[torch.Tensor, list[Any], int]:
    """The loss and gradients of a batch in the fourth step, and how often the second block ran."""
    torch.manual_seed(0)
    common = {"batch": 8, "steps": 9, "device": "cpu", "online_images": 300, "health": False, "grad_checkpointing": on}
    task, _ = build_task(getattr(recipes, recipe)("digits", **common, **fields))
    model: Any = task.model.train()
    inner = getattr(model, "student", getattr(model, "encoder", model))
    inner = getattr(inner, "backbone", inner)
    block = inner.mid_block if hasattr(inner, "mid_block") else inner.blocks[1]
    runs: list[int] = []
    block.register_forward_pre_hook(lambda *_: runs.append(1))
    for wiring in task.wirings:
        wiring.step(3)
    torch.manual_seed(1)
    loss, _ = task.loss(model, next(task.feed.iterate(0, 1)))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()], len(runs)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_do_not_change(name: str) -> None:
    (loss, grads, runs), (again, others, twice) = (passed(*CONFIGS[name], on) for on in (False, True))
    assert twice == 2 * runs
    assert torch.equal(loss, again)
    for one, other in zip(grads, others, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert any(bool(each.any()) for each in grads if each is not None)


def test_a_model_without_gradient_checkpointing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("from torch import nn\ndef plain(**_): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n")
    config = recipes.supervised("digits", model=f"{file}:plain", steps=1, grad_checkpointing=True)
    with pytest.raises(BadInput, match=r"Sequential.*set_grad_checkpointing"):
        build_task(config)
