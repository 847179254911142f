"""Table, comparisons, correlations and figures of the MAE studies, and the choice of alpha_min and learning rates."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing
from _tables import spread

ALPHAS = (0.6, 0.7, 0.8, 0.5, 0.9, 0.4)
RATES = (0.5, 2.0)  # factors on the learning rate of all other runs
MARKS: dict[str, dict[str, Any]] = {  # markers by kind of run, in Okabe-Ito colours
    "final": {"marker": "o", "color": "#000000", "label": "final runs: more epochs, test set"},
    "sweep": {"marker": "s", "color": "#0072b2", "label": "decayed to the alpha_min beside it, held-out part"},
    "ablation": {"marker": "x", "color": "#d55e00", "label": "ablations, held-out part"},
    "start": {"marker": "^", "color": "#009e73", "label": "decayed to 0.4, 0.6 without zero start, held-out part"},
}


def chosen(done: dict[str, Any]) -> float | None:
    """The alpha_min with the best held-out kNN of the last block; None until all have run."""
    names = {alpha: f"sweep | alpha_min {alpha:g}" for alpha in ALPHAS}
    if not all(name in done for name in names.values()):
        return None
    return max(names, key=lambda alpha: last(done[names[alpha]], "knn20"))


def best_rate(done: dict[str, Any], name: str) -> float | None:
    """The factor on the learning rate with the best held-out kNN; None until all have run."""
    usual = f"sweep | alpha_min {name.removeprefix('decay ')}" if name.startswith("decay") else f"ablation | {name}"
    names = {1.0: usual} | {times: f"rate | {name} | x {times:g}" for times in RATES}
    if not all(each in done for each in names.values()):
        return None
    return max(names, key=lambda times: last(done[names[times]], "knn20"))


def last(row: dict[str, Any], key: str) -> float:
    """A result of the last block; 0 for a run that diverged."""
    return float(row["depth"][key][-1]) if "depth" in row else 0.0


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs grouped by configuration: those of a group differ only in their seed."""
    result: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        result.setdefault(name.partition(" | seed")[0], []).append(row)
    return result


def table(done: dict[str, Any]) -> str:
    """One row per configuration: results of the last block, and the best kNN over depth with its block."""
    keys = ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed", "rank")
    lines = [f"| run | seeds | {' | '.join(keys)} | best kNN (block) | fine-tuned | split |", "|---" * 10 + "|"]
    for name, rows in sorted(groups(done).items()):
        whole = [row for row in rows if "depth" in row]
        if not whole:
            lines.append(f"| {name.replace(' | ', ': ')} | {len(rows)} | diverged" + " |" * 8)
            continue
        cells = [spread([last(row, key) for row in whole], 1, 1 if key == "rank" else 100) for key in keys]
        best = [max(range(len(row["depth"]["knn20"])), key=row["depth"]["knn20"].__getitem__) for row in whole]
        top = spread([row["depth"]["knn20"][block] for row, block in zip(whole, best, strict=True)])
        tuned = spread([row["finetune"] for row in whole]) if "finetune" in whole[0] else ""
        split = "val" if whole[0]["config"].get("validate") else "test"
        blocks = ", ".join(str(block) for block in sorted(set(best)))
        title = name.replace(" | ", ": ")
        lines.append(f"| {title} | {len(whole)} | {' | '.join(cells)} | {top} ({blocks}) | {tuned} | {split} |")
    return "\n".join(lines)


def answers(done: dict[str, Any]) -> dict[str, Any]:
    """The comparisons of the study, in points: the gain from decay, transfer over depth, small against large models."""
    best = chosen(done)
    if best is None:
        return {}
    result: dict[str, Any] = {"alpha_min": best}
    rows = {name: [row for row in each if "depth" in row] for name, each in groups(done).items()}

    def mean(name: str, key: str) -> float | None:
        # Read results by block, not the last online ones on fewer images; only fine-tuning has no curve over depth.
        values = [row[key] if key == "finetune" else last(row, key) for row in rows.get(name, ())]
        return 100 * statistics.mean(values) if values else None

    def gain(ours: str, theirs: str, key: str) -> float | None:
        a, b = mean(ours, key), mean(theirs, key)
        return None if a is None or b is None else round(a - b, 2)

    longest = f"longer | decay {best:g} | x 1"
    for other in sorted(name for name in rows if name.startswith("longer") and name != longest):
        for key in ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed"):
            result[f"{key}, longer: decayed less{other.removeprefix('longer |')}"] = gain(longest, other, key)
    ours, sweep = f"final | decay {best:g}", f"sweep | alpha_min {best:g}"
    for other in ("plain", "long skips"):
        for key in ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed", "finetune"):
            result[f"{key}, decayed less {other}"] = gain(ours, f"final | {other}", key)
    for name in sorted(rows):
        if name.startswith("depth") and "long skips" not in name:
            depth = name.split(" | ")[1]
            for key in ("knn20", "probe_lbfgs"):
                result[f"{key}, {name} less long skips"] = gain(name, f"depth | {depth} | long skips", key)
    for key in ("knn20", "probe_lbfgs"):
        result[f"{key}, {sweep} less long skips"] = gain(sweep, "ablation | long skips", key)
    for key in ("probe_lbfgs", "probe_mae", "probe_decayed"):
        result[f"{key}, decayed less plain twice as wide"] = gain(sweep, "size | plain, twice as wide", key)
    return result


def correlations(done: dict[str, Any]) -> dict[str, Any]:
    """Correlation of rank and kNN over configurations at the same share of training, and over checkpoints of a run."""
    curves = {name: row["online"] for name, row in done.items() if len(row.get("online", ())) > 3}
    curves = {name: curve for name, curve in curves.items() if not name.startswith(("depth", "size", "rate", "longer"))}
    result: dict[str, Any] = {"over checkpoints": {}}
    for kind, long in (("final runs", True), ("other runs", False)):
        group = [curve for name, curve in curves.items() if name.startswith("final") == long]
        over = result.setdefault(f"over configurations, {kind}", {})
        count = min((len(curve) for curve in group), default=0)
        for at in range(count if len(group) > 3 else 0):
            points = [curve[at] for curve in group]
            over[f"{points[0][0] / group[0][-1][0]:.0%}"] = pearson([p[2] for p in points], [p[1] for p in points])
    for name, curve in curves.items():
        half = len(curve) // 2
        parts = {"early": curve[:half], "late": curve[half:]}
        result["over checkpoints"][name] = {
            part: pearson([p[2] for p in rows], [p[1] for p in rows]) for part, rows in parts.items() if len(rows) > 2
        }
    return result


def pearson(x: list[float], y: list[float]) -> float | None:
    try:
        return round(statistics.correlation(x, y), 3)
    except statistics.StatisticsError:
        return None


def figures(done: dict[str, Any], folder: Path, word: str) -> None:
    """SVG figures: kNN over depth and training, rank against kNN; feature norms, input reconstruction, frequencies."""
    pyplot = drawing("mae")
    of_a_name: dict[str, Any] = {}
    styles: dict[str, str] = {}
    figure, (depth, training, ranks) = pyplot.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
    for name, rows in sorted(groups(done).items()):
        whole = [row for row in rows if "depth" in row]
        if not whole:
            continue
        label = name.partition(" | ")[2]
        if name.startswith("final"):
            means = [
                100 * statistics.mean(values) for values in zip(*(r["depth"]["knn20"] for r in whole), strict=True)
            ]
            (line,) = depth.plot(means, marker="o", markersize=3, label=label)
            of_a_name[label] = line.get_color()
            for row in whole:
                depth.plot([100 * v for v in row["depth"]["knn20"]], color=line.get_color(), alpha=0.25, linewidth=0.8)
                training.plot(*_course(row), color=line.get_color(), alpha=0.7)
                styles[f"{row['config']['epochs']:g} epochs, one rate for all, colours as on the left"] = "-"
        if name.startswith("longer"):  # sorted after the final runs, so colours are assigned
            kept, _, times = label.partition(" | x ")
            best = float(times) == best_rate(done, kept)
            style = "--" if best else ":"
            training.plot(*_course(whole[0]), style, color=of_a_name.get(kept, "#000000"))
            length = f"{whole[0]['config']['epochs']:g} epochs, one seed"
            styles[f"{length}, each at its best of short runs" if best else f"{length}, at the rate of all"] = style
        kind = name.partition(" | ")[0]
        if kind in MARKS:
            points = [last(r, "rank") for r in whole], [100 * last(r, "knn20") for r in whole]
            ranks.scatter(*points, s=16, **MARKS[kind])
            if kind in ("sweep", "final"):
                shown = label.removeprefix("alpha_min ")
                right = kind == "sweep" and shown != "0.6"  # the point of 0.7 is close to that of 0.6
                beside = (5, -7) if right else (-6, -2)
                ranks.annotate(
                    shown,
                    min(zip(*points, strict=True)),
                    beside,
                    textcoords="offset points",
                    fontsize=7,
                    horizontalalignment="left" if right else "right",
                )
    depth.set(xlabel="block", ylabel="kNN accuracy, k = 20 (%)", title="over depth")
    for style_of, style in styles.items():
        training.plot([], [], style, color="#555555", label=style_of)
    training.set(xlabel="step", ylabel="kNN, k = 20 (%)", title="over training, last block, fewer images")
    ranks.set(xlabel="effective rank, last block", ylabel="kNN, k = 20 (%)", title="rank against kNN")
    ranks.set_ylim(top=ranks.get_ylim()[1] + 10)  # room for the legend
    for axes in (depth, training, ranks):
        _legend(axes, 7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"mae-{word}.svg", metadata={"Date": None})
    pyplot.close(figure)
    figure, (norms, echo, frequency) = pyplot.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
    for name, rows in sorted(groups(done).items()):
        if name.startswith("start") or name in ("sweep | alpha_min 0.4", "sweep | alpha_min 0.6"):
            label = name.partition(" | ")[2] + ("" if name.startswith("start") else " with zero start")
            norms.plot([point[0] for point in rows[0]["loss"]], [point[2] for point in rows[0]["loss"]], label=label)
        measured: Any = [row["measure"] for row in rows if "measure" in row]
        for key, axes in (("echo", echo), ("high_frequency", frequency)) if measured else ():
            each = zip(*([block.get(key) for block in row] for row in measured), strict=True)
            means = [statistics.mean(values) if None not in values else None for values in each]
            axes.plot(means, marker="o", markersize=3, label=name.partition(" | ")[2])
    norms.set(xlabel="step", ylabel="length of the last tokens", title="feature norm over training", yscale="log")
    echo.set(xlabel="block", ylabel="R² of the first stream", title="input reconstruction")
    frequency.set(xlabel="block", ylabel="share of energy", title="high frequencies")
    for axes in (norms, echo, frequency):
        _legend(axes, 7)
    figure.savefig(folder / f"mae-{word}-inside.svg", metadata={"Date": None})
    pyplot.close(figure)


def _course(row: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Online kNN by step."""
    return [point[0] for point in row["online"]], [100 * point[1] for point in row["online"]]


def _legend(axes: Any, size: int) -> None:
    """A legend with one entry per label, although several lines may have the same one."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        named = dict(zip(labels, handles, strict=True))
        axes.legend(named.values(), named.keys(), fontsize=size)
