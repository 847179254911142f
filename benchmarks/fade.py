"""Removes the skips of a trained model by annealing or cutting them, with and without distillation from the original.

    python benchmarks/fade.py                                                # digits on the CPU, minutes
    python benchmarks/fade.py --preset cifar --data "DATA/cifar10-{split}.parquet" --device cuda

A residual ViT is trained once. Every student starts from its weights and trains for the same number of steps: with its
skips (control), with skips cut at once, or annealed from 1 to 0 over the first half; on labels, or on outputs of the
original. The baselines are the original with its skips cut, without training, and a residual-free model initialised by
`skipless_`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

from _record import made_with, write_json

import unskip

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def students(half: int) -> dict[str, dict[str, Any]]:
    fade = f"anneal:keep>cut@{half}"
    return {
        "kept, labels": {},
        "cut at once, labels": {"shortcut": "cut"},
        "cut at once, teacher": {"shortcut": "cut", "teacher": "original"},
        "annealed, labels": {"shortcut": fade},
        "annealed, teacher": {"shortcut": fade, "teacher": "original"},
        "from skipless_, labels": {"shortcut": "cut", "init": "skipless", "weights": None},
    }


def accuracy(config: Any, folder: str) -> float:
    return unskip.train(config, folder, quiet=True).evaluations["test_accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=440, help="training steps of the original and of every student")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the students (AdamW)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    fields: dict[str, Any] = {"device": options.device, "steps": options.steps, "checkpoint_every": 10**9}
    fields |= {"data": options.data} if options.data else {}
    target = options.out or RESULTS / f"fade-{options.preset}.json"
    record: dict[str, Any] = {
        **made_with(__file__, options.device),
        "config": vars(options) | {"out": None, "data": options.data and Path(options.data).name},
        "results": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        first = unskip.recipes.supervised(options.preset, **fields)
        record["original"] = accuracy(first, f"{folder}/original")
        weights = f"{folder}/original/checkpoints/step-{options.steps}"
        bare = unskip.recipes.supervised(
            options.preset, **fields | {"weights": weights, "shortcut": "cut", "lr": 1e-30, "steps": 1}
        )
        record["original, skips cut, not trained"] = accuracy(bare, f"{folder}/bare")
        print(f"original {record['original']:.3f}, cut {record['original, skips cut, not trained']:.3f}", flush=True)
        for name, changes in students(options.steps // 2).items():
            result = []
            for seed in range(options.seeds):
                settings = {**fields, "weights": weights, "lr": options.lr, "seed": seed} | changes
                config = unskip.recipes.supervised(options.preset, **settings)
                result.append(accuracy(config, f"{folder}/{name} {seed}"))
            record["results"][name] = result
            print(f"{name:26s} {statistics.mean(result):.3f}  ({min(result):.3f} to {max(result):.3f})", flush=True)
            write_json(target, record)


if __name__ == "__main__":
    main()
