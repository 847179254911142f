"""Table and figures of the DINO studies, and the choice of their learning rates."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing, seeds_and_mean
from _tables import best_corloc

RATES = (1.0, 1 / 3, 3.0)  # factors on the base learning rate of an optimizer
# Panels of the figures over depth: title, and the keys of the values in the record of a run.
PANELS = {
    "linear probe (%)": ("depth", "probe_lbfgs"),
    "mean IoU by ridge (%)": ("segment", "by block (ridge)"),
    "CorLoc (%)": ("discover", "corloc"),
}
# Lines of the two figures: first words of the run names, and a line style.
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
    """The factors on the learning rate to try; one more if the best of the first three is at the edge."""
    rows = _trials(done, name, way, RATES)
    if None in rows.values():
        return RATES
    best = max(RATES, key=lambda times: held_out(rows[times]))
    further = {max(RATES): 3 * max(RATES), min(RATES): min(RATES) / 3}
    return (*RATES, further[best]) if best in further else RATES


def best_rate(done: dict[str, Any], name: str, way: str) -> float | None:
    """The factor on the learning rate with the best held-out result; None until all have run."""
    rows = _trials(done, name, way, rates(done, name, way))
    if None in rows.values():
        return None
    return max(rows, key=lambda times: held_out(rows[times]))


def _trials(done: dict[str, Any], name: str, way: str, factors: tuple[float, ...]) -> dict[float, Any]:
    return {times: done.get(f"rate | {name} | {way} | x {times:.3g}") for times in factors}


def held_out(row: Any) -> float:
    """The score that chooses a learning rate: the last online kNN, mean over both tokens, or with labels the accuracy.

    0 for a run that diverged.
    """
    last = (row["online"] or row["accuracy"] or [[0, 0.0]])[-1]
    return statistics.mean(map(float, last[1:])) if "diverged" not in row else 0.0


def short(row: dict[str, Any]) -> dict[str, Any]:
    """Rounded results of the last block; the reason if there are none; or the held-out score of a trial."""
    if "depth" not in row:
        why = {key: row[key] for key in ("diverged", "not_judged") if key in row}
        return why or {"held out": round(held_out(row), 3)}
    return {key: round(value, 3) for key, value in _numbers(row).items()}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Unrounded results of the last block, so that their means are rounded once."""
    result: dict[str, float] = {key: values[-1] for key, values in row["depth"].items()}
    if "segment" in row:
        result |= {key: row["segment"][key] for key in ("single", "multi-scale")}
        result["no answer"] = row["discover"]["empty"][-1]
        result |= {"corloc": row["discover"]["corloc"][-1], "corloc of best block": best_corloc(row)}
    pairs = [value for index, values in enumerate(row["cka"]) for value in values[:index]]
    return result | {"CKA": statistics.mean(pairs) if pairs else 1.0}


def table(done: dict[str, Any]) -> str:
    """One row per configuration, all seeds: results of the last block, CorLoc of the block that is best on training
    images, mean CKA between blocks, the lowest rank of any block at any step, and warnings with their first step."""
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
        first: dict[str, int] = {}
        for row in rows:
            for key, step in row["warnings"].items():
                first[key] = min(step, first.get(key, step))
        least = f"{_least(rows, 'rank')} | {_least(rows, 'patch_rank')}"
        warned = ", ".join(f"{key} (step {step})" for key, step in first.items())
        lines.append(f"| {title} | {seeds} | {' | '.join(cells)} | {least} | {warned} |")
    for name, row in done.items():
        if name.startswith("rate"):
            lines.append(f"{name.replace(' | ', ', ')}: {short(row)}")
    return "\n".join(lines)


def _least(rows: list[dict[str, Any]], kind: str) -> str:
    """The lowest rank with its block and step; from the final evaluation if none was logged in training."""
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
    """SVG figures over depth, of the main runs and of the remedies: a line per configuration, a point per seed."""
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
