"""Trains a residual and a residual-free ViT with AdamW, Muon and SOAP for 200 steps on scikit-learn's digits.

    python benchmarks/optim_digits.py          # a few minutes on one core; writes docs/results/optim-digits.json

The model is a small timm ViT (8 x 8 images in patches of 2, width 64, 6 blocks), with batch size 128, the same batches
for every optimizer, 20 steps of warm-up and a cosine schedule to zero. The skips of the residual-free model are cut by
`rewire`, and it is initialised by `unskip.init.skipless_`. For each of the six combinations, the learning rate is
chosen among four by the training loss of one seed, then three seeds are run. The runs are too short and the model too
small to rank the optimizers: they show that all of them work, and how much each loses without shortcuts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch
from _record import made_with, write_json
from sklearn.datasets import load_digits
from torch import Tensor, nn

import unskip
from unskip import Cut
from unskip.optim import build, schedules

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
RATES = {"adamw": (3e-4, 1e-3, 3e-3, 1e-2), "muon": (1e-3, 3e-3, 1e-2, 3e-2), "soap": (3e-4, 1e-3, 3e-3, 1e-2)}
WIRINGS = ("residual", "skipless")
BATCH, WARMUP, DECAY = 128, 20, 0.05
SIZES = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "num_heads": 4, "depth": 6, "num_classes": 10}


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then test images and labels: every fourth image is for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 4 == 3
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def model_of(wiring: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **SIZES)
    if wiring == "skipless":
        unskip.rewire(model, Cut())
        unskip.init.skipless_(model, generator=torch.Generator().manual_seed(seed))
    return model.train()


def train(wiring: str, name: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    x, y, test_x, test_y = data()
    model = model_of(wiring, seed)
    optimizer = build(model, name, lr=rate, weight_decay=DECAY)
    order = torch.Generator().manual_seed(seed)
    losses, begin = [], time.perf_counter()
    for step in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=order)
        schedules.apply(optimizer, lr=schedules.warmup_cosine(step, total=steps, warmup=WARMUP))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    model.eval()
    with torch.no_grad():
        accuracy = (model(test_x).argmax(-1) == test_y).float().mean().item()
    curve = [round(statistics.fmean(losses[i : i + 10]), 4) for i in range(0, steps, 10)]
    return {
        "seed": seed,
        "lr": rate,
        "loss": curve[-1],
        "accuracy": accuracy,
        "seconds": round(seconds, 1),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for wiring in WIRINGS:
        for name, rates in RATES.items():
            trials = [train(wiring, name, rate, 0, options.steps) for rate in rates]
            # the loss of a diverged run is NaN, which counts as infinite
            best = min(trials, key=lambda run: run["loss"] if run["loss"] == run["loss"] else float("inf"))
            runs = [best, *(train(wiring, name, best["lr"], seed, options.steps) for seed in range(1, options.seeds))]
            result = [run["accuracy"] for run in runs]
            results[f"{wiring}, {name}"] = {
                "lr": best["lr"],
                "accuracy": statistics.fmean(result),
                "lowest": min(result),
                "highest": max(result),
                "loss": statistics.fmean(run["loss"] for run in runs),
                "runs": runs,
                "tried": [{key: run[key] for key in ("lr", "loss", "accuracy")} for run in trials],
            }
            row = results[f"{wiring}, {name}"]
            spread = f"[{row['lowest']:.3f}, {row['highest']:.3f}]"
            head = f"{wiring:9s} {name:6s} lr {row['lr']:.0e}"
            print(f"{head}  accuracy {row['accuracy']:.3f} {spread}  loss {row['loss']:.3f}", flush=True)
    record = {
        **made_with(__file__, "cpu", "timm"),
        "protocol": "digits, every fourth image held out; lr chosen by the training loss of seed 0; test accuracy",
        "config": {
            "model": SIZES,
            "batch": BATCH,
            "steps": options.steps,
            "warmup": WARMUP,
            "weight_decay": DECAY,
            "clip": 1.0,
            "rates": RATES,
            "seeds": options.seeds,
        },
        "results": results,
    }
    write_json(options.out / "optim-digits.json", record)


if __name__ == "__main__":
    main()
