"""Plugins: Python files and modules that register shortcuts, evaluators or recipes.

The command line loads the plugins of `--plugin` and of installed packages with the entry-point group `unskip`. A run
records its plugins; opening it imports none of them unless `trust` is set.
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
    """Imports plugins, each a path to a Python file or the name of a module. Loaded ones are not imported again."""
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
            message = str(error) if isinstance(error, UnskipError) else f"{type(error).__name__}: {error}"
            exists = Path(name).is_file() if is_file else getattr(error, "name", None) != given
            hint = "" if exists else "; give a Python file or a module"
            raise BadInput(f"plugin {given}: {message}{hint}") from error
        _LOADED[name] = None


def load_installed() -> None:
    """Imports the plugins of installed packages; warns if one fails."""
    for entry in entry_points(group="unskip"):
        try:
            load_plugins([entry.module])
        except BadInput as error:
            warn(f"{error} (entry point {entry.name} of {entry.dist.name if entry.dist else 'an unknown package'})")


def loaded_plugins() -> list[str]:
    """The loaded plugins: absolute paths of files, names of modules."""
    return list(_LOADED)


@contextmanager
def with_plugins(names: Iterable[str], trust: bool = False) -> Iterator[None]:
    """A context for opening a run or folder that was made with these plugins.

    With `trust` they are imported first. Otherwise none is imported, and errors name the missing ones.
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
        moved = f" ({', '.join(gone)}: no such file; give its new path)" if gone else ""
        raise BadInput(
            f"{error}. It was made with plugins that are not loaded: use {options}{moved}; in Python, import them "
            "first or pass trust=True"
        ) from error


def plugin_of(module: str) -> list[str]:
    """The plugin name of a module that defines a recipe or a rule: a package's module name, or a file's path.

    Empty for a module of unskip, and for a script, because importing would run it again.
    """
    if module.partition(".")[0] in ("unskip", "__main__"):
        return []
    file = getattr(sys.modules.get(module), "__file__", None)
    return [str(Path(file).resolve()) if file and "." not in module else module]


def _is_loaded(name: str) -> bool:
    files = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    return name in _LOADED or name in sys.modules or any(file is not None and name == file for file in files)
