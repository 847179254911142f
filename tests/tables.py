"""Writes what the full matrices found into docs/compatibility.md, where UNSKIP_WRITE_TABLES is set (make test-all)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = re.match(r"tests/zoo/test_(\w+)\.py::test_(\w+)\[(.+)\]", report.nodeid)
        if found is None:
            return
        file, test, case = found.groups()
        if file == "coverage":
            self.timm[case] = ({key: str(value) for key, value in report.user_properties}, report.passed)
        elif file == "families":
            name = test.replace("_", " ")
            for family in set(re.split(r"[-,]", case)) & self.names:  # a case may also name a rule or a mode
                self.families[family][name] = self.families[family].get(name, True) and report.passed

    def pytest_sessionfinish(self) -> None:
        if not self.families or not self.timm:
            return  # not a full run
        PAGE.write_text(HEAD + self._families() + "\n" + self._timm(), encoding="utf-8")

    def _families(self) -> str:
        properties = sorted({name for row in self.families.values() for name in row})
        lines = [
            "## Families by property",
            "",
            "Small random models; each property is a test in `tests/zoo/test_families.py`.",
        ]
        lines += ["", *(f"{i}. {name}" for i, name in enumerate(properties, start=1)), ""]
        lines += ["| family | " + " | ".join(str(i + 1) for i in range(len(properties))) + " |"]
        lines += ["|---" * (len(properties) + 1) + "|"]
        marks = {True: "y", False: "**no**", None: ""}
        for family, row in sorted(self.families.items()):
            lines.append(f"| {family} | " + " | ".join(marks[row.get(name)] for name in properties) + " |")
        return "\n".join(lines) + "\n"

    def _timm(self) -> str:
        lines = ["## One model of every architecture file of timm", "", "Audited and rewired on meta tensors."]
        lines += ["", "| file | model | sites | apart | not decided | |", "|---|---|---|---|---|---|"]
        for file, (row, passed) in sorted(self.timm.items()):
            cells = [file, *(row.get(key, "") for key in ("model", "sites", "apart", "unknown"))]
            lines.append("| " + " | ".join(cells) + f" | {'y' if passed else '**no**'} |")
        return "\n".join(lines) + "\n"


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if os.environ.get("UNSKIP_WRITE_TABLES") and not worker:
        config.pluginmanager.register(Tables())
