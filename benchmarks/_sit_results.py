"""What the study of SiT and U-ViT shows of its JSON: a table and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing

CFG = 1.5
PROTOCOLS = {"knn20": "knn-dino-v1", "probe_lbfgs": "probe-lbfgs-v1"}  # by the number that is shown


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        if name != "judge":
            found.setdefault(name.partition(" | seed")[0], []).append(row)
    return found


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return middle + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def chosen(rows: list[dict[str, Any]], number: str) -> str:
    """Accuracy on the test set at the block and time that the held-out images have chosen."""
    found = [row["features"][number] for row in rows]
    where = "; ".join(dict.fromkeys(f"{each['block']}, {each['time']:g}" for each in found))
    return f"{spread([100 * each['test'][each['block']] for each in found], 1)} ({where})"


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


def figure(done: dict[str, Any], file: Path) -> None:
    """Distances; accuracies over blocks at the chosen time, on the test set; and neighbours over times, held out."""
    pyplot = drawing("sit")
    sheet, (distance, near, probe, noise) = pyplot.subplots(1, 4, figsize=(17, 3.8), constrained_layout=True)
    every = {name: [row for row in rows if "generation" in row] for name, rows in groups(done).items()}
    every = {name: rows for name, rows in every.items() if rows}
    strong = [
        cfg for cfg in ("1", f"{CFG:g}") if any(cfg in row["generation"] for rows in every.values() for row in rows)
    ]
    for turn, cfg in enumerate(strong):
        height = 0.76 / len(strong)
        for index, rows in enumerate(every.values()):
            values = [row["generation"][cfg]["FD-judge"] for row in rows if cfg in row["generation"]]
            if values:
                at = index + (turn - (len(strong) - 1) / 2) * height
                label = f"cfg {cfg}" if not index else None
                distance.barh(at, statistics.mean(values), height=height, color=f"C{turn}", label=label)
                distance.plot(values, [at] * len(values), "k|", markersize=8)
    names = [name.replace(" | ", ": ") for name in every]
    distance.set(yticks=range(len(names)), yticklabels=names, xlabel="FD-judge (less is better)", title="samples")
    distance.invert_yaxis()
    for index, (name, rows) in enumerate(every.items()):
        for turn, row in enumerate(rows):
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "color": f"C{index}"}
            style["linestyle"] = "--" if turn else "-"  # further seeds
            for axes, number in ((near, "knn20"), (probe, "probe_lbfgs")):
                known = row["features"][number]
                label = None if turn else f"{name.replace(' | ', ': ')}, t = {known['time']:g}"
                axes.plot([100 * value for value in known["test"]], label=label, **style)
            known = row["features"]["knn20"]
            times = [float(each) for each in known["held_out"]]
            over = [100 * max(values) for values in known["held_out"].values()]
            noise.plot(times, over, label=None if turn else name.replace(" | ", ": "), **style)
    near.set(xlabel="block", ylabel="accuracy (%)", title="neighbours, k = 20, test images")
    probe.set(xlabel="block", title="linear probe, test images")
    noise.set(xlabel="time: noise 0, data 1", title="neighbours at the best block, held out")
    for axes in (distance, near, probe, noise):
        axes.legend(fontsize=6)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, metadata={"Date": None})
    pyplot.close(sheet)
