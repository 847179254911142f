"""Writes the tables made from docs/results into README and docs, between `<!-- table: NAME -->` and `<!-- end -->`.

python benchmarks/_pages.py          # part of `make results`; takes seconds
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _tables_claims  # noqa: F401  (these imports register tables)
import _tables_cost  # noqa: F401
import _tables_sit  # noqa: F401
import _tables_speed  # noqa: F401
import _tables_studies  # noqa: F401
from _tables import TABLES

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The text of a page with each table made anew from its record."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


def unused() -> set[str]:
    """The registered tables that no page shows."""
    shown = {found[2] for page in PAGES for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))}
    return set(TABLES) - shown


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if filled(old) != old:
            page.write_text(filled(old), encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: tables written")
