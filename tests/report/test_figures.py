"""The figures show the given numbers, and work with any name."""

import io
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from tests.report.runs import by_block, folder

from unskip.errors import BadInput
from unskip.report import figures, read
from unskip.report._dots import summaries
from unskip.report.figures import Tiles, _style

EVIL = "_<b>$\\frac{1$ \u4e2d\u6587 & 'x' \"y\""


def luminance(colour: str) -> float:
    values = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_points_by_group(tmp_path: Path) -> None:
    for seed, value in enumerate((0.5, 0.6, 0.7)):
        row = {"step": 30, "test_accuracy": value, "n": 40}
        folder(tmp_path / "a" / f"seed-{seed}", seed=seed, evals=[row | {"test_accuracy": 0.1, "step": 10}, row])
    one = {"step": 30, "test_accuracy": 0.9, "n": 40, "intervals": {"test_accuracy": [0.77, 0.96]}}
    folder(tmp_path / "b", shortcut="cut", evals=[one])
    folder(tmp_path / "c", shortcut="decay:0.5")
    groups = read([tmp_path / name for name in "abc"], look=False)
    (axes,) = figures.results(groups, "test_accuracy").axes
    means, points = axes.lines[::2], axes.lines[1::2]
    assert [line.get_ydata().tolist() for line in points] == [[0.5, 0.6, 0.7], [0.9]]
    assert [line.get_ydata()[0] for line in means] == pytest.approx([0.6, 0.9])
    boxes = [box.get_paths()[0].get_extents() for box in axes.collections]
    half = 4.302653 * 0.1 / 3**0.5  # Student's t with two degrees of freedom, at 97.5%
    assert [(box.ymin, box.ymax) for box in boxes] == [pytest.approx((0.6 - half, 0.6 + half), abs=1e-4), (0.77, 0.96)]
    assert "n = 40" in axes.get_title("left")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]
    with pytest.raises(BadInput, match="no run was evaluated"):
        figures.results(groups, "knn20")


def test_points_of_unusual_logs(tmp_path: Path) -> None:
    """Invalid counts, extreme values, and more groups than styles."""
    for place, value in enumerate([0.5] * 12 + [1e308]):
        row = {"step": 30, "test_accuracy": value, "n": [1] if place else 40}
        folder(tmp_path / f"{place:02}", shortcut=f"decay:0.{place + 10}", evals=[row])
    figure = figures.results(read([*sorted(tmp_path.iterdir())], look=False), "test_accuracy")
    (axes,) = figure.axes
    points = axes.lines[1::2]
    assert len(points) == 12
    assert {(line.get_marker() != "", line.get_linestyle()) for line in points} == {(True, "None")}
    assert axes.get_title("left") == "Accuracy on the test split"


def test_losses_of_different_recipes_have_separate_figures(tmp_path: Path) -> None:
    for recipe, name in itertools.product(("mae", "supervised"), "ab"):
        row = {"step": 30, "test_loss": 1.0}
        folder(tmp_path / f"{recipe}-{name}", recipe=recipe, shortcut=name, evals=[row])
    found = summaries(read([*tmp_path.iterdir()], look=False), 10)
    assert sorted(dots.title for dots in found) == [
        "Loss on the test split (mae)",
        "Loss on the test split (supervised)",
    ]
    assert {len(dots.columns) for dots in found} == {2}


def test_lines_and_bands(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder(tmp_path / "a" / f"seed-{seed}", losses=(2.0 + seed, 1.0), seed=seed)
    folder(tmp_path / "b", losses=(5.0, 4.0), shortcut="cut")
    figure = figures.loss(read([tmp_path / "a", tmp_path / "b"], look=False))
    (axes,) = figure.axes
    lines = sorted((line.get_ydata().tolist(), line.get_color()) for line in axes.lines)
    assert lines == [([2.5, 1.0], _style.COLOURS[0]), ([5.0, 4.0], _style.COLOURS[1])]
    (band,) = axes.collections
    extent = band.get_paths()[0].get_extents()
    assert (extent.ymin, extent.ymax) == (pytest.approx(1.0), pytest.approx(2.5 + np.std([2, 3], ddof=1)))
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == (
        "training step",
        "loss",
        "Loss in training",
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_more_groups_than_styles(tmp_path: Path) -> None:
    for index in range(14):
        folder(tmp_path / f"r{index}", lr=float(index))
    figure = figures.loss(read([tmp_path], look=False))
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines]
    assert len(set(looks)) == _style.SHOWN + 1
    assert sum(colour == _style.REST for colour, _, _ in looks) == 4
    assert len(figure.legends[0].get_texts()) == _style.SHOWN


def test_missing_data_give_a_message_with_the_next_step(tmp_path: Path) -> None:
    groups = read([folder(tmp_path / "a")], look=False)
    with pytest.raises(BadInput, match="`unskip eval RUN` adds it"):
        figures.depth(groups, "knn20")
    for wanted in (figures.reconstructions, figures.patch_features, figures.neighbours):
        with pytest.raises(BadInput, match="look=True"):
            wanted(groups)
    for missing in (figures.alphas, figures.decay, figures.spectra, figures.conditions):
        with pytest.raises(BadInput, match="nothing to draw"):
            missing(groups)
    with pytest.raises(BadInput, match="echo, high_frequency, token_rank, norm"):
        figures.measured(groups, "eco")
    for figure in (figures.spectra, figures.conditions):
        with pytest.raises(BadInput, match="sublayer, branch"):
            figure(groups, "skip")
    with pytest.raises(BadInput, match="no checkpoint was measured"):
        figures.measured(groups, "echo")


@pytest.mark.filterwarnings("ignore:Glyph .* missing from:UserWarning")  # a page uses the fonts of the browser
def test_no_name_breaks_a_figure(tmp_path: Path) -> None:
    folder(tmp_path / "a", evals=by_block((0.1, 0.2), name=EVIL))
    groups = read([tmp_path], look=False)
    figure = figures.depth([type(groups[0])(EVIL, groups[0].runs)], EVIL)
    file = io.StringIO()
    figure.savefig(file, format="svg")
    assert "<b>" not in file.getvalue()
    assert figure.legends[0].get_texts()[0].get_text().strip().startswith("_<b>")


def test_tiles() -> None:
    rows = tuple(tuple(np.full((3, 3, 3), 40 * (r + c), np.uint8) for c in range(2)) for r in range(3))
    tiles = Tiles("x", "T", rows, ("$a", "_b", ""), ("one", "two"), "d", captions=(("p", "q"),) * 3)
    figure = figures.draw_tiles(tiles)
    shown = [int(image.get_array().max()) for image in figure.axes[0].images]
    assert shown == [0, 40, 40, 80, 80, 120]
    assert figure.get_figwidth() == _style.SIZE[0]  # as wide as a chart, so that their text is scaled equally
    with pytest.raises(BadInput, match="no images"):
        figures.draw_tiles(Tiles("x", "T", (), (), (), ""))


@pytest.mark.parametrize("columns", [2, 9])
def test_captions_are_not_wider_than_their_tile(columns: int) -> None:
    image, names = np.zeros((4, 4, 3), np.uint8), ("a name that goes on and on ✗",) * columns
    rows = ((image,) * columns,) * 2
    figure = figures.draw_tiles(Tiles("x", "T", rows, ("a", "b"), ("a long name",) * columns, "", (names,) * 2))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    pitch = axes.images[1].get_window_extent().x0 - axes.images[0].get_window_extent().x0
    texts = [text for text in axes.texts if text.get_ha() == "center"]
    assert len(texts) == 3 * columns
    assert max(text.get_window_extent().width for text in texts) <= pitch
    assert sum(text.get_text() == "✗" for text in axes.texts) == 2 * columns


@pytest.mark.parametrize("name", ["$x$", r"$x$ \frac", r"\$", r"a\b", "_a"])
def test_names_are_drawn_literally(name: str) -> None:
    from matplotlib.figure import Figure

    file, figure = io.StringIO(), Figure()
    with _style.settings():
        figure.text(0.1, 0.1, _style.plain(name))
        figure.savefig(file, format="svg")
    assert re.findall(r"<text[^>]*>([^<]*)</text>", file.getvalue())[0].strip() == name
