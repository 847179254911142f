"""`import unskip` stays light, only the command line needs tyro, and a room is entered by its `__init__`."""

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
    """What `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    loaded = python("import sys, unskip; print(*(name for name in sys.argv[1:] if name in sys.modules))", *HEAVY)
    assert loaded.split() == []


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and dotted name of everything that a module imports: `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def through_the_back(room: str, tree: ast.AST) -> list[tuple[int, str]]:
    """Imports of another room's files, or of names that do not stand in its `__init__`."""
    wrong = []
    for line, name in imported(tree):
        top, *rest = name.split(".")
        if top != "unskip" or not rest or rest[0] == room or not (SOURCE / rest[0]).is_dir():
            continue
        door = __import__(f"unskip.{rest[0]}", fromlist=["__all__"])
        if len(rest) > 2 or (len(rest) == 2 and rest[1] not in door.__all__):
            wrong.append((line, name))
    return wrong


@pytest.mark.parametrize("room", sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()))
def test_rooms_are_entered_by_their_init(room: str) -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in sorted((SOURCE / room).rglob("*.py"))
        for line, name in through_the_back(room, ast.parse(path.read_text(encoding="utf-8")))
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
def test_a_private_import_is_seen(statement: str) -> None:
    assert through_the_back("wiring", ast.parse(statement))
    assert not through_the_back("anatomy", ast.parse(statement))


def test_what_stands_in_the_init_is_allowed() -> None:
    tree = ast.parse(
        "import unskip\nimport unskip.anatomy\nfrom unskip.anatomy import Site\nfrom unskip._table import table"
    )
    assert through_the_back("wiring", tree) == []
