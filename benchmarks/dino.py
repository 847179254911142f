"""Does DINO give a ViT without residuals better dense features? One study, many short runs.

    python benchmarks/dino.py --data DATA --device cuda --workers 3 --limit 540
    python benchmarks/dino.py                       # digits on the CPU, tiny models, no dense sets: to see that it runs
    python benchmarks/dino.py --data DATA --show    # tables and figures of what is there; runs nothing

DATA is a folder with tinyimagenet100, cifar10 and pets as parquet files. Models are pretrained on the first two
together at 64 pixels in patches of 8, and judged on them by neighbours, rank and probes, and on pets by segmentation
and object discovery.

    main       residual and without residuals + init, by AdamW and by SOAP; SOAP with two seeds
    depth      fewer blocks without residuals, against all of the residual model
    remedy     without residuals: skips annealed away, decayed, lower lr, slower teacher, Sinkhorn, other init
    labels     the same two models trained with labels: is the hierarchy richer there, too?
    contrast   SimCLR with and without decay: what the first paper warns of

Every run is a process of its own, several side by side. A result is added to the JSON when its run is done, and what is
there is not run again. At the limit runs are stopped; their folders (--runs) hold a checkpoint, from which the same
command goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STOPPED = 3  # the exit code of a run that will be gone on with
LR = {"adamw": 5e-4, "soap": 1e-3, "muon": 1e-3}
SKIPLESS = {"shortcut": "cut", "init": "skipless:vit-small"}
PROTOCOLS = ("knn-dino-v1", "rank-v1", "probe-lbfgs-v1")
PETS = {1: 1, 2: 0, 3: 255}  # the trimap: pet, background, border
Job = tuple[str, dict[str, Any]]


def jobs(done: dict[str, Any], fields: dict[str, Any], options: argparse.Namespace) -> list[Job]:
    """What is still to be run, what matters most first."""
    depth = int(dict(word.split("=") for word in fields["model_args"].split(","))["depth"])

    def shallow(blocks: int) -> dict[str, str]:
        return {"model_args": fields["model_args"].replace(f"depth={depth}", f"depth={blocks}")}

    def by(optimizer: str) -> dict[str, Any]:
        return {"optimizer": optimizer, "lr": LR[optimizer] * options.lr}

    strong = options.strong
    found: list[Job] = []
    for seed in (0, 1):
        for optimizer in (strong, "adamw") if seed == 0 else (strong,):
            found.append((f"main | residual | {optimizer} | seed {seed}", {**by(optimizer), "seed": seed}))
            found.append((f"main | skipless | {optimizer} | seed {seed}", {**SKIPLESS, **by(optimizer), "seed": seed}))
        if seed == 0:
            found.append(
                (f"remedy | annealed | {strong}", {**by(strong), "shortcut": f"anneal:keep>cut@{options.steps // 2}"})
            )
            annealed = {**by(strong), **SKIPLESS, "shortcut": f"anneal:keep>cut@{options.steps // 2}"}
            found.append((f"remedy | annealed + init | {strong}", annealed))
            found.append((f"remedy | decay 0.6 | {strong}", {**by(strong), "shortcut": "decay:0.6"}))
            found.append((f"remedy | lr / 3 | {strong}", {**SKIPLESS, **by(strong), "lr": LR[strong] * options.lr / 3}))
            found.append((f"remedy | momentum 0.998 | {strong}", {**SKIPLESS, **by(strong), "momentum": 0.998}))
            found.append((f"remedy | sinkhorn | {strong}", {**SKIPLESS, **by(strong), "balance": "sinkhorn"}))
            found.append(
                (f"remedy | init vit-base | {strong}", {**SKIPLESS, **by(strong), "init": "skipless:vit-base"})
            )
    for blocks in (3 * depth // 4, depth // 2):
        found.append((f"depth | skipless, {blocks} blocks | {strong}", {**SKIPLESS, **by(strong), **shallow(blocks)}))
        found.append((f"depth | residual, {blocks} blocks | {strong}", {**by(strong), **shallow(blocks)}))
    for kind, change in (("residual", {}), ("skipless", SKIPLESS)):
        found.append((f"labels | {kind} | {strong}", {"recipe": "supervised", **change, **by(strong)}))
    for shortcut in ("keep", "decay:0.6", "cut"):
        change = SKIPLESS if shortcut == "cut" else {"shortcut": shortcut}
        found.append((f"contrast | {shortcut} | adamw", {"recipe": "simclr", **change, **by("adamw")}))
    return [(name, {"recipe": "dino", **fields, **config}) for name, config in found if name not in done]


# --- One run ----------------------------------------------------------------------------------------------------------


def planned(config: dict[str, Any]) -> Any:
    """The config of a run; fields that its recipe has not are left out."""
    from dataclasses import fields

    import unskip

    values = dict(config)
    recipe = unskip.recipes.RECIPES[values.pop("recipe")]
    preset = values.pop("preset")
    if recipe.name == "supervised":
        values["model_args"] += ",dynamic_img_size=true"  # pets are judged at another size
        values["weight_decay"] = 0.05
    known = {field.name for field in fields(recipe.config)}
    return getattr(unskip.recipes, recipe.name)(preset, **{key: each for key, each in values.items() if key in known})


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """One run in this process, from its checkpoint where it has one; None where it was told to stop."""
    import unskip
    from unskip.recipes import _dino, _judge
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    # Training and judging open the same images: decode them once.
    _dino.open_images = _judge.open_images = functools.cache(unskip.data.open_images)
    start, folder, config = time.perf_counter(), Path(task["folder"]), planned(task["config"])
    found: dict[str, Any] = {"config": task["config"]}
    run = RunFolder(folder)
    try:
        going = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(config, folder, quiet=True)
        if not outcome.finished:
            return None
        found |= judged(folder, task)
    except unskip.errors.TrainingError as error:
        found["diverged"] = str(error).partition(": ")[2]
    metrics, online = run.read("metrics.jsonl"), [row for row in run.read("evals.jsonl") if "rank_block_0" in row]
    keys = ("loss", "teacher_entropy", "teacher_spread", "divergence", "aligned", "apart", "gradient_norm")
    thinned = metrics[:: max(1, len(metrics) // 60)]
    found |= {
        "course": {key: [[row["step"], row[key]] for row in thinned if key in row] for key in keys},
        "ranks": [[row["step"], *(row[f"rank_block_{i}"] for i in range(_blocks(row)))] for row in online],
        "online": [[row["step"], row["knn20"]] for row in online],
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": _first_warnings(run.read("warnings.jsonl")),
        "seconds": time.perf_counter() - start,
    }
    return found


def _blocks(row: dict[str, Any]) -> int:
    return sum(key.startswith("rank_block_") for key in row)


def _first_warnings(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found.setdefault(row["warning"], row["step"])
    return {name: step for name, step in found.items() if name != "note"}


def judged(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Neighbours, rank and probes by block on its own data, CKA between blocks; segmentation and discovery on pets."""
    import torch

    from unskip import evals
    from unskip.data import Feed
    from unskip.data._dense import open_dense
    from unskip.measures.similarity import cka
    from unskip.recipes._judge import judge_run, open_images

    run, results = judge_run(folder, PROTOCOLS)
    found: dict[str, Any] = {"depth": {}}
    for each in results:
        for key, value in each.values.items():
            if key in ("knn20", "rank", "probe_lbfgs"):
                found["depth"].setdefault(key, []).append(round(value, 5))
    device = next(run.model.parameters()).device
    images = open_images(run.config.data, split="test", root=run.config.data_root)
    some = images.select(torch.arange(len(images))[:: max(1, len(images) // 1024)][:1024])
    maps = evals.extract(run.encoder, Feed(some, 256, run.config.size, device=device).evaluate())["mean", "none"]
    found["cka"] = [[round(cka(x, y), 4) for y in maps.values()] for x in maps.values()]
    if task["pets"] is None:
        return found
    train, test = (open_dense(task["pets"], split, size=task["size"], values=PETS) for split in ("train", "test"))
    assert train.masks is not None
    assert test.masks is not None
    assert test.boxes is not None
    last = len(maps) - 1
    pair = ((train.pixels, train.masks), (test.pixels, test.masks))
    several = sorted({round((last + 1) * share / 4) - 1 for share in (1, 2, 3, 4)})
    options: dict[str, Any] = {"ignore": 255}
    found["segment"] = {
        "single": evals.segment(run.encoder, *pair, 2, blocks=last, **options).mean_iou,
        "multi-scale": evals.segment(run.encoder, *pair, 2, blocks=several, **options).mean_iou,
        "by block (ridge)": [each.mean_iou for each in evals.segment_blocks(run.encoder, *pair, 2, **options)],
    }
    # Masks are at the resolution of the labels; CorLoc needs boxes alone.
    by_block = [evals.discover(run.encoder, test.pixels, test.boxes, block=block) for block in range(last + 1)]
    found["discover"] = {key: [round(row[key], 4) for row in by_block] for key in by_block[0]}
    return found


# --- Side by side -----------------------------------------------------------------------------------------------------


def study(data: dict[str, Any], fields: dict[str, Any], options: argparse.Namespace) -> None:
    """Keeps `workers` runs going until nothing is left, or until the limit."""
    done, begun, stopping = data["runs"], time.perf_counter(), False
    running: dict[str, subprocess.Popen[str]] = {}
    while True:
        late = time.perf_counter() - begun > options.limit
        waiting = [] if late else [job for job in jobs(done, fields, options) if job[0] not in running]
        waiting = [job for job in waiting if options.only in job[0]]
        while waiting and len(running) < options.workers:
            name, config = waiting.pop(0)
            digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
            words = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)
            folder = options.runs / f"{words}-{digest}"
            task = {"config": config, "folder": str(folder), "pets": options.pets, "size": options.judge_size}
            command = [sys.executable, __file__, "--work", json.dumps(task)]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if late and not stopping:
            stopping = True
            for process in running.values():
                process.terminate()  # in training it writes a checkpoint first
        if not running:
            return
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            out, err = process.communicate()
            del running[name]
            if process.returncode == STOPPED or (stopping and process.returncode):
                print(f"{name}: stopped; the same command goes on with it", flush=True)
                continue
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{err[-3000:]}")
            done[name] = json.loads(out.splitlines()[-1])
            options.out.parent.mkdir(parents=True, exist_ok=True)
            aside = options.out.with_suffix(".tmp")
            aside.write_text(json.dumps(data, separators=(",", ":")).replace('"runs":{', '"runs":{\n'))
            aside.replace(options.out)
            print(f"{name}: {short(done[name])} in {done[name]['seconds']:.0f} s", flush=True)


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the last block."""
    if "depth" not in row:
        return {"diverged": row.get("diverged")}
    found = {key: round(values[-1], 3) for key, values in row["depth"].items()}
    if "segment" in row:
        found |= {key: round(row["segment"][key], 3) for key in ("single", "multi-scale")}
        found |= {"corloc": row["discover"]["corloc"][-1], "best corloc": max(row["discover"]["corloc"])}
    return found


# --- What is shown ----------------------------------------------------------------------------------------------------


def table(done: dict[str, Any]) -> str:
    """A line for each configuration, seeds together: numbers of the last block, the best of any, and warnings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        groups.setdefault(name.partition(" | seed")[0], []).append(row)
    keys = ("single", "multi-scale", "corloc", "best corloc", "knn20", "probe_lbfgs", "rank")
    lines = [f"| run | seeds | {' | '.join(keys)} | least rank (block) | warnings |", "|---" * (4 + len(keys)) + "|"]
    for name, rows in sorted(groups.items()):
        whole = [row for row in rows if "depth" in row]
        title = name.replace(" | ", ": ", 1).replace(" | ", ", ")
        if not whole:
            lines.append(f"| {title} | {len(rows)} | diverged" + " |" * (2 + len(keys)))
            continue
        cells = []
        for key in keys:
            values = [short(row)[key] for row in whole if key in short(row)]
            scale = 1 if key == "rank" else 100
            spread = f" ± {scale * statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{scale * statistics.mean(values):.1f}{spread}" if values else "")
        ranks = whole[0]["depth"]["rank"]
        least = min(range(len(ranks)), key=ranks.__getitem__)
        told = ", ".join(f"{key} (step {step})" for row in whole[:1] for key, step in row["warnings"].items())
        lines.append(f"| {title} | {len(whole)} | {' | '.join(cells)} | {ranks[least]:.1f} ({least}) | {told} |")
    return "\n".join(lines)


def figures(done: dict[str, Any], folder: Path, word: str) -> None:
    """Numbers over depth, ranks over steps, and CKA maps; as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "dino"
    folder.mkdir(parents=True, exist_ok=True)
    main = {name: row for name, row in done.items() if "depth" in row and "seed 1" not in name}
    figure, panels = pyplot.subplots(1, 4, figsize=(17, 3.8), constrained_layout=True)
    for name, row in sorted(main.items()):
        if not name.startswith(("main", "labels")):
            continue
        label = name.replace(" | seed 0", "").replace(" | ", ", ")
        curves = [row["depth"]["rank"], [100 * v for v in row["depth"]["knn20"]]]
        if "segment" in row:
            curves += [
                [100 * v for v in row["segment"]["by block (ridge)"]],
                [100 * v for v in row["discover"]["corloc"]],
            ]
        for axes, curve in zip(panels, curves, strict=False):
            axes.plot(curve, marker="o", markersize=3, label=label)
    titles = ("effective rank", "KNN accuracy (%)", "mean IoU by ridge (%)", "CorLoc (%)")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xlabel="block", title=title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    figure.savefig(folder / f"dino-{word}.svg", metadata={"Date": None})
    pyplot.close(figure)
    chosen = [(name, row) for name, row in sorted(main.items()) if name.startswith(("main", "labels"))]
    if chosen:
        figure, cells = pyplot.subplots(
            2, len(chosen), figsize=(3 * len(chosen), 6), constrained_layout=True, squeeze=False
        )
        for (name, row), top, bottom in zip(chosen, cells[0], cells[1], strict=True):
            top.imshow(row["cka"], vmin=0, vmax=1, origin="lower")
            top.set_title(name.replace(" | seed 0", "").replace(" | ", ", "), fontsize=7)
            for index in range(len(row["ranks"][0]) - 1 if row["ranks"] else 0):
                bottom.plot(
                    [r[0] for r in row["ranks"]], [r[1 + index] for r in row["ranks"]], linewidth=0.9, label=index
                )
            bottom.set(xlabel="step", ylabel="rank by block")
        figure.savefig(folder / f"dino-{word}-cka.svg", metadata={"Date": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the folder of the parquet files (default: digits, nothing dense)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--strong", default="soap", choices=["soap", "muon"], help="the optimizer beside AdamW")
    parser.add_argument("--lr", type=float, default=1.0, help="a factor of all learning rates")
    parser.add_argument("--judge-size", type=int, default=128, help="pixels at which pets are judged")
    parser.add_argument("--graph", action="store_true", help="replay the pass of a step as a CUDA graph")
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--out", type=Path, help="the JSON (default docs/results/dino.json)")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "dino-runs", help="where the run folders go")
    parser.add_argument("--show", action="store_true", help="tables and figures of what is there; run nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        result = work(json.loads(options.work))
        if result is None:
            raise SystemExit(STOPPED)
        print(json.dumps(result))
        return
    if options.data is None:
        options.steps, options.pets = 12, None
        fields: dict[str, Any] = {"preset": "digits", "model_args": "depth=4,embed_dim=32,num_heads=2", "small": 2}
        fields |= {"batch": 64, "out": 64, "log_every": 4, "evaluate_every": 6, "online_images": 300, "health": False}
    else:
        options.pets = f"{options.data}/pets-{{split}}.parquet"
        both = "+".join(f"{options.data}/{name}-{{split}}.parquet" for name in ("tinyimagenet100", "cifar10"))
        fields = {"preset": "tiny-imagenet", "data": both, "model": "timm:vit_tiny_patch16_224", "batch": options.batch}
        fields |= {"model_args": "depth=12,embed_dim=192,num_heads=3", "small": 6, "graph": options.graph}
        fields |= {"evaluate_every": max(1, options.steps // 12), "log_every": 20, "checkpoint_every": 500}
        fields |= {"online_images": 4000, "health": False, "compile": False}
    fields |= {"steps": options.steps, "device": options.device}
    word = "digits" if options.data is None else "64"
    options.out = options.out or (ROOT / "docs" / "results" if options.data else ROOT / "build") / f"dino-{word}.json"
    data = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    settings = {key: value for key, value in fields.items() if key not in ("data", "device", "graph")}
    if data.get("settings", settings) != settings and not options.show:
        raise SystemExit(f"{options.out} holds runs of other settings, {data['settings']}; choose another --out")
    if not options.show:
        import torch

        import unskip

        dense = ("segment-linear-v1", "segment-ridge-v1", "discover-tokencut-v1")
        data |= {
            "script": "benchmarks/dino.py",
            "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
            "protocols": {name: unskip.evals.PROTOCOLS[name].to_dict() for name in (*PROTOCOLS, *dense)},
            "settings": settings,
            "judged at": options.judge_size,
            "runs": data["runs"],  # last, a run a line
        }
        study(data, fields, options)
    print(table(data["runs"]))
    figures(data["runs"], ROOT / "docs" / "img" if options.data else ROOT / "build", word)


if __name__ == "__main__":
    main()
