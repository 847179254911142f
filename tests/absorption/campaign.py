"""Random and adversarial small blocks with whole weights, and the truth about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tests.absorption import oracle

from unskip.absorption import Block, Norm, absorb

WORDS = {"relu": (1.0, True), "gelu": (1.0, False), "silu": (1.0, False), "leaky_relu:-3": (-2.0, True)}
WORDS |= {"softplus": (1.0, False), "leaky_relu:0.5": (1.5, True)}


def case(random: np.random.Generator) -> tuple[Block, dict[str, np.ndarray], int, float, bool]:
    """A block, its weights, a width, c and whether phi is homogeneous."""
    word = str(random.choice(list(WORDS)))
    odd, homogeneous = WORDS[word]
    d, o, h = (int(random.integers(1, high)) for high in (4, 4, 7))
    if random.random() < 0.6:
        o = d
    up, down = random.integers(-2, 3, (h, d)), random.integers(-2, 3, (o, h))
    bias = random.integers(-1, 2, h) if random.random() < 0.6 else np.zeros(h, dtype=int)
    skip = random.integers(-1, 2, (o, d)).astype(float)
    if o == d and random.random() < 0.5:
        skip = float(random.choice([1.0, 2.0, 0.5, -1.0])) * np.eye(d)
    trick = random.random()
    if trick < 0.4:  # planted: the skip is what some units add up to
        chosen = random.random(h) < 0.5
        skip = -odd * down[:, chosen] @ up[chosen].astype(float)
        if trick < 0.1:
            skip[random.integers(o), random.integers(d)] += random.choice([-1.0, 1.0])
    for _ in range(int(random.integers(0, 3))):  # degenerate units
        i, j = (int(random.integers(h)) for _ in range(2))
        what = random.integers(5)
        if what == 0:
            down[:, i] = 0
        elif what == 1:
            up[i] = 0
        elif what == 2:
            up[i], bias[i] = up[j], bias[j]
        elif what == 3:
            up[i], bias[i] = -up[j], -bias[j]
        else:
            up[i], bias[i] = 2 * up[j], 2 * bias[j]
    width = h + int(random.choice([0, 0, 0, 0, 0, 1, 2, -1]))
    width = max(width, 1)
    weights = {"up": up, "bias": bias, "down": down, "skip": skip}
    dtype = torch.float32 if random.random() < 0.3 else torch.float64
    block = Block(
        torch.tensor(up, dtype=dtype),
        torch.tensor(down, dtype=dtype),
        up_bias=torch.tensor(bias, dtype=dtype),
        down_bias=torch.zeros(o, dtype=dtype),
        activation=word,
        skip=torch.tensor(skip),
    )
    return block, weights, width, odd, homogeneous


def reduced(weights: dict[str, np.ndarray], norm: Norm | None) -> dict[str, np.ndarray]:
    """The same question without its norm, in whole numbers: differences of outputs, or of inputs, are what is left."""
    if norm is None or norm.kind == "rmsnorm":
        return weights
    up, down, skip = weights["up"], weights["down"], weights["skip"]
    if norm.place == "post":
        return {**weights, "down": down[:-1] - down[-1:], "skip": skip[:-1] - skip[-1:]}
    return {**weights, "up": up[:, :-1] - up[:, -1:], "skip": skip[:, :-1] - skip[:, -1:]}


def normed(random: np.random.Generator, block: Block, homogeneous: bool) -> Norm | None:
    """A norm, or none; what comes out of a norm is a ball, for which the truth is not written down for kinks."""
    choice = random.random()
    if choice < 0.15 and block.outputs > 1:
        return Norm("layernorm", "post", 1e-5)
    if choice < 0.2:
        return Norm("rmsnorm", "post", 1e-5)
    if choice < 0.35 and block.inputs > 1 and not homogeneous:
        return Norm("layernorm", "input", 1e-5)
    return None


def run(count: int, seed: int) -> dict[str, int]:
    """Decides `count` blocks and compares each with the truth. A wrong verdict raises."""
    random = np.random.default_rng(seed)
    counts = {"possible": 0, "impossible": 0, "undecided": 0}
    for index in range(count):
        block, weights, width, odd, homogeneous = case(random)
        norm = normed(random, block, homogeneous)
        block = replace(block, norm=norm)
        truth = oracle.absorbable(**reduced(weights, norm), odd=odd, homogeneous=homogeneous, width=width)
        verdict = absorb(block, width=width)
        where = f"seed {seed}, block {index}, {norm}: {verdict} but the truth is {truth}: {weights}"
        assert verdict.status != ("impossible" if truth else "possible"), where
        assert verdict.verify(), f"does not verify: {where}"
        counts[verdict.status] += 1
    return counts


def run_without_constants(count: int, seed: int) -> dict[str, int]:
    """Blocks with hidden biases and no output bias: a flip set also has to leave no constant. No degenerate units."""
    random = np.random.default_rng(seed)
    counts = {"possible": 0, "impossible": 0, "undecided": 0}
    while sum(counts.values()) < count:
        d, h = int(random.integers(1, 4)), int(random.integers(1, 7))
        up, down = random.integers(-3, 4, (h, d)), random.integers(-2, 3, (d, h))
        bias = random.integers(-2, 3, h)
        if len(oracle.keys(up, bias, down, False)) < h:
            continue
        chosen = random.random(h) < 0.5
        skip = -(down[:, chosen] @ up[chosen]).astype(float)
        if random.random() < 0.3 and chosen.any():
            bias[chosen] = 0
        if len(oracle.keys(up, bias, down, False)) < h:
            continue
        whole = np.concatenate([up, bias[:, None]], 1)
        miss, _ = oracle.closest(whole, down, np.concatenate([skip, np.zeros((d, 1))], 1), 1.0)
        tensors = (torch.tensor(value, dtype=torch.float64) for value in (up, down, bias, skip))
        one, two, three, four = tensors
        verdict = absorb(Block(one, two, up_bias=three, activation="gelu", skip=four))
        where = f"seed {seed}: {verdict} but the nearest flip set misses by {miss}: {up} {bias} {down} {skip}"
        assert verdict.status != ("impossible" if miss < 1e-9 else "possible"), where
        assert verdict.verify(), where
        counts[verdict.status] += 1
    return counts


def run_with_idle_units(count: int, seed: int) -> dict[str, int]:
    """The same with units that count for nothing, at the width of those that count, where only flips are left.

    Dead units give a constant, and a pair that cancels in all but its odd part a linear map. With one unit more there
    is no oracle, but what is said to be impossible must be so with output biases too, for which there is one.
    """
    random = np.random.default_rng(seed)
    counts = {"possible": 0, "impossible": 0, "undecided": 0}
    while sum(counts.values()) < count:
        d, h = int(random.integers(1, 4)), int(random.integers(1, 6))
        up, down, bias = random.integers(-3, 4, (h, d)), random.integers(-2, 3, (d, h)), random.integers(-2, 3, h)
        if len(oracle.keys(up, bias, down, False)) < h:
            continue
        chosen = random.random(h) < 0.5
        whole = np.concatenate([up, bias[:, None]], 1)
        goal = -(down[:, chosen] @ whole[chosen]).astype(float)  # what the skip and all constants should come to
        rows, columns, skip = whole.astype(float), down.astype(float), goal[:, :-1].copy()
        const = np.zeros(d)
        kinds = random.integers(0, 4, int(random.integers(1, 4))).tolist()
        for kind in [*kinds, *([4] if random.random() < 0.5 else [])]:
            row, column = random.integers(-3, 4, d + 1).astype(float), random.integers(-2, 3, d).astype(float)
            if kind == 4:  # planted: it makes up the constant
                row[-1], column = 1, goal[:, -1] - const
            if kind == 0:
                column[:] = 0
            elif kind == 1:
                row[:-1] = 0
                const += column * float(torch.nn.functional.gelu(torch.tensor(row[-1], dtype=torch.float64)))
            else:  # twice the same, or once mirrored, and the columns cancel
                turn = 1.0 if kind == 2 else -1.0
                rows, columns = np.vstack([rows, turn * row]), np.column_stack([columns, -column])
                if kind >= 3:
                    skip -= np.outer(column, row[:-1])
                    const += column * row[-1]
            rows, columns = np.vstack([rows, row]), np.column_stack([columns, column])
        order = random.permutation(len(rows))
        up, bias, down = rows[order, :-1], rows[order, -1], columns[:, order]
        if len(oracle.keys(up.astype(int), bias.astype(int), down.astype(int), False)) != h:
            continue  # an idle unit met another
        miss, _ = oracle.closest(whole, columns[:, :h], np.column_stack([goal[:, :-1], const]), 1.0)
        tensors = [torch.tensor(value, dtype=torch.float64) for value in (up, down, bias, skip)]
        block = Block(tensors[0], tensors[1], up_bias=tensors[2], activation="gelu", skip=tensors[3])
        verdict = absorb(block, width=h)
        where = f"seed {seed}: {verdict} but the nearest flip set misses by {miss}: {up} {bias} {down} {skip}"
        assert verdict.status != ("impossible" if miss < 1e-9 else "possible"), where
        assert verdict.verify(), where
        counts[verdict.status] += 1
        wide = absorb(block, width=h + 1)
        weights = {"up": up.astype(int), "bias": bias.astype(int), "down": down.astype(int), "skip": skip}
        if wide.status == "impossible":
            assert not oracle.absorbable(**weights, odd=1.0, homogeneous=False, width=h + 1), wide
        assert wide.verify()
    return counts
