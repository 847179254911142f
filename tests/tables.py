"""Writes what the full matrices found into docs/compatibility.md, where UNSKIP_WRITE_TABLES is set (make test-all)."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
HEAD = """# Compatibility

This page is written by `make test-all`, from the tests themselves.

"""


class Tables:
    """Gathers reports, also those of xdist's workers, and writes the page at the end."""

    def __init__(self) -> None:
        from tests.zoo import more  # noqa: F401  (adds its families)
        from tests.zoo.families import FAMILIES

        self.names = set(FAMILIES)
        self.families: dict[str, dict[str, bool]] = defaultdict(dict)
        self.timm: dict[str, tuple[dict[str, str], bool]] = {}
        self.transformers: dict[str, tuple[dict[str, str], bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = re.match(r"tests/zoo/test_(\w+)\.py::test_(\w+)\[(.+)\]", report.nodeid)
        if found is None:
            return
        file, test, case = found.groups()
        if file in ("coverage", "transformers"):
            rows = self.timm if file == "coverage" else self.transformers
            rows[case] = ({key: str(value) for key, value in report.user_properties}, report.passed)
        elif file in ("families", "families_kept"):
            name = test.replace("_", " ")
            for family in set(re.split(r"[-,]", case)) & self.names:  # a case may also name a rule or a mode
                self.families[family][name] = self.families[family].get(name, True) and report.passed

    def pytest_sessionfinish(self) -> None:
        if not self.families or not self.timm or not self.transformers:
            return  # not a full run
        PAGE.write_text("\n".join([HEAD + self._families(), self._timm(), self._transformers()]), encoding="utf-8")

    def _families(self) -> str:
        properties = sorted({name for row in self.families.values() for name in row})
        lines = [
            "## Families by property",
            "",
            "Small random models; each property is a test in `tests/zoo/test_families.py` or `test_families_kept.py`.",
        ]
        lines += ["", *(f"{i}. {name}" for i, name in enumerate(properties, start=1)), ""]
        lines += ["| family | " + " | ".join(str(i + 1) for i in range(len(properties))) + " |"]
        lines += ["|---" * (len(properties) + 1) + "|"]
        marks = {True: "y", False: "**no**", None: ""}
        for family, row in sorted(self.families.items()):
            lines.append(f"| {family} | " + " | ".join(marks[row.get(name)] for name in properties) + " |")
        return "\n".join(lines) + "\n"

    def _timm(self) -> str:
        lines = ["## One model of every architecture file of timm", ""]
        lines += ["Audited and rewired. `verified`: on real tensors, against an oracle that rewrites no source; larger"]
        lines += ["models on meta tensors, without values to compare. Empty: nothing but projected shortcuts, or none."]
        lines += ["", "| file | model | sites | apart | not decided | verified | |", "|---|---|---|---|---|---|---|"]
        for file, (row, passed) in sorted(self.timm.items()):
            cells = [file, *(row.get(key, "") for key in ("model", "sites", "apart", "unknown", "verified"))]
            lines.append("| " + " | ".join(cells) + f" | {'y' if passed else '**no**'} |")
        return "\n".join(lines) + "\n"

    def _transformers(self) -> str:
        rows = {name: row for name, (row, _) in self.transformers.items()}
        outcomes = Counter(row.get("outcome", "failed") for row in rows.values())
        sites: Counter[str] = Counter()
        for row in rows.values():
            for part in row.get("sites", "").split(", ") if row.get("outcome") == "done" else []:
                count, _, kind = part.partition(" ")
                sites[kind] += int(count)
        lines = [
            "## One model of every type of transformers",
            "",
            f"The {len(rows)} types behind `AutoModel`, each a small random model on the CPU: audited, "
            "rewired, verified, its outputs moved, and put back bit for bit (`tests/zoo/test_transformers.py`).",
            "",
            "| outcome | types |",
            "|---|---|",
            *(f"| {outcome} | {count} |" for outcome, count in outcomes.most_common()),
            "",
            f"Sites of those that are done: {', '.join(f'{count} {kind}' for kind, count in sites.most_common())}.",
            "",
            "Not done, by reason:",
            "",
        ]
        reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, row in sorted(rows.items()):
            if row.get("outcome", "failed") != "done":
                reasons[row.get("outcome", "failed"), row.get("reason", "")].append(name)
        lines += [f"- **{outcome}**, {why}: {', '.join(names)}" for (outcome, why), names in sorted(reasons.items())]
        kept = [name for name, row in sorted(rows.items()) if row.get("kept")]
        lines += ["", "All their shortcuts are projected or long, so that a rule has to ask for them: "]
        lines[-1] += ", ".join(kept) + "."
        lines += ["", "Additions that are reported as not decided, and left alone:", ""]
        unknown: dict[str, list[str]] = defaultdict(list)
        for name, row in sorted(rows.items()):
            for reason in filter(None, row.get("unknown", "").split("; ")):
                unknown[reason].append(name)
        lines += [f"- {reason}: {', '.join(names)}" for reason, names in sorted(unknown.items())]
        return "\n".join(lines) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if os.environ.get("UNSKIP_WRITE_TABLES") and not worker:
        config.pluginmanager.register(Tables())
