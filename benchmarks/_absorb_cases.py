"""The blocks of `absorb_campaign.py`: adversarial weights, the question about them, and the truth where it is known.

Weights are fractions with a power of two below them, exact in the dtype they are stored in; real weights have a flip
set planted before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from _absorb_oracle import absorbable, canonical, exact, rank

from unskip.absorption import Block, Domain, Norm

# Facts of the oracle's own: c with phi(z) - phi(-z) = c z, and whether phi(r z) = r phi(z).
CLASS_O = {"relu": (1, True), "leaky_relu:0.5": (Fraction(3, 2), True), "leaky_relu:-3": (-2, True)}
CLASS_O |= dict.fromkeys(("gelu", "gelu_tanh", "silu", "softplus", "squareplus", "quick_gelu"), (1, False))
SLOPES = {"leaky_relu:0.01": (1.01, True), "leaky_relu:0.2": (1.2, True)}  # not exact in binary
NEVER = ("tanh", "sigmoid", "relu6", "hardtanh:0,50", "elu", "celu:0.5", "selu", "mish", "abs", "softsign")
GATES = ("swiglu", "geglu", "reglu", "bilinear", "tanh_glu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A block in exact numbers, the question about it, and where the oracle stands."""

    kind: str
    block: Block
    width: int
    biases: str
    domain: Domain | None
    truth: bool | None  # None: not known


def weights_of(random: np.random.Generator, d: int, o: int, h: int, odd: float) -> dict[str, np.ndarray]:
    """Small whole weights with degenerate units, and a skip that is planted, planted and missed, or plain."""
    high = int(random.choice([1, 2, 3]))
    up, down = random.integers(-high, high + 1, (h, d)).astype(float), random.integers(-2, 3, (o, h)).astype(float)
    bias = random.integers(-2, 3, h).astype(float) * (random.random() < 0.6)
    for _ in range(int(random.integers(0, 4))):
        i, j = (int(random.integers(h)) for _ in range(2))
        what = int(random.integers(7))
        if what == 0:
            down[:, i] = 0
        elif what == 1:
            up[i] = 0
        elif what in (2, 3, 4):  # equal, mirrored, twice
            factor = {2: 1.0, 3: -1.0, 4: 2.0}[what]
            up[i], bias[i] = factor * up[j], factor * bias[j]
        elif what == 5 and i != j:  # cancelling
            up[i], bias[i], down[:, i] = up[j], bias[j], -down[:, j]
        else:  # next to equal
            up[i], bias[i] = up[j] * (1 + 2.0 ** -float(random.integers(4, 8))), bias[j]
    chosen = random.random(h) < 0.5
    trick = random.random()
    if trick < 0.45:
        skip = -odd * down[:, chosen] @ up[chosen]
        if trick < 0.12:
            skip[int(random.integers(o)), int(random.integers(d))] += float(random.choice([-1.0, 1.0, 0.5]))
    elif o == d and trick < 0.8:
        skip = float(random.choice([1.0, 0.5, 2.0, -1.0])) * np.eye(d)
    else:
        skip = random.integers(-1, 2, (o, d)).astype(float)
    return {"up": up, "bias": bias, "down": down, "skip": skip}


def block_of(weights: dict[str, np.ndarray], word: str, dtype: torch.dtype, biases: bool = True, **more: Any) -> Block:
    def tensor(value: np.ndarray) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64).to(dtype)

    held = {"up_bias": tensor(weights["bias"]), "down_bias": tensor(np.zeros(len(weights["down"])))} if biases else {}
    skip = torch.tensor(weights["skip"], dtype=torch.float64)
    return Block(tensor(weights["up"]), tensor(weights["down"]), activation=word, skip=skip, **held, **more)


def case(random: np.random.Generator) -> Case:
    """One block with its truth."""
    dtype = DTYPES[int(random.choice(4, p=[0.4, 0.3, 0.1, 0.2]))]
    d, h = int(random.integers(1, 4)), int(random.integers(1, 7))
    o = d if random.random() < 0.7 else int(random.integers(1, 4))
    draw = random.random()
    if draw < 0.12:
        return (_planted if random.random() < 0.75 else _planted_on_a_box)(random, dtype)
    if draw < 0.24:
        return _disguised(random, dtype)
    if draw < 0.72:
        return _class_o(random, d, o, h, dtype)
    if draw < 0.82:
        word = str(random.choice(NEVER))
        weights = weights_of(random, d, o, h, 1.0)
        block = block_of(weights, word, dtype)
        width = max(1, h + int(random.integers(0, 5)))
        return Case("never", block, width, "as-is", None, not weights["skip"].any())
    if draw < 0.89:
        weights = weights_of(random, d, o, h, 2.0)
        width = max(1, h + int(random.choice([0, 0, 1, -1])))
        total = exact(weights["skip"] + weights["down"] @ weights["up"])
        return Case("linear", block_of(weights, "identity", dtype), width, "as-is", None, rank(total) <= width)
    if draw < 0.95:
        weights = weights_of(random, d, o, h, 1.0)
        gate = torch.tensor(random.integers(-2, 3, (h, d)), dtype=torch.float64).to(dtype)
        block = block_of(weights, str(random.choice(GATES)), dtype, biases=False, gate=gate)
        return Case("gated", block, h, "as-is", None, not weights["skip"].any())
    weights = weights_of(random, d, o, h, 1.0)
    norm = Norm(str(random.choice(["layernorm", "rmsnorm"])), str(random.choice(["pre", "out"])), 1e-5)  # type: ignore[arg-type]
    block = block_of(weights, str(random.choice([*CLASS_O, *NEVER])), dtype, norm=norm)
    return Case("pre-norm", block, h, "as-is", None, not weights["skip"].any())


def _planted(random: np.random.Generator, dtype: torch.dtype) -> Case:
    """Real weights in which some units add up to minus the skip, rounded to the dtype afterwards.

    Exactly there may be no replacement any more, but within the rounding of the dtype there is: impossible is wrong.
    In a part of them the skip of one channel or of one oblique direction is small beside the others', and no unit makes
    it up; or one channel is missed by a little, beside channels with larger units; or the rows hardly see some
    directions, down to 1e-12, so that rounding may move the flip set away.
    """
    activations = CLASS_O | SLOPES
    word = str(random.choice(list(activations)))
    odd = float(activations[word][0])
    d = int(random.integers(1, 5))
    h = int(random.integers(d + 1, d + 8))
    up, down = random.standard_normal((h, d)), random.standard_normal((d, h))
    chosen = random.permutation(h)[: int(random.integers(d, h + 1))]
    skip = float(random.choice([1.0, 0.5, -2.0])) * np.eye(d)
    wanted, kind = skip.copy(), "planted"
    trick = random.random() if d > 1 else 1.0
    if trick < 0.4:
        large = abs(skip[0, 0]) * 2.0 ** int(random.integers(2, 10))
        way = np.eye(d)[0]
        if trick < 0.2:
            way = random.standard_normal(d)
            way /= np.linalg.norm(way)
        kind = "one direction missed" if trick < 0.2 else "one channel missed"
        wanted = large * (np.eye(d) - np.outer(way, way))
        skip = wanted + np.outer(way, way)
    elif trick < 0.5:
        kind, scale = "one channel off", np.ones(d)
        scale[1:] = 2.0 ** min(int(random.integers(6, 16)), 7 if dtype == torch.float16 else 16)
        down, skip = down * scale[:, None], skip * scale[:, None]
        wanted = skip.copy()
        wanted[0, 0] *= 1 + 2.0 ** -int(random.integers(4, 18))
    elif trick < 0.7:
        kind, turn = "weak directions", np.linalg.qr(random.standard_normal((d, d)))[0]
        least = {torch.float64: -12, torch.float32: -6}.get(dtype, -2) * random.random()
        up = up @ (turn * 10.0 ** (least * random.random(d))) @ turn.T
    inverse = np.linalg.pinv(up[chosen])
    if np.linalg.norm(inverse) > 20 and kind != "weak directions":
        return _planted(random, dtype)
    down[:, chosen] = -wanted / odd @ inverse + down[:, chosen] @ (np.eye(len(chosen)) - up[chosen] @ inverse)
    weights = {"up": up, "down": down, "bias": random.standard_normal(h), "skip": skip}
    return Case(kind, block_of(weights, word, dtype), h, "as-is", None, True if kind == "planted" else None)


def _planted_on_a_box(random: np.random.Generator, dtype: torch.dtype) -> Case:
    """Real weights, half of the units affine on a box. Their linear part and that of a flip set add up to minus the
    skip, so the other units are enough; in some blocks one entry is missed.
    """
    word = str(random.choice(["relu", "leaky_relu:0.5", *SLOPES]))
    slope = float(word.partition(":")[2] or 0)
    d, h, size = int(random.integers(1, 4)), int(random.integers(2, 9)), float(random.choice([0.5, 1.0, 2.0]))
    up, down = random.standard_normal((h, d)), random.standard_normal((d, h))
    affine, reach = random.random(h) < 0.5, size * abs(up).sum(1)
    sign = random.choice([-1.0, 1.0], h)
    bias = sign * reach * np.where(affine, random.uniform(1.1, 2.0, h), random.uniform(0.0, 0.9, h))
    flips = ~affine & (random.random(h) < 0.5)
    slopes = np.where(affine, np.where(sign > 0, 1.0, slope), 0.0) + np.where(flips, 1 + slope, 0.0)
    skip = -(down * slopes) @ up
    missed = random.random() < 0.3
    if missed:
        skip[0, 0] += random.standard_normal()
    side = torch.full((d,), size, dtype=torch.float64)
    block = block_of({"up": up, "bias": bias, "down": down, "skip": skip}, word, dtype)
    width = max(1, int((~affine).sum()))
    return Case("planted on a box", block, width, "as-is", Domain.box(-side, side), None if missed else True)


def _disguised(random: np.random.Generator, dtype: torch.dtype) -> Case:
    """Begins with a block without a skip and gives it one, exactly: units change sign or are halved, and what that adds
    is the skip. Units are made nearly equal on the way, and some have large biases; in some blocks the channels of the
    input have sizes of their own.
    """
    word = str(random.choice(list(CLASS_O)))
    odd, homogeneous = float(CLASS_O[word][0]), CLASS_O[word][1]
    d, o, h = (int(random.integers(1, most)) for most in (7, 6, 12))
    up, down = random.integers(-6, 7, (h, d)) / 2, random.integers(-4, 5, (o, h)) / 2
    bias = random.integers(-6, 7, h) / 2 * float(random.random() < 0.7)
    for _ in range(int(random.integers(0, 4))):
        i, j, what = (int(random.integers(high)) for high in (h, h, 4))
        near = 2.0 ** -int(random.integers(2, 6))
        up[i], bias[i] = up[j], bias[j]
        if what == 0:
            up[i] *= 1 + near
        elif what == 1:
            bias[i] += random.choice([near, 64.0, -64.0])
        elif what == 2:
            up[i], bias[[i, j]] = up[j] + random.integers(-1, 2, d), random.choice([128.0, -128.0])
        else:
            down[:, i] *= near
    flips = random.random(h) < random.choice([0.2, 0.5, 0.9])
    skip = odd * down[:, flips] @ up[flips]  # phi(z) = phi(-z) + c z
    up[flips], bias[flips] = -up[flips], -bias[flips]
    if random.random() < 0.5:  # one unit as two, the second of them with part of the column
        i, turn = int(random.integers(h)), float(random.choice([-1.0, 1.0]))
        factor = turn * (2.0 if homogeneous and random.random() < 0.5 else 1.0)
        part = random.integers(-3, 4, o) / 2
        up, bias = np.concatenate([up, factor * up[i : i + 1]]), np.append(bias, factor * bias[i])
        if turn < 0:  # phi(-z) = phi(z) - c z
            skip = skip + odd * np.outer(part, up[i])
        down[:, i] -= part
        down = np.concatenate([down, part[:, None] / abs(factor)], 1)
    kind = "disguised"
    if random.random() < 0.25:
        kind, size = "weak channels", 2.0 ** -random.integers(0, 6 if dtype == torch.float16 else 40, d)
        up, skip = up * size, skip * size
    weights = {"up": up, "bias": bias, "down": down, "skip": skip}
    return Case(kind, block_of(weights, word, dtype), h, "as-is", None, True)


def _class_o(random: np.random.Generator, d: int, o: int, h: int, dtype: torch.dtype) -> Case:
    word = str(random.choice(list(CLASS_O)))
    odd, homogeneous = Fraction(CLASS_O[word][0]), CLASS_O[word][1]
    weights = weights_of(random, d, o, h, float(odd))
    width = max(1, h + int(random.choice([0, 0, 0, 0, 1, 2, 3, -1])))
    kind, norm, domain, box, biases = "class O", None, None, None, True
    asked, form = weights, "as-is"
    draw = random.random()
    if draw < 0.12 and o > 1:
        kind, norm = "post layernorm", Norm("layernorm", "post", 1e-5)
        asked = {
            **weights,
            "down": weights["down"][:-1] - weights["down"][-1:],
            "skip": weights["skip"][:-1] - weights["skip"][-1:],
        }
    elif draw < 0.18:
        kind, norm = "post rmsnorm", Norm("rmsnorm", "post", 1e-5)
    elif draw < 0.45 and homogeneous:
        kind, box = "box", Fraction(int(random.choice([1, 2, 4])), 2)
        side = torch.full((d,), float(box), dtype=torch.float64)
        domain = Domain.box(-side, side)
    elif draw < 0.55 and word not in ("softplus", "squareplus"):
        kind, biases = "no biases", False
        weights["bias"][:] = 0
    elif draw < 0.7 and homogeneous:  # rescaled: rows up, columns down
        kind = "rescaled"
        scale = 2.0 ** random.integers(-12, 13, h)
        if dtype == torch.float16:
            scale = scale.clip(2.0**-4, 2.0**4)
        weights["up"], weights["bias"] = weights["up"] * scale[:, None], weights["bias"] * scale
        weights["down"] = weights["down"] / scale
    elif draw < 0.75:
        form = "allowed"
    elif draw < 0.83:  # the same block at inputs of another size: large ones overflow float16
        kind = "inputs rescaled"
        scale = 2.0 ** float(random.integers(-4, 9) if dtype == torch.float16 else random.integers(-40, 21))
        weights["up"], weights["skip"] = weights["up"] * scale, weights["skip"] * scale
    elif draw < 0.9 and dtype != torch.float16:
        kind = "tiny biases"
        weights["bias"] = weights["bias"] * 2.0 ** -float(random.choice([20, 60, 90]))
    block = block_of(weights, word, dtype, biases, norm=norm)
    truth = absorbable(canonical(asked, odd, homogeneous, box), odd, width, box is not None)
    if kind == "box" and odd != 1:
        truth = truth or None  # type: ignore[assignment]  # affine units of a LeakyReLU may look either way
    if kind == "tiny biases" and random.random() < 0.3:  # then a constant has to be made up as well
        block, truth = replace(block, down_bias=None), None if truth else False  # type: ignore[assignment]
    return Case(kind, block, width, form, domain, truth)
