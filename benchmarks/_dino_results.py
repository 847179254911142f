"""What the runs of the DINO study hold: a table, and figures over depth and training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing

RATES = (1.0, 1 / 3, 3.0)  # times the learning rate of an optimizer
# Over depth: what is drawn, and how its values are found in a run.
PANELS = {
    "effective rank": lambda row: row["depth"]["rank"],
    "KNN accuracy, k = 20 (%)": lambda row: [100 * value for value in row["depth"]["knn20"]],
    "mean IoU by ridge (%)": lambda row: [100 * value for value in row["segment"]["by block (ridge)"]],
    "CorLoc (%)": lambda row: [100 * value for value in row["discover"]["corloc"]],
}


def best_rate(done: dict[str, Any], name: str, optimizer: str) -> float | None:
    """The factor on the learning rate with the best KNN on the held-out part, once all have run."""
    rows = {times: done.get(f"rate | {name} | {optimizer} | x {times:.3g}") for times in RATES}
    if None in rows.values():
        return None
    return max(RATES, key=lambda times: _last_online(rows[times]))


def _last_online(row: Any) -> float:
    """The last KNN in training; 0 for a run that diverged."""
    return float(row["online"][-1][1]) if row["online"] and "diverged" not in row else 0.0


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the last block."""
    if "depth" not in row:
        why = {key: row[key] for key in ("diverged", "not_judged") if key in row}
        return why or {"knn20, online": round(_last_online(row), 3)}
    found = {key: round(values[-1], 3) for key, values in row["depth"].items()}
    if "segment" in row:
        found |= {key: round(row["segment"][key], 3) for key in ("single", "multi-scale")}
        found |= {"corloc": row["discover"]["corloc"][-1], "best corloc": max(row["discover"]["corloc"])}
    return found


def table(done: dict[str, Any]) -> str:
    """A line for each configuration, seeds together: numbers of the last block, the best of any, and warnings."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        if not name.startswith("rate"):
            groups.setdefault(name.partition(" | seed")[0], []).append(row)
    keys = ("single", "multi-scale", "corloc", "best corloc", "knn20", "knn20_cls", "probe_lbfgs", "rank")
    lines = [f"| run | seeds | {' | '.join(keys)} | least rank (block) | warnings |", "|---" * (4 + len(keys)) + "|"]
    for name, rows in sorted(groups.items()):
        whole = [row for row in rows if "depth" in row]
        title = name.replace(" | ", ": ", 1).replace(" | ", ", ")
        if not whole:
            word = "diverged" if "diverged" in rows[0] else "not judged"
            lines.append(f"| {title} | {len(rows)} | {word}" + " |" * (2 + len(keys)))
            continue
        cells = []
        for key in keys:
            values = [short(row)[key] for row in whole if key in short(row)]
            scale = 1 if key == "rank" else 100
            spread = f" ± {scale * statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{scale * statistics.mean(values):.1f}{spread}" if values else "")
        ranks = whole[0]["depth"]["rank"]
        least = min(range(len(ranks)), key=ranks.__getitem__)
        told = ", ".join(f"{key} (step {step})" for row in whole[:1] for key, step in row["warnings"].items())
        lines.append(f"| {title} | {len(whole)} | {' | '.join(cells)} | {ranks[least]:.1f} ({least}) | {told} |")
    for name, row in done.items():
        if name.startswith("rate"):
            lines.append(f"{name.replace(' | ', ', ')}: {short(row)}")
    return "\n".join(lines)


def figures(done: dict[str, Any], folder: Path, word: str) -> None:
    """Numbers over depth; how alike blocks are, and their ranks over training. As SVG."""
    pyplot = drawing("dino")
    names = sorted(done, key=lambda name: (name.startswith("labels"), name))
    shown = {_title(name): done[name] for name in names if _is_shown(name, done[name])}
    if not shown:
        return
    folder.mkdir(parents=True, exist_ok=True)
    panels = {name: find for name, find in PANELS.items() if "IoU" not in name and "CorLoc" not in name}
    if any("segment" in row for row in shown.values()):
        panels = PANELS
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.4), constrained_layout=True)
    for panel, (title, find) in zip(axes, panels.items(), strict=True):
        for name, row in shown.items():
            # Models without residuals are dashed, those trained with labels thin.
            style = {"linestyle": "--" if "skipless" in name else "-", "linewidth": 1 if "labels" in name else 1.8}
            panel.plot(find(row), marker="o", markersize=3, label=name, **style)
        panel.set(xlabel="block", title=title)
        panel.xaxis.get_major_locator().set_params(integer=True)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(folder / f"dino-{word}.svg", metadata={"Date": None})
    pyplot.close(figure)
    _inside(pyplot, shown, folder / f"dino-{word}-cka.svg")


def _inside(pyplot: Any, shown: dict[str, dict[str, Any]], file: Path) -> None:
    """CKA between blocks, and below it the rank of every block over training."""
    size = (2.9 * len(shown) + 0.8, 6)
    figure, cells = pyplot.subplots(2, len(shown), figsize=size, constrained_layout=True, squeeze=False)
    highest = max((max(ranks) for row in shown.values() for _, *ranks in row["ranks"]), default=1)
    for index, (name, row) in enumerate(shown.items()):
        top, bottom = cells[0, index], cells[1, index]
        similar = top.imshow(row["cka"], vmin=0, vmax=1, origin="lower", cmap="cividis")
        top.set_title(name, fontsize=9)
        top.set(xlabel="block", ylabel="block" if index == 0 else None)
        for axis in (top.xaxis, top.yaxis):
            axis.get_major_locator().set_params(integer=True)
        blocks = len(row["cka"])
        for block in range(blocks if row["ranks"] else 0):
            steps, ranks = [each[0] for each in row["ranks"]], [each[1 + block] for each in row["ranks"]]
            bottom.plot(steps, ranks, linewidth=1.1, color=pyplot.cm.viridis(block / max(1, blocks - 1)))
        bottom.set(xlabel="step", ylabel="effective rank" if index == 0 else None, ylim=(0, 1.05 * highest))
        if not row["ranks"]:
            bottom.set_axis_off()
    figure.colorbar(similar, ax=cells[0, :], label="CKA", shrink=0.8)
    scale = pyplot.cm.ScalarMappable(pyplot.Normalize(0, blocks - 1), "viridis")
    figure.colorbar(scale, ax=cells[1, :], label="block", shrink=0.8)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _is_shown(name: str, row: dict[str, Any]) -> bool:
    return name.startswith(("main", "labels")) and "depth" in row and "seed 1" not in name


def _title(name: str) -> str:
    kind, *words = name.replace(" | seed 0", "").split(" | ")
    return ", ".join(words) + (", labels" if kind == "labels" else "")
