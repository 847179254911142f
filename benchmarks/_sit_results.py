"""Tables and figures of the SiT and U-ViT studies (sit.py, sit_long.py).

The judge is the classifier over whose features the Fréchet distances (FD-judge) are computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _study import drawing, seeds_and_mean
from _tables import spread

CFG = 1.5
PROTOCOLS = {"knn20": "knn-dino-v1", "probe_lbfgs": "probe-lbfgs-v1"}  # by the metric that is shown


def judge_line(done: dict[str, Any]) -> str:
    """The judge's accuracy and the hash of its weights, if there is one."""
    if "judge" not in done:
        return ""
    return (
        f"judge: accuracy {done['judge'].get('test_accuracy', float('nan')):.3f}, weights {done['judge']['weights']}\n"
    )


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs grouped by configuration, seeds in order; SiT first."""
    result: dict[str, list[dict[str, Any]]] = {}
    seeds = {name: name.partition(" | seed ") for name in done if name != "judge"}
    for name in sorted(seeds, key=lambda name: (name.startswith("uvit"), int(seeds[name][2]))):
        result.setdefault(seeds[name][0], []).append(done[name])
    return result


def chosen(rows: list[dict[str, Any]], number: str) -> str:
    """Test accuracy at the block and time chosen on the held-out images."""
    result = [row["features"][number] for row in rows]
    where = "; ".join(dict.fromkeys(f"{each['block']}, {each['time']:g}" for each in result))
    return f"{spread([each['test'][each['block']] for each in result])} ({where})"


def table(done: dict[str, Any]) -> str:
    """One row per configuration."""
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
            spread([each["FD-judge"] for each in plain], 3, 1),
            *([spread([each["FD-judge"] for each in led], 3, 1) if led else ""] if guided else []),
            spread([each["precision"] for each in plain], 3, 1),
            spread([each["recall"] for each in plain], 3, 1),
            *(chosen(whole, number) for number in PROTOCOLS),
            spread([row["test_loss"] for row in whole], 4, 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if "judge" in done:
        real = done["judge"]["real"]
        cells = [f"{real['n']} test images", "", "", f"{real['FD-judge']:.3f}", *([""] if guided else [])]
        cells += [f"{real['precision']:.3f}", f"{real['recall']:.3f}", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Lines of the figures: first words of the run names, and a line style (solid for decay).
LINES = {
    "SiT, plain": ("sit | plain", ":"),
    "SiT, long skips": ("sit | long skips", "--"),
    "SiT, long skips, decay:0.8": ("sit | decay 0.8", "-"),
    "U-ViT": ("uvit | plain", "--"),
    "U-ViT, decay:0.8": ("uvit | decay 0.8", "-"),
}


def figure(done: dict[str, Any], file: Path) -> None:
    """Fréchet distances of samples; kNN and probe by block at the chosen time, on the test set. One point per seed."""
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


# --- The longer study -------------------------------------------------------------------------------------------------

ALPHAS = ("0.8", "0.7", "0.9")  # in the order in which sit_long.py runs them
LONGER = ", 1.5 x steps"  # suffix of the names of longer runs
Points = dict[float, float]


def distance(row: dict[str, Any]) -> float:
    """Fréchet distance of samples without guidance; infinite for a run that diverged."""
    return float(row["generation"]["1"]["FD-judge"]) if "generation" in row else float("inf")


def best_decay(done: dict[str, Any]) -> str | None:
    """The alpha_min with the lowest distance at seed 0; None until all have run."""
    rows = {alpha: done.get(f"sit | decay {alpha} | seed 0") for alpha in ALPHAS}
    if any(row is None for row in rows.values()):
        return None
    return min(ALPHAS, key=lambda alpha: distance(rows[alpha] or {}))


def title(name: str) -> str:
    """The label of a group of runs in a table."""
    recipe, _, kind = name.removesuffix(LONGER).partition(" | ")
    more = LONGER.removeprefix(", ") if name.endswith(LONGER) else ""
    words = {"plain": "plain" if recipe == "sit" else "", "long skips": "long skips"}
    kind = words.get(kind, f"{'long skips, ' if recipe == 'sit' else ''}`{kind.replace(' ', ':')}`")
    return ", ".join(word for word in ({"sit": "SiT", "uvit": "U-ViT"}[recipe], kind, more) if word)


def by_guidance(row: dict[str, Any]) -> Points:
    """FD by guidance scale."""
    return {float(cfg): each["FD-judge"] for cfg, each in row.get("generation", {}).items()}


def by_evaluations(row: dict[str, Any]) -> Points:
    """FD without guidance by number of network evaluations."""
    every = [*row.get("curve", {}).values(), *([row["generation"]["1"]] if "generation" in row else [])]
    return {each["evaluations"]: each["FD-judge"] for each in sorted(every, key=lambda each: each["evaluations"])}


def by_noise(row: dict[str, Any]) -> Points:
    """kNN of the middle block, in percent, by time."""
    return {float(time): 100 * value for time, value in row.get("middle", {}).get("knn20", {}).items()}


def over_seeds(rows: list[dict[str, Any]], read: Callable[[dict[str, Any]], Points]) -> dict[float, list[float]]:
    """The values of all seeds at each x, sorted by x."""
    result: dict[float, list[float]] = {}
    for points in map(read, rows):
        for place, value in points.items():
            result.setdefault(place, []).append(value)
    return dict(sorted(result.items()))


def further_table(done: dict[str, Any], read: Callable[[dict[str, Any]], Points], digits: int) -> str:
    """A row per group of runs and a column per x; empty if no run has more than one x."""
    found = {name: over_seeds(rows, read) for name, rows in groups(done).items()}
    places = sorted({place for each in found.values() for place in each})
    if len(places) < 2:
        return ""
    lines = [f"| | {' | '.join(f'{place:g}' for place in places)} |", "|---" * (len(places) + 1) + "|"]
    for name, each in found.items():
        if each:
            cells = [spread(each[place], digits, 1) if place in each else "" for place in places]
            lines.append(f"| {title(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def further_tables(done: dict[str, Any]) -> dict[str, str]:
    """The additional tables of the longer study, by title."""
    tables = {
        "FD by guidance": further_table(done, by_guidance, 2),
        "FD without guidance by evaluations of the network": further_table(done, by_evaluations, 2),
        "kNN of the middle block by time, from noise, 0, to data, 1": further_table(done, by_noise, 1),
    }
    return {about: text for about, text in tables.items() if text}


def long_figure(done: dict[str, Any], file: Path) -> None:
    """FD by alpha_min, guidance and evaluations, and kNN over noise levels. One point per seed, lines through means."""
    pyplot = drawing("sit-long")
    sheet, panels = pyplot.subplots(2, 2, figsize=(9, 7), constrained_layout=True)
    every = {name: [row for row in rows if "generation" in row] for name, rows in groups(done).items()}

    def drawn(axes: Any, values: dict[float, list[float]], **style: Any) -> None:
        if values:
            axes.plot([*values], [statistics.mean(each) for each in values.values()], **style)
            for place, each in values.items():
                axes.plot([place] * len(each), each, "o", color=style["color"], alpha=0.6)

    names = {1.0: "sit | long skips", **{float(alpha): f"sit | decay {alpha}" for alpha in ALPHAS}}
    for more, style in (("", "-"), (LONGER, "--")):
        rows = {alpha: every.get(f"{name}{more}", []) for alpha, name in sorted(names.items())}
        points = {alpha: [distance(row) for row in each] for alpha, each in rows.items() if each}
        if points:
            steps = next(each[0]["config"]["steps"] for each in rows.values() if each)
            drawn(panels[0, 0], points, color="C2", linestyle=style, label=f"{steps:,} steps")
            panels[0, 0].legend()
    panels[0, 0].set(xlabel="alpha_min (1: long skips alone)", title="FD of SiT (lower is better)")
    best = best_decay(done) or ALPHAS[0]
    lines = {
        "SiT, plain": ("sit | plain", ":"),
        "SiT, long skips": ("sit | long skips", "--"),
        f"SiT, long skips, decay:{best}": (f"sit | decay {best}", "-"),
        "U-ViT": ("uvit | plain", "--"),
        "U-ViT, decay:0.8": ("uvit | decay 0.8", "-"),
    }
    reads = (by_guidance, by_evaluations, by_noise)
    for axes, read in zip((panels[0, 1], panels[1, 0], panels[1, 1]), reads, strict=True):
        for index, (label, (name, style)) in enumerate(lines.items()):
            drawn(axes, over_seeds(every.get(name, []), read), color=f"C{index}", linestyle=style, label=label)
    panels[0, 1].set(xlabel="guidance (1: none)", title="FD by guidance")
    panels[1, 0].set(xlabel="evaluations of the network", title="FD by sampling cost", xscale="log", yscale="log")
    places = sorted({place for rows in every.values() for row in rows for place in by_evaluations(row)})
    panels[1, 0].set_xticks(places, [f"{place:g}" for place in places])
    panels[1, 0].xaxis.minorticks_off()
    for which in (panels[1, 0].yaxis.set_major_formatter, panels[1, 0].yaxis.set_minor_formatter):
        which("{x:g}")
    panels[1, 1].set(xlabel="time (0: noise, 1: data)", title="kNN of the middle block (%)")
    sheet.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, metadata={"Date": None})
    pyplot.close(sheet)
