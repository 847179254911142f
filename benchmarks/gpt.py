"""A GPT-2 (pre-norm, learned positions, tied embeddings) whose heads may be wider than width / heads.

    unskip train lm --model benchmarks/gpt.py:gpt --model-args hidden_size=384,num_attention_heads=12,head_dim=64

Heads that pass tokens on (`carry=` of `skipless_`) need together the width of the model; with wider heads others are
left to mix tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.shape = (3, heads, head_dim)
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, self.shape).permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, head_dim)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads, head_dim)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(1, context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, head_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():  # as in GPT-2
            if weight.ndim > 1:
                written = name.endswith(("proj.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 / ((2 * depth) ** 0.5 if written else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.positions[:, : ids.shape[1]])
        return self.head(self.norm(x))


def gpt(
    hidden_size: int = 384,
    num_hidden_layers: int = 6,
    num_attention_heads: int = 6,
    head_dim: int | None = None,
    vocabulary: int = 257,
    context: int = 256,
) -> GPT:
    """A GPT with random weights; the names are those of a Hugging Face config, the vocabulary is that of bytes."""
    head_dim = head_dim or hidden_size // num_attention_heads
    return GPT(vocabulary, context, hidden_size, num_hidden_layers, num_attention_heads, head_dim)
