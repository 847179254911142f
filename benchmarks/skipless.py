"""Does a ViT without skips keep up? Supervised training, with and without skips, under three optimizers.

    python benchmarks/skipless.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 8 --limit 540
    python benchmarks/skipless.py                                             # digits on the CPU, a few epochs

First a sweep of learning rates, one seed, on a tenth of the training set that is held out; then, at the best rate of
each, three seeds judged on the test set: at equal epochs, with the skips of one kind alone cut, and, once `--pace` has
timed the optimizers, at the wall time of SOAP. Every run is a process of its own, several side by side; each appends
its result to the JSON, and what is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
WIRINGS: dict[str, dict[str, str]] = {
    "residual": {},
    "skipless": {"shortcut": "cut"},
    "skipless + init": {"shortcut": "cut", "init": "skipless"},
}
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (1e-3, 3e-3, 1e-2), "soap": (1e-3, 3e-3, 1e-2)}
SEEDS = (0, 1, 2)


Job = tuple[str, dict[str, Any]]


def jobs(done: dict[str, Any], fields: dict[str, Any], epochs: tuple[float, float]) -> list[Job]:
    """What is still to be run, what matters most first; what a missing result decides is not there yet."""
    sweep, rows = [], []
    for (wiring, changes), optimizer in itertools.product(WIRINGS.items(), RATES):
        names = {rate: f"sweep | {wiring} | {optimizer} | {rate:g}" for rate in RATES[optimizer]}
        for rate, name in names.items():
            sweep.append((name, {**fields, **changes, "optimizer": optimizer, "lr": rate, "validate": True}))
        if all(name in done for name in names.values()):
            best = max(names, key=lambda rate: done[names[rate]].get("val_accuracy", 0))
            rows.append((wiring, optimizer, {**fields, **changes, "optimizer": optimizer, "lr": best}))
    found: list[Job] = [(name, config | {"epochs": epochs[0]}) for name, config in sweep]
    for seed in SEEDS:
        for wiring, optimizer, config in rows:
            name = f"{wiring} | {optimizer} | {config['lr']:g} | seed {seed}"
            found.append((f"final | {name}", {**config, "seed": seed, "epochs": epochs[1]}))
            if wiring == "skipless + init" and optimizer != "muon":
                for where in ("attention", "mlp"):
                    partial = {**config, "where": where, "seed": seed, "epochs": epochs[1]}
                    found.append((f"final | {where} cut + init | {name.partition(' | ')[2]}", partial))
    if "pace" in done:
        for seed in SEEDS:
            for wiring, optimizer, config in rows:
                pace = done["pace"]["residual" if wiring == "residual" else "skipless"]
                longer = epochs[1] * pace["soap"] / pace[optimizer]
                if optimizer != "soap" and wiring != "skipless":
                    name = f"time | {wiring} | {optimizer} | {config['lr']:g} | seed {seed}"
                    found.append((name, {**config, "seed": seed, "epochs": round(longer, 1)}))
    return [(name, config) for name, config in found if name not in done]


def pace(fields: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds a step of every optimizer, with and without skips, measured with nothing beside it."""
    import unskip

    found: dict[str, dict[str, float]] = {}
    for wiring, optimizer in itertools.product(("residual", "skipless"), RATES):
        config = {**fields, **WIRINGS[wiring], "optimizer": optimizer, "lr": 1e-4, "steps": 120, "log_every": 20}
        with tempfile.TemporaryDirectory() as folder:
            unskip.train(unskip.recipes.supervised(config.pop("preset"), **config), f"{folder}/run", quiet=True)
            rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
        found.setdefault(wiring, {})[optimizer] = statistics.median(row["seconds"] / 20 for row in rows[2:])
    return found


def work(config: dict[str, Any]) -> dict[str, Any]:
    """One run, in this process."""
    import unskip

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    preset = config.pop("preset")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = unskip.train(unskip.recipes.supervised(preset, **config), f"{folder}/run", quiet=True)
            found: dict[str, Any] = dict(outcome.evaluations)
        except unskip.errors.TrainingError as error:
            found = {"diverged": str(error).partition(": ")[2]}
        rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
        raised = unskip.training.RunFolder(f"{folder}/run").read("warnings.jsonl")
    curve = [[row["step"], row["loss"]] for row in rows[:: max(1, len(rows) // 25)]]
    names = sorted({row["warning"] for row in raised})
    return found | {"seconds": time.perf_counter() - start, "loss": curve, "warnings": names, "config": config}


def table(done: dict[str, Any]) -> str:
    """Mean and spread over the seeds of each final run."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, row in done.items():
        if name.startswith(("final", "time")):
            groups.setdefault(tuple(name.split(" | ")[:4]), []).append(row)
    lines = [f"{'':6s} {'':22s} {'optimizer':9s} {'lr':>7s} {'epochs':>7s}  accuracy over seeds"]
    for (kind, wiring, optimizer, rate), rows in groups.items():
        values = [row.get("test_accuracy", 0.0) for row in rows]
        spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        lines.append(
            f"{kind:6s} {wiring:22s} {optimizer:9s} {rate:>7s} {rows[0]['config']['epochs']:7.1f}  "
            f"{statistics.mean(values):.3f}{spread} ({len(values)})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10: cifar10, or parquet files (default: digits)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="start nothing new after this many seconds")
    parser.add_argument("--pace", action="store_true", help="time the optimizers, with nothing beside them, and end")
    parser.add_argument("--compile", action="store_true", help="compile each model too: pays off in long runs")
    parser.add_argument("--epochs", type=float, nargs=2, default=(6, 25), help="of the sweep, and of the final runs")
    parser.add_argument("--out", type=Path, help="the JSON (default docs/results/skipless-cifar.json, or -digits)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(json.loads(options.work))))
        return
    import torch

    import unskip

    fields = {"preset": "digits", "device": options.device}
    epochs = (3, 10)
    if options.data is not None:
        fields = {"preset": "cifar", "data": options.data, "device": options.device, "log_every": 50}
        fields["compile"] = options.compile
        epochs = tuple(options.epochs)
    options.out = options.out or RESULTS / f"skipless-{fields['preset']}.json"
    data = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    data |= {
        "script": "benchmarks/skipless.py",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
        "epochs": {"sweep": epochs[0], "final": epochs[1]},
    }
    done, begun = data["runs"], time.perf_counter()
    if options.pace:
        done["pace"] = pace(fields)
        options.out.write_text(json.dumps(data, indent=1) + "\n")
        print(json.dumps(done["pace"]))
        return
    running: dict[str, subprocess.Popen[str]] = {}
    while True:
        waiting = [job for job in jobs(done, fields, epochs) if job[0] not in running]
        while waiting and len(running) < options.workers and time.perf_counter() - begun < options.limit:
            name, config = waiting.pop(0)
            command = [sys.executable, __file__, "--work", json.dumps(config)]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if not running:
            break
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            out, err = process.communicate()
            del running[name]
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{err[-3000:]}")
            done[name] = json.loads(out.splitlines()[-1])
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(data, indent=1) + "\n")
            shown = {key: round(value, 3) for key, value in done[name].items() if isinstance(value, float)}
            print(f"{name}: {shown}", flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
