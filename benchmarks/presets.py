"""Trains the presets that are meant for a CPU, and records how long they take and what they reach.

    python benchmarks/presets.py                 # all of them, three seeds, about half an hour
    python benchmarks/presets.py --only lm sit   # some recipes

The numbers are the last evaluations of each run. The expected results that `unskip recipes` lists are from this record.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from _record import made_with, write_json

import unskip

TARGET = Path(__file__).resolve().parent.parent / "docs" / "results" / "presets-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=sorted(unskip.recipes.RECIPES), help="names of recipes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    record: dict[str, Any] = {**made_with(__file__, "cpu"), "results": {}}
    for name in options.only:
        for preset in (key for key, each in unskip.recipes.RECIPES[name].presets.items() if "CPU" in each.cost):
            rows = record["results"][f"{name} {preset}"] = []
            for seed in range(options.seeds):
                config = unskip.recipes.RECIPES[name](preset, seed=seed, device="cpu")
                begun = time.process_time()
                with tempfile.TemporaryDirectory() as folder:
                    outcome = unskip.train(config, f"{folder}/run", quiet=True)
                numbers = {key: float(f"{value:.4g}") for key, value in outcome.evaluations.items()}
                rows.append({"CPU seconds": round(time.process_time() - begun, 1), **numbers})
                print(name, preset, seed, rows[-1], flush=True)
                write_json(options.out, record)


if __name__ == "__main__":
    main()
