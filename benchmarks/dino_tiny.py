"""Compares dense features of DINO with and without skips, using the paired initialisation of skipless_tiny.py.

    python benchmarks/dino_tiny.py --data DATA --device cuda --workers 3 --limit 1500
    python benchmarks/dino_tiny.py                          # smoke test: tiny models on digits, on the CPU

DATA is a folder with tinyimagenet200 and pets as parquet files. Models have 12 blocks of width 192, six heads of 64, no
class token and sine-cosine position codes of the same norm as the patches. They are pretrained on Tiny-ImageNet-200 for
30 epochs, and evaluated as in dino.py: kNN, probes and patch rank by block, segmentation and object discovery on pets.

    rate    two learning rates per wiring, 3 epochs, kNN on a held-out tenth of the training set
    main    30 epochs at the better one with SOAP: residual, no skips, MLPs' skips cut, decay; then with AdamW
"""

from __future__ import annotations

import itertools
from typing import Any

from _dino_results import held_out, short, table
from _study import ROOT, Job, about, arguments, folder_of, opened, serve, study
from dino import work

CODE = "position_code=sincos"
CARRY = f"skipless:paired,{CODE},carry={{carry}},mix=0.3,self_attention=0.97"
WIRINGS: dict[str, dict[str, Any]] = {
    "residual": {"init": f"default:{CODE}"},
    "no skips": {"shortcut": "cut", "init": CARRY, "freeze_heads": "{carry}"},
    "MLPs cut": {"shortcut": "cut", "where": "mlp", "init": f"skipless:shaped,{CODE},vo_gain=1,mlp_gain=1"},
    "decay": {"shortcut": "decay:product=0.01", "init": f"default:{CODE}"},
}
RATES = {"soap": (1e-3, 3e-4), "adamw": (5e-4, 1.5e-4)}
EPOCHS, TRIAL = 30, 3


def jobs(done: dict[str, Any], carry: int) -> list[Job]:
    """The runs that can start now, by priority."""
    trials: list[Job] = []
    mains: list[Job] = []
    for optimizer, (name, wiring) in itertools.product(RATES, WIRINGS.items()):
        config = {key: each.format(carry=carry) for key, each in wiring.items()} | {"optimizer": optimizer}
        config |= {"freeze_heads": carry, "carry_rate": 0.1} if "freeze_heads" in config else {}
        tried = {f"rate | {name} | {optimizer} | {lr:g}": {**config, "lr": lr} for lr in RATES[optimizer]}
        trials += [(each, {**own, "epochs": TRIAL, "validate": True}) for each, own in tried.items()]
        if all(each in done for each in tried):
            best = max(tried, key=lambda each: held_out(done[each]))
            mains.append((f"main | {name} | {optimizer} | seed 0", {**tried[best], "epochs": EPOCHS}))
    return [job for job in trials[: 2 * len(WIRINGS)] + mains + trials if job[0] not in done]


def main() -> None:
    parser = arguments(__doc__, "dino-tiny.json; of digits build/dino-tiny-digits.json")
    parser.add_argument("--steps", type=int, help="steps of every run, for a smoke test")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    pooled = "class_token=false,global_pool=avg"
    fields: dict[str, Any] = {"recipe": "dino", "device": options.device, "health": False}
    if options.data is None:
        carry, pets, out, fields["preset"] = 2, None, ROOT / "build" / "dino-tiny-digits.json", "digits"
        fields |= {"model_args": f"depth=2,embed_dim=32,num_heads=4,attn_head_dim=16,{pooled}", "local_crops": 2}
        fields |= {"batch": 64, "projection": 64, "online_images": 300}
    else:
        carry, pets, out = 3, f"{options.data}/pets-{{split}}.parquet", ROOT / "docs" / "results" / "dino-tiny.json"
        fields |= {"preset": "tiny-imagenet", "data": f"{options.data}/tinyimagenet200-{{split}}*.parquet"}
        fields |= {"model": "timm:vit_tiny_patch16_224", "batch": 512, "local_crops": 6, "online_images": 2000}
        fields |= {"model_args": f"depth=12,embed_dim=192,num_heads=6,attn_head_dim=64,{pooled}"}
        fields |= {"log_every": 25, "checkpoint_every": 1_000_000}
        fields |= {"graph": True, "compile": True} if options.device == "cuda" else {}
    steps = {"steps": options.steps or 6} if options.steps or options.data is None else {}
    options.out = options.out or out
    data = opened(options.out, {"preset": fields["preset"], "epochs": EPOCHS, **steps})
    if not options.show:
        data |= about(__file__, options.device, {"preset": fields["preset"], "epochs": EPOCHS, **steps})

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            config = {**fields, **config, **steps}
            if steps:
                del config["epochs"]
            folder = str(folder_of(options.runs, f"dino-tiny-{name}", config))
            task = {"config": config, "folder": folder, "judge": name.startswith("main")}
            return task | {"pets": pets, "size": 128, "picture": None}

        waiting = lambda: jobs(data["runs"], carry)  # noqa: E731
        study(__file__, data, waiting, task_of, options, lambda _, row: str(short(row)))
    print(table(data["runs"]))


if __name__ == "__main__":
    main()
