"""Hooks of the site: README, CONTRIBUTING and CHANGELOG become pages, links of notebooks lead to pages, and no public
name may be missing from the reference.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """The pages at the root of the repository, with links that start in docs/."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text.replace("](docs/", "](")))
    files.append(File.generated(config, "CITATION.cff", content=(ROOT / "CITATION.cff").read_text(encoding="utf-8")))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Notebooks link to Markdown files, which Jupyter opens; on the site these are pages."""
    return re.sub(r'href="(\.\./[\w-]+)\.md', r'href="\1.html', html) if page.file.src_uri.endswith(".ipynb") else html


def on_post_build(config: Any) -> None:
    """Stops the build where a public name has no entry in the reference."""
    pages = (Path(config["site_dir"]) / "reference").glob("*.html")
    anchors = {anchor for page in pages for anchor in re.findall(r'id="([\w.]+)"', page.read_text(encoding="utf-8"))}
    missing = sorted(public_names() - anchors)
    if missing:
        raise PluginError(f"docs/reference has no entry for {', '.join(missing)}")


def public_names() -> set[str]:
    """Full names from the `__all__` of every package, and of what public modules without one define."""
    package, found = ROOT / "src" / "unskip", set[str]()
    for file in [*package.glob("[!_]*.py"), *package.glob("*/__init__.py"), *package.glob("integrations/[!_]*.py")]:
        module = ".".join(["unskip", *file.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        body = ast.parse(file.read_text(encoding="utf-8")).body
        listed = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        names = ast.literal_eval(listed[0].value) if listed else [name for name in defined if not name.startswith("_")]
        found |= {f"{module}.{name}" for name in names}
    return {name for name in found if not name.startswith(("unskip.cli.", "unskip.demo."))}  # commands: `unskip --help`
