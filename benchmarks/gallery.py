"""The gallery of the docs: the figures of a report as small PNGs, those of the studies, and the Markdown around them.

python benchmarks/gallery.py runs/demo                               # writes docs/gallery.md and docs/img/gallery-*.png
python benchmarks/gallery.py report.html --pictured mae-plain mae-decayed     # of a page that was written elsewhere

Chromium draws the page. What the runs were is said by --note.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PICTURED = 2  # runs whose pictures are shown where none are named
# Figures of the studies: the file, what is to be seen, and the page that tells of it.
STUDIES = (
    ("mae-cifar.svg", "Masked autoencoders: neighbours over depth and training, rank against neighbours", "mae"),
    ("mae-cifar-inside.svg", "What the encoders carry: feature norms, echo of the input, high frequencies", "mae"),
    ("skipless-cifar.svg", "Classifiers with and without skips under three optimizers", "skipless"),
    ("conditioning.svg", "Condition numbers of Jacobians, with and without skips and the initialisation", "init"),
    ("dino-64.svg", "DINO: rank, neighbours, segmentation and discovery over depth", "dino"),
    ("dino-64-cka.svg", "DINO: how alike the blocks are, and their ranks over training", "dino"),
    ("sit-cifar.svg", "Diffusion transformers: samples, and features over depth and noise", "generate"),
)
_FIGURES = """[...document.querySelectorAll('main h2, main h3, main figure svg.chart')].map(each => {
    if (each.tagName !== 'svg') return {level: each.tagName, text: each.textContent}
    const box = each.getBoundingClientRect()
    const corner = {x: box.left + scrollX, y: box.top + scrollY}
    return {level: 'figure', text: each.getAttribute('aria-label'), ...corner, width: box.width, height: box.height}
})"""


def drawn(page: Path, pictured: Sequence[str], out: Path) -> Iterator[tuple[str, str, str]]:
    """Heading, description and file of every figure of a page; pictures of some of its runs alone."""
    import base64
    import io

    from PIL import Image

    sys.path.insert(0, str(ROOT))
    from tests.report.browser import Browser

    with Browser() as browser:
        browser.open(page, 560, 900)
        section, part, number = "", "", 0
        parts: list[str] = []
        found: list[dict[str, Any]] = browser.run(_FIGURES)
        for each in found:
            if each["level"] == "H2":
                section, part, parts = each["text"], "", []
            elif each["level"] == "H3":
                part = each["text"]
                parts.append(part)
            else:
                if part and part not in (pictured or parts[:PICTURED]):
                    continue
                clip = {key: each[key] for key in ("x", "y", "width", "height")} | {"scale": 1}
                shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
                file = out / f"gallery-{number:02d}.png"
                image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
                image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)
                number += 1
                yield f"{section}: {part}" if part else section, each["text"], file.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or one page of `unskip report`")
    parser.add_argument("--note", default="Digits, one seed, one CPU: the runs of `unskip demo`.")
    parser.add_argument("--pictured", nargs="*", default=[], help="names of the runs whose pictures are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gallery.md")
    args = parser.parse_args()
    images = args.out.parent / "img"
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("gallery-*.png"):
        old.unlink()
    lines = ["# Gallery", "", "## From the studies", ""]
    for name, words, page in STUDIES:
        if (images / name).exists():
            lines += [f"[{words}]({page}.md):", "", f"![{words}](img/{name})", ""]
    lines += ["## From a report", "", args.note, ""]
    lines += ["Made by `benchmarks/gallery.py` from a page of `unskip report` ([report](report.md)).", ""]
    with tempfile.TemporaryDirectory() as folder:
        page = args.runs[0]
        if page.suffix != ".html":
            from unskip.report import write

            page = write(args.runs, Path(folder) / "report.html")
        heading = ""
        for title, words, file in drawn(page, args.pictured, images):
            if title != heading:
                heading = title
                lines += [f"### {heading}", ""]
            lines += [f"![{words.replace('[', '(').replace(']', ')')}](img/{file})", ""]
            print(f"{file}: {(images / file).stat().st_size / 1000:.0f} kB")
    args.out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
