"""The report in a browser: rendering, small screens, contrast, and the keyboard."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.browser import CHROMIUM, Browser
from tests.report.runs import by_block, folder

from unskip import report
from unskip.report._look import Look
from unskip.report._page import page as write

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt install chromium)")

# Finds text with less contrast to its background than the 4.5 to 1 of WCAG 2.
CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [low, high] = [light(ink), light(behind(element))].sort((a, b) => a - b);
    if ((high + 0.05) / (low + 0.05) < 4.5) bad.push([walk.currentNode.textContent.trim(), ink, behind(element)]);
  }
  return bad;
})()"""

# Finds empty figures: those without a size, or without a line and an image that have a size.
EMPTY = """[...document.querySelectorAll("svg.chart")].filter((svg) => {
  const box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, image, use")].filter((m) => m.getBoundingClientRect().width > 0);
  return box.width < 100 || box.height < 50 || marks.length < 5;
}).map((svg) => svg.getAttribute("aria-label"))"""


# Finds text in figures that is cut off at the edge or overlaps other text.
CROWDED = """[...document.querySelectorAll("svg.chart")].flatMap((svg) => {
  const edge = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((each) => each.textContent.trim())
    .map((each) => [each.textContent.trim(), each.getBoundingClientRect()]);
  const cut = texts.filter(([_, box]) => box.left < edge.left - 1 || box.right > edge.right + 1
    || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
  const pairs = texts.flatMap((a, i) => texts.slice(i + 1).map((b) => [a, b]));
  const over = pairs.filter(([[_, a], [__, b]]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3);
  return [...cut.map(([text]) => text), ...over.map(([[a], [b]]) => a + " | " + b)];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    long = "a-run-with-a-name-that-goes-on-and-on-" * 2
    for seed in (0, 1):
        rows = by_block((0.1, 0.2 + seed / 10)) + by_block((4.0, 5.0), "rank")
        folder(place / "plain" / f"seed-{seed}", seed=seed, losses=(2, 1, 0.9 + seed), evals=rows, weights=(1.0, 0.8))
    warning = {"step": 10, "warning": "<b>", "text": "<script>throw 1</script>" + "x" * 400}
    folder(place / "<img src=x onerror=alert(1)>", shortcut="cut", losses=(3, "nan", 1), warnings=[warning])
    folder(place / long, recipe="supervised", shortcut=long, weights=(0.0, 0.0))
    groups = report.read(sorted(each for each in place.iterdir()), look=False)
    noise = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8, 3), dtype=np.uint8)
    rows = tuple(tuple(row) for row in noise)
    title = "A title that is longer than three small pictures in a row are wide"
    tiles = report.Tiles("neighbours", title, rows, ("<b>", "row"), ("a", "b", "c"), "Noise.", (("$x$",) * 3,) * 2)
    run = replace(groups[0].runs[0], look=Look(30, None, [tiles]))
    groups[0] = replace(groups[0], runs=(run, *groups[0].runs[1:]))
    file = place / "page.html"
    file.write_text(write(groups))
    return file


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as result:
        yield result


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (800, False), (1280, True), (1920, False)])
def test_the_page_renders_without_errors(page: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.open(page, width, dark=dark)
    assert browser.problems == []
    assert browser.run("document.querySelectorAll('svg.chart').length") == 6
    assert browser.run(EMPTY) == []
    assert browser.run(CROWDED) == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CONTRAST) == []
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert browser.problems == []


def test_text_in_figures_is_legible_on_a_phone(page: Path, browser: Browser) -> None:
    browser.open(page, 390)
    sizes = browser.run(
        "[...document.querySelectorAll('svg.chart text')].map((each) => {"
        "  const svg = each.ownerSVGElement;"
        "  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;"
        "  return parseFloat(getComputedStyle(each).fontSize) * scale; })"
    )
    assert min(sizes) >= 8.5


def test_tables_sort_from_the_keyboard(page: Path, browser: Browser) -> None:
    browser.open(page, 1280)
    column = (
        "[...document.querySelector('#results table').tBodies[0].rows].map((row) => "
        "[...row.cells].map((cell) => cell.textContent.trim())[3].split(' [')[0])"
    )
    browser.run("document.querySelectorAll('#results th button')[3].focus()")
    assert browser.run("document.activeElement.textContent") == "Loss in training"
    browser.press("Enter")
    assert browser.run("document.querySelectorAll('#results th')[3].getAttribute('aria-sort')") == "ascending"
    assert browser.run(column) == ["1", "1.40 ± 0.71"]
    browser.press("Enter")
    assert browser.run(column) == ["1.40 ± 0.71", "1"]


def test_all_controls_are_reached_by_tab(page: Path, browser: Browser) -> None:
    browser.open(page, 1280)
    wanted = browser.run("document.querySelectorAll('a, button, summary, [tabindex]').length")
    hidden = browser.run("document.querySelectorAll('details a, details button, details [tabindex]').length")
    seen = []
    for _ in range(wanted + 1):
        browser.press("Tab")
        seen.append(browser.run("(() => { const e = document.activeElement; return e.tagName + e.textContent; })()"))
    assert seen[0] == "ATo the content"
    kinds = {
        name: sum(each.startswith(name) for each in seen[: wanted - hidden]) for name in ("A", "BUTTON", "SUMMARY")
    }
    assert kinds["SUMMARY"] == browser.run("document.querySelectorAll('summary').length")
    assert kinds["BUTTON"] == browser.run("document.querySelectorAll(':not(details) > .wide th button').length")


def test_injected_scripts_and_images_are_blocked(page: Path, browser: Browser, tmp_path: Path) -> None:
    """The content security policy of the page is active."""
    spoilt = page.read_text().replace("</main>", "</main><script>document.title = 'owned'</script>")
    (tmp_path / "spoilt.html").write_text(spoilt)
    browser.open(tmp_path / "spoilt.html", 1280)
    assert browser.run("document.title") != "owned"
    assert browser.problems
    browser.problems.clear()
