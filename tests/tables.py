"""Writes the results of the compatibility tests to docs/results/compatibility.json, if UNSKIP_WRITE_TABLES is set.

`make test-all` sets it. A partial run replaces only its rows; rows from other library versions are removed:

    UNSKIP_WRITE_TABLES=1 python -m pytest -m full tests/zoo/test_coverage.py
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "compatibility.json"
LIBRARIES = ("diffusers", "timm", "torch", "torchvision", "transformers")
EVERY = 20  # seconds between writes: a sweep takes an hour, and an interrupted one keeps its results


class Tables:
    """A pytest plugin that collects test reports, including those of xdist workers, and writes them regularly."""

    def __init__(self) -> None:
        from tests.zoo import more  # noqa: F401  (adds its families)
        from tests.zoo.families import FAMILIES

        self.names = set(FAMILIES)
        self.parts: dict[str, dict[str, dict[str, Any]]] = {
            "families": defaultdict(dict),
            "timm": {},
            "transformers": {},
        }
        self.written = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        found = re.match(r"tests/zoo/test_(\w+)\.py::test_every_\w+\[(.+)\]", report.nodeid)
        if found and found[1] in ("coverage", "transformers"):
            facts = {key: value for key, value in report.user_properties if value}
            part = "timm" if found[1] == "coverage" else "transformers"
            today = {"date": f"{datetime.now(UTC):%Y-%m-%d}"}
            self.parts[part][found[2]] = facts | ({} if report.passed else {"failed": True}) | today
        found = re.match(r"tests/zoo/test_families(?:_kept)?\.py::test_(\w+)\[(.+)\]", report.nodeid)
        if found:
            name, row = found[1].replace("_", " "), self.parts["families"]
            for family in set(re.split(r"[-,]", found[2])) & self.names:  # a test id may also contain a rule or a mode
                row[family][name] = row[family].get(name, True) and report.passed
        if time.monotonic() - self.written > EVERY:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        from unskip._provenance import versions_of

        versions = versions_of(LIBRARIES)
        whole = json.loads(RESULTS.read_text(encoding="utf-8"))
        for part, rows in self.parts.items():
            if rows:
                earlier = whole[part]["rows"] if whole[part]["versions"] == versions else {}
                whole[part] = {"versions": versions, "rows": dict(sorted((earlier | rows).items()))}
        whole["shares"] = shares(whole)
        new = RESULTS.with_suffix(".new")
        new.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        new.replace(RESULTS)
        self.written = time.monotonic()


def shares(whole: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Counts by outcome: rewired, without a residual, refused, not built or not run."""
    timm = whole["timm"]["rows"].values()
    types = Counter(row.get("outcome", "failed") for row in whole["transformers"]["rows"].values())
    without = sum(row.get("sites") == "none" for row in timm)
    failed, rewired = sum("failed" in row for row in timm), sum("verified" in row for row in timm)
    kept = len(timm) - rewired - without - failed
    return {
        "timm": {"rewired": rewired, "projected shortcuts only": kept, "no residual": without, "failed": failed},
        "transformers": dict(types.most_common()),
    }


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if os.environ.get("UNSKIP_WRITE_TABLES") and not worker:
        config.pluginmanager.register(Tables())
