"""Tests which settings close the gap of a ViT without skips: weight decay, initialisation, heads, optimizer settings.

python benchmarks/skipless_gap.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 8 --limit 1600
python benchmarks/skipless_gap.py --stage 2 --data ... --out docs/results/skipless-long.json
python benchmarks/skipless_gap.py --only grid                             # digits on the CPU, six steps per run

Every run, with or without skips, has mean pooling and a strong position code unless its name differs. Settings are
chosen on a held-out tenth of the training set.

grid      learning rate x weight decay for each wiring
factor    one change to the model without skips, with shaped initialisation, at lr 3e-3 and weight decay 0.3
control   one change to the residual model, at lr 3e-3 and weight decay 1
mix       some heads start as orthogonal maps of each token ("carrying heads"), others mix tokens (stage 2, 20 epochs,
          first)
hold      the weights of these maps are trained, trained at a lower rate, or frozen; only in heads, or also in MLPs as
          mirrored pairs of units (stage 2, 20 epochs)
long      100 epochs with mixup and cutmix, several weight decays and settings of `hold`, on held-out images (stage 2)
final     100 epochs with mixup and cutmix, test set (stage 2): residual at two weight decays, the best of `mix` without
          skips, and only the MLPs' skips cut; each also quantised to few bits
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _skipless_run import BASE, EMA, Config, tell, value, work
from _study import ROOT, Job, about, arguments, drawing, opened, results, serve, study, write
from _tables import LONG as LONG_ROWS
from _tables import runs

PAPER: Config = {"alpha": 1.8, "beta": 1.0, "c": 3.0, "gain": 1.0, "bias": None}
EVEN: Config = {"c": 1.0, "gain": 1.0}  # branch outputs with the norm of the residual stream
WIRINGS: dict[str, Config] = {
    "residual": {"shortcut": "keep", "start": False},
    "cut, shaped": {},
    "cut, paper": PAPER,
    "decay": {"shortcut": "decay:product=0.001", "start": False},
    "MLPs cut, shaped": {"where": "mlp", **EVEN},
    "MLPs cut, paper": {"where": "mlp", **PAPER},
    "attention cut, shaped": {"where": "attention", **EVEN},
    "attention cut, paper": {"where": "attention", **PAPER},
}
FULL = [*itertools.product((3e-3, 1e-3), (0.3, 1.0, 2.0)), (3e-3, 0.05)]
GRID: dict[str, list[tuple[float, float]]] = {
    "cut, shaped": [*FULL, (6e-3, 0.3)],
    "residual": [*FULL, (6e-3, 1.0)],
    "cut, paper": [(3e-3, 0.3), (3e-3, 1.0)],
    "decay": [(3e-3, 1.0), (3e-3, 0.3)],
    **{name: [(3e-3, 0.3)] for name in WIRINGS if "MLPs" in name or "attention" in name},
}
SCALE_FREE: Config = {"decays": "scale-free", "weight_decay": 1.0}
FACTORS: dict[str, Config] = {
    "biases decay, too": {"decays": "all"},
    "biases decay, too; weight decay 0.15": {"decays": "all", "weight_decay": 0.15},
    "biases decay, too; weight decay 0.6": {"decays": "all", "weight_decay": 0.6},
    "biases decay, too; lr 1.8e-3": {"decays": "all", "lr": 1.8e-3},
    "biases decay, too; lr 5.1e-3": {"decays": "all", "lr": 5.1e-3},
    "scale-free decay 0.3": {"decays": "scale-free"},
    "scale-free decay 1": SCALE_FREE,
    "scale-free decay 2": {"decays": "scale-free", "weight_decay": 2.0},
    "scale-free decay 1; lr 6e-3": {**SCALE_FREE, "lr": 6e-3},
    "scale-free decay 1; c 3, gain 3": {**SCALE_FREE, "c": 3.0, "gain": 3.0},
    "scale-free decay 1; c 1, gain 1": {**SCALE_FREE, "c": 1.0, "gain": 1.0},
    "scale-free decay 1; self-attention 0.97": {**SCALE_FREE, "target": 0.97},
    "scale-free decay 1; 6 heads, self-attention 0.97": {**SCALE_FREE, "heads": 6, "target": 0.97},
    "scale-free decay 1; 1 head": {**SCALE_FREE, "heads": 1},
    "scale-free decay 1; value-output x 0.1": {**SCALE_FREE, "value_output": 0.1},
    "refresh every step": {"refresh": 1},
    "value-output x 0.1": {"value_output": 0.1},
    "value-output frozen": {"value_output": 0.0},
    "split qkv": {"split_qkv": True},
    "half-whitened patches": {"whiten": -0.25},
    "1 head": {"heads": 1},
    "2 heads": {"heads": 2},
    "6 heads": {"heads": 6},
    "self-attention 0.9": {"target": 0.9},
    "self-attention 0.97": {"target": 0.97},
    "6 heads, self-attention 0.9": {"heads": 6, "target": 0.9},
    "12 heads, self-attention 0.9": {"heads": 12, "target": 0.9},
    "c 3, gain 3": {"c": 3.0, "gain": 3.0},
    "bias 0": {"bias": 0.0},
    "bias 3": {"bias": 3.0},
    "Muon 3e-3": {"optimizer": "muon"},
    # not run yet:
    "c 27, gain 27": {"c": 27.0, "gain": 27.0},
    "alpha 1.8": {"alpha": 1.8},
    "alpha 0.5": {"alpha": 0.5},
    "12 heads": {"heads": 12},
    "self-attention 0.8": {"target": 0.8},
    "Muon 1e-2": {"optimizer": "muon", "lr": 1e-2},
}
CONTROLS: dict[str, Config] = {
    "biases decay, too": {"decays": "all"},
    # not run yet:
    "refresh every step": {"refresh": 1},
    "class token, timm's position embedding": {"pool": "token", "code": None},
    "6 heads": {"heads": 6},
    "1 head": {"heads": 1},
    "half-whitened patches": {"whiten": -0.25},
}
OWN, CONTROL = (3e-3, 0.3), (3e-3, 1.0)  # (learning rate, weight decay): the best of the two full grids


def at(wiring: str, place: tuple[float, float], **changes: Any) -> Config:
    """The config of a wiring at a learning rate and a weight decay."""
    return {**BASE, **WIRINGS[wiring], "lr": place[0], "weight_decay": place[1], **changes}


def stage_one(done: dict[str, Any]) -> Iterator[Job]:
    """Yields the runs of single factors, 20 epochs."""
    for wiring, places in GRID.items():
        yield from ((f"grid | {wiring} | {lr:g} | {decay:g}", at(wiring, (lr, decay))) for lr, decay in places)
    for name, changes in FACTORS.items():
        yield f"factor | {name}", at("cut, shaped", OWN, **changes)
    for name, changes in CONTROLS.items():
        yield f"control | {name}", at("residual", CONTROL, **changes)


# --- Stage 2: 100 epochs ----------------------------------------------------------------------------------------------

ALL: Config = {"decays": "all"}
WIDE: Config = {"heads": 6, "head_dim": 64}  # twice the attention width: three carrying heads, three for mixing
CARRY: Config = {**ALL, **WIDE, "target": 0.97, "even": 3}
MIX: dict[str, Config] = {
    "3 of 6 wide heads carry": at("cut, shaped", OWN, **CARRY, carry=0.3),
    "3 of 6 wide heads carry; mix 1": at("cut, shaped", OWN, **CARRY, carry=1.0),
    "6 wide heads": at("cut, shaped", OWN, **ALL, **WIDE),
    "residual; 6 wide heads": at("residual", CONTROL, **ALL, **WIDE),
}
LONG: Config = {"epochs": 100, "mixup": 0.8, "cutmix": 1.0}
FINAL: Config = {**LONG, "validate": False, "quantise": True}
FIXED: Config = {"fixed": True}
HELD: Config = {**FIXED, "c": 1.0, "carry_rate": 0.0}
EVENLY: Config = {**FIXED, "c": 1.0, "gain": 1.0, "pairs": 1.0}
HOLD: dict[str, Config] = {  # changes to "3 of 6 wide heads carry", with W_Q and W_K of carrying heads frozen
    "shaped MLPs": FIXED,
    "shaped MLPs, carrying V and O fixed": HELD,
    "pairs": {**FIXED, "pairs": 3.0, "gain": 3.0},
    "pairs, c 3": {**FIXED, "pairs": 1.7, "gain": 1.7, "c": 3.0},
    "pairs, carrying V and O fixed": {**HELD, "pairs": 3.0, "gain": 3.0, "pairs_trained": True},
    "pairs, carrying weights x 0.1": {**EVENLY, "carry_rate": 0.1},
    "pairs, carrying weights fixed": {**EVENLY, "carry_rate": 0.0},
    "pairs, carrying weights fixed, mix 0.1": {**EVENLY, "carry_rate": 0.0, "carry": 0.1},
    "pairs, carrying weights fixed, mix 1": {**EVENLY, "carry_rate": 0.0, "carry": 1.0},
    "pairs, carrying weights fixed, weight decay 1": {**EVENLY, "carry_rate": 0.0, "weight_decay": 1.0},
}
LONGER: dict[tuple[str, float], Config] = {  # (wiring and change, weight decay)
    ("no skips, carrying heads fixed", 0.3): FIXED,
    ("no skips, carrying heads fixed", 0.1): FIXED,
    ("no skips, carrying heads fixed", 0.03): FIXED,
    ("no skips, carrying heads fixed, mix 1", 0.1): {**FIXED, "carry": 1.0},
    ("residual", 0.1): {},
    ("residual", 0.3): {},
    ("no skips", 0.1): {},
    ("MLPs cut", 0.1): {},
    ("no skips, Q and K do not decay", 0.3): {"decays": "but QK"},
    ("no skips, carrying heads fixed, mix 1", 0.3): {**FIXED, "carry": 1.0},
    ("no skips, carrying heads fixed, V and O x 0.1", 0.3): {**FIXED, "value_output": 0.1},
    ("no skips, pairs, carrying weights x 0.1", 0.3): HOLD["pairs, carrying weights x 0.1"],
    ("no skips, pairs, carrying weights x 0.1", 0.1): HOLD["pairs, carrying weights x 0.1"],
    ("no skips, shaped MLPs, carrying V and O fixed", 0.3): HELD,
    ("no skips, pairs, c 3", 0.1): HOLD["pairs, c 3"],
    # not run yet:
    ("no skips, pairs, carrying V and O fixed", 0.3): HOLD["pairs, carrying V and O fixed"],
    ("no skips, shaped MLPs, carrying V and O fixed", 0.17): HELD,
    ("no skips, shaped MLPs, carrying V and O fixed", 0.6): HELD,
    ("no skips, shaped MLPs, carrying V and O fixed, refresh every step", 0.3): {**HELD, "refresh": 1},
    ("residual, refresh every step", 0.3): {"refresh": 1},
}
COMPILED = ("residual", "cut, shaped", "MLPs cut, shaped")  # wirings compiled before the runs of 100 epochs
SEEDS = (0, 1, 2)


def stage_two(done: dict[str, Any]) -> Iterator[Job]:
    """Yields the runs with carrying heads, then those of 100 epochs with mixup and cutmix."""
    yield from ((f"mix | {name}", config) for name, config in MIX.items())
    if not all(f"mix | {name}" in done for name in MIX):
        return
    skipless = {name: config for name, config in MIX.items() if not name.startswith("residual")}
    finals = {"residual": MIX["residual; 6 wide heads"]}
    finals["no skips"] = skipless[max(skipless, key=lambda name: value(done[f"mix | {name}"]))]
    finals["MLPs cut"] = at("MLPs cut, shaped", OWN, **ALL, **WIDE)
    finals["residual, weight decay 0.3"] = {**finals["residual"], "weight_decay": 0.3}
    for name, changes in HOLD.items():
        yield f"hold | {name}", {**MIX["3 of 6 wide heads carry"], **changes}
    longer = {}
    for (name, decay), changes in LONGER.items():
        base = name.partition(", ")[0]
        longer[f"long | {name} | {decay:g}"] = {**finals[base], **LONG, **changes, "weight_decay": decay}
    yield from longer.items()
    skipless = {name: config for name, config in longer.items() if "no skips" in name and name in done}
    if skipless:
        best = max(skipless, key=lambda name: value(done[name]))
        finals[best.removeprefix("long | ").replace(" | ", ", weight decay ")] = skipless[best]
    for seed, name in itertools.product(SEEDS, finals):
        yield f"final | {name} | seed {seed}", {**finals[name], **FINAL, "seed": seed}


# --- Results ----------------------------------------------------------------------------------------------------------


def table(done: dict[str, Any]) -> str:
    """Markdown table of runs, sorted by held-out accuracy, then one line per setting of the final runs."""
    lines = ["| run | lr | weight decay | held out | EMA | training loss | last cosine |", "|---" * 7 + "|"]
    for name, row in sorted(done.items(), key=lambda item: -value(item[1])):
        if name.startswith("final"):
            continue
        config, seen = row["config"], row.get("watch", {}).get("cosine", [[math.nan]])
        cells = [": ".join(name.split(" | ")[:2]), f"{config['lr']:.3g}", f"{config['weight_decay']:.3g}"]
        cells += [f"{100 * row[key]:.1f}" if key in row else "-" for key in ("val_accuracy", "ema_val_accuracy")]
        cells += [str(row.get("train_loss", row.get("diverged", "failed"))), f"{seen[-1][-1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    groups: dict[str, list[float]] = {}
    for name, row in done.items():
        if name.startswith("final") and "test_accuracy" in row:
            groups.setdefault(name.rpartition(" | ")[0], []).append(100 * row["test_accuracy"])
    for name, tests in groups.items():
        spread = f" ± {statistics.stdev(tests):.2f}, {len(tests)} seeds" if len(tests) > 1 else ", one seed"
        lines.append(f"{name}: test {statistics.mean(tests):.2f}{spread}")
    return "\n".join(lines)


def figure(done: dict[str, Any], file: Path) -> None:
    """Draws accuracy by weight decay, accuracy against training loss, and self-attention by block."""
    pyplot = drawing("skipless-gap")
    image, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    lines = {
        "residual": ("grid | residual", "C0-"),
        "no skips": ("grid | cut, shaped", "C3-"),
        "no skips, biases decay": ("factor | biases decay", "C3--"),
    }
    for label, (begin, style) in lines.items():
        rows = [row for name, row in done.items() if name.startswith(begin) and row["config"]["lr"] == 3e-3]
        points = sorted((row["config"]["weight_decay"], 100 * value(row)) for row in rows)
        left.plot(*zip(*points, strict=True), style, marker="o", label=label)
    left.set(xscale="log", xlabel="weight decay", ylabel="held-out accuracy (%)", title="SOAP, learning rate 3e-3")
    left.legend(fontsize=8)
    kinds = {
        "residual, decay": lambda config: config["shortcut"] != "cut",
        "MLPs cut": lambda config: config["where"] == "mlp",
        "attention cut": lambda config: config["where"] == "attention",
        "no skips": lambda config: config["shortcut"] == "cut" and config["where"] is None,
    }
    for label, chosen in kinds.items():
        rows = [row for row in done.values() if chosen(row["config"]) and value(row) > 0.7]
        middle.plot([row["train_loss"] for row in rows], [100 * value(row) for row in rows], "o", ms=4, label=label)
    middle.set(xlabel="training loss, last tenth", ylabel="held-out accuracy (%)", title="every run above 70 %")
    middle.legend(fontsize=8)
    shown = {
        "residual": "grid | residual | 0.003 | 1",
        "MLPs cut": "grid | MLPs cut, shaped | 0.003 | 0.3",
        "no skips, biases decay": "factor | biases decay, too",
        "no skips, self-attention 0.97": "factor | self-attention 0.97",
    }
    for (label, name), style in zip(shown.items(), ("C0-", "C1-.", "C3--", "C3:"), strict=True):
        values = done[name]["watch"]["self_attention"][-1]
        right.plot(range(1, len(values) + 1), values, style, marker="o", ms=3, label=label)
    right.set(xlabel="block", ylabel="self-attention", title="after training")
    right.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(file, metadata={"Date": None})
    pyplot.close(image)


def long_figure(file: Path) -> None:
    """Draws, after 100 epochs, test accuracy (one point per seed), token cosine by block and accuracy by bits."""
    pyplot = drawing("skipless-long")
    image, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    bits = ("8", "6", "4")
    for place, (label, start) in enumerate(LONG_ROWS.items()):
        done = runs("skipless-long", start)
        tests = [100 * row["test_accuracy"] for row in done]
        axes[0].plot([place] * len(tests), tests, f"C{place}o", ms=6, alpha=0.8)
        axes[0].annotate(
            f"{statistics.mean(tests):.1f}", (place, max(tests)), (0, 7), textcoords="offset points", ha="center"
        )
        for row in done:
            cosine = row["watch"]["cosine"][-1]
            axes[1].plot(range(1, len(cosine) + 1), cosine, f"C{place}-", marker="o", ms=3, alpha=0.8)
            rounded = [100 * row["quantised"][f"accuracy_{each}_tensor_clipped"] for each in bits]
            axes[2].plot(
                range(3), rounded, f"C{place}-", marker="o", ms=4, alpha=0.8, label=label if row is done[0] else None
            )
    axes[0].set(
        ylabel="test accuracy (%)", ylim=(88, 92), xlim=(-0.6, 4.6), title="100 epochs, one point per seed", xticks=[]
    )
    short = {"' skips": "", "carrying heads": "heads", "weight decay": "wd", ", ": "\n"}
    names = [functools.reduce(lambda text, each: text.replace(*each), short.items(), label) for label in LONG_ROWS]
    axes[0].set_xticks(range(len(names)), names, fontsize=7)
    axes[1].set(xlabel="block", ylabel="mean cosine between tokens", title="after training, one line per seed")
    axes[2].set(
        xlabel="bits of weights and activations", ylabel="test accuracy (%)", title="rounded, one scale per tensor"
    )
    axes[2].set_xticks(range(3), bits)
    axes[2].legend(fontsize=8)
    image.savefig(file, metadata={"Date": None})
    pyplot.close(image)


def main() -> None:
    parser = arguments(__doc__, "skipless-gap.json; of digits in build")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, help="steps of every run, for a smoke test")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    preset = "digits" if options.data is None else "cifar"
    fields: Config = {"preset": preset, "device": options.device}
    if options.data is not None:
        fields["data"] = options.data
    shrink: Config = {"steps": options.steps or 6} if options.steps or options.data is None else {}
    options.out = options.out or results(options.data) / "skipless-gap.json"
    settings = {"preset": preset, "epochs": BASE["epochs"], **shrink}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, settings, base=BASE, ema=EMA)
        # A short run of each model fills the compiler cache before several workers start.
        wide = [at(name, OWN, **ALL, **WIDE, **LONG) for name in COMPILED]
        shapes = [at("cut, shaped", OWN)] if options.stage == 1 else wide
        first = [(f"warm {index}", {**each, "steps": 8}) for index, each in enumerate(shapes)]
        first = first if options.device == "cuda" and options.workers > 1 else []

        def waiting() -> list[Job]:
            queue = [*(stage_one if options.stage == 1 else stage_two)(done)]
            jobs = [(name, {**config, **shrink}) for name, config in queue if name not in done]
            return [job for job in first if job[0] not in done] or jobs

        study(__file__, data, waiting, lambda name, config: {**config, **fields}, options, tell)
        for name, _ in first:
            done.pop(name, None)
        write(data, options.out)
    print(table(done))
    if options.show:
        images = ROOT / "docs" / "img"
        if options.stage == 1:
            figure(done, images / "skipless-gap.svg")
        else:
            long_figure(images / "skipless-long.svg")


if __name__ == "__main__":
    main()
