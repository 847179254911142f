"""A whole model: one verdict for every MLP site.

Beside the verdict of a site with norms stands that of its bare MLP, the norms set aside: the question of "Can an MLP
Absorb Its Own Skip Connection?" (arXiv 2604.23705). With data also the best replacement of the same width on what the
site really reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import nn

from unskip._table import table
from unskip.absorption._approximate import Approximation, approximate, needed
from unskip.absorption._decide import absorb
from unskip.absorption._from import NoBlock, opened, read_block, streams
from unskip.absorption._problem import Biases
from unskip.absorption._verdict import Verdict
from unskip.anatomy import MlpParts, ParallelParts, Site, example_for
from unskip.errors import BadInput

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class ScanRow:
    """One MLP site. `verdict` is None where its branch is no plain MLP, and `reason` says why."""

    site: Site
    verdict: Verdict | None
    bare: Verdict | None  # with the norms set aside, where there are some
    approximation: Approximation | None
    reason: str

    @property
    def status(self) -> str:
        return "unknown" if self.verdict is None else self.verdict.status

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.site.index,
            "path": self.site.path,
            "status": self.status,
            "reason": self.reason,
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "bare": None if self.bare is None else self.bare.to_dict(),
            "approximation": None
            if self.approximation is None
            else {
                "step": self.approximation.step,
                "error": self.approximation.error,
                "ladder": dict(self.approximation.ladder),
            },
        }


class Scan(Sequence[ScanRow]):
    """The rows of a model's MLP sites; `str()` is a table."""

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
        """Checks every verdict again, those of the bare MLPs included."""
        every = [v for row in self.rows for v in (row.verdict, row.bare) if v is not None]
        return all(verdict.verify() for verdict in every)

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "counts": self.counts(), "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        # Without a norm a site is its own bare MLP.
        bare = ("bare MLP", "bare: no flips closer than", "bare: extra units")
        header = ("site", "path", "mlp", "norm", "verdict", "by", *bare, "approx")
        lines: list[list[object]] = []
        for row in self.rows:
            line: list[object] = [row.site.index, row.site.path or "(model)"]
            verdict = row.verdict
            if verdict is None:
                lines.append([*line, None, None, "unknown", row.reason, None, None, None, None])
                continue
            block, best = verdict.block, row.bare or verdict
            shape = f"{block.inputs} > {block.width}, {block.activation}"
            norms = " ".join(block.norms) or None
            by = ", ".join(each.kind for each in verdict.obstructions) or None
            error = None if row.approximation is None else row.approximation.error
            said = None if row.bare is None else row.bare.status
            lines.append([*line, shape, norms, verdict.status, by, said, best.flip_bound, best.extra_width, error])
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items() if count)
        reasons = dict.fromkeys(row.reason for row in self.rows if row.verdict is not None)
        return f"{self.model}: {counts or 'no MLP sites'}\n\n" + table(header, lines) + "\n\n" + "\n".join(reasons)

    def __repr__(self) -> str:
        return f"<Scan of {self.model}: {len(self)} MLP sites>"


def scan(
    model: nn.Module,
    example: object = None,
    data: object = None,
    biases: Biases = "as-is",
    progress: Progress | None = None,
) -> Scan:
    """A verdict for every MLP site. With `data`, a batch, also the best approximation on what each site reads."""
    given = example_for(model, data if data is not None else example)
    laid = opened(model, given)
    widest = max((len(part.up) for part in laid.parts.mlps()), default=0)
    read = streams(model, given, needed(widest)) if data is not None else {}
    found: list[tuple[Site, MlpParts | None, str]] = []
    for index, (site, part) in enumerate(zip(laid.parts.sites, laid.parts, strict=True)):
        if isinstance(part, MlpParts):
            found.append((site, part, ""))
        elif isinstance(part, ParallelParts):
            found.append((site, None, "its MLP is added together with an attention"))
        elif part is None and site.kind in ("mlp", "parallel"):
            found.append((site, None, laid.parts.reasons[index]))
    if any(value.is_meta for value in model.parameters()):
        raise BadInput(
            f"scan: {type(model).__name__} is on the meta device and holds no numbers; load the weights first"
        )
    rows = []
    for done, (site, part, reason) in enumerate(found):
        if progress is not None:
            progress(done, len(found), site.path)
        if part is None:
            rows.append(ScanRow(site, None, None, None, reason))
            continue
        block = read_block(model, laid, part)
        if isinstance(block, NoBlock):
            rows.append(ScanRow(site, None, None, None, block.reason))
            continue
        verdict = absorb(block, biases=biases)
        bare = absorb(block.bare(), biases=biases) if block.norms else None
        near = None
        if site.index in read:
            inner = block.bare() if "post" in block.norms else block
            try:
                near = approximate(inner, read[site.index])
            except BadInput:  # too few inputs
                near = None
        rows.append(ScanRow(site, verdict, bare, near, verdict.reason))
    return Scan(type(model).__name__, rows)
