"""Tests whether the advantage of decayed shortcuts in a masked autoencoder grows with epochs, model and data.

    python benchmarks/mae_long.py --set tiny --data "DATA/tinyimagenet200-{split}*.parquet" --device cuda --workers 3 --limit 1500
    python benchmarks/mae_long.py --set cifar --data "DATA/cifar10-{split}.parquet" --device cuda --workers 4 --limit 1500
    python benchmarks/mae_long.py                           # smoke test: tiny models on digits, on the CPU

    tiny     ViT-S with patches of 8, decoder 256 x 8, 200 epochs: plain MAE, long skips, two decays; a second seed of long
             skips and of the better decay. About 10 minutes per run on one H200.
    cifar    ViT 192 x 12, 400 epochs: long skips and the decay to 0.8, two seeds

The learning rate of each is chosen by kNN of the last block on a held-out tenth of the training set, in runs of a fifth
of the epochs. Final runs are evaluated on the test set, fine-tuned and measured. The code of a run is in mae.py.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import Any

from _mae_results import last, table
from _study import Job, about, arguments, folder_of, opened, results, serve, study
from mae import LOOKS, PLAIN, PROTOCOLS, TUNED, tell, work

SKIPS = {"shortcut": "keep"}
DECAYS = {f"decay to {product:g}": {"shortcut": f"decay:product={product:g}"} for product in (7.6e-2, 3.6e-3)}
ALL: dict[str, dict[str, Any]] = {"long skips": SKIPS, **DECAYS, "plain": PLAIN}
# By set: fields of the recipe, epochs of a final run, training images, compared wirings, learning rates.
SETS: dict[str, dict[str, Any]] = {
    "digits": {
        "fields": {"preset": "digits", "model_args": "depth=4,embed_dim=32,num_heads=2", "online_images": 500},
        "epochs": 20,
        "images": 1438,
        "batch": 64,
        "wirings": ALL,
        "rates": (1e-3, 5e-4),
        "seeds": 2,
        "finetune": 2,
    },
    "tiny": {
        "fields": {"preset": "tiny-imagenet", "online_images": 10_000, "checkpoint_every": 5000, "health": False},
        "epochs": 200,
        "images": 100_000,
        "batch": 512,
        "wirings": ALL,
        "rates": (1e-3, 5e-4, 2e-3),
        "seeds": 2,
        "finetune": 10,
    },
    "cifar": {
        "fields": {"preset": "cifar", "online_images": 5000, "checkpoint_every": 5000, "health": False},
        "epochs": 400,
        "images": 50_000,
        "batch": 512,
        "wirings": {"long skips": SKIPS, "decay to 0.076": DECAYS["decay to 0.076"]},
        "rates": (1e-3, 5e-4),
        "seeds": 2,
        "finetune": 15,
    },
}


def jobs(done: dict[str, Any], plan: dict[str, Any]) -> list[Job]:
    """The runs that can start now: rates, final runs, then the second seed of long skips and of the better decay."""
    rates: list[Job] = []
    first: list[Job] = []
    for name, wiring in plan["wirings"].items():
        tried = {f"rate | {name} | {lr:g}": {**wiring, "lr": lr} for lr in plan["rates"]}
        rates += tried.items()
        if all(each in done for each in tried):
            best = max(tried, key=lambda each: last(done[each], "knn20"))
            first.append((f"final | {name} | seed 0", tried[best]))
    more: list[Job] = []
    finished = [name for name, _ in first if name in done]
    if len(finished) == len(plan["wirings"]):
        decay = max((name for name in finished if "decay" in name), key=lambda name: last(done[name], "knn20"))
        repeated = [job for job in first if "long skips" in job[0] or job[0] == decay]
        for seed in range(1, plan["seeds"]):
            more += [(name.replace("seed 0", f"seed {seed}"), {**config, "seed": seed}) for name, config in repeated]
    return [planned(*job, plan) for job in rates + first + more if job[0] not in done]


def planned(name: str, config: dict[str, Any], plan: dict[str, Any]) -> Job:
    final = name.startswith("final")
    epochs = plan["epochs"] if final else plan["epochs"] / 5
    images = plan["images"] if final else plan["images"] - plan["images"] // 10
    every = max(1, math.floor(epochs * (images // plan["batch"]) / LOOKS))
    return name, {**plan["fields"], **config, "validate": not final, "epochs": epochs, "evaluate_every": every}


def main() -> None:
    parser = arguments(__doc__, "mae-SET-long.json")
    parser.add_argument("--set", choices=("tiny", "cifar"), help="with --data: which of the two studies")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    if (options.set is None) != (options.data is None):
        parser.error("--set and --data go together")
    word = options.set or "digits"
    plan = SETS[word]
    options.out = options.out or results(options.data) / f"mae-{word}-long.json"
    data = opened(options.out, {"set": word})
    if not options.show:
        import unskip

        protocols = {name: unskip.evals.PROTOCOLS[name].to_dict() for name in (*PROTOCOLS, TUNED)}
        data |= about(__file__, options.device, {"set": word}, protocols=protocols)
        job_fields = {"device": options.device, "log_every": 50 if options.data else 10}
        job_fields |= {"compile": True} if options.device == "cuda" else {}  # worth its time in runs of minutes
        job_fields |= {"data": options.data} if options.data else {}

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            folder = str(folder_of(options.runs, name, config))
            return {"name": name, "config": job_fields | config, "folder": folder, "finetune": plan["finetune"]}

        study(__file__, data, lambda: jobs(data["runs"], plan), task_of, options, tell)
    print(table(data["runs"]))


if __name__ == "__main__":
    main()
