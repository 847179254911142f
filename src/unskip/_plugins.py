"""Plugins: Python files and modules that register shortcuts, evaluators or recipes of one's own.

The command line loads what `--plugin` names and what installed packages announce under the entry-point group `unskip`.
A run records the plugins it was made with; opening it imports none of them unless it is told to.
"""

from __future__ import annotations

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
            raise BadInput(f"plugin {given}: {said}; give a Python file, ending in .py, or a module") from error
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
    missing = [name for name in names if name not in _LOADED]
    if trust:
        load_plugins(missing)
        missing = []
    try:
        yield
    except UnskipError as error:
        if not missing:
            raise
        options = " ".join(f"--plugin {name}" for name in missing)
        raise BadInput(
            f"{error}. It was made with plugins that are not loaded: give {options}; in Python, import them first or "
            "pass trust=True"
        ) from error
