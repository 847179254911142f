"""The command line: `unskip COMMAND ...`.

Exit codes: 0 success; 2 bad input, reported in one line; 1 any other error; 130 interrupted. Results go to stdout,
everything else to stderr. Tables are formatted for a terminal, and plain text in a pipe.

A command is a function in the file named in COMMANDS. The file is imported when its command is given, and torch when
it runs, so that help and version are fast. This module imports little, because Ctrl-C prints a traceback until
`process` is called.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

COMMANDS = {  # name: (file, description); the function is NAME_command
    "audit": ("_audit", "list every residual addition of a model"),
    "measure": ("_measure", "rank, conditioning, attention and quantisation on a few samples"),
    "absorb": ("_absorb", "decide which MLPs can absorb their skip, with a certificate"),
    "train": ("_train", "train a model by a recipe"),
    "resume": ("_train", "continue a run from its last checkpoint"),
    "eval": ("_eval", "evaluate a run or any model by named protocols"),
    "sample": ("_sample", "sample images or text from a run"),
    "report": ("_report", "write one HTML page about runs"),
    "recipes": ("_train", "list the recipes and their presets"),
    "demo": ("_demo", "rewire, train with and without skips, absorb, report; takes minutes on two cores"),
}
_LINES = "\n".join(f"  {name:<9} {about}" for name, (_, about) in COMMANDS.items())
HELP = f"""usage: unskip COMMAND [OPTIONS]

Take control of the skip connections in your transformer.

commands:
{_LINES}

options:
  -h, --help      show this help; unskip COMMAND --help shows that of a command
  --version       show the version
  --plugin NAME   for every command: load a Python file or module that registers shortcuts, evaluators or recipes

example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6"""

PLUGIN = "--plugin NAME first loads a Python file or module that registers shortcuts, evaluators or recipes."
INTERRUPTED = "unskip: interrupted"
_GRACEFUL = ("train", "resume", "demo")  # when interrupted, they write a checkpoint or print how to continue


def process() -> NoReturn:
    """Runs the command of this process and exits.

    A process started by a launcher skips the interpreter's shutdown: threads of torch.distributed that still run would
    abort it ("terminate called without an active exception").
    """
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # SIGINT is ignored in background jobs of a script
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
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # raised by tyro after help or an unknown argument
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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"unskip: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        return 1


def _plugins(args: list[str]) -> tuple[list[str], list[str]]:
    """The values of all --plugin options, and the other arguments."""
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
    from unskip.cli._say import one_line_warnings

    with one_line_warnings(), _exit_on_interrupt() as raise_on_interrupt:
        if command == "eval" or args[:1] not in (["-h"], ["--help"]):  # the help of eval lists the protocols of plugins
            from unskip._plugins import load_installed, load_plugins

            load_installed()
            load_plugins(plugins)
            if command in _GRACEFUL:
                for library in ("unskip.recipes", "timm"):  # imported while Ctrl-C ends the process
                    import_module(library)
                raise_on_interrupt()
        function = getattr(import_module(f"unskip.cli.{COMMANDS[command][0]}"), f"{command}_command")
        if command == "train":
            return int(function(args))  # its options depend on the recipe and the preset
        about = f"{inspect.getdoc(function)}\n\n{PLUGIN}"
        return int(tyro.cli(function, prog=f"unskip {command}", description=about, args=args))


@contextmanager
def _exit_on_interrupt() -> Iterator[Callable[[], None]]:
    """Makes Ctrl-C end the process. An exception could be caught by libraries, or abort C++ code during an import.

    Yields a function that makes Ctrl-C raise KeyboardInterrupt again, for commands that handle it.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if (
        ignored or threading.current_thread() is not threading.main_thread()
    ):  # only the main thread can set signal handlers
        yield lambda: None
        return
    before = signal.signal(signal.SIGINT, _leave)

    def raise_on_interrupt() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        yield raise_on_interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: FrameType | None) -> None:
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
    os.write(2, f"{show_cursor}{INTERRUPTED}\n".encode())
    os._exit(130)
