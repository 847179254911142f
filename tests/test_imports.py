"""`import unskip` loads no heavy package, and packages of unskip import only public names of each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import unskip

SOURCE = Path(unskip.__file__).parent

HEAVY = [
    "accelerate",
    "datasets",
    "diffusers",
    "matplotlib",
    "pyarrow",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "timm",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torchvision",
    "transformers",
    "tyro",
]


def python(code: str, *args: str) -> str:
    """The output of `code` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_heavy_package() -> None:
    loaded = python("import sys, unskip; print(*(name for name in sys.argv[1:] if name in sys.modules))", *HEAVY)
    assert loaded.split() == []


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a module; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def private_imports(package: str, tree: ast.AST) -> list[tuple[int, str]]:
    """Imports from files of another package, or of names that its `__all__` does not list."""
    wrong = []
    for line, name in imports_of(tree):
        top, *rest = name.split(".")
        if top != "unskip" or not rest or rest[0] == package or not (SOURCE / rest[0]).is_dir():
            continue
        exported = __import__(f"unskip.{rest[0]}", fromlist=["__all__"])
        if len(rest) > 2 or (len(rest) == 2 and rest[1] not in exported.__all__):
            wrong.append((line, name))
    return wrong


@pytest.mark.parametrize("package", sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()))
def test_packages_import_only_public_names_of_each_other(package: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for line, name in private_imports(package, ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "statement",
    [
        "from unskip.anatomy._trace import record",
        "from unskip.anatomy import _trace",
        "import unskip.anatomy._trace",
        "import unskip.anatomy._trace as trace",
        "def f():\n    from unskip.anatomy._trace import record",
    ],
)
def test_private_imports_are_found(statement: str) -> None:
    assert private_imports("wiring", ast.parse(statement))
    assert not private_imports("anatomy", ast.parse(statement))


def test_public_imports_are_allowed() -> None:
    tree = ast.parse(
        "import unskip\nimport unskip.anatomy\nfrom unskip.anatomy import Site\nfrom unskip._table import table"
    )
    assert private_imports("wiring", tree) == []
