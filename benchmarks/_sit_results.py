"""What the study of SiT and U-ViT shows of its JSON: a table and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing, seeds_and_mean

CFG = 1.5
PROTOCOLS = {"knn20": "knn-dino-v1", "probe_lbfgs": "probe-lbfgs-v1"}  # by the number that is shown


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together and in their order; SiT first."""
    result: dict[str, list[dict[str, Any]]] = {}
    seeds = {name: name.partition(" | seed ") for name in done if name != "judge"}
    for name in sorted(seeds, key=lambda name: (name.startswith("uvit"), int(seeds[name][2]))):
        result.setdefault(seeds[name][0], []).append(done[name])
    return result


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return middle + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def chosen(rows: list[dict[str, Any]], number: str) -> str:
    """Accuracy on the test set at the block and time that the held-out images have chosen."""
    result = [row["features"][number] for row in rows]
    where = "; ".join(dict.fromkeys(f"{each['block']}, {each['time']:g}" for each in result))
    return f"{spread([100 * each['test'][each['block']] for each in result], 1)} ({where})"


def table(done: dict[str, Any]) -> str:
    """A line for each configuration."""
    every, strong = groups(done), f"{CFG:g}"
    guided = any(strong in row.get("generation", {}) for rows in every.values() for row in rows)
    heads = ["FD-judge", *([f"FD-judge, cfg {strong}"] if guided else []), "precision", "recall"]
    heads += ["KNN (block, t)", "probe (block, t)", "test loss"]
    lines = [f"| run | seeds | decay | {' | '.join(heads)} |", "|---" * (len(heads) + 3) + "|"]
    for name, rows in every.items():
        whole = [row for row in rows if "generation" in row]
        for row in rows:
            if "diverged" in row:
                lines.append(f"| {name.replace(' | ', ': ')} | 1 | diverged: {row['diverged']} |" + " |" * len(heads))
        if not whole:
            continue
        plain, led = ([row["generation"][cfg] for row in whole if cfg in row["generation"]] for cfg in ("1", strong))
        cells = [
            name.replace(" | ", ": "),
            str(len(whole)),
            f"{whole[0]['effective_decay']:.2g}",
            spread([each["FD-judge"] for each in plain], 3),
            *([spread([each["FD-judge"] for each in led], 3) if led else ""] if guided else []),
            spread([each["precision"] for each in plain], 3),
            spread([each["recall"] for each in plain], 3),
            *(chosen(whole, number) for number in PROTOCOLS),
            spread([row["test_loss"] for row in whole], 4),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if "judge" in done:
        real = done["judge"]["real"]
        cells = [f"{real['n']} test images", "", "", f"{real['FD-judge']:.3f}", *([""] if guided else [])]
        cells += [f"{real['precision']:.3f}", f"{real['recall']:.3f}", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# What is drawn, by the start of a run's name: SiT in the first colours, U-ViT in the next, decayed ones solid.
LINES = {
    "SiT, plain": ("sit | plain", ":"),
    "SiT, long skips": ("sit | long skips", "--"),
    "SiT, long skips, decay:0.8": ("sit | decay 0.8", "-"),
    "U-ViT": ("uvit | plain", "--"),
    "U-ViT, decay:0.8": ("uvit | decay 0.8", "-"),
}


def figure(done: dict[str, Any], file: Path) -> None:
    """Distances of samples; kNN and probe over blocks at the chosen time, on the test set. A point a seed."""
    pyplot = drawing("sit")
    sheet, (distance, near, probe) = pyplot.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
    every = {name: [row for row in rows if "generation" in row] for name, rows in groups(done).items()}
    shown = {label: (every[name], style) for label, (name, style) in LINES.items() if every.get(name)}
    for index, (label, (rows, style)) in enumerate(shown.items()):
        values = [row["generation"]["1"]["FD-judge"] for row in rows]
        distance.hlines(statistics.mean(values), index - 0.3, index + 0.3, color=f"C{index}")
        distance.plot([index] * len(values), values, "o", color=f"C{index}", alpha=0.6)
        for axes, number in ((near, "knn20"), (probe, "probe_lbfgs")):
            curves = [[100 * value for value in row["features"][number]["test"]] for row in rows]
            seeds_and_mean(axes, curves, color=f"C{index}", linestyle=style, label=label)
    distance.set(
        xticks=[], ylim=(0, 1.1 * distance.get_ylim()[1]), title="Fréchet distance of samples (lower is better)"
    )
    near.set(xlabel="block", title="kNN, k = 20 (%)")
    probe.set(xlabel="block", title="linear probe (%)")
    for axes in (near, probe):
        axes.xaxis.get_major_locator().set_params(integer=True)
    sheet.legend(*near.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, metadata={"Date": None})
    pyplot.close(sheet)
