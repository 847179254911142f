"""The truth for small blocks of class O, by brute force in whole numbers: no code of the package is used.

With active keys k (units merged), p = width - m spare units, signs s_k, split keys T and q fresh pairs, a replacement
exists if and only if for some |T| + 2 q <= p and some signs

    rank( (A + (c / 2) W_down W_up - (c / 2) sum_{k not in T} s_k J_k u_k^T) P_T ) <= q,

P_T the projector away from the rows of T; rank(M P_T) = rank([M; U_T]) - rank(U_T). Weights are small integers, so
ranks in floating point are right.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np


def keys(up: np.ndarray, bias: np.ndarray, down: np.ndarray, homogeneous: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """The active keys: (row, J) in exact fractions turned to floats; rows are those of the first unit."""
    groups: dict[tuple[Fraction, ...], list[tuple[int, Fraction]]] = {}
    for i, (row, b) in enumerate(zip(up, bias, strict=True)):
        if not row.any():
            continue
        full = [Fraction(int(x)) for x in (*row, b)]
        lead = next(x for x in full if x)
        scale = abs(lead) if homogeneous else Fraction(1)
        sign = 1 if lead > 0 else -1
        groups.setdefault(tuple(sign * x / scale for x in full), []).append((i, scale))
    found = []
    for name, members in groups.items():
        joint = sum((scale * np.array([Fraction(int(x)) for x in down[:, i]]) for i, scale in members), start=0)
        if any(joint):
            found.append((np.array([float(x) for x in name[:-1]]), np.array([float(x) for x in joint])))
    return found


def absorbable(
    up: np.ndarray, bias: np.ndarray, down: np.ndarray, skip: np.ndarray, odd: float, homogeneous: bool, width: int
) -> bool:
    """Whether a replacement of this width exists, all biases allowed."""
    found = keys(up, bias, down, homogeneous)
    m, n = len(found), up.shape[1]
    spares = width - m
    if spares < 0:
        return False
    whole = skip + odd / 2 * down @ up
    rows = np.array([row for row, _ in found]).reshape(m, n)
    ones = np.array([np.outer(joint, row) for row, joint in found]).reshape(m, *skip.shape)
    for size in range(min(spares, m) + 1):
        pairs = (spares - size) // 2
        for split in itertools.combinations(range(m), size):
            rest = [k for k in range(m) if k not in split]
            held = rows[list(split)]
            base = np.linalg.matrix_rank(held) if size else 0
            signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(rest)))).reshape(2 ** len(rest), len(rest))
            left = whole - odd / 2 * np.einsum("sk,kij->sij", signs, ones[rest])
            stack = np.concatenate([left, np.broadcast_to(held, (len(left), *held.shape))], 1)
            if (np.linalg.matrix_rank(stack, tol=1e-9) - base <= pairs).any():
                return True
    return False


def closest(up: np.ndarray, down: np.ndarray, skip: np.ndarray, odd: float) -> tuple[float, tuple[int, ...]]:
    """The least |A + c W_down[:, S] W_up[S]|_F over all S, and its S."""
    best = (float("inf"), ())
    for size in range(len(up) + 1):
        for chosen in itertools.combinations(range(len(up)), size):
            at = list(chosen)
            best = min(best, (float(np.linalg.norm(skip + odd * down[:, at] @ up[at])), chosen))
    return best
