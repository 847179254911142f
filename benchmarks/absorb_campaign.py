"""An attack on `unskip.absorb`: adversarial blocks whose truth is known without a line of the library.

    python benchmarks/absorb_campaign.py --workers 2               # writes docs/results/absorb-campaign.json

Started again it goes on after the last seed of the record, if the library and the oracle are as they were: the record
holds a hash of their code. The blocks are made in `_absorb_cases.py`; `_absorb_oracle.py` decides in exact fractions. A
wrong verdict is

    impossible   where the oracle knows a replacement
    possible     where it finds none, unless the replacement errs at most 4 times what the block itself loses by
                 computing in its dtype (coarse dtypes only; these are counted as "within rounding"), or where the skip
                 of an output or an input is lost beside larger ones
    any          that its own check does not take, or that differs between two dtypes as possible and impossible
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import math
import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _absorb_cases import case
from _absorb_oracle import EXACT, equal_exactly, keeps_channels, within_rounding
from _record import made_with, write_json

from unskip.absorption import absorb

ROOT = Path(__file__).resolve().parent.parent


def run(count: int, seed: int) -> dict[str, Any]:
    """Attacks with `count` blocks; wrong verdicts are listed, not raised."""
    random, points = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    start = time.monotonic()
    for index in range(count):
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
                if not within_rounding(this.block, made, this.domain, points):
                    wrong.append(f"{name}: possible, and the replacement errs by more than the rule allows")
                if this.kind not in ("gated", "never", "pre-norm") and not keeps_channels(
                    this.block, made, this.domain
                ):
                    wrong.append(f"{name}: possible, and the skip of one channel is lost")
                if this.truth is False:
                    counts["possible within rounding only"] += 1
                    if this.block.dtype == torch.float64:
                        wrong.append(f"{name}: possible in float64, and there is no replacement")
                plain = this.block.activation in EXACT and not this.block.norms and this.domain is None
                if plain and this.block.dtype == torch.float64 and not equal_exactly(this.block, made, points):
                    wrong.append(f"{name}: possible, and not equal in exact arithmetic")
            if this.block.dtype != torch.float64 and index % 3 == 0:
                wide = absorb(this.block.double(), this.width, this.biases, domain=this.domain)  # type: ignore[arg-type]
                counts["asked in two dtypes"] += 1
                if {verdict.status, wide.status} == {"possible", "impossible"}:
                    wrong.append(f"{name}: {verdict.status}, and {wide.status} in float64")
        except Exception as error:  # a crash is a finding
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return {"counts": dict(counts), "wrong": wrong, "seconds": time.monotonic() - start}


def code() -> str:
    """A hash of the code that decides an outcome (the room, cases, oracle), without docstrings and comments."""
    own = Path(__file__).parent
    digest = hashlib.sha256()
    for file in (
        *sorted((ROOT / "src/unskip/absorption").glob("*.py")),
        own / "_absorb_cases.py",
        own / "_absorb_oracle.py",
    ):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                del node.body[0]
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1, help="processes, a seed each at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="write no further seed after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-campaign.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    part, start = 500, time.monotonic()
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if record.get("code") != code():
        record = {"counts": {}, "wrong": [], "seconds": 0.0}
    record |= {**made_with(__file__, "cpu"), "code": code(), "asked_for": options.count, "blocks_a_seed": part}
    seeds = range(record["counts"].get("blocks", 0) // part, math.ceil(options.count / part))
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for outcome in pool.map(functools.partial(run, part), seeds):
            record["counts"] = dict(Counter(record["counts"]) + Counter(outcome["counts"]))
            record["wrong"] += outcome["wrong"]
            record["seconds"] += outcome["seconds"]  # of all processes together
            write_json(options.out, record)
            if time.monotonic() - start > 60 * options.minutes:
                pool.shutdown(cancel_futures=True)
                break
    print(f"{record['counts']['blocks']} blocks, {len(record['wrong'])} wrong")


if __name__ == "__main__":
    main()
