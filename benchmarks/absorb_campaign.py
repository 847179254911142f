"""An attack on `unskip.absorb`: adversarial blocks whose truth is known without a line of the library.

    python benchmarks/absorb_campaign.py --count 100000            # writes docs/results/absorb-campaign.json

Weights are fractions with a power of two below them, exact in the dtype they are stored in. The oracle decides in
`fractions.Fraction`: for class O whether flips, splits and fresh pairs make up the skip (on a box: flips and affine
units), for linear blocks by rank, for the other families by their theorem. Real weights have a flip set planted before
they are rounded. What is called possible is also computed at rational points, exactly for piecewise linear activations.
A wrong verdict is

    impossible   where the oracle finds a replacement
    possible     where it finds none, unless the replacement errs at most 4 times what the block itself loses by
                 computing in its dtype (coarse dtypes only; these are counted as "within rounding")
    any          that its own check does not take, or that differs between two dtypes as possible and impossible
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unskip
from unskip.absorption import Block, Domain, Norm, absorb

ROOT = Path(__file__).resolve().parent.parent
Matrix = list[list[Fraction]]

# Facts of the oracle's own: c with phi(z) - phi(-z) = c z, and whether phi(r z) = r phi(z).
CLASS_O = {"relu": (1, True), "leaky_relu:0.5": (Fraction(3, 2), True), "leaky_relu:-3": (-2, True)}
CLASS_O |= dict.fromkeys(("gelu", "gelu_tanh", "silu", "softplus", "squareplus", "quick_gelu"), (1, False))
NEVER = ("tanh", "sigmoid", "relu6", "hardtanh:0,50", "elu", "celu:0.5", "selu", "mish", "abs", "softsign")
EXACT = {
    "relu": lambda z: max(z, Fraction(0)),
    "leaky_relu:0.5": lambda z: z if z > 0 else z / 2,
    "leaky_relu:-3": lambda z: z if z > 0 else -3 * z,
    "identity": lambda z: z,
    "abs": abs,
}
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


# --- Exact linear algebra ---------------------------------------------------------------------------------------------


def exact(values: np.ndarray) -> Matrix:
    return [[Fraction(float(x)) for x in row] for row in np.atleast_2d(values)]


def rank(matrix: Matrix) -> int:
    """By elimination, without rounding."""
    rows, done = [list(row) for row in matrix], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((i for i in range(done, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        for i in range(done + 1, len(rows)):
            if rows[i][column]:
                factor = rows[i][column] / rows[done][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[done], strict=True)]
        done += 1
    return done


@dataclass(frozen=True)
class Canonical:
    """Active keys with their row and joint column, and the linear part of the block."""

    rows: Matrix  # m x n
    joint: Matrix  # m x o
    linear: Matrix  # o x n: A + (c / 2) W_down W_up, or what the affine units leave on a box


def canonical(weights: dict[str, np.ndarray], odd: Fraction, homogeneous: bool, box: Any = None) -> Canonical:
    up, bias, down, skip = (exact(weights[name]) for name in ("up", "bias", "down", "skip"))
    n, o = len(up[0]), len(skip)
    groups: dict[tuple[Fraction, ...], list[Fraction]] = {}
    linear = [list(row) for row in skip]
    for i, row in enumerate(up):
        column = [down[k][i] for k in range(o)]
        shift = bias[0][i]
        slope = odd / 2
        if box is not None:  # a hinge that misses the box leaves an affine unit
            reach = sum(abs(u) * box for u in row)
            if abs(shift) >= reach and any(row):
                slope = Fraction(1) if shift > 0 else odd - 1
                row_counts = False
            else:
                row_counts = True
        else:
            row_counts = True
        for k in range(o):
            for j in range(n):
                linear[k][j] += slope * column[k] * row[j]
        if not any(row) or not row_counts:
            continue
        lead = next(x for x in row if x)
        scale = abs(lead) if homogeneous else Fraction(1)
        sign = 1 if lead > 0 else -1
        name = tuple(sign * x / scale for x in (*row, shift))
        joint = groups.setdefault(name, [Fraction(0)] * o)
        for k in range(o):
            joint[k] += scale * column[k]
    kept = {name: joint for name, joint in groups.items() if any(joint)}
    return Canonical([list(name[:-1]) for name in kept], list(kept.values()), linear)


def absorbable(form: Canonical, odd: Fraction, width: int, box: bool) -> bool:
    """Whether flips, splits of some keys and fresh pairs (on a box: affine units) make up the linear part."""
    m = len(form.rows)
    spares = width - m
    if spares < 0:
        return False
    o, n = len(form.linear), len(form.linear[0])
    half = odd / 2
    ones = [
        [[half * joint[k] * row[j] for j in range(n)] for k in range(o)]
        for row, joint in zip(form.rows, form.joint, strict=True)
    ]
    rough = np.array([[[float(x) for x in line] for line in one] for one in ones]).reshape(m, o, n)
    whole = np.array([[float(x) for x in line] for line in form.linear])
    for size in range((0 if box else min(spares, m)) + 1):
        room = spares if box else (spares - size) // 2
        for split in itertools.combinations(range(m), size):
            rest = [k for k in range(m) if k not in split]
            held = [form.rows[k] for k in split]
            base = rank(held) if held else 0
            signs = np.array(list(itertools.product((1, -1), repeat=len(rest)))).reshape(2 ** len(rest), len(rest))
            left = whole - np.einsum("sk,kij->sij", signs, rough[rest])
            most = base + room
            stack = left
            if held:
                lines = np.array([[float(x) for x in line] for line in held])
                size_of = max(float(np.abs(whole).max()), 1e-30) / float(np.abs(lines).max())
                stack = np.concatenate([left, np.broadcast_to(size_of * lines, (len(left), *lines.shape))], 1)
            if most >= min(stack.shape[1:]):
                return True
            # Floats say which choices are worth a look; fractions decide.
            values = np.linalg.svd(stack, compute_uv=False)
            for at in np.nonzero(values[:, most] <= 1e-6 * np.maximum(values[:, 0], 1e-300))[0]:
                result = [list(line) for line in form.linear]
                for sign, k in zip(signs[at], rest, strict=True):
                    for i in range(o):
                        for j in range(n):
                            result[i][j] -= int(sign) * ones[k][i][j]
                if rank(result + held) <= most:
                    return True
    return False


# --- Cases ------------------------------------------------------------------------------------------------------------


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
        return _planted(random, dtype)
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
    """
    word = str(random.choice(list(CLASS_O)))
    odd = float(CLASS_O[word][0])
    d = int(random.integers(1, 5))
    h = int(random.integers(d + 1, d + 8))
    up, down = random.standard_normal((h, d)), random.standard_normal((d, h))
    chosen = random.permutation(h)[: int(random.integers(d, h + 1))]
    skip = float(random.choice([1.0, 0.5, -2.0])) * np.eye(d)
    inverse = np.linalg.pinv(up[chosen])
    if np.linalg.norm(inverse) > 20:
        return _planted(random, dtype)
    down[:, chosen] = -skip / odd @ inverse + down[:, chosen] @ (np.eye(len(chosen)) - up[chosen] @ inverse)
    weights = {"up": up, "down": down, "bias": random.standard_normal(h), "skip": skip}
    return Case("planted", block_of(weights, word, dtype), h, "as-is", None, True)


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
    block = block_of(weights, word, dtype, biases, norm=norm)
    truth = absorbable(canonical(asked, odd, homogeneous, box), odd, width, box is not None)
    if kind == "box" and odd != 1:
        truth = truth or None  # type: ignore[assignment]  # affine units of a LeakyReLU may look either way
    return Case(kind, block, width, form, domain, truth)


# --- The attack -------------------------------------------------------------------------------------------------------


def within_rounding(block: Block, other: Block, domain: Domain | None, random: np.random.Generator) -> bool:
    """The rule, measured here: 1e-10 of the block's terms in float64, else 4 times what the block itself loses."""
    for size in (1e-2, 1.0, 1e2, 1e5):
        x = torch.tensor(size * random.standard_normal((32, block.inputs)))
        if domain is not None:
            x = torch.tensor(random.uniform(-1, 1, (32, block.inputs))) * domain.factor  # a box around the origin
        low = x.to(block.dtype)
        truth, made = block.bare().double()(low.double()), other.bare().double()(low.double())
        if "post" in block.norms and block.norms["post"].kind == "layernorm":
            made, truth = made - made.mean(1, keepdim=True), truth - truth.mean(1, keepdim=True)
        gap = float((made - truth).norm())
        up, down = block.up.double().abs(), block.down.double().abs()
        shift = 0 if block.up_bias is None else block.up_bias.double().abs()
        terms = float(
            (low.double().abs() @ block.matrix.abs().mT + (low.double().abs() @ up.mT + shift + 1) @ down.mT).norm()
        )
        if block.dtype == torch.float64:
            if gap > 1e-10 * terms:
                return False
            continue
        here = block.bare()(low).double()
        if not bool(torch.isfinite(here).all()):
            continue
        if "post" in block.norms and block.norms["post"].kind == "layernorm":
            here = here - here.mean(1, keepdim=True)
        own = max(float((here - truth).norm()), torch.finfo(block.dtype).eps / 2 * float(truth.norm()))
        if gap > 4 * own:
            return False
    return True


def equal_exactly(block: Block, other: Block, random: np.random.Generator) -> bool:
    """At rational points, without rounding: the difference is at most 1e-9 of the block's terms (float64 weights)."""
    phi = EXACT[block.activation]

    def run(one: Block, x: list[Fraction]) -> tuple[list[Fraction], Fraction]:
        up, down = exact(one.up.double().numpy()), exact(one.down.double().numpy())
        bias = [Fraction(0)] * len(up) if one.up_bias is None else exact(one.up_bias.double().numpy())[0]
        const = [Fraction(0)] * len(down) if one.down_bias is None else exact(one.down_bias.double().numpy())[0]
        skip = exact(one.matrix.numpy())
        z = [sum(a * b for a, b in zip(row, x, strict=True)) + shift for row, shift in zip(up, bias, strict=True)]
        size = [
            sum(abs(a * b) for a, b in zip(row, x, strict=True)) + abs(shift)
            for row, shift in zip(up, bias, strict=True)
        ]
        hidden = [phi(each) for each in z]
        out, total = [], Fraction(0)
        for k in range(len(down)):
            out.append(
                sum(a * b for a, b in zip(skip[k], x, strict=True))
                + sum(a * b for a, b in zip(down[k], hidden, strict=True))
                + const[k]
            )
            total += sum(abs(a * b) for a, b in zip(skip[k], x, strict=True)) + abs(const[k])
            total += sum(abs(a) * 4 * b for a, b in zip(down[k], size, strict=True))
        return out, total

    for size in (Fraction(1, 100), 1, 100_000):
        x = [Fraction(int(random.integers(-99, 100)), 7) * size for _ in range(block.inputs)]
        (ours, terms), (theirs, _) = run(block, x), run(other, x)
        if sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > Fraction(1, 10**9) * terms:
            return False
    return True


def run(count: int, seed: int, stop: float = math.inf) -> dict[str, Any]:
    """Attacks with `count` blocks; wrong verdicts are listed, not raised."""
    random = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    start = time.monotonic()
    for index in range(count):
        if time.monotonic() - start > stop:
            break
        this = case(random)
        name = f"seed {seed}, block {index}, {this.kind}, {this.block.activation}, {this.block.dtype}"
        try:
            verdict = absorb(this.block, this.width, this.biases, domain=this.domain)  # type: ignore[arg-type]
            counts["blocks"] += 1
            counts[verdict.status] += 1
            counts[f"{this.kind}: {verdict.status}"] += 1
            if not verdict.verify():
                wrong.append(f"{name}: {verdict.status} failed its own check")
            if verdict.status == "impossible" and this.truth:
                wrong.append(f"{name}: impossible, and there is a replacement")
            if verdict.status == "possible":
                made = verdict.replacement()
                if not within_rounding(this.block, made, this.domain, random):
                    wrong.append(f"{name}: possible, and the replacement errs by more than the rule allows")
                if this.truth is False:
                    counts["possible within rounding only"] += 1
                    if this.block.dtype == torch.float64:
                        wrong.append(f"{name}: possible in float64, and there is no replacement")
                plain = this.block.activation in EXACT and not this.block.norms and this.domain is None
                if plain and this.block.dtype == torch.float64 and not equal_exactly(this.block, made, random):
                    wrong.append(f"{name}: possible, and not equal in exact arithmetic")
            if this.block.dtype != torch.float64 and index % 3 == 0:
                wide = absorb(this.block.double(), this.width, this.biases, domain=this.domain)  # type: ignore[arg-type]
                counts["asked in two dtypes"] += 1
                if {verdict.status, wide.status} == {"possible", "impossible"}:
                    wrong.append(f"{name}: {verdict.status}, and {wide.status} in float64")
        except Exception as error:  # a crash is a finding
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return {"counts": dict(counts), "wrong": wrong, "seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time, with what ran by then")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-campaign.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    wrong: list[str] = []
    start, part = time.monotonic(), 1000
    for seed in range(options.seed, options.seed + math.ceil(options.count / part)):
        left = 60 * options.minutes - (time.monotonic() - start)
        if left <= 0:
            break
        outcome = run(min(part, options.count - total["blocks"]), seed, left)
        total.update(outcome["counts"])
        wrong += outcome["wrong"]
        record = {
            "script": "benchmarks/absorb_campaign.py",
            "asked_for": options.count,
            "first_seed": options.seed,
            "blocks_a_seed": part,
            "counts": dict(total),
            "wrong": wrong,
            "seconds": time.monotonic() - start,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{total['blocks']} blocks, {len(wrong)} wrong")


if __name__ == "__main__":
    main()
