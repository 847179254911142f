"""One self-contained HTML page about runs: text, tables, figures with their data, and what is missing.

This file builds the content as plain data; page.html is its template. A section is (key, heading, parts), and a part
has some of title, text, header and rows of a table, figures, note and lines. The page loads nothing: style, script,
figures and data are in the file, and its security policy forbids anything else. The template escapes the names of runs.
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
from unskip.report._rows import ON_CHANGED_DATA
from unskip.report._svg import inline
from unskip.report._tables import FORMATS
from unskip.report._text import clean, short, slug, words
from unskip.report.figures import _style
from unskip.report.figures._draw import Tiles, draw, draw_dots, draw_tiles

COMPARED = 9  # most groups compared with the first of their recipe
PICTURED = 8  # most groups with pictures
TABLE_ROWS = 200  # most rows shown of a figure's data; its CSV has them all

Part = dict[str, Any]
Missing = list[tuple[str, str]]  # (item, reason)


def page(groups: Sequence[Group]) -> str:
    """The HTML page for groups of runs."""
    missing: Missing = []
    (key, heading, parts), *others = tables(groups)
    opening = [{"figures": figures}] if (figures := [*map(_dots, summaries(groups, _style.SHOWN))]) else []
    sections: list[tuple[str, str, Sequence[Part]]] = [(key, heading, [*opening, *parts]), *others]
    for key, heading, charts in every_chart(groups):
        drawn = [_chart(chart) for chart in charts if chart.lines]
        if key == "jacobians" and not drawn:  # one line instead of six
            missing.append(("Singular values and condition numbers of Jacobians", charts[0].missing))
        else:
            missing += [(chart.title, chart.missing) for chart in charts if not chart.lines]
        sections.append((key, heading, [{"figures": drawn}] if drawn else []))
    sections += [("pictures", "Pictures", _pictures(groups, missing)), ("warnings", "Warnings", [_warnings(groups)])]
    lines = _missing(missing, groups)
    sections.append(("missing", "Missing", [{"lines": lines}] if lines else []))
    return _document(groups, [section for section in sections if section[2]])


def tables(groups: Sequence[Group]) -> list[tuple[str, str, list[Part]]]:
    """The sections with tables only."""
    return [
        ("results", "Results", _results(groups)),
        ("differences", "Differences", _differences(groups)),
        ("configs", "Configs", _configs(groups)),
    ]


def every_chart(groups: Sequence[Group]) -> list[tuple[str, str, list[Chart]]]:
    """The sections with charts; a chart without data has no lines."""
    return [
        ("training", "Training", _training(groups)),
        ("depth", "By depth", _depth(groups)),
        ("shortcuts", "Shortcuts", [_charts.alphas(groups), _charts.decay(groups)]),
        ("jacobians", "Jacobians", _jacobians(groups)),
    ]


def _document(groups: Sequence[Group], sections: Sequence[tuple[str, str, Sequence[Part]]]) -> str:
    from jinja2 import Environment  # a dependency of torch
    from markupsafe import Markup

    from unskip import __version__

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": short, "finite": math.isfinite, "link": _link, "slug": slug}
    script = file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.from_string(file("page.html")).render(
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
    recipes = by_recipe(groups)
    parts: list[Part] = []
    for recipe, members in recipes.items():
        header, rows = compare.results(members)
        kept = [i for i in range(len(header)) if i < 3 or any(row[i] is not None for row in rows)]
        table = {"header": [header[i] for i in kept], "rows": [[row[i] for i in kept] for row in rows]}
        parts.append({"title": recipe if len(recipes) > 1 else "", "label": f"Results, {recipe}", **table})
    note = "The newest value of each metric; for metrics by block, of the last block. "
    if any(len(group.runs) > 1 for group in groups):
        note += "Mean ± standard deviation over the runs of a group, which differ only in their seed. "
    repeats = [group.label for group in groups if group.repeats]
    note += f"Some runs of {words(repeats)} have the same seed. " if repeats else ""
    evaluated = [(group, row) for group in groups for run in group.runs for row in run.evals]
    if any(row.get("intervals") for group, row in evaluated if not group.is_text):
        note += "Brackets, one run: 95% Wilson interval over its n test samples. "
    if any(row.get("intervals") for group, row in evaluated if group.is_text):
        note += "Brackets, one language model: 95% interval over documents, or over its n sequences if they are few. "
    if any(ON_CHANGED_DATA in name for _, row in evaluated for name in row):
        note += "On changed data: the run's data had changed since it began; these values compare with no others. "
    if any(len(group.runs) > 1 for group in groups):
        note += "Brackets, several runs: 95% interval of their mean (Student's t). "
    note += f"The last {more} groups are grey in the figures." if (more := len(groups) - _style.SHOWN) > 0 else ""
    return [*parts, {"note": note.strip()}]


def _differences(groups: Sequence[Group]) -> list[Part]:
    """Each group against the first of its recipe: config fields that differ, and differences in metrics."""
    parts: list[Part] = []
    recipes = by_recipe(groups)
    for recipe, (first, *others) in recipes.items():
        if not 0 < len(others) <= COMPARED:
            continue
        header, rows = compare.deltas([first, *others])
        lines = [f"{group.label}: {fields}" for group in others if (fields := compare.changed(first, group))]
        title = f"{recipe}: against {first.label}" if len(recipes) > 1 else f"Against {first.label}"
        table = {"label": f"Differences, {recipe}", "header": header, "rows": rows} if rows else {}
        parts += [{"title": title, "lines": lines}, table] if lines or rows else []
    if parts:
        note = "Newcombe: interval over test samples, for two single runs. Welch: interval over seeds. "
        note += "A difference whose interval contains 0 may be chance. "
        differ = {name for members in recipes.values() for name in compare.differences(members)[0]}
        note += "Results on different data do not compare. " if "data" in differ else ""
        note += "Between tokenizers only bits per byte compare. " if "tokenizer" in differ else ""
        parts.append({"note": note.strip()})
    return parts


def _configs(groups: Sequence[Group]) -> list[Part]:
    recipes = by_recipe(groups)
    parts: list[Part] = []
    for recipe, members in recipes.items():
        differ, same = compare.differences(members)
        of_recipe: list[Part] = []
        if differ:
            rows = [[group, *(compare.shown(group.config, name) for name in differ)] for group in members]
            table = {"label": f"Configs, {recipe}: differences", "header": ["group", *differ], "rows": rows}
            of_recipe.append({"text": "Fields that differ, except the seed:", **table})
        elif len(members) > 1:
            of_recipe.append({"text": "No field of the configs differs."})
        if same:
            fields = [[name, compare.shown(members[0].config, name)] for name in same]
            title = "All fields" if len(members) == 1 else f"In common: {len(same)} fields"
            label = f"Configs, {recipe}: in common"
            of_recipe.append({"folded": title, "label": label, "header": ["field", "value"], "rows": fields})
        of_recipe = of_recipe or [{"text": "No readable config."}]
        parts += [{**of_recipe[0], "title": recipe if len(recipes) > 1 else ""}, *of_recipe[1:]]
    return parts


def _training(groups: Sequence[Group]) -> list[Chart]:
    """One chart per metric and recipe: losses of different recipes are not comparable."""
    recipes = by_recipe(groups)
    charts: list[Chart] = []
    for recipe, members in recipes.items():
        names = evaluations(members, False)
        # Without a kNN evaluation of images this adds a chart without data, which is listed as missing.
        names += [] if members[0].is_text or any(name.startswith("knn") for name in names) else ["knn20"]
        of_recipe = [_charts.over_steps(members, name) for name in ("loss", *of_loss(members))]
        of_recipe += [_charts.evaluated(members, name) for name in names]
        if len(recipes) > 1:
            prefix = f"r{len(charts)}-"
            of_recipe = [replace(c, title=f"{c.title} ({recipe})", name=f"{prefix}{c.name}") for c in of_recipe]
        charts += of_recipe
    return charts


def _depth(groups: Sequence[Group]) -> list[Chart]:
    names = evaluations(groups, True)
    images = any(not group.is_text for group in groups)
    always = {"knn": "knn20", "probe": "probe_lbfgs", "rank": "rank"} if images else {}
    names += [name for kind, name in always.items() if not any(n.startswith(kind) for n in names)]
    charts = [_charts.over_depth(groups, name) for name in names]
    return charts + [_charts.measured(groups, name) for name in ("echo", "high_frequency", "token_rank", "norm")]


def _jacobians(groups: Sequence[Group]) -> list[Chart]:
    parts = [_charts.spectra(groups, part, q) for part in ("sublayer", "branch") for q in ("0.5", "0.1")]
    return [*parts, _charts.conditions(groups, "sublayer"), _charts.conditions(groups, "branch")]


def _chart(chart: Chart) -> Part:
    note = [chart.note] if chart.note else []
    if any(std for line in chart.lines for std in line.std):
        note.append("Bands: one standard deviation over seeds.")
    if any(ends and std is None for line in chart.lines for ends, std in zip(line.interval, line.std, strict=True)):
        note.append("Bands of single runs: 95% interval over test samples.")
    if len(chart.lines) > _style.SHOWN:
        note.append(f"Groups after the first {_style.SHOWN} are grey.")
    return _figure(chart, inline(draw(chart), chart.name, chart.alt()), " ".join(note))


def _dots(dots: Dots) -> Part:
    note = "One point per run. Line: mean of the group."
    if any(column.interval for column in dots.columns):
        note += " Box: 95% interval over at least three runs, or over the test samples of one run."
    return _figure(dots, inline(draw_dots(dots), dots.name, dots.alt()), note)


def _figure(data: Chart | Dots, svg: str, note: str) -> Part:
    header, rows = data.rows()
    return {"name": data.name, "title": data.title, "svg": svg, "note": note, "header": header, "rows": rows}


def _pictures(groups: Sequence[Group], missing: Missing) -> list[Part]:
    parts: list[Part] = []
    others: list[str] = []
    for index, group in enumerate(groups):
        pictured = next((run for run in group.runs if run.look is not None and run.look.tiles), None)
        tiles = pictured.look.tiles if pictured and pictured.look else []
        samples = [*filter(None, (_samples(run, group) for run in group.runs))][:1]
        figures = [*(_tiles(grid, f"g{index}", group) for grid in tiles), *samples]
        if group.recipe in ("sit", "uvit") and not samples:
            missing.append((f"Samples of {group.label}", "none in its folder; use `unskip sample RUN`"))
        if pictured and group.recipe != "mae":
            others.append(group.label)
        if figures and len(parts) < PICTURED:
            parts.append({"title": compare.title(group, pictured) if pictured else group.label, "figures": figures})
        elif figures:
            missing.append((f"Pictures of {group.label}", f"only the first {PICTURED} groups have pictures"))
    if others:
        missing.append((f"Reconstructions by {words(others)}", "only masked autoencoders reconstruct masked patches"))
    if not parts:
        missing.append(("Reconstructions, patch features and nearest neighbours", "no checkpoint was measured"))
    return parts


def _tiles(tiles: Tiles, prefix: str, group: Group) -> Part:
    name = f"{prefix}-{tiles.name}"
    svg = inline(draw_tiles(tiles), name, f"{group.label}. {tiles.title}: {tiles.description}")
    table = {"header": tiles.header, "rows": tiles.table}
    return {"name": name, "title": tiles.title, "svg": svg, "note": tiles.note, **table}


def _samples(run: Run, group: Group) -> Part | None:
    """The newest image that `unskip sample` wrote into the run's folder."""
    pictures = [png for png in (run.path / "samples").glob("*.png") if png.is_file() and png.stat().st_size < 2**21]
    if not pictures:
        return None
    newest = max(pictures, key=lambda png: (png.stat().st_mtime, png.name))
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
    """What is missing from the page, grouped by reason, and problems with the folders."""
    runs = [run for group in groups for run in group.runs]
    measured = sum(run.look is not None for run in runs)
    entries = list(missing)
    if 0 < measured < len(runs):
        why = f"{measured} of {len(runs)} runs were measured; `--look {len(runs)}` measures all"
        entries.append(("Measurements and pictures of the other runs", why))
    for group in groups:
        for run in group.runs:
            notes = [*run.notes, *(run.look.notes if run.look is not None else ())]
            entries += [(compare.title(group, run), note) for note in notes]
    reasons: dict[str, dict[str, None]] = {}
    for item, why in entries:
        reasons.setdefault(why, {})[item] = None
    return [f"{_several([*items])}: {why}." for why, items in reasons.items()]


def _several(names: Sequence[str], most: int = 12) -> str:
    """Joins titles by semicolons, because they may contain commas."""
    kept = [clean(name, 120) for name in names[:most]]
    return "; ".join(kept + [f"and {len(names) - most} more"] * (len(names) > most))


def _versions(groups: Sequence[Group]) -> str:
    seen: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        versions = run.about.get("versions")
        parts = [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else []
        seen[clean(", ".join([*parts, f"device {run.about.get('device', 'unknown')}"]), 200)] = None
    return "Runs made with: " + "; ".join([*seen][:6]) + "."


def _link(table: Mapping[str, Any], form: str) -> str:
    """A table in another format, as a data URL."""
    content = FORMATS[form](table["header"], table["rows"])
    return f"data:text/plain;base64,{base64.b64encode(content.encode()).decode()}"


def file(name: str) -> str:
    """A file of this package."""
    return resources.files("unskip.report").joinpath(name).read_text(encoding="utf-8")
