"""The front door: `unskip audit MODEL`, `unskip measure MODEL` and `unskip demo`.

Exit codes: 0 fine; 2 bad input, told in one line on stderr; 1 a fault; 130 interrupted. Results go to stdout, all else
to stderr. On a terminal tables are drawn; in a pipe the same table is plain text.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json as json_format
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TextIO

import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import unskip
from unskip import demo as demonstration
from unskip import spec
from unskip.anatomy import Audit, Site
from unskip.anatomy._audit import HEADER, count, rows
from unskip.anatomy._example import example_for
from unskip.data import batch as data_batch
from unskip.errors import BadInput, ForwardError, UnskipError, UnskipWarning
from unskip.wiring import Shortcut, Wiring
from unskip.wiring.shortcuts import band, parse

DESCRIPTION = """Take control of the skip connections in your transformer.

Example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6"""

_MODEL = f"What to audit: {spec.FORMS}. Weights are random; none are needed."
_SHORTCUT = (
    "Show what a rule would give each site: keep, cut, decay:0.6, decay:0.6,cosine, decay:product=5e-3, "
    "scale:0.7,0.7, learn:1.0 or anneal:keep>cut@10000."
)
_INPUT = (
    "The shape of what the model takes, for one that does not say: 2,3,32,32 of numbers or int:2,16 of token ids. "
    "Several for several arguments."
)


_MEASURED = f"What to measure: {spec.FORMS}. Pretrained weights are loaded, unless --random."
_DATA = "Samples: a folder of images, an .npy file, or random:N."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(unskip.__version__)
        return 0
    commands: dict[str, Callable[..., int]] = {"audit": audit, "measure": measure, "demo": demo}
    try:
        with _warnings_in_a_line(), _argument_errors_in_a_line(commands) as held:
            code: int = tyro.extras.subcommand_cli_from_dict(held, prog="unskip", description=DESCRIPTION, args=args)
        sys.stdout.flush()
        return code
    except UnskipError as error:
        print(f"unskip: {_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # of tyro: help, or an argument it does not know
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0


def audit(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=_MODEL, metavar="MODEL")],
    shortcut: Annotated[str | None, tyro.conf.arg(help=_SHORTCUT, metavar="RULE", help_behavior_hint="")] = None,
    input: Annotated[tuple[str, ...], tyro.conf.arg(help=_INPUT, metavar="SHAPE", help_behavior_hint="")] = (),  # noqa: A002
    json: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Print JSON and nothing else.", help_behavior_hint=""),
    ] = False,
) -> int:
    """List every residual addition of a model, in execution order.

    Example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6
    """
    rule = parse(shortcut) if shortcut is not None else None
    shapes = [_shape(text) for text in input]
    # Whatever the model prints while it is built and run is no part of the result.
    with contextlib.redirect_stdout(sys.stderr), _busy(f"auditing {model}"):
        found, wiring = _look(model, rule, shapes)
    last = rule.steps if rule is not None else None
    if json:
        _write_json(model, found, wiring, last)
        return 0
    if sys.stdout.isatty():
        _draw(found, wiring)
    else:
        print(found if wiring is None else f"{found}\n\n{wiring}")
    if wiring is not None and last is not None:
        wiring.step(last)
        print(f"after step {last}: {_decay(wiring)}")
    return 0


def measure(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=_MEASURED, metavar="MODEL")],
    data: Annotated[str, tyro.conf.arg(help=_DATA, metavar="SOURCE", help_behavior_hint="")] = "random:8",
    n: Annotated[int, tyro.conf.arg(help="How many samples of the source.", metavar="N")] = 8,
    shortcut: Annotated[
        str | None, tyro.conf.arg(help="Rewire first: cut, decay:0.6, ...", metavar="RULE", help_behavior_hint="")
    ] = None,
    init: Annotated[
        str | None,
        tyro.conf.arg(help="Initialise first: skipless or zero.", metavar="NAME", help_behavior_hint=""),
    ] = None,
    jacobians: Annotated[
        str, tyro.conf.arg(help="auto, exact (as matrices, however large) or off.", metavar="WAY")
    ] = "auto",
    device: Annotated[str, tyro.conf.arg(help="Where to compute.", metavar="DEVICE")] = "cpu",
    random: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Random weights instead of pretrained ones.", help_behavior_hint=""),
    ] = False,
    json: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Print JSON and nothing else.", help_behavior_hint=""),
    ] = False,
) -> int:
    """Measure rank, conditioning, attention, echo and quantisation of a model on a few samples.

    Example: unskip measure timm:vit_small_patch16_224 --data photos --shortcut decay:0.6
    """
    rule = parse(shortcut) if shortcut is not None else None
    with contextlib.redirect_stdout(sys.stderr), _progress(f"measuring {model}") as tick:
        torch.manual_seed(0)  # random weights, but the same ones each time
        built = spec.build(model, pretrained=not random).to(device)
        samples = _samples(built, data, n)
        if init is not None:
            _initialise(built, init, samples)
        if rule is not None:
            unskip.rewire(built, rule, samples)
        found = unskip.measure(built, samples, jacobians=jacobians, progress=tick)  # type: ignore[arg-type]
    if json:
        print(json_format.dumps(_finite({"model": model, **found.to_dict()}), indent=2, allow_nan=False))
    else:
        print(found)
    return 0


def demo() -> int:
    """Audit and rewire a small vision transformer, and take it back; needs seconds and no network."""
    return 0 if demonstration.run() else 1


# --- The measurement --------------------------------------------------------------------------------------------------


def _samples(model: nn.Module, source: str, n: int) -> object:
    """A batch that fits the model: images of its size, or the inputs that it says it takes."""
    example = example_for(model)
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    if len(example.values) > 1 or not images:
        if source.startswith("random"):
            return example
        ids = data_batch(source, n)
        return dict.fromkeys(list(example.kwargs)[:1], ids) or (ids,)
    channels, *size = images[0].shape[1:]
    config = getattr(model, "pretrained_cfg", None) or {}
    known = isinstance(config, dict) and len(config.get("mean", ())) == channels
    mean, std = (config["mean"], config["std"]) if known else ((0.5,) * channels, (0.5,) * channels)
    values = data_batch(source, n, (int(size[0]), int(size[1])), mean=mean, std=std).to(images[0])
    return dict.fromkeys(example.kwargs, values) or (values,)


def _initialise(model: nn.Module, name: str, samples: object) -> None:
    if name == "skipless":
        unskip.init.skipless_(model, generator=torch.Generator().manual_seed(0), example=samples)
    elif name == "zero":
        unskip.init.zero_branches_(model, samples)
    else:
        raise BadInput(f"--init {name}: it can be skipless or zero")


@contextlib.contextmanager
def _progress(text: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr while it lasts, where somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(text), total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=escape(f"{text}: {what}")
        )


# --- The audit --------------------------------------------------------------------------------------------------------


def _look(name: str, rule: Shortcut | None, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[Audit, Wiring | None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random weights, but the same ones each time
        model = spec.build(name, light=True)
        if not _is_meta(model):
            return _survey(model, rule, shapes)
        try:
            result = _survey(model, rule, shapes)
        except ForwardError:  # a forward that needs values
            return _survey(spec.build(name), rule, shapes)
    print(
        "note: a large model, built without values: |f|/|x| is not measured, nor is what depends on it", file=sys.stderr
    )
    return result


def _survey(
    model: nn.Module, rule: Shortcut | None, shapes: list[tuple[str, tuple[int, ...]]]
) -> tuple[Audit, Wiring | None]:
    example = tuple(_tensor(model, kind, shape) for kind, shape in shapes) or None
    try:
        # The sites of a rewired model are those it had before, so one trace serves both.
        wiring = unskip.rewire(model, rule, example, verify=False) if rule is not None else None
        return unskip.audit(model, example), wiring
    except (BadInput, ForwardError) as error:
        if "example=" not in str(error):
            raise
        raise type(error)(f"{_line(error)} On the command line: --input 2,3,224,224 or --input int:2,16") from error


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    kind, _, sizes = text.rpartition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if kind not in ("", "int") or not shape or min(shape) < 1:
        raise BadInput(f"--input {text!r} is not a shape; write 2,3,32,32, or int:2,16 for token ids")
    return kind, shape


def _tensor(model: nn.Module, kind: str, shape: tuple[int, ...]) -> Tensor:
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    generator = torch.Generator().manual_seed(0)
    if kind == "int":
        return torch.randint(2, shape, generator=generator).to(weight.device)  # ids that any vocabulary has
    return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)


# --- What is shown ----------------------------------------------------------------------------------------------------


def _write_json(name: str, found: Audit, wiring: Wiring | None, last: int | None) -> None:
    data = {"spec": name, **found.to_dict()}
    if wiring is not None:
        data["shortcut"] = wiring.to_dict() | {"band": band(wiring.effective_decay)}
        if last is not None:
            wiring.step(last)
            data["shortcut"]["end"] = wiring.to_dict() | {"band": band(wiring.effective_decay)}
    print(json_format.dumps(_finite(data), indent=2, allow_nan=False))


def _draw(found: Audit, wiring: Wiring | None) -> None:
    """The same for a terminal: the weights stand in the table, and columns that are empty or do not fit go."""
    console = Console(highlight=False)
    console.print(f"{found.model}: {count(len(found), 'residual site')}", markup=False, style="bold")
    _draw_table(console, found.sites, wiring)
    if found.long_skips:
        console.print(f"{count(len(found.long_skips), 'long skip')}, kept unless asked for")
        _draw_table(console, found.long_skips, wiring)
    if found.unknown:
        console.print(f"{count(len(found.unknown), 'addition')} not decided, and left alone:", style="yellow")
    for unknown in found.unknown:
        console.print(f"  {unknown.path or '(model)'} ({unknown.source}): {unknown.reason}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    if wiring is not None:
        console.print(_decay(wiring), markup=False)


def _draw_table(console: Console, sites: Sequence[Site], wiring: Wiring | None) -> None:
    header, cells = list(HEADER), rows(sites)
    if wiring is not None:
        header[5:5] = ["alpha", "beta"]
        for row, site in zip(cells, sites, strict=True):
            row[5:5] = [wiring.alphas[site.index], wiring.betas[site.index]]
    plain = {"runs": 1}  # what goes without saying
    shown = [name for i, name in enumerate(header) if any(row[i] not in (None, "", plain.get(name)) for row in cells)]
    table = _table(header, cells, shown)
    endless = console.options.update_width(10_000)  # else it would measure the table as cut to the terminal
    gone = []
    for name in ("source", "branch"):
        if name in shown and console.measure(table, options=endless).maximum > console.width:
            shown.remove(name)
            gone.append(name)
            table = _table(header, cells, shown)
    if shown:
        console.print(table)
    if gone:
        console.print(
            f"too wide for the terminal: {' and '.join(gone)} not shown; add | cat for all columns", style="dim"
        )


def _table(header: Sequence[str], cells: Sequence[Sequence[object]], shown: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    indices = [header.index(name) for name in shown]
    for i in indices:
        numbers = all(isinstance(row[i], int | float | None) for row in cells)
        short = header[i] not in ("path", "branch", "source", "note")
        table.add_column(escape(header[i]), justify="right" if numbers else "left", no_wrap=short, overflow="fold")
    for row in cells:
        table.add_row(*(escape(_cell(row[i])) for i in indices))
    return table


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _decay(wiring: Wiring) -> str:
    return f"effective decay {wiring.effective_decay:.3g}, {band(wiring.effective_decay)}"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _busy(text: str) -> Iterator[None]:
    """A spinner while it lasts, where somebody is looking."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(escape(text)):
        yield


@contextlib.contextmanager
def _argument_errors_in_a_line(commands: dict[str, Callable[..., int]]) -> Iterator[dict[str, Callable[..., int]]]:
    """Holds back what tyro prints about bad arguments, a box of several lines, and prints it as one.

    What it gives are the commands, which let go of stderr when they start.
    """
    stderr, held = sys.stderr, io.StringIO()

    def letting_go(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> int:
            sys.stderr = stderr
            return command(*args, **kwargs)

        return run

    sys.stderr = held
    try:
        yield {name: letting_go(command) for name, command in commands.items()}
    finally:
        sys.stderr = stderr
        words = re.sub(r"[^\x20-\x7e]+", " ", held.getvalue()).split()
        words = [word for word in words if word.strip("-")]
        if words:
            print("unskip:", " ".join(words), file=stderr)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Our own warnings as one line each, all of them; those of other libraries as Python shows them."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UnskipWarning):
            print(f"warning: {_line(message)}", file=sys.stderr)
        else:
            others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        others, warnings.showwarning = warnings.showwarning, show
        warnings.filterwarnings("always", category=UnskipWarning)
        yield


def _line(message: object) -> str:
    return " ".join(str(message).split())
