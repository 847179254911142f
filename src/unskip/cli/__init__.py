"""The front door: `audit`, `measure`, `absorb`, `train`, `resume`, `eval`, `sample`, `report`, `recipes` and `demo`.

Exit codes: 0 fine; 2 bad input, told in one line on stderr; 1 a fault; 130 interrupted. Results go to stdout, all else
to stderr. On a terminal tables are drawn; in a pipe the same table is plain text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import tyro

import unskip
from unskip._words import nearest
from unskip.cli._absorb import absorb
from unskip.cli._audit import audit
from unskip.cli._demo import demo
from unskip.cli._eval import evaluate
from unskip.cli._measure import measure
from unskip.cli._report import report
from unskip.cli._sample import sample
from unskip.cli._say import argument_errors_in_a_line, one_line, warnings_in_a_line
from unskip.cli._train import plan, recipes, resume, train
from unskip.errors import BadInput, UnskipError

DESCRIPTION = """Take control of the skip connections in your transformer.

Example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(unskip.__version__)
        return 0
    commands: dict[str, Callable[..., int]] = {
        "audit": audit,
        "measure": measure,
        "absorb": absorb,
        "train": train,
        "resume": resume,
        "eval": evaluate,
        "sample": sample,
        "report": report,
        "recipes": recipes,
        "demo": demo,
    }
    try:
        if args and not args[0].startswith("-") and args[0] not in commands:
            raise BadInput(f"{args[0]!r} is not a command{nearest(args[0], commands)}. unskip --help lists them all.")
        with warnings_in_a_line(), argument_errors_in_a_line(commands) as held:
            if args[:1] == ["train"]:  # its options depend on the recipe and the preset
                code = held["train"](plan(args[1:]))
            else:
                code = tyro.extras.subcommand_cli_from_dict(held, prog="unskip", description=DESCRIPTION, args=args)
        sys.stdout.flush()
        return int(code)
    except UnskipError as error:
        print(f"unskip: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # of tyro: help, or an argument it does not know
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
