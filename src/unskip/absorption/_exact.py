"""Exact arithmetic on stored weights. A float is m 2^e, so every statement about weights is one about integers.

`flips_exactly` checks A + c W_down[:, S] W_up[S, :] = 0 by Freivalds' test: the map is applied to random vectors modulo
random primes. A map that is not zero passes all rounds with a probability below 1e-18. `no_subset` decides in exact
arithmetic that no t in {0, 1}^m solves one linear equation modulo a prime; a solution of the matrix equation would.
"""

from __future__ import annotations

import secrets
from fractions import Fraction

import numpy as np
from torch import Tensor

from unskip.absorption._reduce import Problem

Integers = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
ROUNDS = 4


def flips_exactly(problem: Problem, flips: Tensor) -> bool:
    """Whether flipping these units leaves no error at all. The norms' quotients are taken exactly."""
    block = problem.block
    odd = block.phi.odd
    if odd is None or block.phi.note:
        return False
    norms = block.norms
    if "input" in norms:
        return False  # its basis is rounded
    chosen = flips.nonzero().flatten()
    up, down = block.up.detach().double()[chosen], block.down.detach().double()[:, chosen]
    parts = [_numpy(value) for value in (up, down, block.matrix)]
    bias = None if block.up_bias is None else _numpy(block.up_bias.detach().double()[chosen])
    const = None if block.down_bias is None else _numpy(block.down_bias.detach().double())
    shift = "post" in norms and norms["post"].kind == "layernorm"
    for _ in range(ROUNDS):
        q = random_prime()
        rows, columns, skip = (residues(part, q) for part in parts)
        x = _random(rows.shape[1], q)
        hidden, out = _apply(rows, x, q), _apply(skip, x, q)
        if not problem.output_bias:  # the constant must vanish as well
            one = np.uint64(1 + secrets.randbelow(q - 1))
            hidden = (hidden + (residues(bias, q) * one if bias is not None else 0)) % np.uint64(q)
            out = (out + (residues(const, q) * one if const is not None else 0)) % np.uint64(q)
        top, bottom = np.uint64(odd.numerator % q), np.uint64(odd.denominator % q)
        total = (out * bottom + _apply(columns, hidden, q) * top) % np.uint64(q)
        if (total != total[0]).any() if shift else total.any():
            return False
    return True


def residues(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], q: int) -> Integers:
    """Floats as integers modulo q, their powers of two included."""
    mantissa, exponent = np.frexp(values)
    whole = (np.abs(mantissa) * 2.0**53).astype(np.uint64) % np.uint64(q)
    low = int(exponent.min(initial=0)) - 53
    powers = np.array([pow(2, e, q) for e in range(low, int(exponent.max(initial=0)) - 52)], dtype=np.uint64)
    out = whole * powers[exponent - 53 - low] % np.uint64(q)
    signed: Integers = np.where(values < 0, (np.uint64(q) - out) % np.uint64(q), out)
    return signed


def random_prime(bits: int = 31) -> int:
    """A random prime with this many bits."""
    while True:
        candidate = secrets.randbits(bits) | (1 << (bits - 1)) | 1
        if _is_prime(candidate):
            return candidate


def _is_prime(n: int) -> bool:
    if any(n % p == 0 for p in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)):
        return False
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # enough for every n below 3e24
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def hashed(
    joint: Tensor, rows: Tensor, goal: Tensor, odd: Fraction, skip: Tensor
) -> tuple[int, list[list[int]], list[int], int]:
    """A random functional modulo a 61-bit prime: its weights Z, its value on each rank-one, and on -A / c."""
    q = random_prime(61)
    o, n = skip.shape
    z = [[secrets.randbelow(q) for _ in range(n)] for _ in range(o)]
    values = [functional(z, joint[:, k].tolist(), rows[k].tolist(), q) for k in range(len(rows))]
    total = sum(z[i][j] * exact_residue(a, q) for i, row in enumerate(skip.tolist()) for j, a in enumerate(row)) % q
    goal_value = -total * odd.denominator * pow(odd.numerator, -1, q) % q
    return q, z, values, goal_value


def functional(z: list[list[int]], column: list[float], row: list[float], q: int) -> int:
    """<Z, v u^T> modulo q, without rounding."""
    u = [exact_residue(value, q) for value in row]
    return (
        sum(
            exact_residue(v, q) * sum(a * b for a, b in zip(line, u, strict=True))
            for v, line in zip(column, z, strict=True)
        )
        % q
    )


def exact_residue(value: float, q: int) -> int:
    """One float modulo q."""
    top, bottom = value.as_integer_ratio()
    return top * pow(bottom, -1, q) % q


def no_subset(values: list[int], goal: int, q: int) -> bool:
    """Whether no subset of the values sums to the goal modulo q: sums of each half, and a search in the other."""
    half = len(values) // 2
    left, right = _sums(values[:half], q), np.sort(_sums(values[half:], q))
    wanted = (np.uint64(q) + np.uint64(goal) - left) % np.uint64(q)
    place = np.searchsorted(right, wanted)
    return not bool((right[np.minimum(place, len(right) - 1)] == wanted).any())


def _sums(values: list[int], q: int) -> Integers:
    sums = np.zeros(1, dtype=np.uint64)
    for value in values:  # each below 2^61, so a sum of two fits
        sums = np.concatenate([sums, (sums + np.uint64(value)) % np.uint64(q)])
    return sums


def _apply(matrix: Integers, x: Integers, q: int) -> Integers:
    # Products stay below 2^62, sums of residues far below 2^64.
    out: Integers = (matrix * x % np.uint64(q)).sum(1) % np.uint64(q)
    return out


def _random(n: int, q: int) -> Integers:
    return np.array([secrets.randbelow(q) for _ in range(n)], dtype=np.uint64)


def _numpy(value: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return value.cpu().numpy()
