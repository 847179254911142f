"""The front door: `unskip COMMAND ...`.

Exit codes: 0 fine; 2 bad input, in one line; 1 a fault; 130 interrupted. Results go to stdout, all else to stderr.
On a terminal tables are drawn; in a pipe the same table is plain text.

A command is a function of the file named here. The file is imported when its command is given, and imports torch when
it runs, so help and version take no time. Little is imported here: until `process` is called, Ctrl-C is Python's.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

COMMANDS = {  # name: (file, what it does); the function is called NAME_command
    "audit": ("_audit", "list every residual addition of a model"),
    "measure": ("_measure", "rank, conditioning, attention and quantisation on a few samples"),
    "absorb": ("_absorb", "decide which MLPs can absorb their skip, with a certificate"),
    "train": ("_train", "train a model by a recipe"),
    "resume": ("_train", "continue a run from its last checkpoint"),
    "eval": ("_eval", "evaluate a run or any model by named protocols"),
    "sample": ("_sample", "sample images or text from a run"),
    "report": ("_report", "one HTML page about any runs"),
    "recipes": ("_train", "list the recipes and their presets"),
    "demo": ("_demo", "rewire, train with and without skips, prove, report: minutes on two cores"),
}
_LINES = "\n".join(f"  {name:<9} {about}" for name, (_, about) in COMMANDS.items())
HELP = f"""usage: unskip COMMAND [OPTIONS]

Take control of the skip connections in your transformer.

commands:
{_LINES}

options:
  -h, --help      show this help, or that of a command: unskip COMMAND --help
  --version       show the version
  --plugin NAME   of every command: a Python file or module that registers shortcuts, evaluators or recipes

example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6"""

PLUGIN = "With --plugin NAME, a Python file or module with shortcuts, evaluators or recipes is loaded first."
INTERRUPTED = "unskip: interrupted"
_IN_ORDER = ("train", "resume", "demo")  # they write a checkpoint, or say how to go on, when interrupted


def process() -> NoReturn:
    """Runs the command of this process, and ends it.

    One of several processes ends without the interpreter's own end: threads of torch.distributed that still run need
    the interpreter, and would abort the process ("terminate called without an active exception").
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in the background of a script
        signal.signal(signal.SIGINT, _leave)
    code = main()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # of tyro: help, or an argument it does not know
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0


def _main(args: list[str]) -> int:
    from unskip._words import nearest
    from unskip.errors import BadInput, UnskipError

    try:
        plugins, args = _plugins(args)
        command, *rest = args or [""]
        if command in ("-h", "--help"):
            print(HELP)
            return 0
        if command == "--version":
            from unskip import __version__

            print(__version__)
            return 0
        if not command:
            raise BadInput("give a command, such as `unskip audit MODEL`; unskip --help lists them all")
        if command not in COMMANDS:
            raise BadInput(f"{command!r} is not a command{nearest(command, COMMANDS)}; unskip --help lists them all")
        return _run(command, rest, plugins)
    except UnskipError as error:
        print(f"unskip: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _plugins(args: list[str]) -> tuple[list[str], list[str]]:
    """The values of every --plugin, and the other arguments."""
    from unskip.errors import BadInput

    plugins, rest = [], []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--plugin":
            rest.append(word)
        elif given := value if equals else next(words, ""):
            plugins.append(given)
        else:
            raise BadInput("--plugin needs a value, a Python file or a module")
    return plugins, rest


def _run(command: str, args: list[str], plugins: list[str]) -> int:
    import inspect

    from unskip._extras import need

    tyro = need("tyro")
    from unskip.cli._say import warnings_in_a_line

    with warnings_in_a_line(), _interrupted_at_once() as usual:
        if command == "eval" or args[:1] not in (["-h"], ["--help"]):  # the help of eval lists what plugins add
            from unskip._plugins import load_installed, load_plugins

            load_installed()
            load_plugins(plugins)
            if command in _IN_ORDER:
                for library in ("unskip.recipes", "timm"):  # now, while an interrupt is no exception
                    import_module(library)
                usual()
        function = getattr(import_module(f"unskip.cli.{COMMANDS[command][0]}"), f"{command}_command")
        if command == "train":
            return int(function(args))  # its options depend on the recipe and the preset
        about = f"{inspect.getdoc(function)}\n\n{PLUGIN}"
        return int(tyro.cli(function, prog=f"unskip {command}", description=about, args=args))


@contextmanager
def _interrupted_at_once() -> Iterator[Callable[[], None]]:
    """Ctrl-C ends the process. As an exception it would be caught by libraries, or abort their C++ code in an import.

    What it gives makes Ctrl-C an exception again, for commands that end in order.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():  # others cannot have signals
        yield lambda: None
        return
    before = signal.signal(signal.SIGINT, _leave)

    def usual() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        yield usual
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
    os.write(2, f"{show_cursor}{INTERRUPTED}\n".encode())
    os._exit(130)
