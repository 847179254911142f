"""Scans a whole model: one verdict for every MLP site.

A site with norms gets a second verdict for its MLP alone, y + MLP(y) without the norms, which is the case of "Can an
MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705). A site whose activation has a kink gets another one, for the
MLP alone on its actual inputs: those of the data, or all possible outputs of the norm before it. With data, the best
replacement of the same width is fitted to the inputs of each site as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor, nn

from unskip._table import table
from unskip.absorption._approximate import Approximation, approximate, inputs_to_read
from unskip.absorption._block import Block
from unskip.absorption._decide import absorb
from unskip.absorption._domain import Domain
from unskip.absorption._from import NoBlock, mlp_sites, one_batch, read_block, streams, trace_sample
from unskip.absorption._problem import Biases
from unskip.absorption._verdict import Verdict
from unskip.anatomy import Site, example_for
from unskip.errors import BadInput

Progress = Callable[[int, int, str], None]
LEGEND = """as it stands: the site with its norms; MLP alone: y + MLP(y), its norms set aside
distance: how far the closest flip set of the MLP alone stays from the skip (Frobenius), of the skip's own norm
its inputs: the MLP alone, asked only about the inputs that it gets (ReLU-like units)
extra units: enough to absorb the skip of the MLP alone exactly; approx: error of the best replacement of the same width
  on held-out inputs, relative to the spread of the outputs"""
ADVICE = """No skip of this model can be absorbed exactly at its width. What you can do:
  keep it                              it costs one addition a token
  absorption.apply(mode="approximate") the same width, fitted to your data, with the error printed; max_error= refuses
{widen}  rewire(model, Cut()) and train       a model that is trained without the skip (docs/rewire.md)
  absorption.AbsorbableMLP             trains with a skip and runs without one, exactly (in bfloat16 with pairs=True)"""
WIDEN = """  absorption.apply(mode="widen")       exact with more units, at sites without a norm on the branch
"""


@dataclass(frozen=True, eq=False)
class ScanRow:
    """One MLP site. `verdict` is None if its branch is not a plain MLP; `reason` then says why."""

    site: Site
    verdict: Verdict | None
    bare: Verdict | None  # the MLP alone, if the site has norms
    local: Verdict | None  # the MLP alone on its actual inputs, if its activation has a kink
    approximation: Approximation | None
    reason: str
    note: str = ""  # why there is no approximation, if data were given

    @property
    def status(self) -> str:
        return "unknown" if self.verdict is None else self.verdict.status

    @property
    def verdicts(self) -> list[Verdict]:
        return [each for each in (self.verdict, self.bare, self.local) if each is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        near = self.approximation
        return {
            "site": self.site.index,
            "path": self.site.path,
            "status": self.status,
            "reason": self.reason,
            "note": self.note,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "bare": None if self.bare is None else self.bare.to_dict(),
            "local": None if self.local is None else self.local.to_dict(),
            "approximation": None
            if near is None
            else {"step": near.step, "error": near.error, "ladder": dict(near.ladder), "held_out": near.held_out},
        }

    def cells(self) -> list[object]:
        """The cells of this row of the table."""
        line: list[object] = [self.site.index, self.site.path or "(model)"]
        verdict = self.verdict
        if verdict is None:
            return [*line, None, None, "unknown", None, None, None, None, None, None]
        block, alone = verdict.block, self.bare or verdict
        shape = f"{block.inputs} > {block.width}, {block.activation}"
        by = ", ".join(each.kind for each in verdict.obstructions) or None
        far = alone.flip_bound
        distance = None if far is None else f"{far:.3g} of {alone.skip_norm or 0:.3g}"
        said = None if self.bare is None else self.bare.status
        local = None if self.local is None else self.local.status
        error = None if self.approximation is None else self.approximation.error
        norms = " ".join(block.norms) or None
        return [*line, shape, norms, verdict.status, by, said, distance, local, alone.extra_width, error]


class Scan(Sequence[ScanRow]):
    """The rows of a model's MLP sites; `str()` is a table with its legend."""

    def __init__(self, model: str, rows: Sequence[ScanRow]) -> None:
        self.model = model
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> ScanRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScanRow]: ...
    def __getitem__(self, index: int | slice) -> ScanRow | Sequence[ScanRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def counts(self) -> dict[str, int]:
        """How many sites have each status."""
        found = [row.status for row in self.rows]
        return {status: found.count(status) for status in ("possible", "impossible", "undecided", "unknown")}

    def verify(self) -> bool:
        """Checks every verdict again, including those of the MLPs alone."""
        return all(verdict.verify() for row in self.rows for verdict in row.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"model": self.model, "counts": self.counts(), "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        header = ("site", "path", "mlp", "norm", "as it stands", "by", "MLP alone", "distance", "its inputs")
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items() if count)
        if not self.rows:
            return f"{self.model}: no MLP sites"
        out = [f"{self.model}: {counts}", ""]
        out += [table((*header, "extra units", "approx"), [row.cells() for row in self.rows]), "", LEGEND, ""]
        said: dict[str, list[int]] = {}
        for row in self.rows:
            said.setdefault(f"as it stands: {row.reason}", []).append(row.site.index)
            if row.bare is not None and row.bare.status != "impossible":
                said.setdefault(f"MLP alone: {row.bare.reason}", []).append(row.site.index)
            if row.local is not None:
                said.setdefault(f"its inputs: {row.local.domain}", []).append(row.site.index)
            if row.note:
                said.setdefault(f"approx: {row.note}", []).append(row.site.index)
        for text, sites in said.items():
            out.append(f"{'site' if len(sites) == 1 else 'sites'} {', '.join(map(str, sites))}, {text}")
        if all(row.status == "impossible" for row in self.rows):
            inside = [{"pre", "out"} & row.verdict.block.norms.keys() for row in self.rows if row.verdict is not None]
            out += ["", ADVICE.format(widen="" if all(inside) else WIDEN)]
        return "\n".join(out)

    def __repr__(self) -> str:
        return f"<Scan of {self.model}: {len(self)} MLP sites>"


def scan(
    model: nn.Module,
    example: object = None,
    data: object = None,
    biases: Biases = "as-is",
    progress: Progress | None = None,
) -> Scan:
    """Decides every MLP site. With `data`, a batch, it also fits the best approximation to the inputs of each site."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"scan: expected a torch.nn.Module, got {type(model).__name__}")
    given = example_for(model, one_batch("scan", example, data))
    traced = trace_sample(model, given)
    widest = max((len(part.up) for part in traced.parts.mlps()), default=0)
    read = streams(model, given, inputs_to_read(widest)) if data is not None else {}
    found = mlp_sites(traced.parts)
    if any(value.is_meta for value in model.parameters()):
        raise BadInput(
            f"scan: {type(model).__name__} is on the meta device and holds no numbers; load the weights first"
        )
    rows = []
    for done, (site, part, reason) in enumerate(found):
        if progress is not None:
            progress(done, len(found), site.path)
        block = NoBlock(reason) if part is None else read_block(traced, part)
        if isinstance(block, NoBlock):
            rows.append(ScanRow(site, None, None, None, None, block.reason))
        else:
            rows.append(_row(site, block, read.get(site.index), biases, data is not None))
    return Scan(type(model).__name__, rows)


def _row(site: Site, block: Block, read: Tensor | None, biases: Biases, asked: bool) -> ScanRow:
    verdict = absorb(block, biases=biases)
    bare = absorb(block.bare(), biases=biases) if block.norms else None
    local = None if block.phi.analytic or block.gated else _local(block, read, biases)
    near, note = None, "its inputs could not be recorded" if asked and read is None else ""
    if read is not None:
        try:
            near = approximate(block.bare() if "post" in block.norms else block, read)
        except BadInput as error:
            note = str(error).removeprefix("approximate: ")
    return ScanRow(site, verdict, bare, local, near, verdict.reason, note)


def _local(block: Block, read: Tensor | None, biases: Biases) -> Verdict | None:
    """The verdict for the MLP alone on its inputs: those of the data, or all outputs of the norm before it."""
    norm = block.norms.get("pre")
    if norm is not None and norm.kind == "other":
        return None
    if read is not None:
        inputs = read.detach().double()
        return absorb(block.bare(), biases=biases, domain=Domain.around(inputs if norm is None else norm(inputs)))
    return None if norm is None else absorb(block.bare(), biases=biases, domain=Domain.after(norm, block.inputs))
