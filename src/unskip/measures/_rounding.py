"""Whether what sets tokens apart is the model or only the rounding of its arithmetic.

    |c(x) - c(x')| > |c(x)| / 10        x a stream as it came out, x' the same in float64, c takes the mean out

Without skips tokens can become so uniform (rank collapse) that they differ in their last digits alone. A rank has no
scale, so it would read that noise as full rank. A few samples are therefore computed once more in float64, from the
first stream on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from unskip.anatomy import ReplayError, Sample, Site, replay, tokens
from unskip.measures.rank import effective_rank, feature_matrix

_SAMPLES = 4  # that are computed again
_APART = 0.1


class _Only(dict[int, Tensor]):
    """Keeps the wanted nodes alone, for memory's sake."""

    def __init__(self, wanted: Iterable[int]) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)

    def __setitem__(self, node: int, value: Tensor) -> None:
        if node in self.wanted:
            super().__setitem__(node, value)


class Rounding:
    """The outputs of every block, in float64, of the first few samples."""

    def __init__(self) -> None:
        self.exact: dict[int, list[Tensor]] = {}  # by block, (tokens, dim) each
        self.count = 0

    def add(self, sample: Sample, ends: Mapping[int, tuple[int, Site]]) -> None:
        """Computes one sample again; `ends` are the nodes of the block outputs, with the last site of each block."""
        if self.count == _SAMPLES:
            return
        self.count += 1
        kept = _Only(node for node, _ in ends.values())
        start, end = sample.first(), max([sample.last(), *(node for node, _ in ends.values())])
        try:
            with torch.no_grad():
                replay(sample.trace.graph, start, end, torch.float64, keep=kept)(sample.value(start))
        except (ReplayError, RuntimeError, NotImplementedError):  # what cannot be computed again is taken as it is
            return
        for block, (node, site) in ends.items():
            if node in kept:
                self.exact.setdefault(block, []).append(tokens(kept[node], site)[0])

    def anywhere(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether anything of a block differs by rounding alone."""
        return any(differ(block, outputs) for differ in (self.in_tokens, self.in_samples, self.in_patches))

    def in_tokens(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the tokens of all samples together differ by rounding."""
        return any(_apart(a.flatten(0, 1), b.flatten(0, 1)) for a, b in self._pair(block, outputs))

    def in_samples(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the means of samples differ by rounding."""
        pairs = [(feature_matrix(a, "pooled"), b.mean(1)) for a, b in self._pair(block, outputs)]
        return any(len(a) > 1 and _apart(a, b) for a, b in pairs)

    def in_patches(self, block: int, outputs: list[Tensor]) -> bool:
        """Whether the tokens of some sample differ by rounding."""
        return any(_apart(*each) for a, b in self._pair(block, outputs) for each in zip(a, b, strict=True))

    def _pair(self, block: int, outputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        exact = self.exact.get(block, [])
        few = outputs[: len(exact)]
        return [(torch.stack(few), torch.stack(exact))] if exact else []


def _apart(outputs: Tensor, exact: Tensor) -> bool:
    """Whether rounding makes up much of what rows (rows, dim) have beside their mean, or moves their rank much."""
    a, b = (x.double() - x.double().mean(0) for x in (outputs, exact))
    size = float(a.norm())
    if size == 0 or effective_rank(outputs) == 0:  # constant as it came out, which rank 0 says
        return False
    if float((a - b).norm()) > _APART * size:
        return True
    one, other = effective_rank(outputs), effective_rank(exact)
    return abs(one - other) > _APART * max(one, other)
