"""The gallery of the docs: figures of a report as small PNGs, those of the studies, and the words around them.

python benchmarks/gallery.py runs/demo                               # writes docs/gallery.md and docs/img/gallery-*.png
python benchmarks/gallery.py report.html --pictured mae-plain mae-decayed     # of a page that was written elsewhere
python benchmarks/gallery.py                                         # the part of the studies alone; the rest stays

Chromium draws the page. Below each figure stands how it is read; what the runs were, and what is to be seen of them, is
said by --note.
"""

from __future__ import annotations

import argparse
import html
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURED = 2  # runs whose pictures are shown where none are named
# Figures of the studies: the file, what is to be seen, and the page that tells of it.
STUDIES = (
    ("skipless-long.svg", "Classifiers, 100 epochs: accuracy, token cosine by block, accuracy by bits.",
     "skipless-results"),
    ("mae-cifar.svg", "MAE on CIFAR-10: kNN accuracy by block, over training, and against the effective rank.",
     "mae-results"),
    ("conditioning.svg", "A ViT-S before training: singular values, token cosine, condition of attention.",
     "init-results"),
    ("dino-64.svg", "DINO with and without skips, by block: probe, segmentation, object discovery.", "dino-results"),
    ("dino-64-residual-soap.png", "DINO with skips: patch features of four blocks, and attention, of six photographs.",
     "dino-results"),
    ("dino-64-skipless-soap.png", "The same without skips: the patches of an image become alike.", "dino-results"),
    ("sit-cifar.svg", "SiT and U-ViT on CIFAR-10: Fréchet distance of samples, kNN and probe by block.",
     "generate-results"),
    ("sit-cifar-sit-decay-0.8-seed-0-cfg1.5.png", "Samples of a SiT with decayed shortcuts, 38 epochs, guidance 1.5.",
     "generate-results"),
)  # fmt: skip
# The pictures of a report that are shown, by how their titles begin, in their order here, and how each is read.
READ = {
    "Patch features by block": "Each square is a patch; its colour is the first three principal components of its "
    "features.",
    "Nearest neighbours": "A test image and the training images with the nearest features.",
    "Reconstructions": "An image, its visible patches, and the reconstruction.",
}
_SECOND = "## From the studies"
_FIGURES = """[...document.querySelectorAll('main h2, main h3, main figure svg.chart')].map(each => {
    if (each.tagName !== 'svg') return {level: each.tagName, text: each.textContent}
    const box = each.getBoundingClientRect()
    const corner = {x: box.left + scrollX, y: box.top + scrollY}
    const below = each.closest('figure').querySelector('figcaption').firstChild
    const said = {text: each.getAttribute('aria-label'), note: below.nodeType === 3 ? below.textContent : ''}
    return {level: 'figure', ...said, ...corner, width: box.width, height: box.height}
})"""


class Shown(NamedTuple):
    """A figure of a report: the run it is of, where it is of one, what it says to those who do not see it, its file."""

    run: str
    words: str
    note: str
    file: str

    @property
    def kind(self) -> str | None:
        """Which of those that are shown it is."""
        title = self.words.removeprefix("Line chart. ").removeprefix(f"{self.run}. ")
        return next((kind for kind in READ if title.startswith(kind)), None)


def drawn(page: Path, pictured: Sequence[str], out: Path) -> Iterator[Shown]:
    """The figures of a page that are shown; pictures of some of its runs alone."""
    import base64
    import io

    from PIL import Image

    sys.path.insert(0, str(ROOT))
    from tests.report.browser import Browser

    with Browser() as browser:
        browser.open(page, 560, 900)
        part, number = "", 0
        parts: list[str] = []
        result: list[dict[str, Any]] = browser.run(_FIGURES)
        for each in result:
            if each["level"] == "H2":
                part, parts = "", []
            elif each["level"] == "H3":
                part = each["text"]
                parts.append(part)
            else:
                shown = Shown(part, each["text"], each["note"], f"gallery-{number:02d}.png")
                if shown.kind is None or (part and part not in (pictured or parts[:PICTURED])):
                    continue
                clip = {key: each[key] for key in ("x", "y", "width", "height")} | {"scale": 1}
                shot = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
                image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
                image.quantize(128, dither=Image.Dither.NONE).save(out / shown.file, optimize=True)
                number += 1
                yield shown


def of_report(figures: Sequence[Shown], note: str) -> str:
    """The page's first part: pictures in the order of READ, two in a row."""
    lines = ["# Gallery", "", note, ""]
    for kind, how in READ.items():
        pictures = [each for each in figures if each.kind == kind and each.run]
        if pictures:
            said = [each.words.partition(": ")[2] for each in pictures]
            below = said if len({*said}) > 1 else []
            lines += [f"## {kind}", "", *_table(pictures, below), f"{how} {pictures[0].note}".strip(), ""]
    return "\n".join(lines)


def of_studies(images: Path) -> str:
    """Its second: the figures of the studies that there are."""
    parts = [_SECOND]
    for name, words, page in STUDIES:
        if (images / name).exists():
            parts += [f"![{words}](img/{name})", f"{words} [More]({page}.md)"]
    return "\n\n".join(parts)


def _table(figures: Sequence[Shown], below: Sequence[str]) -> list[str]:
    """Figures two in a row, with the run above and words below. One table, or its columns would be of many widths."""
    lines = ["| | |", "|---|---|"]
    for place in range(0, len(figures), 2):
        pair = slice(place, place + 2)
        lines += [_row([f"**{each.run}**" for each in figures[pair]])] if figures[place].run else []
        lines += [_row([_image(each) for each in figures[pair]])]
        lines += [_row([_cell(text) for text in below[pair]])] if below else []
    return [*lines, ""]


def _image(shown: Shown) -> str:
    """With a width, so that of two figures none takes the other's room."""
    return f'<img src="img/{shown.file}" width="400" alt="{html.escape(_cell(shown.words))}">'


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join([*cells, ''][:2])} |"


def _cell(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="run folders, or one page of `unskip report`; none: the studies' part alone"
    )
    parser.add_argument("--note", default="Digits, one seed, one CPU: the runs of `unskip demo`.")
    parser.add_argument("--pictured", nargs="*", default=[], help="names of the runs whose pictures are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gallery.md")
    args = parser.parse_args()
    images = args.out.parent / "img"
    if not args.runs:
        above = args.out.read_text(encoding="utf-8").partition(_SECOND)[0]
        args.out.write_text(f"{above}{of_studies(images)}\n", encoding="utf-8")
        return
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("gallery-*.png"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        page = args.runs[0]
        if page.suffix != ".html":
            from unskip.report import write

            page = write(args.runs, Path(folder) / "report.html")
        figures = [*drawn(page, args.pictured, images)]
    args.out.write_text(f"{of_report(figures, args.note)}\n{of_studies(images)}\n", encoding="utf-8")
    print(f"{len(figures)} figures: {sum((images / each.file).stat().st_size for each in figures) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
