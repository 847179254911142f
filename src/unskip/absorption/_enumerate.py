"""Small cases that the linear algebra leaves open, by trying them all.

Where the rank-ones are dependent, deciding is as hard as SUBSET-SUM. Up to 20 keys every subset is tried; up to 40 the
sums of two halves are compared, in floats for a subset that fits within rounding and modulo a prime for a proof that
none fits exactly; beyond that an integer program (HiGHS) may still find one. With p spare units a replacement may also
split the keys of a set T (one more unit each) and add q fresh pairs (two units each, any rank-one), so with signs t on
the other keys the condition is, for some |T| + 2 q <= p,

    rank [ sum_{k not in T} t_k J_k u_k^T - B ;  u_k, k in T ]  <=  q + |T|.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ALL = 20  # keys whose subsets are all tried
HALVES = 40  # keys that are decided in two halves
PROGRAM = 60  # keys that the integer program is asked about
CASES = 20_000  # (T, t) that are tried with spare units


def closest(joint: Tensor, rows: Tensor, goal: Tensor) -> tuple[Tensor, float]:
    """The subset whose sum comes closest to the goal, and how close: min over S of |sum_S J u^T - B|_F."""
    m = len(rows)
    flat = (joint.mT[:, :, None] * rows[:, None, :]).reshape(m, -1)
    half = m // 2
    left, right = _table(flat[:half]) - goal.flatten(), _table(flat[half:])
    best: list[tuple[float, int, int]] = []
    square = right.square().sum(1)
    for start in range(0, len(left), 512):
        part = left[start : start + 512]
        apart = part.square().sum(1)[:, None] + square + 2 * part @ right.mT
        value, place = apart.flatten().topk(min(8, apart.numel()), largest=False)
        best += [
            (float(v), start + int(p) // len(right), int(p) % len(right)) for v, p in zip(value, place, strict=True)
        ]
    best.sort()
    # The quadratic loses digits near zero, so the best few are computed again.
    gap, i, j = min((float((left[i] + right[j]).norm()), i, j) for _, i, j in best[:64])
    mask = torch.zeros(m, dtype=torch.bool, device=rows.device)
    for k in range(m):
        mask[k] = bool((i >> k) & 1) if k < half else bool((j >> (k - half)) & 1)
    return mask, gap


def _table(flat: Tensor) -> Tensor:
    sums = flat.new_zeros(1, flat.shape[1])
    for row in flat:
        sums = torch.cat([sums, sums + row])
    return sums


def in_halves(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float) -> tuple[Tensor, float] | None:
    """As `closest`, but only among the subsets within the tolerance; a gap of inf says that there is none.

    One random functional of the equation is solved by sorting the sums of each half. None where too many remain.
    """
    m = len(rows)
    flat = (joint.mT[:, :, None] * rows[:, None, :]).reshape(m, -1)
    probe = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(m), dtype=torch.float64).to(flat.device)
    probe /= probe.norm()
    values, aim = flat @ probe, float(goal.flatten() @ probe)
    half = m // 2
    left, right = _table(values[:half, None]).flatten(), _table(values[half:, None]).flatten()
    order = right.argsort()
    right = right[order]
    reach = tolerance + 1e-14 * float(values.abs().sum() + abs(aim))
    low = torch.searchsorted(right, aim - left - reach)
    high = torch.searchsorted(right, aim - left + reach, right=True)
    if int((high - low).sum()) > 1_000_000:
        return None
    best, gap = torch.zeros(m, dtype=torch.bool, device=rows.device), math.inf
    for i in torch.nonzero(high > low).flatten().tolist():
        for place in range(int(low[i]), int(high[i])):
            code = i | (int(order[place]) << half)
            mask = torch.tensor([bool((code >> k) & 1) for k in range(m)]).to(rows.device)
            miss = float((flat[mask].sum(0) - goal.flatten()).norm())
            if miss < gap and miss <= tolerance + 1e-14 * float(flat.abs().sum()):
                best, gap = mask, miss
    return best, gap


def program(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float, seconds: float = 5.0) -> Tensor | None:
    """An integer program: every entry of the equation within the tolerance. None where no t was found in time."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    m = len(rows)
    flat = (joint.mT[:, :, None] * rows[:, None, :]).reshape(m, -1).mT.cpu().numpy()
    aim = goal.flatten().cpu().numpy()
    size = np.maximum(np.abs(flat).max(1, initial=0), np.abs(aim))
    keep = size > 0
    flat, aim = flat[keep] / size[keep, None], aim[keep] / size[keep]
    slack = tolerance / size[keep] + 1e-9
    done = milp(
        np.zeros(m),
        constraints=LinearConstraint(flat, aim - slack, aim + slack),
        bounds=Bounds(0, 1),
        integrality=np.ones(m),
        options={"time_limit": seconds},
    )
    return torch.as_tensor(done.x > 0.5) if done.status == 0 else None


@dataclass(frozen=True, eq=False)
class Split:
    """A way to use spare units: the keys that are split, and the flips of the others."""

    split: tuple[int, ...]
    flips: Tensor


def cases(m: int, spares: int) -> int:
    """How many (T, t) there are to try."""
    return sum(math.comb(m, size) * 2 ** (m - size) for size in range(min(spares, m) + 1))


def exhaust(
    joint: Tensor, rows: Tensor, goal: Tensor, spares: int, affine: bool, tolerance: float
) -> tuple[Split | None, float]:
    """Tries every use of the spare units. The one that works, or the least singular value that stood in the way.

    `affine`: a unit whose kink misses the domain gives any rank-one alone, so splitting is never needed.
    """
    least = math.inf
    for split, flips in _choices(len(rows), 0 if affine else spares):
        fresh = spares if affine else (spares - len(split)) // 2
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[list(split)] = False
        rest = (joint[:, kept] * flips[:, kept][:, None, :]) @ rows[kept] - goal  # (choices, o, n)
        held = rows[list(split)]
        held = held * (goal.norm() / held.norm(dim=1, keepdim=True))
        stack = torch.cat([rest, held.expand(len(flips), -1, -1)], 1)
        values = torch.linalg.svdvals(stack)
        place = fresh + len(split)
        if place >= values.shape[1]:
            return Split(split, flips[0].bool()), 0.0
        gap, index = values[:, place].min(0)
        if float(gap) <= tolerance:
            return Split(split, flips[int(index)].bool()), 0.0
        least = min(least, float(gap))
    return None, least


def _choices(m: int, spares: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    for size in range(min(spares, m) + 1):
        for split in itertools.combinations(range(m), size):
            free = [k for k in range(m) if k not in split]
            signs = torch.zeros(2 ** len(free), m, dtype=torch.float64)
            codes = torch.arange(2 ** len(free))
            for place, k in enumerate(free):
                signs[:, k] = ((codes >> place) & 1).double()
            yield split, signs
