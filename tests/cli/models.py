"""Models in a file of their own, for commands that name them, and what a strict reader makes of JSON."""

import json
from typing import Any

SOURCE = """
from torch import nn

print("a line of the model's own")

class Block(nn.Module):
    def __init__(self, norm=True, silent=False):
        super().__init__()
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if silent:
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Empty(Block):
    def forward(self, x):
        return super().forward(x * 0)

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 8), nn.Sequential(Block(False), Block(False))

    def forward(self, ids, bias=0.0):
        return self.blocks(self.embed(ids)) + bias

class Pictures(nn.Module):
    default_cfg = pretrained_cfg = {"input_size": (3, 4, 4), "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.5, 0.5)}

    def __init__(self, *blocks):
        super().__init__()
        self.embed, self.blocks = nn.Linear(12, 8), nn.Sequential(*blocks)

    def forward(self, x):
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.blocks(self.embed(patches))

def make():
    return nn.Sequential(Block(), Block(), Block())

def silent():
    return nn.Sequential(Block(silent=True), Block(silent=True))

def bare():
    return nn.Sequential(Block(False), Block())

def pictures():
    return Pictures(Block(False), Block(False))

def normed():
    return Pictures(Block(), Block())

def plain():
    return Pictures(nn.Linear(8, 8))
"""


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)
