"""The model card, README.md: shortcut, recipe, results with n and interval, and how to load the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unskip.errors import UnskipError
from unskip.wiring import from_dict

MARK = "<!-- Written by unskip.save, which replaces this file unless this line is removed. -->"
_FIELDS = (
    *("recipe", "preset", "data", "model", "model_args", "shortcut", "where", "init", "weights", "optimizer", "lr"),
    *("weight_decay", "batch", "warmup", "ema", "precision", "seed"),
)
_OF_BLOCK = re.compile(r"_block_\d+$")  # such as rank_block_3; the last block has a metric of its own
_NO_RESULTS = ("step", "time", "cfg", "tolerance")  # settings of an evaluation, not results


def run_facts(config: Mapping[str, Any], step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A run's part of the card: its config, and the results at a step."""
    shown = {name: _short(config[name]) for name in _FIELDS if config.get(name) is not None}
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:  # of several blocks, the last one: choosing by results would bias them
        if row.get("step") == step:
            last[tuple(row.get(name) for name in ("evaluation", "pool", "split", "time"))] = row
    return {
        "config": {**shown, "steps": step},
        "results": [result for row in last.values() for result in _results(row)],
    }


def _short(value: Any) -> Any:
    """A path without the folders of the machine."""
    return "/".join(Path(value).parts[-2:]) if isinstance(value, str) and Path(value).is_absolute() else value


def _results(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    intervals = row.get("intervals", {})
    for name, value in row.items():
        if not isinstance(value, float) or name in _NO_RESULTS or _OF_BLOCK.search(name):
            continue
        if name in intervals or not intervals:
            result = {"evaluation": row.get("evaluation", ""), "block": row.get("path"), "metric": name, "value": value}
            yield result | {"interval": intervals.get(name), "n": row.get("n"), "split": row.get("split")}


def card(name: str, record: Mapping[str, Any], parameters: int) -> str:
    """The text of README.md, from the record of a saved model. The licence is left to the user."""
    about = record.get("about", {})
    run = about.get("run", {})
    config, results = run.get("config", {}), run.get("results", {})
    library = record["class"].partition(".")[0]
    front = ["library_name: unskip", f"tags: {json.dumps(sorted({'unskip', 'residual-connections', library}))}"]
    if results:
        front.append(f"model-index: {json.dumps([_index(name, config, results)])}")
    parts = [
        "---\n" + "\n".join(front) + "\n---",
        MARK,
        f"# {name}",
        f"`{record['class']}` with {parameters:,} parameters, saved by unskip {record['versions'].get('unskip', '')}.",
        "## Shortcut",
        _shortcut(record["wiring"]),
    ]
    if config:
        rows = [f"| {field.replace('_', ' ')} | `{value}` |" for field, value in config.items()]
        parts += ["## Recipe", "\n".join(["| field | value |", "|---|---|", *rows])]
    if results:
        rows = [f"| {' | '.join(_cells(result))} |" for result in results]
        head = "| evaluation | block | metric | value | 95% interval | n | split |"
        parts += ["## Results", "\n".join([head, "|---" * 7 + "|", *rows]), f"One run, seed {config.get('seed')}."]
    lines = ["import unskip", 'model = unskip.load("hf-hub:OWNER/NAME").eval()  # or the path of this folder']
    if "preprocess" in about:
        lines.append("preprocess = unskip.data.preprocess_of(model)  # of images: size, crop, interpolation, mean, std")
    if record["builder"] is None:
        lines[1:2] = ["model = build()  # as it was built before it was saved", 'unskip.load("FOLDER", model=model)']
    parts += ["## Load", "```python\n" + "\n".join(lines) + "\n```"]
    if record["wiring"] is not None:
        parts.append("Libraries that read only the weights build the plain model, without these shortcut weights.")
    return "\n\n".join(parts) + "\n"


def _shortcut(wiring: Mapping[str, Any] | None) -> str:
    if wiring is None:
        return "All residual additions are those of the plain model: `x + f(x)`."
    lines = ["At site l, `x <- alpha_l x + beta_l f_l(x)`.", ""]
    for entry in wiring["plan"]:
        alphas = [wiring["alphas"][site] for site in entry["sites"]]
        try:
            rule = str(from_dict(entry["rule"]))
        except UnskipError:  # a rule of a plugin
            rule = json.dumps(entry["rule"])
        known = alphas and None not in alphas
        ends = f", alpha from {float(alphas[0]):.4g} to {float(alphas[-1]):.4g}" if known else ""
        lines.append(f"- `{rule}` on {len(entry['sites'])} of {len(wiring['sites'])} sites{ends}")
    return "\n".join(lines)


def _cells(result: Mapping[str, Any]) -> Iterator[str]:
    interval = result["interval"]
    yield from (str(result[name] or "") for name in ("evaluation", "block", "metric"))
    yield f"{result['value']:.4g}"
    yield f"{interval[0]:.4g} to {interval[1]:.4g}" if interval else ""
    yield from (str(result[name] or "") for name in ("n", "split"))


def _index(name: str, config: Mapping[str, Any], results: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The results in the format of the hub's model-index."""
    data = str(config.get("data", "unknown"))
    return {
        "name": name,
        "results": [
            {
                "task": {"type": "image-classification" if row["interval"] else "other", "name": row["evaluation"]},
                "dataset": {"name": data, "type": data, "split": row["split"] or "test"},
                "metrics": [{"type": row["metric"], "name": row["metric"], "value": row["value"]}],
            }
            for row in results
        ],
    }
