"""Whether differences between tokens come from the model or only from rounding.

    |c(x) - c(x')| > |c(x)| / 10        x a stream, x' the same stream in float64, c subtracts the mean

Without skips tokens can become so uniform (rank collapse) that they differ only in their last digits. A rank does not
depend on scale, so that noise would have full rank. Therefore a few samples are recomputed in float64, starting from
the first stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unskip.anatomy import ReplayError, Sample, Site, replay, tokens
from unskip.measures.rank import effective_rank, feature_matrix

_SAMPLES = 4  # samples to recompute
_TOLERANCE = 0.1


class _Only(dict[int, Tensor]):
    """A dict that stores only the wanted nodes, to save memory."""

    def __init__(self, wanted: Iterable[int]) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)

    def __setitem__(self, node: int, value: Tensor) -> None:
        if node in self.wanted:
            super().__setitem__(node, value)


class Rounding:
    """The outputs of every block for the first few samples, in float64."""

    def __init__(self) -> None:
        self.exact: dict[int, list[Tensor]] = {}  # by block, (tokens, dim) each
        self.count = 0

    def add(self, sample: Sample, ends: Mapping[int, tuple[int, Site]]) -> None:
        """Recomputes one sample; `ends` are the node of the output and the last site of each block."""
        if self.count == _SAMPLES:
            return
        self.count += 1
        kept = _Only(node for node, _ in ends.values())
        start, end = sample.first(), max([sample.last(), *(node for node, _ in ends.values())])
        try:
            with torch.no_grad():
                replay(sample.trace.graph, start, end, torch.float64, keep=kept)(sample.value(start))
        except (ReplayError, RuntimeError, NotImplementedError):  # then its outputs count as exact
            return
        for block, (node, site) in ends.items():
            if node in kept:
                self.exact.setdefault(block, []).append(tokens(kept[node], site)[0])

    def anywhere(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether tokens, sample means or the tokens of any sample differ only by rounding."""
        return any(test(block, outputs) for test in (self.in_tokens, self.in_samples, self.in_patches))

    def in_tokens(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the tokens of all samples together differ only by rounding."""
        return any(_only_rounding(a.flatten(0, 1), b.flatten(0, 1)) for a, b in self._pair(block, outputs))

    def in_samples(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the means of samples differ only by rounding."""
        pairs = [(feature_matrix(a, "pooled"), b.mean(1)) for a, b in self._pair(block, outputs)]
        return any(len(a) > 1 and _only_rounding(a, b) for a, b in pairs)

    def in_patches(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the tokens of any sample differ only by rounding."""
        return any(_only_rounding(*each) for a, b in self._pair(block, outputs) for each in zip(a, b, strict=True))

    def _pair(self, block: int, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The outputs of the recomputed samples and their exact values; empty if there are none."""
        exact = self.exact.get(block, [])
        return [(torch.stack(outputs[: len(exact)]), torch.stack(exact))] if exact else []


def _only_rounding(outputs: Tensor, exact: Tensor) -> bool:
    """Whether rounding is a large part of the deviations of rows (rows, dim) from their mean, or of their rank."""
    rank = effective_rank(outputs)
    if rank == 0:  # constant rows
        return False
    a, b = (x.double() - x.double().mean(0) for x in (outputs, exact))
    if float((a - b).norm()) > _TOLERANCE * float(a.norm()):
        return True
    exact_rank = effective_rank(exact)
    return abs(rank - exact_rank) > _TOLERANCE * max(rank, exact_rank)
