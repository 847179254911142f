"""One self-contained HTML page about any runs: words, tables, figures with their data, and what was left out.

Here is what the page shows, as plain data; page.html is how. A section is (key, heading, parts), and a part has
some of title, text, header and rows of a table, figures, note and lines. Nothing is fetched: style, script, figures and
data are in the file, and its security policy forbids the rest. The template escapes what runs are called.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from unskip.report import _charts
from unskip.report import _compare as compare
from unskip.report._charts import Chart
from unskip.report._dots import Dots, summaries
from unskip.report._names import evaluations, of_loss
from unskip.report._read import Group, Run, by_recipe
from unskip.report._svg import inline
from unskip.report._tables import FORMATS
from unskip.report._text import clean, short, slug, words
from unskip.report.figures import _style
from unskip.report.figures._draw import Tiles, draw, draw_dots, draw_tiles

COMPARED = 9  # groups that are held against the first of their recipe; more would be a wall of rows
PICTURED = 8  # groups whose pictures are shown
TABLE_ROWS = 200  # of a figure's data that are shown; its CSV has them all

Part = dict[str, Any]
Missing = list[tuple[str, str]]  # what, and why


def page(groups: Sequence[Group]) -> str:
    """The page about some groups of runs."""
    missing: Missing = []
    (key, heading, parts), *others = tables(groups)
    opening = [{"figures": figures}] if (figures := [*map(_dots, summaries(groups, _style.SHOWN))]) else []
    sections: list[tuple[str, str, Sequence[Part]]] = [(key, heading, [*opening, *parts]), *others]
    for key, heading, charts in every_chart(groups):
        drawn = [_chart(chart) for chart in charts if chart.lines]
        if key == "jacobians" and not drawn:  # one line in place of six titles
            missing.append(("Singular values and condition numbers of Jacobians", charts[0].missing))
        else:
            missing += [(chart.title, chart.missing) for chart in charts if not chart.lines]
        sections.append((key, heading, [{"figures": drawn}] if drawn else []))
    sections.append(("pictures", "Pictures", _pictures(groups, missing)))
    sections.append(("warnings", "Warnings", [_warnings(groups)]))
    lines = _missing(missing, groups)
    sections.append(("missing", "Left out", [{"lines": lines}] if lines else []))
    return _document(groups, [section for section in sections if section[2]])


def tables(groups: Sequence[Group]) -> list[tuple[str, str, list[Part]]]:
    """The sections of a page that are tables alone."""
    return [
        ("results", "Results", _results(groups)),
        ("differences", "Differences", _differences(groups)),
        ("configs", "Configs", _configs(groups)),
    ]


def every_chart(groups: Sequence[Group]) -> list[tuple[str, str, list[Chart]]]:
    """The sections of a page that are charts, drawn or not."""
    return [
        ("training", "In training", _training(groups)),
        ("depth", "Over depth", _depth(groups)),
        ("shortcuts", "Shortcuts", [_charts.alphas(groups), _charts.decay(groups)]),
        ("jacobians", "Jacobians", _jacobians(groups)),
    ]


def _document(groups: Sequence[Group], sections: Sequence[tuple[str, str, Sequence[Part]]]) -> str:
    from jinja2 import Environment  # torch brings it
    from markupsafe import Markup

    from unskip import __version__

    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"short": short, "finite": math.isfinite, "link": _link, "slug": slug}
    script = file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = made.from_string(file("page.html")).render(
        name=words([group.label for group in groups], 3),
        sentence=compare.sentence(groups),
        sections=sections,
        version=__version__,
        made_with=_versions(groups),
        style=Markup(file("page.css")),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        most=TABLE_ROWS,
        colours=len(_style.COLOURS),
        coloured=_style.SHOWN,
    )
    return text.strip() + "\n"


def _results(groups: Sequence[Group]) -> list[Part]:
    kinds = by_recipe(groups)
    parts: list[Part] = []
    for recipe, members in kinds.items():
        header, rows = compare.results(members)
        kept = [place for place in range(len(header)) if place < 3 or any(row[place] is not None for row in rows)]
        table = {"header": [header[place] for place in kept], "rows": [[row[place] for place in kept] for row in rows]}
        parts.append({"title": recipe if len(kinds) > 1 else "", "label": f"Results, {recipe}", **table})
    note = "The newest number of each name; of numbers by block that of the last block. "
    if any(len(group.runs) > 1 for group in groups):
        note += "Mean ± standard deviation over the runs of a group, which have one config and differ by their seed. "
    again = [group.label for group in groups if group.repeats]
    note += f"But of {words(again)} several runs have the same seed. " if again else ""
    if any(row.get("intervals") for group in groups for run in group.runs for row in run.evals):
        note += "In brackets, of one run: 95% Wilson interval over its n test samples. "
    if any(len(group.runs) > 1 for group in groups):
        note += "In brackets, of several runs: 95% interval of their mean (Student's t). "
    more = len(groups) - _style.SHOWN
    note += f"The last {more} groups are grey in the figures." if more > 0 else ""
    return [*parts, {"note": note.strip()}]


def _differences(groups: Sequence[Group]) -> list[Part]:
    """Each group beside the first of its recipe: what of its config is other, and what it has above it."""
    parts: list[Part] = []
    kinds = by_recipe(groups)
    for recipe, (first, *others) in kinds.items():
        if not 0 < len(others) <= COMPARED:
            continue
        header, rows = compare.deltas([first, *others])
        lines = [f"{group.label}: {fields}" for group in others if (fields := compare.changed(first, group))]
        title = f"{recipe}: against {first.label}" if len(kinds) > 1 else f"Against {first.label}"
        table = {"label": f"Differences, {recipe}", "header": header, "rows": rows} if rows else {}
        parts += [{"title": title, "lines": lines}, table] if lines or rows else []
    if parts:
        note = "Newcombe: both are one run, and the interval is that of their test samples. Welch: over seeds. "
        parts.append({"note": note + "An interval that holds 0 may be chance."})
    return parts


def _configs(groups: Sequence[Group]) -> list[Part]:
    kinds = by_recipe(groups)
    parts: list[Part] = []
    for recipe, members in kinds.items():
        differ, same = compare.differences(members)
        mine: list[Part] = []
        if differ:
            rows = [[group, *(compare.shown(group.config, name) for name in differ)] for group in members]
            table = {"label": f"Configs, {recipe}: differences", "header": ["group", *differ], "rows": rows}
            mine.append({"text": "What differs, seeds aside:", **table})
        elif len(members) > 1:
            mine.append({"text": "No field of the configs differs."})
        if same:
            fields = [[name, compare.shown(members[0].config, name)] for name in same]
            title = "All fields" if len(members) == 1 else f"In common: {len(same)} fields"
            label = f"Configs, {recipe}: in common"
            mine.append({"folded": title, "label": label, "header": ["field", "value"], "rows": fields})
        mine = mine or [{"text": "No config that can be read."}]
        parts += [{**mine[0], "title": recipe if len(kinds) > 1 else ""}, *mine[1:]]
    return parts


def _training(groups: Sequence[Group]) -> list[Chart]:
    """Losses of different recipes are different things, and have a chart each."""
    kinds = by_recipe(groups)
    charts: list[Chart] = []
    for recipe, members in kinds.items():
        names = evaluations(members, False)
        # kNN has a place here even where no run was evaluated by it: it says so.
        names += [] if any(name.startswith("knn") for name in names) else ["knn20"]
        mine = [_charts.over_steps(members, name) for name in ("loss", *of_loss(members))]
        mine += [_charts.evaluated(members, name) for name in names]
        if len(kinds) > 1:
            mine = [replace(c, title=f"{c.title} ({recipe})", name=f"r{len(charts)}-{c.name}") for c in mine]
        charts += mine
    return charts


def _depth(groups: Sequence[Group]) -> list[Chart]:
    names = evaluations(groups, True)
    always = {"knn": "knn20", "probe": "probe_lbfgs", "rank": "rank"}
    names += [name for kind, name in always.items() if not any(each.startswith(kind) for each in names)]
    charts = [_charts.over_depth(groups, name) for name in names]
    return charts + [_charts.measured(groups, name) for name in ("echo", "high_frequency", "token_rank", "norm")]


def _jacobians(groups: Sequence[Group]) -> list[Chart]:
    parts = [_charts.spectra(groups, part, q) for part in ("sublayer", "branch") for q in ("0.5", "0.1")]
    return [*parts, _charts.conditions(groups, "sublayer"), _charts.conditions(groups, "branch")]


def _chart(chart: Chart) -> Part:
    note = [chart.note] if chart.note else []
    if any(std for line in chart.lines for std in line.std):
        note.append("Bands: one standard deviation over the runs of a group.")
    if any(ends and std is None for line in chart.lines for ends, std in zip(line.interval, line.std, strict=True)):
        note.append("Bands of one run: 95% Wilson interval over its test samples.")
    if len(chart.lines) > _style.SHOWN:
        note.append(f"The first {_style.SHOWN} groups have colours; the others are grey.")
    header, rows = chart.rows()
    svg = inline(draw(chart), chart.name, chart.alt())
    data = {"header": header, "rows": rows}
    return {"name": chart.name, "title": chart.title, "svg": svg, "note": " ".join(note), **data}


def _dots(dots: Dots) -> Part:
    header, rows = dots.rows()
    note = "One point per run. Line: mean of the group."
    if any(column.interval for column in dots.columns):
        note += " Box: 95% interval over three runs or more, or of one run over its test samples."
    svg = inline(draw_dots(dots), dots.name, dots.alt())
    return {"name": dots.name, "title": dots.title, "svg": svg, "note": note, "header": header, "rows": rows}


def _pictures(groups: Sequence[Group], missing: Missing) -> list[Part]:
    parts: list[Part] = []
    others: list[str] = []
    for index, group in enumerate(groups):
        pictured = next((run for run in group.runs if run.look is not None and run.look.tiles), None)
        looked = pictured.look.tiles if pictured and pictured.look else []
        figures = [_tiles(tiles, f"g{index}", group) for tiles in looked]
        samples = [figure for run in group.runs if (figure := _samples(run, group)) is not None][:1]
        figures += samples
        if group.recipe in ("sit", "uvit") and not samples:
            missing.append((f"Samples of {group.label}", "none in its folder; `unskip sample RUN` draws some"))
        if pictured and group.recipe != "mae":
            others.append(group.label)
        if figures and len(parts) < PICTURED:
            parts.append({"title": compare.title(group, pictured) if pictured else group.label, "figures": figures})
        elif figures:
            missing.append((f"Pictures of {group.label}", f"those of the first {PICTURED} groups are shown"))
    if others:
        missing.append((f"Reconstructions by {words(others)}", "only masked autoencoders reconstruct masked patches"))
    if not parts:
        missing.append(("Reconstructions, patch features and nearest neighbours", "no checkpoint was looked at"))
    return parts


def _tiles(tiles: Tiles, prefix: str, group: Group) -> Part:
    name = f"{prefix}-{tiles.name}"
    svg = inline(draw_tiles(tiles), name, f"{group.label}. {tiles.title}: {tiles.description}")
    table = {"header": tiles.header, "rows": tiles.table}
    return {"name": name, "title": tiles.title, "svg": svg, "note": tiles.note, **table}


def _samples(run: Run, group: Group) -> Part | None:
    """The newest picture that `unskip sample` left in the run's folder."""
    pictures = [each for each in (run.path / "samples").glob("*.png") if each.is_file() and each.stat().st_size < 2**21]
    if not pictures:
        return None
    newest = max(pictures, key=lambda each: (each.stat().st_mtime, each.name))
    content = newest.read_bytes()
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"png": source, "alt": f"Samples of {group.label}", "note": f"Samples: {clean(newest.name)}"}


def _warnings(groups: Sequence[Group]) -> Part:
    rows = compare.warned(groups)
    header = ["run", "warning", "times", "first step", "last step", "text"]
    return {"label": "Warnings", "header": header, "rows": rows} if rows else {"text": "No run has raised a warning."}


def _missing(missing: Missing, groups: Sequence[Group]) -> list[str]:
    """What is not on the page, and why; what was wrong with the folders. A reason stands once."""
    runs = [run for group in groups for run in group.runs]
    looked = sum(run.look is not None for run in runs)
    wanted = list(missing)
    if 0 < looked < len(runs):
        why = f"{looked} of {len(runs)} runs were looked at; `--look {len(runs)}` looks at all"
        wanted.append(("Measurements and pictures of the other runs", why))
    for group in groups:
        for run in group.runs:
            notes = [*run.notes, *(run.look.notes if run.look is not None else ())]
            wanted += [(compare.title(group, run), note) for note in notes]
    reasons: dict[str, dict[str, None]] = {}
    for what, why in wanted:
        reasons.setdefault(why, {})[what] = None
    return [f"{_several([*whats])}: {why}." for why, whats in reasons.items()]


def _several(names: Sequence[str], most: int = 12) -> str:
    """Titles, which may have commas in them."""
    kept = [clean(name, 120) for name in names[:most]]
    return "; ".join([*kept, *([f"and {len(names) - most} more"] if len(names) > most else [])])


def _versions(groups: Sequence[Group]) -> str:
    makers: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        versions = run.about.get("versions")
        parts = [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else []
        makers[clean(", ".join([*parts, f"device {run.about.get('device', 'unknown')}"]), 200)] = None
    return "Runs made with: " + "; ".join([*makers][:6]) + "."


def _link(table: Mapping[str, Any], form: str) -> str:
    """A whole table in another format, as the address of a download."""
    content = FORMATS[form](table["header"], table["rows"])
    return f"data:text/plain;base64,{base64.b64encode(content.encode()).decode()}"


def file(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("unskip.report").joinpath(name).read_text(encoding="utf-8")
