"""Compares ViT-S with and without skips on Tiny-ImageNet-200, to test the claim of arXiv 2510.00345.

python benchmarks/skipless_tiny.py --data "DATA/tinyimagenet200-{split}*.parquet" --pets "DATA/pets-{split}.parquet" \\
    --device cuda --workers 2 --limit 1500 --only "rate | no skips" "final | no skips"
python benchmarks/skipless_tiny.py                                        # digits on the CPU, six steps per run

Models have width 384, 12 blocks, patches of 8, twelve heads of 64, mean pooling and orthogonal position embeddings.
They are trained with SOAP, mixup and cutmix, and weight decay 0.3.

rate      20 epochs at three learning rates for each wiring, evaluated on a held-out tenth of the training set
final     100 epochs (--epochs) of each kind of wiring, with the settings of its best run of `rate`; a second seed for
          residual and no skips. Top-1 and top-5 accuracy, and mean IoU on pets by block from frozen features

Without skips, six heads start as orthogonal maps of each token ("carrying heads") and are frozen. "Paired units": half
of the units of an MLP start as mirrored pairs, which compute an orthogonal map; these and W_V, W_O of carrying heads
are trained at a tenth of the learning rate, or at 0.3 of it. "Shifted units": a quarter of the units do the same, with
a bias of 4, where GELU is nearly linear. Two wirings test whether the rest of the gap is the capacity used for these
maps: "wider, no skips" adds as many heads and units as they use, and "narrower, residual" has only as many as the model
without skips has besides them.
"""

from __future__ import annotations

from typing import Any

from _skipless_run import BASE, EMA, Config, tell, value, work
from _study import Job, about, arguments, opened, results, serve, study

WIDE: Config = {"heads": 12, "head_dim": 64, "decays": "all", "lr": 3e-3, "weight_decay": 0.3}
CARRY: Config = {"target": 0.97, "even": 6, "carry": 0.3, "fixed": True, "c": 1.0}
WIRINGS: dict[str, Config] = {
    "residual": {"shortcut": "keep", "start": False},
    "no skips": {**CARRY, "carry_rate": 0.0},
    "no skips, paired units": {**CARRY, "pairs": 1.0, "gain": 1.0, "carry_rate": 0.1},
    "no skips, shifted units": {**CARRY, "pairs": 1.0, "shift": 4.0, "gain": 1.0, "carry_rate": 0.1},
    "no skips, paired units at 0.3": {**CARRY, "pairs": 1.0, "gain": 1.0, "carry_rate": 0.3},
    "no skips, paired units, three heads carry": {**CARRY, "even": 9, "pairs": 1.0, "gain": 1.0, "carry_rate": 0.1},
    "wider, no skips": {**CARRY, "pairs": 1.0, "gain": 1.0, "carry_rate": 0.1, "heads": 18, "even": 12, "mlp_ratio": 6},
    "narrower, residual": {"shortcut": "keep", "start": False, "heads": 6, "mlp_ratio": 2},
    "MLPs cut": {"where": "mlp", "c": 1.0, "gain": 1.0},
    "MLPs cut, paired units": {"where": "mlp", "c": 1.0, "gain": 1.0, "pairs": 1.0, "carry_rate": 0.1},
    "decay to 1e-2": {"shortcut": "decay:product=0.01", "start": False},
}
LONG: Config = {"mixup": 0.8, "cutmix": 1.0, "validate": False}
RATES = (3e-3, 1.5e-3, 7.5e-4)


def jobs(done: dict[str, Any], epochs: int) -> list[Job]:
    """The runs that are not done, the learning-rate search first."""
    runs: list[Job] = []
    chosen: dict[str, tuple[float, str, Config]] = {}  # by kind of wiring: held-out accuracy, name, config
    for name, own in WIRINGS.items():
        kind = name.partition(", ")[0]
        for lr in RATES:
            trial, config = f"rate | {name} | {lr:g}", {**BASE, **WIDE, **own, **LONG, "lr": lr}
            runs.append((trial, {**config, "epochs": 20, "validate": True}))
            if trial in done:
                text = name if lr == WIDE["lr"] else f"{name}, lr {lr:g}"
                best = (value(done[trial]), text, {**config, "epochs": epochs})
                chosen[kind] = max(chosen.get(kind, best), best, key=lambda each: each[0])
    for seed in (0, 1):
        kinds = chosen if seed == 0 else chosen.keys() & {"residual", "no skips"}
        runs += [(f"final | {chosen[kind][1]} | {seed}", {**chosen[kind][2], "seed": seed}) for kind in sorted(kinds)]
    return [job for job in runs if job[0] not in done]


def table(done: dict[str, Any]) -> str:
    """Markdown table with one row per run."""
    lines = ["| run | accuracy | top 5 | training loss | mean IoU, last block | best block |", "|---" * 6 + "|"]
    for name, row in done.items():
        if name.startswith("rate"):
            lines.append(
                f"| {name.replace(' | ', ', ')} | held out {100 * value(row):.1f} | | {row.get('train_loss')} | | |"
            )
            continue
        iou = row.get("mean_iou") or [float("nan")]
        cells = [f"{100 * row.get(key, float('nan')):.1f}" for key in ("test_accuracy", "top5")]
        cells += [str(row.get("train_loss", "failed")), f"{100 * iou[-1]:.1f}", f"{100 * max(iou):.1f}"]
        setting, _, seed = name.removeprefix("final | ").rpartition(" | ")
        lines.append(f"| {setting}, seed {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, "skipless-tiny.json; of digits in build")
    parser.add_argument("--pets", help="images with masks, for the segmentation probe")
    parser.add_argument("--steps", type=int, help="steps of every run, for a smoke test")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    preset = "digits" if options.data is None else "tiny-imagenet"
    fields: Config = {"preset": preset, "device": options.device}
    fields |= {"data": options.data, "pets": options.pets} if options.data else {}
    shrink: Config = {"steps": options.steps or 6} if options.steps or options.data is None else {}
    options.out = options.out or results(options.data) / "skipless-tiny.json"
    settings = {"preset": preset, **shrink}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, settings, base=BASE, ema=EMA)
        waiting = lambda: [(name, {**config, **shrink}) for name, config in jobs(done, options.epochs)]  # noqa: E731
        study(__file__, data, waiting, lambda name, config: {**config, **fields}, options, tell)
    print(table(done))


if __name__ == "__main__":
    main()
