"""The result of `absorb`: a status, a sentence that explains it, and a certificate that anyone can re-check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._domain import Domain
from unskip.absorption._problem import Biases, problem_of
from unskip.errors import BadInput

Status = Literal["possible", "impossible", "undecided"]


@dataclass(frozen=True, eq=False)
class Certificate:
    """The data that prove a verdict. Their content depends on `kind`; docs/absorption-map.md lists it."""

    kind: str
    data: Mapping[str, Any]

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={_short(v)}" for n, v in self.data.items())
        return f"Certificate({self.kind}: {shown})"


@dataclass(frozen=True, eq=False)
class Obstruction:
    """One reason why a skip cannot be absorbed, with its own certificate."""

    sentence: str
    certificate: Certificate

    @property
    def kind(self) -> str:
        return self.certificate.kind


@dataclass(frozen=True, eq=False)
class Verdict:
    """Whether a block can absorb its skip. `str()` gives a summary of a few lines."""

    status: Status
    reason: str
    block: Block
    width: int  # of the replacement
    biases: Biases
    domain: str  # the inputs for which the verdict holds
    certificate: Certificate | None = None
    obstructions: tuple[Obstruction, ...] = ()
    error: float | None = None  # possible: |F - G| as a linear map, relative to the skip (Frobenius norm);
    #                             with changed weights the measured error of the output, relative to the output
    flips: Tensor | None = None  # possible: the units whose rows are negated, if flips alone are enough
    skip_norm: float | None = None  # the skip's own Frobenius norm, to compare flip_bound with
    extra_width: int | None = None  # additional units that are enough; None: no number is known, or none exists
    measured: Mapping[str, float] = field(default_factory=dict)  # measured output errors
    notes: tuple[str, ...] = ()
    weights: Block | None = None  # possible: the replacement
    inputs: Domain | None = None  # the domain as given; None: all inputs
    tolerance: float | None = None  # possible: the largest relative change of the weights, as given
    change: float | None = None  # possible: the relative change of the weights that was made

    def replacement(self) -> Block:
        """The block without its skip: the same function within `error`, with the same norms."""
        if self.weights is None:
            raise BadInput(
                f"absorb: the verdict is {self.status}, so there is no replacement; "
                "absorption.widen adds the units that are needed, absorption.approximate fits one of the same width"
            )
        return self.weights

    @cached_property
    def flip_bound(self) -> float | None:
        """A lower bound on the distance of every flip set from the skip (Frobenius norm). Computed on first access."""
        from unskip.absorption._flips import flip_bound

        for each in self.obstructions:
            if each.kind == "dual":
                problem = problem_of(self.block, self.width, self.biases, self.inputs)
                return flip_bound(problem, each.certificate.data["bound"])
        return None

    def verify(self) -> bool:
        """Checks the verdict again from the weights and the certificates alone. An undecided verdict claims nothing."""
        from unskip.absorption._verify import verify

        return verify(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the weights."""
        same = "status reason width biases domain error flip_bound skip_norm extra_width tolerance change".split()
        return {
            **{name: getattr(self, name) for name in same},
            "activation": self.block.activation,
            "shape": [self.block.inputs, self.block.width, self.block.outputs],
            "obstructions": [{"kind": each.kind, "sentence": each.sentence} for each in self.obstructions],
            "flips": None if self.flips is None else self.flips.tolist(),
            "measured": dict(self.measured),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        block = self.block
        head = f"{block.inputs} > {block.width} > {block.outputs}, {block.activation}: {self.status}"
        lines = [head, f"  {self.reason}", f"  {'asked' if self.status == 'undecided' else 'holds'} on: {self.domain}"]
        for each in self.obstructions:
            lines.append(f"  obstruction: {each.kind}" + (f": {each.sentence}" if each.sentence != self.reason else ""))
        if self.flip_bound is not None:
            lines.append(f"  every flip set stays {self.flip_bound:.3g} or more from the skip ({self.skip_norm:.3g})")
        if self.error is not None:
            scale = "skip" if self.change is None else "output"
            lines.append(f"  error of the replacement, relative to the {scale}: {self.error:.3g}")
        if self.change is not None:
            lines.append(f"  the weights were moved by {self.change:.3g} of their size (tolerance {self.tolerance:g})")
        if self.status != "possible" and self.extra_width:
            lines.append(f"  {self.extra_width} more units are enough for an exact replacement")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "()"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) < 60 else text[:57] + "..."
