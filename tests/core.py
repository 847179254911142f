"""Script that uses the core of unskip while the packages named on its command line cannot be imported."""

# ruff: noqa: E402

import importlib
import pkgutil
import sys
import tempfile

for name in sys.argv[1:]:
    sys.modules[name] = None  # type: ignore[assignment]  (a later import of that name fails)
import pytest
import torch
from torch import nn

import unskip

for module in pkgutil.walk_packages(unskip.__path__, "unskip."):
    if not module.name.startswith(("unskip.__main__", "unskip.cli", "unskip.integrations.")):
        importlib.import_module(module.name)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


model, x = nn.Sequential(Block(), Block()), torch.randn(6, 5, 32)
assert len(unskip.audit(model, x)) == len(unskip.parts(model, x)) == 4
unskip.init.zero_branches_(model, x)
unskip.init.skipless_(model, x)
unskip.rewire(model, unskip.Decay(0.6), x)
assert len(unskip.features(model, x)) == 2
unskip.measure(model, x)
for name in ("soap", "muon", "adamw"):
    optimizer = unskip.optim.build(model, name, lr=1e-3)
    model(x).square().mean().backward()
    optimizer.step()
block = unskip.absorption.Block(up=torch.randn(16, 8), down=torch.randn(8, 16), activation="gelu")
assert unskip.absorb(block).status == "impossible"
with tempfile.TemporaryDirectory() as folder:
    unskip.save(model, folder)
    again = unskip.load(folder, nn.Sequential(Block(), Block()))
assert torch.equal(again(x), model(x))
points = torch.randn(200, 8)
unskip.evals.knn(points, torch.arange(200) % 2, points, torch.arange(200) % 2)
unskip.evals.frechet(points, points)
unskip.data.open_images("digits")
missing = [
    ("train", lambda: unskip.train(unskip.recipes.supervised("digits", steps=1), "run", quiet=True)),
    ("train", lambda: unskip.spec.build("timm:test_vit")),
    ("report", lambda: unskip.report.figures.draw(None)),
    ("hf", lambda: unskip.spec.build("hf:any")),
    ("hf", lambda: unskip.load("hf-hub:owner/name")),
]
for extra, call in missing:
    with pytest.raises(unskip.errors.UnskipError, match=rf"pip install 'unskip\[{extra}\]'"):
        call()
