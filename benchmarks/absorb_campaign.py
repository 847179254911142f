"""An attack on `unskip.absorb`: adversarial blocks whose truth is known without a line of the library.

    python benchmarks/absorb_campaign.py --count 100000            # writes docs/results/absorb-campaign.json

Started again it goes on after the last seed of the record, if the library and the oracle are as they were. The blocks
are made in `_absorb_cases.py`; `_absorb_oracle.py` decides in exact fractions. A wrong verdict is

    impossible   where the oracle knows a replacement
    possible     where it finds none, unless the replacement errs at most 4 times what the block itself loses by
                 computing in its dtype (coarse dtypes only; these are counted as "within rounding"), or where the skip
                 of an output or an input is lost beside larger ones
    any          that its own check does not take, or that differs between two dtypes as possible and impossible
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections import Counter
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further seed after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-campaign.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = ("src/unskip/absorption", "benchmarks/_absorb_cases.py", "benchmarks/_absorb_oracle.py")
    commit = _git("log", "-1", "--format=%h", "--", *files)
    if _git("status", "--porcelain", "--untracked-files=no", *files):
        raise SystemExit(f"{', '.join(files)}: changes that are not committed, and the record names a commit")
    total: Counter[str] = Counter()
    wrong: list[str] = []
    before, start, part = 0.0, time.monotonic(), 500
    if options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
        if record.get("commit") == commit:
            total.update(record["counts"])
            wrong, before = record["wrong"], record["seconds"]
    for seed in range(total["blocks"] // part, math.ceil(options.count / part)):
        if time.monotonic() - start > 60 * options.minutes:
            break
        outcome = run(part, seed)
        total.update(outcome["counts"])
        wrong += outcome["wrong"]
        record = {
            **made_with(__file__, "cpu"),
            "commit": commit,
            "asked_for": options.count,
            "blocks_a_seed": part,
            "counts": dict(total),
            "wrong": wrong,
            "seconds": before + time.monotonic() - start,
        }
        write_json(options.out, record)
    print(f"{total['blocks']} blocks, {len(wrong)} wrong")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
