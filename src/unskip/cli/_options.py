"""The options that several commands have, worded once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro


def option(text: str, metavar: str | None = None) -> Any:
    """The help of an option without "(default: ...)" behind it: the text says it, or there is nothing to say."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


def blocks_of(text: str) -> Any:
    """--blocks as `unskip.features` takes them."""
    if text in ("all", "last"):
        return "all" if text == "all" else -1
    items = text.split(",")
    try:
        return [int(item) for item in items]
    except ValueError:
        return items


def model_help(text: str) -> Any:
    """The help of MODEL: what a command does with it, then every form it can have."""
    forms = "timm:NAME, torchvision:NAME, hf:NAME-or-FOLDER, diffusers:FOLDER, file.py:FUNCTION"
    return tyro.conf.arg(help=f"{text}: {forms}, or the folder of a run or of unskip.save.", metavar="MODEL")


Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="The folder of the run.", metavar="RUN")]
Runs = Annotated[
    str, tyro.conf.Positional, tyro.conf.arg(help="The folder of a run, or of several as --seeds makes.", metavar="RUN")
]
Count = Annotated[int, tyro.conf.arg(help="How many samples of the source.", metavar="N")]
Device = Annotated[str, tyro.conf.arg(help="Where to compute.", metavar="DEVICE")]
DeviceOfRun = Annotated[str | None, option("Where to compute (default: as the run).", "DEVICE")]
Blocks = Annotated[
    str,
    tyro.conf.arg(
        help="all, last, indices such as 3,7,11, or modules to take as blocks such as 'encoder.layers.*'.",
        metavar="BLOCKS",
    ),
]
PrecisionOption = Annotated[Literal["float32", "bf16", "fp16"], tyro.conf.arg(help="Of the forward pass.")]
Mean = Annotated[
    str | None,
    option("Mean of the channels, of values from 0 to 1, as 0.5,0.5,0.5 (default: the model's own).", "NUMBERS"),
]
Std = Annotated[str | None, option("Standard deviation of the channels (default: the model's own).", "NUMBERS")]
Random = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Random weights instead of pretrained ones.")]
Trust = Annotated[
    bool, tyro.conf.FlagCreatePairsOff, option("Run the Python files that a folder names: its model, its plugins.")
]
Json = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Print JSON and nothing else.")]
Quiet = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Show no progress.")]
ChangedData = Annotated[
    bool, tyro.conf.FlagCreatePairsOff, option("Continue although the data is not what the run began with.")
]
Inputs = Annotated[
    tuple[tuple[str, ...], ...],  # both --input A B and --input A --input B
    tyro.conf.UseAppendAction,
    option(
        "The shape of what the model takes, for one that does not say: 2,3,32,32 of numbers or int:2,16 of token ids. "
        "Several for several arguments.",
        "SHAPE",
    ),
]
