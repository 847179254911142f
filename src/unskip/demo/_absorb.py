"""Absorption verdicts for a trained MLP, and for an MLP that is built to absorb its skip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from unskip.absorption import AbsorbableMLP, absorb
from unskip.anatomy import MlpParts, parts
from unskip.recipes import open_run

Write = Callable[[str], object]


def decide(run: Path | None, write: Write) -> bool:
    """Prints both verdicts and returns whether both pass verification from the weights alone.

    Without a run (None: no run has a checkpoint) only the constructed MLP is tested.
    """
    verified = [] if run is None else [_first_mlp(run, write)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mlp, x = AbsorbableMLP(16, 64).double(), torch.randn(32, 16, dtype=torch.float64)
    block = mlp.block()
    write(
        f"AbsorbableMLP, built to absorb its skip: 16 dimensions, {block.up.shape[0]} units and a skip become a plain "
        "MLP of 64 units:\n"
    )
    verdict = absorb(block, width=64)
    write(_indented(str(verdict)))
    verified.append(_checked(verdict.verify(), write))
    with torch.no_grad():
        difference = float((mlp(x) - mlp.absorbed()(x)).abs().max())
    write(f"  The outputs before and after absorbing the skip differ by at most {difference:.1g}.\n")
    return all(verified) and difference < 1e-6


def _first_mlp(run: Path, write: Write) -> bool:
    sites = parts(open_run(run).encoder)
    index, part = next((index, part) for index, part in enumerate(sites) if isinstance(part, MlpParts))
    write(f"The MLP of site {index} ({sites.sites[index].path}) of the model in {run}:\n")
    verdict = absorb(part)
    write(_indented(str(verdict)))
    return _checked(verdict.verify(), write)


def _checked(holds: bool, write: Write) -> bool:
    write(
        "  Verified from the weights and the certificate alone.\n"
        if holds
        else "  Verification FAILED. This is a bug in unskip. Please report it.\n"
    )
    return holds


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
