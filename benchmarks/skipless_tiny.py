"""Does a ViT-S without skips keep up with a residual one on Tiny-ImageNet-200? The claim of arXiv 2510.00345.

python benchmarks/skipless_tiny.py --data "DATA/tinyimagenet200-{split}*.parquet" --pets "DATA/pets-{split}.parquet" \\
    --device cuda --workers 2 --limit 1500 --only "residual | 0" "no skips | 0"
python benchmarks/skipless_tiny.py                                        # digits on the CPU, six steps a run

384 wide, 12 blocks, patches of 8, twelve heads of 64, mean pooling, orthogonal position embeddings; SOAP, 100 epochs
with mixup and cutmix, seed 0, and a second seed for the first two. Rates and weight decays are those of 100 epochs of
CIFAR-10 (skipless_gap.py). Accuracy at 1 and 5, and mean IoU of pets by block from the frozen features.
"""

from __future__ import annotations

from typing import Any

from _skipless_run import BASE, EMA, Config, tell, work
from _study import ROOT, Job, about, arguments, opened, serve, study

WIDE: Config = {"heads": 12, "head_dim": 64, "decays": "all", "lr": 3e-3, "weight_decay": 0.3}
WIRINGS: dict[str, Config] = {
    "residual": {"shortcut": "keep", "start": False},
    "no skips": {"target": 0.97, "even": 6, "carry": 0.3, "fixed": True, "c": 1.0, "carry_rate": 0.0},
    "MLPs cut": {"where": "mlp", "c": 1.0, "gain": 1.0},
    "decay": {"shortcut": "decay:product=0.001", "start": False},
}
LONG: Config = {"mixup": 0.8, "cutmix": 1.0, "validate": False, "quantise": True}


def jobs(done: dict[str, Any]) -> list[Job]:
    """What is still to be run, the pair that decides first."""
    order = [*((name, 0) for name in WIRINGS), ("no skips", 1), ("residual", 1)]
    runs = [(f"{name} | {seed}", {**BASE, **WIDE, **WIRINGS[name], **LONG, "seed": seed}) for name, seed in order]
    return [job for job in runs if job[0] not in done]


def table(done: dict[str, Any]) -> str:
    """A line a run."""
    lines = ["| run | accuracy | top 5 | training loss | mean IoU, last block | best block |", "|---" * 6 + "|"]
    for name, row in done.items():
        iou = row.get("mean_iou") or [float("nan")]
        cells = [f"{100 * row.get(key, float('nan')):.1f}" for key in ("test_accuracy", "top5")]
        cells += [str(row.get("train_loss", "failed")), f"{100 * iou[-1]:.1f}", f"{100 * max(iou):.1f}"]
        lines.append(f"| {name.replace(' | ', ', seed ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, "skipless-tiny.json, or -digits")
    parser.add_argument("--pets", help="images with masks, for the segmentation probe")
    parser.add_argument("--steps", type=int, help="of every run, to see that it works")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    preset = "digits" if options.data is None else "tiny-imagenet"
    fields: Config = {"preset": preset, "device": options.device}
    fields |= {"data": options.data, "pets": options.pets} if options.data else {}
    shrink: Config = {"steps": options.steps or 6} if options.steps or options.data is None else {}
    options.out = options.out or ROOT / "docs" / "results" / f"skipless-tiny{'' if options.data else '-digits'}.json"
    settings = {"preset": preset, **shrink}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, settings, base=BASE, ema=EMA)
        waiting = lambda: [(name, {**config, "epochs": options.epochs, **shrink}) for name, config in jobs(done)]  # noqa: E731
        study(__file__, data, waiting, lambda name, config: {**config, **fields}, options, tell)
    print(table(done))


if __name__ == "__main__":
    main()
