"""Plugins: Python files and modules that register shortcuts, evaluators or recipes of one's own.

The command line loads what `--plugin` names and what installed packages announce under the entry-point group `unskip`.
A run records the plugins it was made with; opening it imports none of them unless it is told to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from unskip import spec
from unskip._warn import warn
from unskip.errors import BadInput, UnskipError

_LOADED: dict[str, None] = {}


def load_plugins(names: Iterable[str]) -> None:
    """Imports plugins, each a path to a Python file or the name of a module. One that is loaded stays as it is."""
    for given in names:
        is_file = given.endswith(".py")
        name = str(Path(given).expanduser().resolve()) if is_file else given
        if name in _LOADED:
            continue
        try:
            if is_file:
                spec.import_file(name)
            else:
                import_module(name)
        except Exception as error:
            said = str(error) if isinstance(error, UnskipError) else f"{type(error).__name__}: {error}"
            there = Path(name).is_file() if is_file else getattr(error, "name", None) != given
            raise BadInput(f"plugin {given}: {said}{'' if there else '; give a Python file or a module'}") from error
        _LOADED[name] = None


def load_installed() -> None:
    """Imports the plugins of installed packages; one that fails is a warning."""
    for entry in entry_points(group="unskip"):
        try:
            load_plugins([entry.module])
        except BadInput as error:
            warn(f"{error} (entry point {entry.name} of {entry.dist.name if entry.dist else 'an unknown package'})")


def loaded_plugins() -> list[str]:
    """The plugins that are loaded: absolute paths of files, names of modules."""
    return list(_LOADED)


@contextmanager
def with_plugins(names: Iterable[str], trust: bool = False) -> Iterator[None]:
    """Surrounds the opening of what was made with these plugins.

    With `trust` they are imported first. Without it none is, and an error names those that are missing.
    """
    missing = [name for name in names if not _is_loaded(name)]
    gone = [name for name in missing if name.endswith(".py") and not Path(name).is_file()]
    if trust:
        load_plugins(name for name in missing if name not in gone)
        missing = gone
    try:
        yield
    except UnskipError as error:
        if not missing:
            raise
        options = " ".join(f"--plugin {name}" for name in missing)
        moved = f" ({', '.join(gone)}: no such file any more; give the new path)" if gone else ""
        raise BadInput(
            f"{error}. It was made with plugins that are not loaded: give {options}{moved}; in Python, import them "
            "first or pass trust=True"
        ) from error


def plugin_of(module: str) -> list[str]:
    """The name under which a run records the module that defines a recipe or a rule: a package's name, or its file.

    Nothing for a module of unskip, or for a script, which would run again.
    """
    if module.partition(".")[0] in ("unskip", "__main__"):
        return []
    file = getattr(sys.modules.get(module), "__file__", None)
    return [str(Path(file).resolve()) if file and "." not in module else module]


def _is_loaded(name: str) -> bool:
    files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    return name in _LOADED or name in sys.modules or any(file is not None and name == file for file in files)
