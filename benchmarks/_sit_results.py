"""What the study of SiT and U-ViT shows of its JSON: a table and a figure."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from _study import drawing

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


def figure(done: dict[str, Any], file: Path) -> None:
    """Distances; accuracies over blocks at the chosen time, on the test set; and kNN over times, held out."""
    pyplot = drawing("sit")
    sheet, cells = pyplot.subplots(2, 2, figsize=(10, 7.4), constrained_layout=True)
    distance, near, probe, noise = cells.flatten()
    every = {name: [row for row in rows if "generation" in row] for name, rows in groups(done).items()}
    every = {name.replace(" | ", ": "): rows for name, rows in every.items() if rows}
    for index, (name, rows) in enumerate(every.items()):
        for cfg, shade in (("1", 1.0), (f"{CFG:g}", 0.5)):
            values = [row["generation"][cfg]["FD-judge"] for row in rows if cfg in row["generation"]]
            if values:
                at = index if shade == 1 else index + 0.4
                distance.barh(at, statistics.mean(values), height=0.36, color=f"C{index}", alpha=shade)
                distance.plot(values, [at] * len(values), "k|", markersize=8)
        for turn, row in enumerate(rows):
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": f"C{index}"}
            style |= {"linestyle": "--" if turn else "-", "label": None if turn else name}  # dashed: further seeds
            for axes, number in ((near, "knn20"), (probe, "probe_lbfgs")):
                axes.plot([100 * value for value in row["features"][number]["test"]], **style)
            known = row["features"]["knn20"]["held_out"]
            noise.plot([float(each) for each in known], [100 * max(values) for values in known.values()], **style)
    distance.set(yticks=range(len(every)), yticklabels=every, xlabel="FD-judge, less is better", title="samples")
    distance.invert_yaxis()
    near.set(xlabel="block", title="kNN, k = 20, test images (%)")
    probe.set(xlabel="block", title="linear probe, test images (%)")
    noise.set(xlabel="time: noise 0, data 1", title="kNN at the best block, held out (%)")
    for axes in (near, probe):
        axes.xaxis.get_major_locator().set_params(integer=True)
    sheet.legend(*near.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(file, metadata={"Date": None})
    pyplot.close(sheet)
