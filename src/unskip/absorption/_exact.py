"""Exact arithmetic on stored weights. A float is m 2^e, so every statement about weights is one about integers.

`flips_exactly` checks A + c W_down[:, S] W_up[S, :] = 0 by Freivalds' test: the map is applied to random vectors modulo
random primes. A map that is not zero passes all rounds with a probability below 1e-18.
"""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from unskip.absorption._problem import Problem

ROUNDS = 4
AT_ONCE = 2**22  # entries that are turned into residues at a time


def flips_exactly(problem: Problem, flips: Tensor) -> bool:
    """Whether flipping these units, by index, leaves no error at all. The norms' quotients are taken exactly."""
    block = problem.block
    odd = block.phi.odd
    if odd is None or block.phi.note:
        return False
    norms = block.norms
    if "input" in norms:
        return False  # its basis is rounded
    chosen = flips.to(block.up.device)
    rows, columns, skip = block.up.detach().double()[chosen], block.down.detach().double()[:, chosen], block.matrix
    bias = None if block.up_bias is None else block.up_bias.detach().double()[chosen]
    const = None if block.down_bias is None else block.down_bias.detach().double()
    shift = "post" in norms and norms["post"].kind == "layernorm"
    for _ in range(ROUNDS):
        q = random_prime()
        x = torch.tensor([secrets.randbelow(q) for _ in range(rows.shape[1])]).to(rows.device)
        hidden, out = _apply(rows, x, q), _apply(skip, x, q)
        if not problem.output_bias:  # the constant must vanish as well
            one = 1 + secrets.randbelow(q - 1)
            hidden = hidden if bias is None else (hidden + residues(bias, q) * one) % q
            out = out if const is None else (out + residues(const, q) * one) % q
        total = (out * (odd.denominator % q) + _apply(columns, hidden, q) * (odd.numerator % q)) % q
        if bool((total != total[0]).any() if shift else total.any()):
            return False
    return True


def residues(values: Tensor, q: int) -> Tensor:
    """Floats as integers modulo a prime q of at most 31 bits, their powers of two included."""
    mantissa, exponent = torch.frexp(values)
    if not values.numel():
        return exponent.long()
    whole = (mantissa.abs() * 2.0**53).long() % q
    low, high = int(exponent.min()) - 53, int(exponent.max()) - 53
    powers = torch.tensor([pow(2, e, q) for e in range(low, high + 1)]).to(values.device)
    out = whole * powers[exponent.long() - 53 - low] % q  # a product stays below 2^62
    return torch.where(values < 0, (q - out) % q, out)


def random_prime() -> int:
    """A random number of 31 bits that passes Fermat's test, so hardly ever not a prime: then it only tells less."""
    while True:
        found = secrets.randbits(31) | (1 << 30) | 1
        if pow(2, found - 1, found) == pow(3, found - 1, found) == 1:
            return found


def _apply(matrix: Tensor, x: Tensor, q: int) -> Tensor:
    """A matrix of floats times a vector of residues. Sums of residues stay far below 2^63."""
    some = max(1, AT_ONCE // max(1, matrix.shape[1]))
    return torch.cat([(residues(part, q) * x % q).sum(1) % q for part in matrix.split(some)])
