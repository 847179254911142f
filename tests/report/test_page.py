"""The page: complete, self-contained, reproducible, and safe for any run name."""

import base64
import csv
import errno
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.report.runs import by_block, folder
from tests.report.test_figures import contrast

from unskip import cli, report
from unskip.errors import BadInput
from unskip.report._charts import evaluated
from unskip.report._compare import deltas, over_seeds, results
from unskip.report._page import file, page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
VOID = {"meta", "link", "img", "br"}


class Elements(HTMLParser):
    """Parses a page: its elements, whether they are nested correctly, and the text outside of script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def of(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def made(*paths: Path) -> str:
    return page(report.read(paths, look=False))


def test_the_page_is_complete(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder(tmp_path / "plain" / f"seed-{seed}", losses=(1, 0.5 + seed / 10), seed=seed, evals=by_block((0.1, 0.3)))
    alert = {"step": 20, "warning": "flat-loss", "text": "the loss is flat"}
    folder(tmp_path / "decayed", shortcut="decay:0.6", weights=(1.0, 0.6), warnings=[alert, alert | {"step": 30}])
    text = made(tmp_path / "plain", tmp_path / "decayed")
    elements = Elements(text)
    assert re.search(r"3 runs in 2 groups.*shortcut \(keep and decay:0.6\)", text)
    assert "0.550 ± 0.071" in elements.text
    assert "flat-loss" in elements.text
    assert re.search(r"Reconstructions.*no checkpoint was measured", elements.text)
    assert next(each["aria-label"] for each in elements.of("svg") if each.get("role") == "img").startswith(
        "Line chart."
    )
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [each["href"] for each in elements.of("a") if each["href"].startswith("#")]
    assert {link[1:] for link in links} <= set(ids)
    uses = [
        v[1:] for _, attributes in elements.tags for k, v in attributes.items() if k == "xlink:href" and v[0] == "#"
    ]
    assert uses
    assert set(uses) <= set(ids)


def test_nothing_is_fetched(tmp_path: Path) -> None:
    elements = Elements(made(folder(tmp_path / "a")))
    for _, attributes in elements.tags:
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    policy = next(each["content"] for each in elements.of("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "url(http" not in file("page.css")


def test_data_of_a_figure(tmp_path: Path) -> None:
    elements = Elements(made(folder(tmp_path / "a", losses=(1.0, 0.5))))
    (link,) = [each for each in elements.of("a") if each.get("download") == "step-loss.csv"]
    text = base64.b64decode(link["href"].partition("base64,")[2]).decode()
    assert list(csv.reader(io.StringIO(text))) == [
        ["group", "training step", "loss", "standard deviation", "runs", "95% low", "95% high"],
        ["a", "10.0", "1.0", "", "1", "", ""],
        ["a", "20.0", "0.5", "", "1", "", ""],
    ]


def test_metrics_of_the_objective(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row | {"teacher_entropy": 2.0}) + "\n" for row in rows))
    names = {each["download"] for each in Elements(made(path)).of("a") if "download" in each}
    charts = {name for name in names if name.startswith("step-") and name.endswith(".csv")}
    assert charts == {"step-loss.csv", "step-teacher-entropy.csv"}


def test_the_page_is_reproducible(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", evals=by_block((0.1, 0.2)))
    assert made(path) == made(path)


def test_names_are_escaped(tmp_path: Path) -> None:
    path = folder(
        tmp_path / EVIL.replace("/", ""),
        evals=[*by_block((0.1, 0.2), name=EVIL), {"step": 10, "evaluation": EVIL, EVIL: 1.0}],
        warnings=[{"step": 1, "warning": EVIL, "text": EVIL}],
        shortcut=EVIL,
        recipe=EVIL,
    )
    (path / "config.json").write_text(
        (path / "config.json")
        .read_text()
        .replace('"versions": {"torch": "2"}', f'"versions": {json.dumps({EVIL: EVIL})}')
    )
    elements = Elements(made(path, folder(tmp_path / "b", **{EVIL: EVIL})))
    assert len(elements.of("script")) == 1
    assert not elements.of("img")
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in elements.text
    assert "<script>alert(1)<script>" in elements.text  # the name of the folder, which cannot contain a slash


def test_metrics_with_unusual_names(tmp_path: Path) -> None:
    """The name of a metric becomes the title of a figure and part of its ids."""
    names = ('"><img src=x onerror=alert(1)>', "\\d \\g<9> $", "a b", "a-b", "a_b")
    rows = [{"step": step, "block": block, **dict.fromkeys(names, 0.5)} for step in (10, 20) for block in (None, 0, 1)]
    elements = Elements(made(folder(tmp_path / "run", evals=rows)))
    assert not any(key.startswith("on") for _, attributes in elements.tags for key in attributes)
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.-]+", each) for each in ids)
    assert sum(each.get("role") == "img" for each in elements.of("svg")) == 1 + 2 * len(names)


@pytest.mark.parametrize("losses", [("nan", "nan"), (), (1e308, 1e-308, -1e308), (0.0, 0.0)])
def test_unusual_losses(tmp_path: Path, losses: tuple[object, ...]) -> None:
    text = made(folder(tmp_path / "a", losses=losses))
    assert "One run," in text
    assert Elements(text).of("svg") or "no run has logged loss" in text


def test_fifty_runs(tmp_path: Path) -> None:
    for index in range(50):
        rows = by_block([0.1 * index] * 12)
        folder(tmp_path / f"r{index}", losses=[1.0] * 400, lr=float(index), weights=(1.0,) * 24, evals=rows)
    text = made(tmp_path)
    assert len(text) < 3_000_000
    elements = Elements(text)
    assert "lr (0.0, 1.0, 2.0, 3.0 and 46 more)" in text
    assert "The last 40 groups are grey in the figures." in elements.text


def test_runs_of_different_recipes(tmp_path: Path) -> None:
    folder(tmp_path / "a", recipe="supervised", evals=[{"step": s, "test_accuracy": s / 100} for s in (10, 20)])
    folder(tmp_path / "b")
    text = made(tmp_path)
    assert "Loss in training (supervised)" in text
    assert "Loss in training (mae)" in text
    assert "Accuracy on the test split (supervised)" in text
    assert "Accuracy on the test split (mae)" not in text
    assert "supervised on digits; mae on digits." in text


def test_mean_over_seeds() -> None:
    assert over_seeds([], 3) is None
    assert over_seeds([0.5], 1) == (0.5, "0.5")
    assert over_seeds([0.5], 3) == (0.5, "0.5 (1 of 3 runs)")
    assert over_seeds([math.nan, 0.5], 2) == (0.5, "0.5 (1 not finite)")
    cases = ([1, 2], [0.909, 0.90901], [1400, 2000], [1e-8, 3e-8], [3, 3])
    texts = [over_seeds(values)[1].partition(" [")[0] for values in cases]  # type: ignore[index]
    assert texts == ["1.50 ± 0.71", "0.9090 ± 0.0000", "1700 ± 424", "2e-08 ± 1.4e-08", "3.000 ± 0.000"]


def test_samples(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    (path / "samples").mkdir()
    (path / "samples" / "bad.png").write_bytes(b"<script>")
    assert not Elements(made(path)).of("img")
    (path / "samples" / "bad.png").unlink()
    (path / "samples" / "step-30.png").write_bytes(b"\x89PNG\r\n\x1a\n...")
    (image,) = Elements(made(path)).of("img")
    assert image["src"].startswith("data:image/png;base64,")


def test_contrast_of_colours() -> None:
    """Text has 4.5 to 1 and lines 3 to 1, on the page and on cards, light and dark."""
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in file("page.css").split("prefers-color-scheme")]
    assert len(schemes) == 2
    for scheme in schemes:
        for ground in ("page", "card"):
            for name in ("ink", "soft", "link"):
                assert contrast(scheme[name], scheme[ground]) >= 4.5, (name, scheme[ground])
            for name in ("c0", "c1", "c2", "c3", "c4", "c5"):
                assert contrast(scheme[name], scheme[ground]) >= 3, (name, scheme[ground])
            assert contrast(scheme["rest"], scheme[ground]) >= 2.8


def test_tables(tmp_path: Path) -> None:
    """Numbers sort as numbers, long tables are cut but complete as CSV, and formulas are escaped."""
    folder(tmp_path / "=1+1", losses=[1.0] * 250 + ["nan"])
    elements = Elements(made(tmp_path))
    cells = [each for each in elements.of("td") if each.get("class") == "number"]
    assert "1.0" in {each.get("data-value") for each in cells}
    assert all(math.isfinite(float(each["data-value"])) for each in cells if "data-value" in each)
    assert "The first 200 of 250 rows; the files have all." in elements.text
    (link,) = [each["href"] for each in elements.of("a") if each.get("download") == "step-loss.csv"]
    rows = base64.b64decode(link.partition("base64,")[2]).decode().splitlines()
    assert (len(rows), rows[1][:5]) == (251, "'=1+1")


def test_differences(tmp_path: Path) -> None:
    """The page has the changed config fields of two runs, and the interval of their difference over test samples."""
    row = {"step": 30, "test_accuracy": 0.7, "n": 100, "intervals": {"test_accuracy": [0.604, 0.781]}}
    better = row | {"test_accuracy": 0.9, "intervals": {"test_accuracy": [0.826, 0.945]}}
    runs = [folder(tmp_path / "a", evals=[row]), folder(tmp_path / "b", evals=[better], shortcut="cut")]
    elements = Elements(made(*runs))
    (opening, *_) = (each["aria-label"] for each in elements.of("svg") if each.get("role") == "img")
    assert opening.startswith(
        "Points, one per run. Accuracy on the test split, n = 100, mean of each group: a: 0.7; b: 0.9."
    )
    text = elements.text
    assert "b: shortcut: keep → cut" in text
    assert "+0.2" in text
    assert "[0.090, 0.306]" in text  # Newcombe 1998, method 10
    assert "Newcombe" in text


def test_files(tmp_path: Path) -> None:
    """Tables and figures are also written as files beside the page."""
    row = {"step": 30, "test_accuracy": 0.7, "n": 100, "intervals": {"test_accuracy": [0.604, 0.781]}}
    runs = [folder(tmp_path / name, evals=[row], shortcut=name) for name in ("a_1", "b|2")]
    report.write(runs, tmp_path / "page.html", look=0, export=tmp_path / "files")
    names = {each.name for each in (tmp_path / "files").iterdir()}
    assert {"results-mae.csv", "results-mae.md", "results-mae.tex", "differences-mae.tex"} <= names
    assert {"step-loss.svg", "step-loss.pdf", "result-test-accuracy.svg"} <= names
    assert (tmp_path / "files" / "step-loss.pdf").read_bytes().startswith(b"%PDF")
    markdown = (tmp_path / "files" / "results-mae.md").read_text().splitlines()
    assert "0.7 [0.604, 0.781]" in markdown[2]
    assert markdown[3].startswith("| b\\|2 |".replace("\\\\", "\\"))
    latex = (tmp_path / "files" / "results-mae.tex").read_text()
    assert "a\\_1 &" in latex
    assert latex.count(" \\\\\n") == 3


def test_n_and_intervals(tmp_path: Path) -> None:
    """One run has the interval over its test samples, several have their standard deviation. Both show n."""
    row = {"step": 30, "block": 1, "knn20": 0.85, "rank": 4.0, "n": 40, "intervals": {"knn20": [0.709, 0.929]}}
    folder(tmp_path / "one", evals=[row], shortcut="cut")
    for seed in (0, 1):
        folder(tmp_path / "two" / f"seed-{seed}", seed=seed, evals=[row | {"knn20": 0.8 + seed / 10}])
    text = Elements(made(tmp_path / "one", tmp_path / "two")).text
    assert "0.85 [0.709, 0.929]" in text
    assert "0.850 ± 0.071" in text
    assert "k = 20 (fraction), n = 40" in text
    assert "(directions), n = 40" in text
    assert "Wilson" in text


@pytest.mark.parametrize("out", ["folder", "file/page.html"])
def test_a_page_that_cannot_be_written(tmp_path: Path, out: str) -> None:
    run = folder(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"name the page|cannot be written"):
        report.write([run], tmp_path / out)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder", "run"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path / "a")
    out = tmp_path / "new" / "page.html"
    assert cli.main(["report", str(run), "--out", str(out), "--look", "0"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text() == made(run)
    assert [each.name for each in out.parent.iterdir()] == ["page.html"]
    for wrong in ([], [str(tmp_path / "x")], [str(run), "--look", "-1"]):
        assert cli.main(["report", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = folder(tmp_path / "run")
    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html"), "--look", "0"]) == 1
    assert capsys.readouterr().err == "unskip: cannot write: No space left on device\n"


def test_runs_of_language_models(tmp_path: Path) -> None:
    """Only values of equal n are compared, and those on changed data stand apart, with a note."""

    def rows(bits: float) -> list[dict[str, object]]:
        ends = {"intervals": {"test_bits_per_byte": [bits - 0.1, bits + 0.1]}}
        return [{"step": 30, "split": "test", "n": 32, "test_bits_per_byte": bits, "test_loss": 2 * bits, **ends}]

    full = {"step": 30, "evaluation": "bits-per-byte-v1", "block": None, "split": "test", "n": 300}
    own = full | {"bits_per_byte": 3.5, "loss": 7.25, "intervals": {"bits_per_byte": [3.25, 3.75]}}
    changed = own | {"bits_per_byte": 5.151, "data": "changed since the run began"}
    evals = [*rows(3.0), own, changed, full | {"split": "val", "n": 206, "loss": 7.5}]
    runs = [
        folder(tmp_path / "a", recipe="lm", evals=evals),
        folder(tmp_path / "b", recipe="lm", shortcut="cut", data="notes", evals=rows(4.0)),
    ]
    groups = report.read(runs, look=False)
    header, (first, second) = results(groups)
    cells = {name: (x[1], y and y[1]) for name, x, y in zip(header, first, second, strict=True) if "split" in name}  # type: ignore[index]
    assert cells == {
        "Bits per byte on the test split, n = 32": ("3 [2.900, 3.100]", "4 [3.900, 4.100]"),
        "Bits per byte on the test split, n = 300": ("3.5 [3.250, 3.750]", None),
        "Loss on the test split, n = 32": ("6", "8"),
        "Loss on the test split, n = 300": ("7.25", None),
        "Bits per byte on the test split on changed data, n = 300": ("5.151 [3.250, 3.750]", None),
        "Loss on the test split on changed data, n = 300": ("7.25", None),
        "Loss on the validation split, n = 206": ("7.5", None),
    }
    compared = [row[1] for row in deltas(groups)[1]]
    assert compared == ["Bits per byte on the test split, n = 32", "Loss on the test split, n = 32"]
    text = Elements(page(groups)).text
    assert "images a second" not in text
    assert "Wilson" not in text
    assert "95% interval over documents" in text
    assert "On changed data: " in text
    assert "Results on different data do not compare." in text


def test_evaluations_on_fewer_samples_are_not_joined_with_those_on_all(tmp_path: Path) -> None:
    """The chart over steps has the evaluations during training, with a note where runs differ in n."""
    for name, n in (("a", 32), ("b", 64)):
        rows = [{"step": step, "knn20": step / 100, "n": n} for step in (10, 20)]
        folder(tmp_path / name, shortcut=name, evals=[*rows, {"step": 20, "block": None, "knn20": 0.9, "n": 300}])
    chart = evaluated(report.read([tmp_path], look=False), "knn20")
    assert [line.y for line in chart.lines] == [(0.1, 0.2), (0.1, 0.2)]
    assert "Test samples: a 32; b 64." in chart.note
