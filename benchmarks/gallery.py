"""A page of figures from any runs, such as those of a study: small PNGs, and the Markdown that shows them.

python benchmarks/gallery.py runs/demo                               # writes docs/gallery.md and docs/img/gallery-*.png
python benchmarks/gallery.py runs/plain runs/decayed --note "CIFAR-10, 200 epochs, three seeds."
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unskip.report import Group, _charts, _compare, figures, read
from unskip.report._read import by_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PICTURED = 2  # groups whose pictures are shown


def drawn(groups: Sequence[Group]) -> Iterator[tuple[str, str, Figure]]:
    """Section, description and figure of everything that the runs have."""
    for recipe, members in by_recipe(groups).items():
        courses = [_charts.over_steps(members, "loss")]
        courses += [_charts.evaluated(members, name) for name in _charts.evaluations(members, False)]
        for chart in courses:
            if chart.lines:
                yield f"In training: {recipe}", chart.alt(), figures.draw(chart)
    depth = [_charts.over_depth(groups, name) for name in _charts.evaluations(groups, True)]
    depth += [_charts.measured(groups, name) for name in ("echo", "high_frequency", "token_rank")]
    for chart in depth:
        if chart.lines:
            yield "Over depth", chart.alt(), figures.draw(chart)
    for chart in (_charts.alphas(groups), _charts.decay(groups)):
        if chart.lines:
            yield "Shortcuts", chart.alt(), figures.draw(chart)
    for group in groups[:PICTURED]:
        look = group.runs[0].look
        for tiles in look.tiles if look is not None else ():
            yield f"Pictures: {group.label}", tiles.description, figures.draw_tiles(tiles)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--note", default="Digits, one seed, one CPU: the runs of `unskip demo`.")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gallery.md")
    args = parser.parse_args()
    groups = read(args.runs)
    images = args.page.parent / "img"
    for old in images.glob("gallery-*.png"):
        old.unlink()
    lines = ["# Gallery", "", f"{_compare.sentence(groups)} {args.note}", ""]
    lines += [
        "Made by `benchmarks/gallery.py`; `unskip report` puts the same on a page of its own ([report](report.md)).",
        "",
    ]
    section = ""
    for number, (heading, description, figure) in enumerate(drawn(groups)):
        if heading != section:
            section = heading
            lines += [f"## {section}", ""]
        file = images / f"gallery-{number:02d}.png"
        figure.savefig(file, dpi=80, facecolor="white")
        words = description.replace("[", "(").replace("]", ")")
        lines += [f"![{words}](img/{file.name})", ""]
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")
    args.page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
