"""What the runs of the DINO study hold: a table, and figures over depth and training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing

RATES = (1.0, 1 / 3, 3.0)  # times the learning rate of an optimizer
# Over depth, what is drawn: where it is in a run, and its scale.
PANELS = {
    "effective rank": ("depth", "rank", 1),
    "effective rank within an image": ("depth", "patch_rank", 1),
    "KNN accuracy, k = 20 (%)": ("depth", "knn20", 100),
    "probe accuracy (%)": ("depth", "probe_lbfgs", 100),
    "mean IoU by ridge (%)": ("segment", "by block (ridge)", 100),
    "CorLoc (%)": ("discover", "corloc", 100),
    "no object found (%)": ("discover", "empty", 100),
}
# Over the number of blocks: `_numbers`.
BY_BLOCKS = {
    "single": "mean IoU, last block",
    "multi-scale": "mean IoU, multi-scale",
    "corloc": "CorLoc, last block",
    "knn20": "KNN, k = 20",
    "probe_lbfgs": "probe",
}


def rates(done: dict[str, Any], name: str, way: str) -> tuple[float, ...]:
    """The factors on the learning rate that are tried: one more where the best of the first is at an end."""
    rows = _trials(done, name, way, RATES)
    if None in rows.values():
        return RATES
    best = max(RATES, key=lambda times: _held_out(rows[times]))
    further = {max(RATES): 3 * max(RATES), min(RATES): min(RATES) / 3}
    return (*RATES, further[best]) if best in further else RATES


def best_rate(done: dict[str, Any], name: str, way: str) -> float | None:
    """The factor on the learning rate that is best on the held-out part, once all have run."""
    rows = _trials(done, name, way, rates(done, name, way))
    if None in rows.values():
        return None
    return max(rows, key=lambda times: _held_out(rows[times]))


def _trials(done: dict[str, Any], name: str, way: str, factors: tuple[float, ...]) -> dict[float, Any]:
    return {times: done.get(f"rate | {name} | {way} | x {times:.3g}") for times in factors}


def _held_out(row: Any) -> float:
    """By what a run is chosen: its last KNN in training, the mean over both tokens; with labels its last accuracy.

    0 for a run that diverged.
    """
    last = (row["online"] or row["accuracy"] or [[0, 0.0]])[-1]
    return statistics.mean(map(float, last[1:])) if "diverged" not in row else 0.0


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the last block, rounded to be read; why there are none; or by what the run is chosen."""
    if "depth" not in row:
        why = {key: row[key] for key in ("diverged", "not_judged") if key in row}
        return why or {"held out": round(_held_out(row), 3)}
    return {key: round(value, 3) for key, value in _numbers(row).items()}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Of the last block, as they are: means of rounded numbers would be rounded twice."""
    result: dict[str, float] = {key: values[-1] for key, values in row["depth"].items()}
    if "segment" in row:
        result |= {key: row["segment"][key] for key in ("single", "multi-scale")}
        curve, known = row["discover"]["corloc"], row["discover"]["corloc, train"]
        result["no answer"] = row["discover"]["empty"][-1]
        result |= {"corloc": curve[-1], "corloc of best block": curve[known.index(max(known))]}
    pairs = [value for index, values in enumerate(row["cka"]) for value in values[:index]]
    return result | {"CKA": statistics.mean(pairs) if pairs else 1.0}


def table(done: dict[str, Any]) -> str:
    """A line for each configuration, seeds together: numbers of the last block, the CorLoc of the block that is best on
    training images, how alike blocks are (CKA, the mean over pairs), the least rank of any block at any step, and
    warnings with the first step."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        if not name.startswith("rate"):
            groups.setdefault(name.partition(" | seed")[0], []).append(row)
    keys = ("single", "multi-scale", "corloc", "no answer", "corloc of best block", "knn20", "knn20_cls", "probe_lbfgs")
    keys = (*keys, "rank", "patch_rank", "CKA")
    lines = [
        f"| run | seeds | {' | '.join(keys)} | least rank | least patch rank | warnings |",
        "|---" * (5 + len(keys)) + "|",
    ]
    for name, rows in sorted(groups.items()):
        whole = [row for row in rows if "depth" in row]
        title = name.replace(" | ", ": ", 1).replace(" | ", ", ")
        lost = [next(key for key in ("diverged", "not_judged") if key in row) for row in rows if row not in whole]
        seeds = ", ".join([str(len(rows)), *(f"one {word.replace('_', ' ')}" for word in lost)])
        cells = []
        for key in keys:
            values = [_numbers(row)[key] for row in whole if key in _numbers(row)]
            scale, digits = {"rank": (1, 1), "patch_rank": (1, 1), "CKA": (1, 2)}.get(key, (100, 1))
            spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{scale * statistics.mean(values):.{digits}f}{spread}" if values else "")
        told: dict[str, int] = {}
        for row in rows:
            for key, step in row["warnings"].items():
                told[key] = min(step, told.get(key, step))
        least = f"{_least(rows, 'rank')} | {_least(rows, 'patch_rank')}"
        warned = ", ".join(f"{key} (step {step})" for key, step in told.items())
        lines.append(f"| {title} | {seeds} | {' | '.join(cells)} | {least} | {warned} |")
    for name, row in done.items():
        if name.startswith("rate"):
            lines.append(f"{name.replace(' | ', ', ')}: {short(row)}")
    return "\n".join(lines)


def _least(rows: list[dict[str, Any]], kind: str) -> str:
    """The least rank, its block, and the step at which it was seen; that of the end where none was taken before."""
    seen = [
        (rank, block, f"step {step}")
        for row in rows
        for step, *ranks in row.get(f"{kind}s", ())
        for block, rank in enumerate(ranks)
    ]
    if not seen:
        depth = [row["depth"].get(kind, ()) for row in rows if "depth" in row]
        seen = [(rank, block, "end") for ranks in depth for block, rank in enumerate(ranks)]
    if not seen:
        return ""
    rank, block, step = min(seen)
    return f"{rank:.1f} (block {block}, {step})"


def figures(done: dict[str, Any], folder: Path, word: str) -> None:
    """Numbers over depth, how alike blocks are and their ranks over training, of the main runs and of the remedies;
    and what fewer blocks do. As SVG."""
    pyplot = drawing("dino")
    whole = {name: row for name, row in done.items() if "depth" in row and "seed 1" not in name}
    names = sorted(whole, key=lambda name: (name.startswith("labels"), name))
    main = {_title(name): whole[name] for name in names if name.startswith(("main", "labels"))}
    remedies = {_title(name): whole[name] for name in names if name.startswith("remedy")}
    if remedies:
        strong = next(name for name in names if name.startswith("remedy")).rpartition(" | ")[2]
        pair = [name for name in names if name.startswith("main") and f"| {strong} |" in name]
        remedies = {_title(name): whole[name] for name in pair} | remedies
    for shown, end in ((main, ""), (remedies, "-remedies")):
        if shown:
            folder.mkdir(parents=True, exist_ok=True)
            _over_depth(pyplot, shown, folder / f"dino-{word}{end}.svg")
            _inside(pyplot, shown, folder / f"dino-{word}{end}-cka.svg")
    _by_blocks(pyplot, whole, folder / f"dino-{word}-depth.svg")


def _grid(pyplot: Any, count: int, high: float, below: float = 0.0) -> tuple[Any, Any]:
    """A figure and its first `count` panels, three in a row: more cannot be read across a page."""
    rows = -(-count // 3)
    size = (10, high * rows + below)
    figure, cells = pyplot.subplots(rows, 3, figsize=size, constrained_layout=True, squeeze=False)
    for spare in cells.flatten()[count:]:
        spare.set_axis_off()
    return figure, cells.flatten()[:count]


def _over_depth(pyplot: Any, shown: dict[str, dict[str, Any]], file: Path) -> None:
    """A panel for each number that any of the runs has; runs that have it not are left out there."""
    panels = {
        title: (part, key, scale)
        for title, (part, key, scale) in PANELS.items()
        if any(key in row.get(part, {}) for row in shown.values())
    }
    colours = len(pyplot.rcParams["axes.prop_cycle"])
    figure, axes = _grid(pyplot, len(panels), 3.0, 0.3 + 0.2 * -(-len(shown) // 3))
    for panel, (title, (part, key, scale)) in zip(axes, panels.items(), strict=True):
        for index, (name, row) in enumerate(shown.items()):
            if key not in row.get(part, {}):
                continue
            # Models that end without residuals are dashed, those trained with labels thin.
            cut = "cut" in row["config"].get("shortcut", "keep") and "where" not in row["config"]
            style = {"linestyle": "--" if cut else "-", "linewidth": 1 if "labels" in name else 1.8}
            style |= {"color": f"C{index}", "marker": "os^"[index // colours], "markersize": 4}
            panel.plot([scale * value for value in row[part][key]], label=name, **style)
        panel.set(xlabel="block", title=title)
        panel.xaxis.get_major_locator().set_params(integer=True)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=10)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _by_blocks(pyplot: Any, whole: dict[str, dict[str, Any]], file: Path) -> None:
    """The numbers of models with fewer blocks, beside those of the whole ones."""
    fewer = [name for name in whole if name.startswith("depth")]
    if not fewer:
        return
    strong = fewer[0].rpartition(" | ")[2]
    names = [*fewer, *(name for name in whole if name.startswith("main") and f"| {strong} |" in name)]
    keys = [key for key in BY_BLOCKS if all(key in _numbers(whole[name]) for name in names)]
    figure, axes = _grid(pyplot, len(keys), 3.0)
    for panel, key in zip(axes, keys, strict=True):
        for model, style in (("residual", "-"), ("skipless", "--")):
            mine = [whole[name] for name in names if model in name]
            points = sorted((len(row["cka"]), 100 * _numbers(row)[key]) for row in mine)
            panel.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=model) if points else None
        panel.set(xlabel="blocks", title=f"{BY_BLOCKS[key]} (%)")
        panel.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _inside(pyplot: Any, shown: dict[str, dict[str, Any]], file: Path) -> None:
    """CKA between blocks, and below it the ranks of every block over training: of images, and of patches within one.

    Four models side by side, the next four below.
    """
    kinds = {"ranks": "effective rank", "patch_ranks": "rank within an image"}
    kinds = {kind: label for kind, label in kinds.items() if any(row.get(kind) for row in shown.values())}
    across, high = min(4, len(shown)), 1 + len(kinds)
    rows = -(-len(shown) // across) * high
    size = (2.4 * across + 0.8, 2.4 * rows)
    figure, cells = pyplot.subplots(rows, across, figsize=size, constrained_layout=True, squeeze=False)
    for empty in cells.flatten():
        empty.set_axis_off()
    most = max(len(row["cka"]) for row in shown.values())
    for index, (name, row) in enumerate(shown.items()):
        first, column = index // across * high, index % across
        top = cells[first, column]
        top.set_axis_on()
        similar = top.imshow(row["cka"], vmin=0, vmax=1, origin="lower", cmap="cividis")
        top.set_title(name, fontsize=10)
        top.set(xlabel="block", ylabel="block" if column == 0 else None)
        for axis in (top.xaxis, top.yaxis):
            axis.get_major_locator().set_params(integer=True)
        for below, (kind, label) in enumerate(kinds.items(), first + 1):
            panel = cells[below, column]
            highest = max((max(ranks) for each in shown.values() for _, *ranks in each.get(kind, ())), default=1)
            if not row.get(kind):
                continue
            panel.set_axis_on()
            leftmost = not any(other.axison for other in cells[below, :column])
            for block in range(len(row["cka"])):
                steps, ranks = [each[0] for each in row[kind]], [each[1 + block] for each in row[kind]]
                panel.plot(steps, ranks, linewidth=1.1, color=pyplot.cm.viridis(block / max(1, most - 1)))
            panel.set(xlabel="step", ylabel=label if leftmost else None, ylim=(0, 1.05 * highest))
    figure.colorbar(similar, ax=cells[0, :], label="CKA", shrink=0.8)
    if kinds:
        scale = pyplot.cm.ScalarMappable(pyplot.Normalize(0, most - 1), "viridis")
        figure.colorbar(scale, ax=cells[1, :], label="block", shrink=0.8, ticks=range(0, most, -(-most // 6)))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _title(name: str) -> str:
    kind, *words = name.replace(" | seed 0", "").split(" | ")
    return ", ".join(words) + (", labels" if kind == "labels" else "")
