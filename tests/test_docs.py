"""Runs all examples of the README and the docs, page by page, each page in one folder and one namespace.

A ```python block is executed; a ```text block after it has lines that must be printed. In a ```console block each line
`$ unskip ...` is run and must exit with 0.
"""

import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import unskip
from unskip import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Blocks in the other languages are not run. A block without one of these languages is an error.
LANGUAGES = {"python", "console", "", "text", "json", "toml", "yaml", "make", "bibtex", "html", "svg", "diff"}


# Pages with slow examples. README and getting-started are slow as well, but run in the quick tests.
SLOW = ("report", "absorb", "generate", "tools", "measure", "dino", "mae", "evals", "dense", "training", "lm")


def _marks(page: Path) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.full,) if page.stem in SLOW else ()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the opening fence, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    start, language, lines = 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not start and line.lstrip().startswith("```"):
            start, language, lines = number, (line.strip("` ").split() or [""])[0], []
        elif start and line.strip() == "```":
            found.append(Block(page, start, language, textwrap.dedent("\n".join(lines))))
            start = 0
        elif start:
            lines.append(line)
    assert not start, f"{page.name}:{start}: the block is never closed"
    return found


def as_module(page: Path, folder: Path) -> ModuleType:
    """A module to run the page's Python in. Its source file has the blocks at their line numbers of the page.

    So tracebacks have the page's line numbers, and classes defined in examples have source and can be pickled.
    """
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.language == "python":
            code = block.text.splitlines()
            lines[block.line : block.line + len(code)] = code
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    module.__file__ = str(folder / f"{page.stem}.py")
    Path(module.__file__).write_text("\n".join(lines), encoding="utf-8")
    return module


def run_python(block: Block, module: ModuleType) -> None:
    assert module.__file__
    exec(compile("\n" * block.line + block.text, module.__file__, "exec"), module.__dict__)


def run_console(block: Block) -> None:
    for line in block.text.splitlines():
        if line.startswith("$ unskip"):
            arguments = shlex.split(line.removeprefix("$ unskip"), comments=True)
            assert cli.main(arguments) == 0, f"{block}: {line}"


@pytest.mark.parametrize("page", [pytest.param(page, marks=_marks(page), id=page.name) for page in PAGES])
def test_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = as_module(page, tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    printed: list[str] | None = None
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: unknown language {block.language!r}"
        if block.language == "text" and printed is not None and not block.text.startswith("$"):
            missing = [line for line in block.text.splitlines() if line.split() not in map(str.split, printed)]
            assert not missing, f"{block}: not printed: {missing[0]}"
        printed = None
        if block.language == "python":
            capsys.readouterr()
            run_python(block, module)
            printed = capsys.readouterr().out.splitlines()
        elif block.language == "console":
            run_console(block)


def test_the_reference_lists_every_public_name() -> None:
    """The index lists all names of `unskip`, and each package has a page, whose names `make docs` checks."""
    folder = ROOT / "docs" / "reference"
    index = (folder / "index.md").read_text(encoding="utf-8")
    packages = {name for name in unskip.__all__ if isinstance(getattr(unskip, name), ModuleType)}
    assert [name for name in packages if f"[`unskip.{name}`]({name}.md)" not in index] == []
    assert [name for name in packages if f"::: unskip.{name}\n" not in (folder / f"{name}.md").read_text()] == []
    assert [name for name in set(unskip.__all__) - packages if f"[`{name}`](" not in index] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*") if page.suffix in (".md", ".ipynb")
    ]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_long(page: Path) -> None:
    """At most 1,000 words, not counting code, tables and images."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "![", "<img", "<!--"))]
    assert len(" ".join(prose).split()) <= 1000
