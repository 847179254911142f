"""What the runs of the DINO study hold: a table, and figures over depth and training."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing, seeds_and_mean

RATES = (1.0, 1 / 3, 3.0)  # times the learning rate of an optimizer
# Over depth, what is drawn: where it is in a run.
PANELS = {
    "linear probe (%)": ("depth", "probe_lbfgs"),
    "mean IoU by ridge (%)": ("segment", "by block (ridge)"),
    "CorLoc (%)": ("discover", "corloc"),
}
# The lines of the two figures: what a run's name begins with, and a line style.
MAIN = {
    "with skips": ("main | residual | soap", "-"),
    "without skips": ("main | skipless | soap", "--"),
    "with skips, labels": ("labels | residual | soap", "-"),
    "without skips, labels": ("labels | skipless | soap", "--"),
}
REMEDIES = {
    "with skips": ("main | residual | soap", "-"),
    "without skips": ("main | skipless | soap", "--"),
    "decay:0.6": ("remedy | decay 0.6 | soap", "-"),
    "only the MLPs' skips cut": ("remedy | MLPs' skips cut | soap", "-"),
    "mean of patches, no skips": ("remedy | mean of patches | soap", "--"),
    "centred and sharper, no skips": ("remedy | centred, sharper | soap", "--"),
}


def rates(done: dict[str, Any], name: str, way: str) -> tuple[float, ...]:
    """The factors on the learning rate that are tried: one more where the best of the first is at an end."""
    rows = _trials(done, name, way, RATES)
    if None in rows.values():
        return RATES
    best = max(RATES, key=lambda times: held_out(rows[times]))
    further = {max(RATES): 3 * max(RATES), min(RATES): min(RATES) / 3}
    return (*RATES, further[best]) if best in further else RATES


def best_rate(done: dict[str, Any], name: str, way: str) -> float | None:
    """The factor on the learning rate that is best on the held-out part, once all have run."""
    rows = _trials(done, name, way, rates(done, name, way))
    if None in rows.values():
        return None
    return max(rows, key=lambda times: held_out(rows[times]))


def _trials(done: dict[str, Any], name: str, way: str, factors: tuple[float, ...]) -> dict[float, Any]:
    return {times: done.get(f"rate | {name} | {way} | x {times:.3g}") for times in factors}


def held_out(row: Any) -> float:
    """By what a run is chosen: its last KNN in training, the mean over both tokens; with labels its last accuracy.

    0 for a run that diverged.
    """
    last = (row["online"] or row["accuracy"] or [[0, 0.0]])[-1]
    return statistics.mean(map(float, last[1:])) if "diverged" not in row else 0.0


def short(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of the last block, rounded to be read; why there are none; or by what the run is chosen."""
    if "depth" not in row:
        why = {key: row[key] for key in ("diverged", "not_judged") if key in row}
        return why or {"held out": round(held_out(row), 3)}
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
    """Numbers over depth, of the main runs and of what was tried, as SVG: a line a configuration, a point a seed."""
    pyplot = drawing("dino")
    for lines, end in ((MAIN, ""), (REMEDIES, "-remedies")):
        shown = {label: [row for name, row in done.items() if name == start or name.startswith(f"{start} | seed")]
                 for label, (start, _) in lines.items()}  # fmt: skip
        figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
        for panel, (title, (part, key)) in zip(axes, PANELS.items(), strict=True):
            for index, (label, rows) in enumerate(shown.items()):
                curves = [[100 * value for value in row[part][key]] for row in rows if key in row.get(part, {})]
                if curves:
                    seeds_and_mean(panel, curves, color=f"C{index}", linestyle=lines[label][1], label=label)
            panel.set(xlabel="block", title=title)
            panel.xaxis.get_major_locator().set_params(integer=True)
        handles, names = axes[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, names, loc="outside lower center", ncols=len(names) if len(names) < 5 else 3)
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / f"dino-{word}{end}.svg", metadata={"Date": None})
        pyplot.close(figure)
