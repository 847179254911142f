"""Draws the figure of the README from docs/results: shortcuts of two models and the cost of SOAP, one point per seed.

python benchmarks/headline.py     # writes docs/img/headline.svg (make results)
"""

from __future__ import annotations

import statistics

from _study import ROOT, drawing
from _tables import FROZEN, record, runs

VIT = {
    "kept": "residual, weight decay 0.3",
    "MLPs' cut": "MLPs cut",
    "all cut,\n3 heads frozen": f"{FROZEN}, weight decay 0.3",
}
SIT = {"kept": "plain", "long skips": "long skips", "decayed": "decay 0.8"}
STEPS = {"pytorch_optimizer": "pytorch_optimizer SOAP", "unskip": "unskip SOAP"}


def classifiers() -> dict[str, list[float]]:
    return {
        label: [100 * row["test_accuracy"] for row in runs("skipless-long", f"final | {name}")]
        for label, name in VIT.items()
    }


def distances() -> dict[str, list[float]]:
    return {
        label: [row["generation"]["1"]["FD-judge"] for row in runs("sit-cifar", f"sit | {name}")]
        for label, name in SIT.items()
    }


def steps() -> dict[str, list[float]]:
    optim = record("optim-gpu")["results"]["vit_base_patch16_224"]
    return {label: [optim[name]["alone_mean_ms"]] for label, name in STEPS.items()}


def main() -> None:
    pyplot = drawing("headline")
    image, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.2), constrained_layout=True, width_ratios=(3, 3, 2.4))
    panels = (
        ("ViT, skips of its blocks", "CIFAR-10 accuracy (%)", classifiers()),
        ("SiT, its shortcuts", "Fréchet distance (lower: better)", distances()),
        ("SOAP, ViT-B", "ms per step, one H200", steps()),
    )
    for axis, (title, unit, groups) in zip(axes, panels, strict=True):
        means = [statistics.mean(values) for values in groups.values()]
        axis.hlines(means, [place - 0.25 for place in range(len(means))], [place + 0.25 for place in range(len(means))])
        for place, values in enumerate(groups.values()):
            axis.plot([place] * len(values), values, "C1o", ms=5, alpha=0.8)
            axis.annotate(f"{means[place]:.1f}", (place, max(values)), (0, 6), textcoords="offset points", ha="center")
        axis.set_xticks(range(len(means)), groups)
        axis.set(title=title, ylabel=unit, xlim=(-0.5, len(means) - 0.5))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(85, 93)
    for axis in axes[1:]:
        axis.set_ylim(0, axis.get_ylim()[1] * 1.08)
    image.savefig(ROOT / "docs" / "img" / "headline.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
