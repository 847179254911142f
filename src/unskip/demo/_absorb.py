"""Verdicts on absorption: for a trained MLP as it is, and for one that was made to be absorbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from unskip.absorption import AbsorbableMLP, absorb
from unskip.anatomy import MlpParts, parts
from unskip.recipes import open_run

Write = Callable[[str], object]


def decide(run: Path | None, write: Write) -> bool:
    """True where every verdict holds when it is checked again from the weights alone.

    Without a run that has come to a checkpoint only the MLP that was made for it is decided.
    """
    right = [] if run is None else [_first_mlp(run, write)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mlp, x = AbsorbableMLP(16, 64).double(), torch.randn(32, 16, dtype=torch.float64)
    block = mlp.block()
    write(
        f"AbsorbableMLP, built to absorb its skip: 16 dimensions, {block.up.shape[0]} units and a skip become a plain "
        "MLP of 64 units:\n"
    )
    second = absorb(block, width=64)
    write(_indented(str(second)))
    right.append(_checked(second.verify(), write))
    with torch.no_grad():
        difference = float((mlp(x) - mlp.absorbed()(x)).abs().max())
    write(f"  Outputs with the skip and after absorbing it differ by at most {difference:.1g}.\n")
    return all(right) and difference < 1e-6


def _first_mlp(run: Path, write: Write) -> bool:
    every = parts(open_run(run).encoder)
    place, part = next((place, part) for place, part in enumerate(every) if isinstance(part, MlpParts))
    write(f"The MLP of site {place} ({every.sites[place].path}) of the model in {run}:\n")
    verdict = absorb(part)
    write(_indented(str(verdict)))
    return _checked(verdict.verify(), write)


def _checked(holds: bool, write: Write) -> bool:
    write(
        "  Checked again from the weights and the certificate alone: it holds.\n"
        if holds
        else "  Checked again, it does NOT hold: a fault of unskip. Please report it.\n"
    )
    return holds


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
