"""Compares the dense features of DINO with and without residual connections, in many short runs.

    python benchmarks/dino.py --data DATA --device cuda --workers 3 --limit 540
    python benchmarks/dino.py                       # smoke test: tiny models on digits, on the CPU, no dense sets
    python benchmarks/dino.py --data DATA --show    # tables and figures of the recorded runs; runs nothing

DATA is a folder with tinyimagenet100, cifar10 and pets as parquet files. Models are pretrained on the first two
together at 64 pixels in patches of 8, and evaluated on them by kNN, rank and probes, and on pets by segmentation
and object discovery.

    rate       a third, one and three times a learning rate, and one step further if the best is at an end; a third of
               the steps, evaluated on a held-out tenth of the training set (no test image is used). The best rate of
               each of the two models is used in the other runs with SOAP, with AdamW and with labels
    main       residual and without residuals + init, with AdamW and SOAP; SOAP with two seeds
    remedy     without residuals: centred and sharper attention, skips annealed away, decayed, cut only in the MLPs,
               the mean of patches instead of the class token, slower teacher, Sinkhorn
    depth      fewer blocks without residuals, compared with the full residual model
    labels     the same two models trained with labels: does the feature hierarchy become richer there, too?
    contrast   SimCLR with and without decay, at one learning rate: the case that the first paper warns of

Runs are parallel, in processes that are reused. A result is added to the JSON when its run is done, and recorded runs
are not repeated. Runs that are not done at the limit are stopped; their folders (--runs) contain checkpoints, from
which the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from _dino_results import best_rate, figures, rates, short, table
from _study import ROOT, Job, about, arguments, folder_of, opened, release, serve, study

LR = {"adamw": 5e-4, "soap": 1e-3, "muon": 1e-3}
SKIPLESS = {"shortcut": "cut", "init": "skipless:vit-small"}
DENSE = ("segment-linear-v1", "segment-ridge-v1", "discover-tokencut-v1")
PROBE = {"iterations": 100}  # of L-BFGS, by block; the protocol has 1000
KNOWN = 20_000  # training images of kNN and probes
PETS = {1: 1, 2: 0, 3: 255}  # the trimap: pet, background, border


def jobs(done: dict[str, Any], fields: dict[str, Any], options: argparse.Namespace) -> list[Job]:
    """The runs that are not done, by priority, without those whose settings depend on missing results."""
    depth = int(dict(word.split("=") for word in fields["model_args"].split(","))["depth"])

    def shallow(blocks: int) -> dict[str, str]:
        return {"model_args": fields["model_args"].replace(f"depth={depth}", f"depth={blocks}")}

    def by(optimizer: str, times: float = 1.0) -> dict[str, Any]:
        return {"optimizer": optimizer, "lr": times * LR[optimizer] * options.lr}

    pooled = {"model_args": f"{fields['model_args']},global_pool=avg"}
    strong, fade = options.strong, f"anneal:keep>cut@{options.steps // 2}"
    shorter = {"steps": options.steps // 3, "evaluate_every": max(1, options.steps // 9), "validate": True}
    if "data" in fields:  # held out from the training files, since files called val are test sets
        shorter |= {"data": fields["data"].replace("{split}", "train"), "online_images": 10_000}
    models = {"residual": {}, "skipless": SKIPLESS}
    ways = {strong: {}, "adamw": {}, "labels": {"recipe": "supervised"}}

    def trials(way: str) -> list[Job]:
        """The runs of the learning-rate search."""
        optimizer = strong if way == "labels" else way
        return [
            (f"rate | {name} | {way} | x {times:.3g}", {**ways[way], **config, **by(optimizer, times), **shorter})
            for name, config in models.items()
            for times in rates(done, name, way)
        ]

    def chosen(way: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The configs of the residual and the skipless model; None until their learning rates are chosen."""
        best = [best_rate(done, name, way) for name in models]
        if None in best:
            return None
        residual, skipless = (by(strong if way == "labels" else way, times) for times in best)
        return {**ways[way], **residual}, {**ways[way], **SKIPLESS, **skipless}

    result, pair = trials(strong), chosen(strong)
    if pair is not None:
        residual, skipless = pair
        for seed in (0, 1):
            result.append((f"main | residual | {strong} | seed {seed}", {**residual, "seed": seed}))
            result.append((f"main | skipless | {strong} | seed {seed}", {**skipless, "seed": seed}))
        result += [
            # At initialisation, patches of an image are similar from the eighth block on; these two together help most.
            (f"remedy | centred, sharper | {strong}", {**skipless, "init": "skipless:vit-small,centre,beta=2"}),
            (f"remedy | annealed + init | {strong}", {**skipless, "shortcut": fade}),
            (f"remedy | sharper attention | {strong}", {**skipless, "init": "skipless:vit-small,beta=2"}),
            (f"remedy | centred | {strong}", {**skipless, "init": "skipless:vit-small,centre"}),
            (f"remedy | decay 0.6 | {strong}", {**residual, "shortcut": "decay:0.6"}),
            (f"remedy | MLPs' skips cut | {strong}", {**skipless, "where": "mlp"}),
            (f"remedy | mean of patches | {strong}", {**skipless, **pooled}),
            (f"depth | skipless, {3 * depth // 4} blocks | {strong}", {**skipless, **shallow(3 * depth // 4)}),
            (f"depth | skipless, {depth // 2} blocks | {strong}", {**skipless, **shallow(depth // 2)}),
        ]
    for way, names in (("adamw", "main | {} | adamw | seed 0"), ("labels", f"labels | {{}} | {strong}")):
        result += trials(way)
        if (both := chosen(way)) is not None:
            result += [(names.format(name), config) for name, config in zip(models, both, strict=True)]
    result += [
        ("contrast | keep | adamw", {"recipe": "simclr", **by("adamw")}),
        ("contrast | decay:0.6 | adamw", {"recipe": "simclr", "shortcut": "decay:0.6", **by("adamw")}),
    ]
    if pair is not None:  # low priority
        result += [
            (f"depth | residual, {depth // 2} blocks | {strong}", {**residual, **shallow(depth // 2)}),
            (f"remedy | momentum 0.998 | {strong}", {**skipless, "momentum": 0.998}),
            (f"remedy | annealed | {strong}", {**residual, "shortcut": fade}),
            (f"remedy | sinkhorn | {strong}", {**skipless, "balance": "sinkhorn"}),
            (f"depth | residual, {3 * depth // 4} blocks | {strong}", {**residual, **shallow(3 * depth // 4)}),
            (f"remedy | init vit-base | {strong}", {**skipless, "init": "skipless:vit-base"}),
            ("contrast | cut | adamw", {"recipe": "simclr", **SKIPLESS, **by("adamw")}),
        ]
    return [(name, {"recipe": "dino", **fields, **config}) for name, config in result if name not in done]


# --- One run ----------------------------------------------------------------------------------------------------------


def planned(config: dict[str, Any]) -> Any:
    """The config of a run, without the fields that its recipe does not have."""
    from dataclasses import fields

    import unskip

    values = dict(config)
    recipe = unskip.recipes.RECIPES[values.pop("recipe")]
    preset = values.pop("preset")
    if recipe.name == "supervised":
        values["model_args"] += ",dynamic_img_size=true"  # pets are evaluated at a different size
        values["weight_decay"] = 0.05
    known = {field.name for field in fields(recipe.config)}
    return getattr(unskip.recipes, recipe.name)(preset, **{key: each for key, each in values.items() if key in known})


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains or resumes, then evaluates, one run in this process; None if it was stopped."""

    import unskip
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    start, folder, config = time.perf_counter(), Path(task["folder"]), planned(task["config"])
    recorded = {key: value for key, value in task["config"].items() if key not in ("data", "device")}
    result: dict[str, Any] = {"config": recorded}
    run = RunFolder(folder)
    try:
        resumed = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if resumed else unskip.train(config, folder, quiet=True)
        if not outcome.finished:
            return None
        trained = time.perf_counter()
        release()
        result |= evaluated(folder, task) if task["judge"] else {}
        result["judged_seconds"] = time.perf_counter() - trained
    except unskip.errors.TrainingError as error:
        if isinstance(error.__cause__, OSError):
            raise  # such as a full disk, not a failure of the model
        result["diverged"] = str(error).partition(": ")[2]
    except unskip.errors.BadInput as error:  # such as non-finite features; the study continues
        if not run.read("metrics.jsonl"):
            raise  # the run did not start
        result["not_judged"] = str(error)
    metrics, looks = run.read("metrics.jsonl"), run.read("evals.jsonl")
    online = [row for row in looks if "rank_block_0" in row]
    right = ("val_accuracy", "test_accuracy")  # only in runs with labels
    keys = ("loss", "teacher_entropy", "teacher_spread", "divergence", "aligned", "apart", "gradient_norm")
    thinned = metrics[:: max(1, len(metrics) // 60)]
    result |= {
        "course": {key: [[row["step"], row[key]] for row in thinned if key in row] for key in keys},
        "ranks": [[row["step"], *(row[f"rank_block_{i}"] for i in range(_blocks(row)))] for row in online],
        "patch_ranks": [[row["step"], *(row[f"patchrank_block_{i}"] for i in range(_blocks(row)))] for row in online],
        "online": [[row["step"], row["knn20"], row.get("cls_knn20", row["knn20"])] for row in online],
        "accuracy": [[row["step"], row[key]] for row in looks for key in right if key in row],
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": _first_warnings(run.read("warnings.jsonl")),
        "seconds": time.perf_counter() - start,
    }
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _blocks(row: dict[str, Any]) -> int:
    return sum(key.startswith("rank_block_") for key in row)


def _first_warnings(rows: list[dict[str, Any]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for row in rows:
        result.setdefault(row["warning"], row["step"])
    return {name: step for name, step in result.items() if name != "note"}


def evaluated(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Results by block: kNN, rank and probes on the pretraining data, CKA; segmentation and discovery on pets."""
    import torch

    from unskip import data, evals
    from unskip.measures import cka
    from unskip.recipes import open_run, open_splits

    run = open_run(folder)
    device = next(run.model.parameters()).device
    mean: Any = ("mean", "none")
    token: Any = ("cls", "layer")  # the class token is what DINO trains and evaluates
    if run.encoder.cls_token is None:
        token = mean
    sides = []
    # Opened with the same arguments as in the recipes, so that the cache of decoded images is used.
    for images, most in zip(open_splits(run.config, split="test"), (KNOWN, 2 * KNOWN), strict=True):
        images = data.subset(images, most)
        feed = data.Feed(images, 1024, run.config.size, device=device)
        sides.append(evals.extract(run.encoder, feed.evaluate(), "all", [*{mean, token}]))
    patches = evals.evaluate(run.encoder, None, feed, ["patchrank-v1"], changes={"patchrank-v1": {"samples": 256}})
    train, test = sides

    def knn20(view: Any, block: int) -> float:
        return evals.knn(train[view][block], train.labels, test[view][block], test.labels)[20]

    blocks = range(test.blocks)
    splits = [evals.Split(side.labels, torch.stack([side[mean][block] for block in blocks])) for side in sides]
    probe = evals.PROTOCOLS["probe-lbfgs-v1"]
    probes = [each["probe_lbfgs"] for each in probe.function(*splits, **probe.settings_with(PROBE))]
    depth = {
        "knn20": [knn20(mean, block) for block in blocks],
        "knn20_cls": [knn20(token, block) for block in blocks],
        "rank": [evals.rank(test[mean][block])["rank"] for block in blocks],
        "probe_lbfgs": probes,
        "patch_rank": [each.values["patchrank"] for each in patches],
    }
    result: dict[str, Any] = {"depth": {key: [round(value, 5) for value in row] for key, row in depth.items()}}
    maps = [test[mean][block][:: -(-len(test) // 1024)] for block in blocks]
    result["cka"] = [[0.0] * len(maps) for _ in maps]
    for i, x in enumerate(maps):
        for j, y in enumerate(maps[: i + 1]):
            result["cka"][i][j] = result["cka"][j][i] = round(cka(x, y), 4)
    if task["pets"] is None:
        return result
    pair = tuple((pets(task["pets"], split, task["size"])) for split in ("train", "test"))
    last = test.blocks - 1
    several = sorted({round((last + 1) * share / 4) - 1 for share in (1, 2, 3, 4)})
    masked: Any = [(each.pixels, each.masks) for each in pair]
    options: dict[str, Any] = {"ignore": 255, "batch": 512}
    counted = masked[1][1][masked[1][1] != 255]
    result["segment"] = {
        "always background": (counted == 0).double().mean().item() / 2,  # the baseline without learning
        "single": evals.segment(run.encoder, *masked, 2, blocks=last, **options).mean_iou,
        "multi-scale": evals.segment(run.encoder, *masked, 2, blocks=several, **options).mean_iou,
        "by block (ridge)": [each.values["mean_iou"] for each in curves(run.encoder, pair, "segment-ridge-v1")],
    }
    curve = [each.values for each in curves(run.encoder, pair, "discover-tokencut-v1")]
    result["discover"] = {key: [round(row[key], 4) for row in curve] for key in curve[0]}
    # The best block is chosen on the training images, so that its test result is unbiased.
    known = [each.values for each in curves(run.encoder, pair[::-1], "discover-tokencut-v1")]
    result["discover"]["corloc, train"] = [round(row["corloc"], 4) for row in known]
    if task["picture"] is not None:
        shown = torch.linspace(0, len(pair[1]) - 1, 6).long()
        evals.pictures(run.encoder, pair[1].pixels[shown], task["picture"])
        keep_features(task["picture"])
    return result


def curves(encoder: Any, pair: Any, protocol: str) -> list[Any]:
    """Results by block of a protocol on masks or boxes, for the second set of a pair."""
    from unskip import evals

    sets = [dataclasses.replace(each, ignore=255) for each in pair]
    return evals.evaluate(encoder, *sets, [protocol], batch=512)


def keep_features(file: str) -> None:
    """Crops a sheet to its feature and attention columns, since the photographs may not be published."""
    from PIL import Image

    sheet = Image.open(file)
    column = (sheet.width + 2) // 7  # columns: image, four blocks, attention, discovered object
    sheet.crop((column, 0, 6 * column - 2, sheet.height)).save(file, optimize=True)


@functools.cache
def pets(source: str, split: Any, size: int) -> Any:
    """The pets data set, cached in the process."""
    from unskip.data import open_dense

    return open_dense(source, split, size=size, values=PETS)


def main() -> None:
    parser = arguments(__doc__, "dino-64.json; of digits build/dino-digits.json")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--strong", default="soap", choices=["soap", "muon"], help="the second optimizer, besides AdamW"
    )
    parser.add_argument("--lr", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--judge-size", type=int, default=128, help="pixels at which pets are evaluated")
    parser.add_argument("--compile", action="store_true", help="compile each model; useful with parallel runs on a GPU")
    parser.add_argument("--img", type=Path, help="folder of figures and pictures (default docs/img)")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    if options.data is None:
        options.steps, source = 12, None
        fields: dict[str, Any] = {
            "preset": "digits",
            "model_args": "depth=4,embed_dim=32,num_heads=2",
            "local_crops": 2,
        }
        fields |= {"batch": 64, "projection": 64, "log_every": 4, "evaluate_every": 6, "online_images": 300}
        fields["health"] = False
    else:
        source = f"{options.data}/pets-{{split}}.parquet"
        both = "+".join(f"{options.data}/{name}-{{split}}.parquet" for name in ("tinyimagenet100", "cifar10"))
        fields = {"preset": "tiny-imagenet", "data": both, "model": "timm:vit_tiny_patch16_224", "batch": options.batch}
        fields |= {"model_args": "depth=12,embed_dim=192,num_heads=3", "local_crops": 6}
        fields |= {"evaluate_every": max(1, options.steps // 8), "log_every": 25, "checkpoint_every": options.steps}
        fields |= {"online_images": 2000, "health": False, "graph": options.device == "cuda"}
    fields |= {"steps": options.steps, "device": options.device, "compile": options.compile}
    word = "digits" if options.data is None else "64"
    results, images = (
        (ROOT / "build", ROOT / "build") if options.data is None else (ROOT / "docs/results", ROOT / "docs/img")
    )
    options.out, options.img = options.out or results / f"dino-{word}.json", options.img or images
    settings = {key: value for key, value in fields.items() if key not in ("data", "device", "compile", "graph")}
    settings |= {"times lr": options.lr, "judged at": options.judge_size}
    data = json.loads(options.out.read_text()) if options.show else opened(options.out, settings)
    if not options.show:
        import unskip

        names = ("knn-dino-v1", "rank-v1", "probe-lbfgs-v1", *DENSE)
        more = {
            "protocols": {name: unskip.evals.PROTOCOLS[name].to_dict() for name in names},
            "changes": {"probe-lbfgs-v1": PROBE, "training images of neighbours and probes": KNOWN},
        }
        data |= about(__file__, options.device, settings, **more)

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            pictured = source is not None and name.startswith("main") and name.endswith("seed 0")
            sheet = options.img / f"dino-{word}-{'-'.join(name.split(' | ')[1:3])}.png" if pictured else None
            return {
                "config": config,
                "folder": str(folder_of(options.runs, f"dino-{name}", config)),
                "judge": not name.startswith("rate"),
                "pets": source,
                "size": options.judge_size,
                "picture": None if sheet is None else str(sheet),
            }

        study(
            __file__,
            data,
            lambda: jobs(data["runs"], fields, options),
            task_of,
            options,
            lambda _, row: str(short(row)),
        )
    print(table(data["runs"]))
    figures(data["runs"], options.img, word)


if __name__ == "__main__":
    main()
