"""Runs `unskip demo`, records its results as JSON and takes screenshots of its report for the docs.

python benchmarks/demo.py                       # runs the demo, writes the JSON
python benchmarks/demo.py --runs runs/demo      # uses an existing demo
python benchmarks/demo.py --runs runs/demo --pictures docs/img       # also takes screenshots, with chromium
python benchmarks/demo.py --page report.html --pictures docs/img     # screenshots of another report; no JSON
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def in_order(folder: Path) -> list[Path]:
    """The runs of a demo, sorted by start time."""
    found = [*folder.glob("*/config.json"), *folder.glob("*/seed-*/config.json")]
    return sorted((each.parent for each in found), key=started)


def started(run: Path) -> float:
    return (run / "config.json").stat().st_mtime


def record(folder: Path) -> dict[str, Any]:
    """Configs, last results and results by block of every run of a demo, and its duration."""
    import torch

    from unskip.report import _charts, _names, read

    groups = read(in_order(folder), look=False)
    result: dict[str, Any] = {}
    for run in (run for group in groups for run in group.runs):
        names = _names.evaluations([group for group in groups if run in group.runs], by_block=True)
        result[run.path.relative_to(folder).as_posix()] = {
            "config": {**run.config, "data": Path(run.config["data"]).name},
            "state": run.state,
            "last": {name: row[name] for name, row in _names.newest_rows(run).items()},
            "by block": {name: list(_charts._by_block(run, name).values()) for name in names},
            "seconds in steps": sum(row["seconds"] for row in run.metrics),
            "warnings": sorted({str(row["warning"]) for row in run.warnings}),
        }
    about, first = groups[0].runs[0].about, started(groups[0].runs[0].path)
    device = f"{platform.machine()} CPU" if about["device"] == "cpu" else torch.cuda.get_device_name(about["device"])
    # Only file names of data are recorded, not paths on the machine that ran the demo.
    return {
        "script": "benchmarks/demo.py",
        "device": device,
        "versions": about["versions"],
        "protocol": "unskip demo, on the test split",
        "seconds": round((folder / "report.html").stat().st_mtime - first, 1),
        "runs": result,
    }


def pictures(page: Path, out: Path) -> None:
    """Takes screenshots of a report: its top, its figures (also in dark mode), its pictures, and on a phone."""
    sys.path.insert(0, str(ROOT))
    from PIL import Image
    from tests.report.browser import Browser

    with Browser() as browser:
        for name, section, width, height, dark in (
            ("report", "content", 1180, 640, False),
            ("report-depth", "depth", 1180, 860, False),
            ("report-dark", "depth", 1180, 470, True),
            ("report-pictures", "pictures", 1180, 760, False),
            ("report-phone", "training", 390, 720, False),
        ):
            browser.open(page, width, height, dark)
            if name != "report":
                browser.run(f"document.getElementById('{section}').scrollIntoView({{behavior: 'instant'}})")
            file = out / f"{name}.png"
            browser.screenshot(file)
            Image.open(file).convert("RGB").save(file, optimize=True)
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
        assert not browser.problems, browser.problems


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, help="folder of an existing demo")
    parser.add_argument("--page", type=Path, help="an existing report, for --pictures")
    parser.add_argument("--pictures", type=Path, help="folder of the screenshots")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "results" / "demo-digits.json")
    args = parser.parse_args()
    if args.page is None:
        if args.runs is None:
            from unskip import demo

            args.runs = demo.run("runs/demo").page.parent
        args.json.write_text(json.dumps(record(args.runs), indent=1) + "\n")
        args.page = args.runs / "report.html"
    if args.pictures is not None:
        pictures(args.page, args.pictures)


if __name__ == "__main__":
    main()
