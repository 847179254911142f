"""One self-contained HTML page about any runs: words, tables, figures with their data, and what was left out.

Nothing is fetched: style, script, figures and data are in the file, and its security policy forbids the rest. What the
runs say is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources

from unskip.report import _charts
from unskip.report import _compare as compare
from unskip.report._charts import Chart
from unskip.report._html import Markup, data, join, table, tag, words
from unskip.report._read import Group, Run, by_recipe, clean
from unskip.report._svg import inline
from unskip.report.figures import _style
from unskip.report.figures._draw import Tiles, draw, draw_tiles

PICTURED = 8  # groups whose pictures are shown


def page(groups: Sequence[Group]) -> str:
    """The page about some groups of runs."""
    sections: list[tuple[str, str, Markup | None]] = []
    missing: list[tuple[str, str]] = []  # what, and why
    sections.append(("results", "Results", _results(groups)))
    sections.append(("configs", "Configs", _configs(groups)))
    for key, heading, charts in (
        ("training", "In training", _training(groups)),
        ("depth", "Over depth", _depth(groups)),
        ("shortcuts", "Shortcuts", [_charts.alphas(groups), _charts.decay(groups)]),
        ("jacobians", "Jacobians", _jacobians(groups)),
    ):
        drawn = [_chart(chart) for chart in charts if chart.lines]
        if key == "jacobians" and not drawn:  # six titles would say no more
            missing.append(("Singular values and condition numbers of Jacobians", charts[0].missing))
        else:
            missing += [(chart.title, chart.missing) for chart in charts if not chart.lines]
        sections.append((key, heading, tag("div", *drawn, class_="figures") if drawn else None))
    sections.append(("pictures", "Pictures", _pictures(groups, missing)))
    sections.append(("warnings", "Warnings", _warnings(groups)))
    sections.append(("missing", "Left out", _missing(missing, groups)))
    return _document(groups, [section for section in sections if section[2] is not None])


def _document(groups: Sequence[Group], sections: Sequence[tuple[str, str, Markup | None]]) -> str:
    from unskip import __version__

    script, style = _file("page.js"), _file("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    said = compare.sentence(groups)
    name = words([group.label for group in groups], 3)
    links = [tag("li", tag("a", heading, href=f"#{key}")) for key, heading, _ in sections]
    body = join(
        [
            tag("a", "To the content", href="#content", class_="skip"),
            tag("header", tag("h1", name), tag("p", said)),
            tag("nav", tag("ul", *links), aria_label="Sections"),
            tag("main", *(tag("section", tag("h2", h), body, id=k) for k, h, body in sections), id="content"),
            tag("footer", tag("p", f"unskip {__version__}. {_versions(groups)}")),
        ]
    )
    head = join(
        [
            Markup('<meta charset="utf-8">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", f"{name}: unskip report"),
            Markup('<link rel="icon" href="data:,">'),
            tag("style", Markup(style)),
        ]
    )
    content = join([tag("head", head), tag("body", body, tag("script", Markup(script)))])
    return "<!doctype html>\n" + tag("html", content, lang="en") + "\n"


def _results(groups: Sequence[Group]) -> Markup:
    parts: list[Markup] = []
    kinds = by_recipe(groups)
    for recipe, members in kinds.items():
        header, rows = compare.results(members)
        marked = [[_key(group), *row[1:]] for group, row in zip(members, rows, strict=True)]
        kept = [place for place in range(len(header)) if place < 3 or any(row[place] is not None for row in rows)]
        parts += [tag("h3", recipe)] if len(kinds) > 1 else []
        shown = [[row[place] for place in kept] for row in marked]
        parts.append(table(f"Results, {recipe}", [header[place] for place in kept], shown))
    note = "The newest number of each name; of numbers by block that of the last block. "
    if any(len(group.runs) > 1 for group in groups):
        note += "Mean ± standard deviation over the runs of a group, which have one config and differ by their seed. "
    again = [group.label for group in groups if group.repeats]
    note += f"But of {words(again)} several runs have the same seed. " if again else ""
    more = len(groups) - _style.SHOWN
    note += f"The last {more} groups are grey in the figures." if more > 0 else ""
    return join([*parts, tag("p", note.strip(), class_="soft")])


def _key(group: Group) -> Markup:
    """A group's name behind the colour it has in the figures."""
    place = group.place
    colour = f"var(--c{place % len(_style.COLOURS)})" if place < _style.SHOWN else "var(--rest)"
    dash = "5 2" if len(_style.COLOURS) <= place < _style.SHOWN else None
    line = tag("line", x1=0, y1=5, x2=26, y2=5, stroke=colour, stroke_width=3, stroke_dasharray=dash)
    return join([tag("svg", line, class_="swatch", viewBox="0 0 26 10", aria_hidden="true"), group.label])


def _configs(groups: Sequence[Group]) -> Markup:
    parts: list[Markup] = []
    kinds = by_recipe(groups)
    for recipe, members in kinds.items():
        parts += [tag("h3", recipe)] if len(kinds) > 1 else []
        parts += _config(recipe, members)
    return join(parts)


def _config(recipe: str, groups: Sequence[Group]) -> list[Markup]:
    differ, same = compare.differences(groups)
    parts: list[Markup] = []
    if differ:
        rows = [[_key(group), *(compare.shown(group.config, name) for name in differ)] for group in groups]
        parts.append(tag("p", "What differs, seeds aside:"))
        parts.append(table(f"Configs, {recipe}: differences", ["group", *differ], rows))
    elif len(groups) > 1:
        parts.append(tag("p", "No field of the configs differs."))
    if same:
        rows = [[name, compare.shown(groups[0].config, name)] for name in same]
        common = table(f"Configs, {recipe}: in common", ["field", "value"], rows)
        title = "All fields" if len(groups) == 1 else f"In common: {len(same)} fields"
        parts.append(tag("details", tag("summary", title), common))
    return parts or [tag("p", "No config that can be read.")]


def _training(groups: Sequence[Group]) -> list[Chart]:
    """Losses of different recipes are different things, and have a chart each."""
    kinds = by_recipe(groups)
    charts: list[Chart] = []
    for recipe, members in kinds.items():
        names = _charts.evaluations(members, False)
        # Neighbours have a place here even where no run was judged by them: it says so.
        names += [] if any(name.startswith("knn") for name in names) else ["knn20"]
        mine = [_charts.over_steps(members, "loss"), *(_charts.evaluated(members, name) for name in names)]
        if len(kinds) > 1:
            mine = [replace(c, title=f"{c.title} ({recipe})", name=f"r{len(charts)}-{c.name}") for c in mine]
        charts += mine
    return charts


def _depth(groups: Sequence[Group]) -> list[Chart]:
    names = _charts.evaluations(groups, True)
    always = {"knn": "knn20", "probe": "probe_lbfgs", "rank": "rank"}
    names += [name for kind, name in always.items() if not any(each.startswith(kind) for each in names)]
    charts = [_charts.over_depth(groups, name) for name in names]
    return charts + [_charts.measured(groups, name) for name in ("echo", "high_frequency", "token_rank", "norm")]


def _jacobians(groups: Sequence[Group]) -> list[Chart]:
    parts = [_charts.spectra(groups, part, share) for part in ("sublayer", "branch") for share in ("0.5", "0.1")]
    return [*parts, _charts.conditions(groups, "sublayer"), _charts.conditions(groups, "branch")]


def _chart(chart: Chart) -> Markup:
    drawn = inline(draw(chart), chart.name, chart.alt())
    caption = [chart.note] if chart.note else []
    alone = [line.label for line in chart.lines]
    if any(spread for line in chart.lines for spread in line.spread):
        caption.append("Bands: one standard deviation over the runs of a group.")
    if len(alone) > _style.SHOWN:
        caption.append(f"The first {_style.SHOWN} groups have colours; the others are grey.")
    header, rows = chart.rows()
    return tag("figure", drawn, tag("figcaption", " ".join(caption), data(chart.title, chart.name, header, rows)))


def _pictures(groups: Sequence[Group], missing: list[tuple[str, str]]) -> Markup | None:
    parts: list[Markup] = []
    others: list[str] = []
    for index, group in enumerate(groups):
        seen = next((run for run in group.runs if run.look is not None and run.look.tiles), None)
        figures = [_tiles(tiles, f"g{index}", group) for tiles in seen.look.tiles] if seen and seen.look else []
        samples = [figure for run in group.runs if (figure := _samples(run, group)) is not None][:1]
        figures += samples
        if group.recipe in ("sit", "uvit") and not samples:
            missing.append((f"Samples of {group.label}", "none in its folder; `unskip sample RUN` draws some"))
        if seen and group.recipe != "mae":
            others.append(group.label)
        if figures and len(parts) < 2 * PICTURED:
            parts += [tag("h3", compare.title(group, seen) if seen else group.label)]
            parts += [tag("div", *figures, class_="figures")]
        elif figures:
            missing.append((f"Pictures of {group.label}", f"those of the first {PICTURED} groups are shown"))
    if others:
        missing.append((f"Reconstructions by {words(others)}", "only masked autoencoders paint what is masked"))
    if not parts:
        missing.append(("Reconstructions, patch features and neighbours", "no checkpoint was looked at"))
    return join(parts) if parts else None


def _tiles(tiles: Tiles, prefix: str, group: Group) -> Markup:
    name = f"{prefix}-{tiles.name}"
    drawn = inline(draw_tiles(tiles), name, f"{group.label}. {tiles.title}: {tiles.description}")
    rows = [list(row) for row in tiles.table]
    return tag("figure", drawn, tag("figcaption", tiles.note, data(tiles.title, name, tiles.header, rows)))


def _samples(run: Run, group: Group) -> Markup | None:
    """The newest picture that `unskip sample` left in the run's folder."""
    pictures = [each for each in (run.path / "samples").glob("*.png") if each.is_file() and each.stat().st_size < 2**21]
    if not pictures:
        return None
    file = max(pictures, key=lambda each: (each.stat().st_mtime, each.name))
    content = file.read_bytes()
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    picture = f'<img class="picture" alt="Samples of {html.escape(group.label)}" src="{source}">'
    return tag("figure", Markup(picture), tag("figcaption", f"Samples: {clean(file.name)}"))


def _warnings(groups: Sequence[Group]) -> Markup:
    rows = compare.warned(groups)
    header = ["run", "warning", "times", "first step", "last step", "text"]
    if not rows:
        return tag("p", "No run has raised a warning.")
    return table("Warnings", header, rows)


def _missing(missing: Sequence[tuple[str, str]], groups: Sequence[Group]) -> Markup | None:
    """What is not on the page, and why; what was wrong with the folders. A reason is said once."""
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
    items = [f"{_several([*whats])}: {why}." for why, whats in reasons.items()]
    return tag("ul", *(tag("li", item) for item in items), class_="plain") if items else None


def _several(names: Sequence[str], most: int = 12) -> str:
    """Titles, which may have commas in them."""
    kept = [clean(name, 120) for name in names[:most]]
    return "; ".join([*kept, *([f"and {len(names) - most} more"] if len(names) > most else [])])


def _versions(groups: Sequence[Group]) -> str:
    found: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        versions = run.about.get("versions")
        parts = [f"{name} {value}" for name, value in versions.items()] if isinstance(versions, dict) else []
        found[clean(", ".join([*parts, f"device {run.about.get('device', 'unknown')}"]), 200)] = None
    return "Runs made with: " + "; ".join([*found][:6]) + "."


def _file(name: str) -> str:
    return resources.files("unskip.report").joinpath(name).read_text(encoding="utf-8")
