"""The table of docs/absorption-map.md: activation x biases x norm -> same width, extra width, or never.

Every cell names its theorem and can build an example, which tests/absorption/test_map.py passes to `absorb`. The cells
are for weights in general position and a skip A of rank r on d inputs; `absorb` decides for given weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unskip.absorption import Block, Norm
from unskip.absorption._activations import resolve

Same = Literal["flips", "never", "open", "rank"]
GROUPS: dict[str, tuple[str, ...]] = {  # representative: activations with the same results
    "gelu": ("gelu", "gelu_tanh", "quick_gelu", "silu", "softplus", "shifted_softplus", "squareplus", "log_sigmoid"),
    "relu": ("relu", "leaky_relu"),
    "hardswish": ("hardswish",),
    "tanh": ("tanh", "sigmoid", "sin"),
    "relu6": ("relu6", "hardtanh", "hardsigmoid", "softsign"),
    "elu": ("elu", "selu", "celu", "abs"),
    "mish": ("mish",),
    "identity": ("identity",),
    "relu2": ("relu2",),
    "square": ("square",),
    "swiglu": ("swiglu", "geglu", "geglu_tanh", "mish_glu", "tanh_glu"),
    "reglu": ("reglu", "bilinear"),
    "glu": ("glu",),
}
NORMS: dict[str, Norm | None] = {
    "none": None,
    "pre": Norm("layernorm", "pre"),
    "post layernorm": Norm("layernorm", "post"),
    "post rmsnorm": Norm("rmsnorm", "post"),
}


@dataclass(frozen=True)
class Cell:
    """One cell of the map."""

    word: str  # the representative of `activations`
    biases: bool  # whether block and replacement have biases
    norm: str
    same: Same
    extra: str | None  # formula for the extra units that suffice; None: no width is known, or none suffices
    theorem: str

    @property
    def activations(self) -> tuple[str, ...]:
        return GROUPS[self.word]

    def units(self, d: int, h: int, rank: int) -> int | None:
        """The value of the formula `extra` for the (d, d) skip of an example."""
        lost = rank - 1 if rank == d and "layernorm" in self.norm else rank  # a layernorm removes one direction
        values = {
            "min(2 r, 2 d - min(h, d))": min(2 * lost, 2 * d - min(h, d)),
            "r": rank,
            "max(0, min(r, d - h))": max(0, min(rank, d - h)),
        }
        return None if self.extra is None else values[self.extra]

    def example(self, planted: bool = False, seed: int = 0) -> Block:
        """A block of this cell: generic, or with a planted flip set."""
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        d, h = 4, 10
        phi, gated = resolve(self.word)
        up, down, gate = normal(h, d), normal(d, h), normal(h, d) if gated else None
        if planted:
            chosen = torch.arange(6)
            inverse = torch.linalg.pinv(up[chosen])
            free = torch.eye(6, dtype=torch.float64) - up[chosen] @ inverse
            down[:, chosen] = -inverse / float(phi.odd or 1) + down[:, chosen] @ free
        bias = 0.1 * normal(h) if self.biases else None
        gate_bias = 0.1 * normal(h) if self.biases and gated else None
        const = normal(d) if self.biases else None
        return Block(up, down, gate, bias, gate_bias, const, self.word, 1.0, NORMS[self.norm])


def table() -> list[Cell]:
    """All cells of the map."""
    return [_cell(word, biases, norm) for word in GROUPS for biases in (False, True) for norm in NORMS]


def _cell(word: str, biases: bool, norm: str) -> Cell:
    phi, gated = resolve(word)
    if norm == "pre":
        return Cell(word, biases, norm, "never", None, "growth: behind a norm the MLP is bounded")
    if gated or phi.family == "power":
        return _flat(word, biases, norm)
    if phi.family == "odd-linear":
        where = ", up to 1 w^T" if norm == "post layernorm" else ""
        why = f"flip criterion{where}; splits and fresh pairs"
        return Cell(word, biases, norm, "flips", "min(2 r, 2 d - min(h, d))", why)
    if phi.family == "linear":
        if norm != "none":
            return Cell(word, biases, norm, "open", None, "not settled")
        return Cell(word, biases, norm, "rank", "max(0, min(r, d - h))", "one matrix; only its rank counts")
    why = "growth: the MLP is bounded" if phi.family == "bounded" else "its units never add up to a linear map"
    return Cell(word, biases, norm, "never", None, why)


def _flat(word: str, biases: bool, norm: str) -> Cell:
    phi, gated = resolve(word)
    if gated and (biases or phi.at_zero != 0):
        return Cell(word, biases, norm, "open", "r", "units with an open gate can be added that make up the skip")
    if biases:
        return Cell(word, biases, norm, "open", None, "not settled")
    return Cell(word, biases, norm, "never", None, "linearisation: the replacement is flat at the origin")


SHORT: dict[Same, str] = {"flips": "with a flip set", "never": "never", "open": "open", "rank": "if the rank fits h"}


def summary() -> str:
    """The map as a Markdown table for the docs, with one row per group of activations with the same results."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for word, names in GROUPS.items():
        cells = [cell for cell in table() if cell.word == word and cell.norm not in ("pre", "post rmsnorm")]
        kinds = dict.fromkeys((cell.norm, cell.biases, SHORT[cell.same], cell.extra or "none") for cell in cells)
        entries = {(same, extra) for _, _, same, extra in kinds}
        for same, extra in sorted(entries, key=lambda pair: pair[0] == "open"):
            where = [(norm, biases) for norm, biases, *rest in kinds if tuple(rest) == (same, extra)]
            none = "not built here" if same == "open" else "none"
            key = (_where(where), same, none if extra == "none" else f"`{extra}`")
            rows.setdefault(key, []).extend(names)
    lines = ["| activation | norm and biases | same width | more units that are enough |", "|---|---|---|---|"]
    lines += ["| any | pre-norm | never | none |"]
    lines += [f"| {', '.join(names)} | {' | '.join(key)} |" for key, names in rows.items()]
    return "\n".join(lines)


def _where(cells: list[tuple[str, bool]]) -> str:
    """A description of the norms and biases of a row."""
    norms, biases = {norm for norm, _ in cells}, {has for _, has in cells}
    norm = "none or post-norm" if len(norms) == 2 else {"none": "no norm"}.get(min(norms), "post-norm")
    return norm if len(biases) == 2 else f"{norm}, {'with' if True in biases else 'without'} biases"
