"""Source is accepted only if it compiles to the code that runs."""

from __future__ import annotations

import importlib.util
import linecache
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn
from torch.nn.modules import transformer

from unskip._source import compile_function, expression_at, function_source
from unskip.errors import SourceError

MODULE = '''
from __future__ import annotations
import torch.nn.functional as F
try:
    from math import pi
except ImportError:
    pi = 3.0

class Base:
    def run(self, x): return x

class Hard(Base):
    """Private names, super(), a closure over the module's imports, defaults, decorators."""
    __secret = 2

    def run(self, x, *, scale=3, **rest):
        """Docs."""
        def inner(y): return F.relu(y) * self.__secret + pi
        return super().run(inner(x)) + scale
'''


def load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compiles_to_the_same_bytecode(tmp_path: Path) -> None:
    code = load(tmp_path / "hard.py", MODULE).Hard.run.__code__
    source = function_source(code)
    assert source.class_name == "Hard"
    again = compile_function(source, source.node, code)
    assert again.co_code == code.co_code
    assert "_Hard__secret" in {
        name for const in again.co_consts if hasattr(const, "co_names") for name in const.co_names
    }


@pytest.mark.parametrize(
    "function",
    [transformer.TransformerEncoderLayer.forward, transformer.TransformerDecoderLayer.forward, nn.Module._call_impl],
    ids=lambda f: f.__qualname__,
)
def test_finds_library_source(function: object) -> None:
    assert function_source(function.__code__).node.name == function.__name__  # type: ignore[attr-defined]


def test_edited_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    module = load(path, MODULE)
    path.write_text(MODULE.replace("+ scale", "- scale"))
    linecache.checkcache(str(path))
    with pytest.raises(SourceError, match=r"Hard\.run .*does not match"):
        function_source(module.Hard.run.__code__)


def test_missing_source_is_refused() -> None:
    space: dict[str, object] = {}
    exec(compile("def f(x):\n    return x + 1\n", "<nowhere>", "exec"), space)
    with pytest.raises(SourceError, match="is not available"):
        function_source(space["f"].__code__)  # type: ignore[attr-defined]


def test_positions_are_unique(tmp_path: Path) -> None:
    module = load(tmp_path / "sums.py", "def f(a, b, c):\n    é = (a + b) + c; é += a\n    return é.add(b + a)\n")
    code = module.f.__code__
    source = function_source(code)
    positions = {(p[0] - 1, p[1] - 1, *p[2:]) for p in code.co_positions() if p[0] and p[1]}  # from the def line
    found = [expression_at(source, position) for position in positions]  # type: ignore[arg-type]
    kinds = sorted(type(node).__name__ for node in found if node is not None)
    assert kinds == ["AugAssign", "BinOp", "BinOp", "BinOp", "Call"]
