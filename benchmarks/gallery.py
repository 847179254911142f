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
    (
        "skipless-cifar.svg",
        "Classifiers on CIFAR-10. Left, their test accuracy: a point a seed. Right, how alike the tokens of an image "
        "become with depth: at 1 they are all the same.",
        "skipless",
    ),
    (
        "mae-cifar.svg",
        "Masked autoencoders on CIFAR-10: kNN accuracy by block, over training, and against the effective rank.",
        "mae",
    ),
    (
        "mae-cifar-inside.svg",
        "What these encoders carry: the length of features over training, and by block the echo of the input and the "
        "high frequencies.",
        "mae",
    ),
    (
        "conditioning.svg",
        "At the start, before any training: singular values of the whole stack, likeness of tokens by depth, and the "
        "condition of attention sub-layers, with skips, without, and without from the initialisation.",
        "init",
    ),
    (
        "dino-64.svg",
        "DINO with residuals and without (dashed), and the same models trained with labels, by block: rank, "
        "kNN, probes, segmentation, object discovery, and the share of images in which no object is found.",
        "dino",
    ),
    (
        "dino-64-residual-soap.png",
        "Pets as a residual model sees them after DINO: patch features of four blocks, attention, the object found.",
        "dino",
    ),
    (
        "dino-64-skipless-soap.png",
        "The same without residuals: patches fall into groups, and in the end all of an image are one.",
        "dino",
    ),
    ("dino-64-cka.svg", "DINO: how alike the blocks are, and their ranks over training.", "dino"),
    (
        "sit-cifar.svg",
        "Diffusion transformers on CIFAR-10: distances of their samples, and what their blocks know, by block and "
        "noise.",
        "generate",
    ),
    (
        "sit-cifar-sit-decay-0.8-seed-0-cfg1.5.png",
        "Samples of a SiT with decayed shortcuts after 38 epochs of CIFAR-10, with guidance of 1.5.",
        "generate",
    ),
)
# The figures of a report that are shown, by how their titles begin, in their order here, and how each is read.
READ = {
    "Patch features by block": "A square is a patch, its colour the three main directions of its features. Where a "
    "colour keeps to a thing, features tell what is there; where all images have one pattern, they tell the place.",
    "Nearest neighbours": "A test image, and the training images with the nearest features.",
    "Reconstructions": "An image, what the encoder saw of it, and what the decoder reconstructed.",
    "20 nearest neighbours, by depth": "How often the 20 nearest training images vote for the right class, from the "
    "frozen features of each block.",
    "Linear probe": "How often a linear classifier on the frozen features of each block is right.",
    "Effective rank of the features, by depth": "How many directions the features of the test images spread over.",
    "Echo of the input": "How much of what entered the first block can still be read off, by a linear map fitted on "
    "other images. Below 0 it is worse than guessing the mean.",
    "High frequencies": "How much of what sets the patches of an image apart differs from patch to patch, rather than "
    "slowly across the image.",
    "Effective rank of the tokens": "How many directions the tokens spread over. Few: they have become alike.",
    "Length of the tokens": "How long the tokens are that a block hands on, on average.",
    "Shortcut weight alpha": "The knob, as each run has it: alpha * x + f(x), at each of the additions in turn.",
    "Loss in training": "The loss of the batches as they came.",
    "Accuracy on test images": "How often the classifiers are right.",
    "20 nearest neighbours": "The neighbours again, in the course of training.",
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
    """The page's first part: figures in the order of READ, two in a row."""
    lines = ["# Gallery", "", "## From a report", "", note, ""]
    lines += ["Made by `benchmarks/gallery.py` from a page of `unskip report` ([report](report.md)).", ""]
    charts: list[Shown] = []
    for kind, how in READ.items():
        mine = [each for each in figures if each.kind == kind]
        pictures = [each for each in mine if each.run]
        charts += [each for each in mine if not each.run]
        if pictures:
            said = [each.words.partition(": ")[2] for each in pictures]
            below = said if len({*said}) > 1 else []
            lines += [f"### {kind}", "", f"{how} {pictures[0].note}".strip(), ""]
            lines += _table(pictures, below)
    lines += ["### Numbers", ""]
    lines += _table(charts, [f"{READ[str(each.kind)]} {each.note}".strip() for each in charts])
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
