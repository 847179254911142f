"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro


def option(text: str, metavar: str | None = None) -> Any:
    """Help without the "(default: ...)" that tyro appends, for options without a default or whose text gives it."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


def blocks_of(text: str) -> Any:
    """Parses --blocks into the argument of `unskip.features`."""
    if text in ("all", "last"):
        return "all" if text == "all" else -1
    items = text.split(",")
    try:
        return [int(item) for item in items]
    except ValueError:
        return items


def model_help(text: str) -> Any:
    """The help of MODEL: `text`, then all forms of a model."""
    forms = "timm:NAME, torchvision:NAME, hf:NAME-or-FOLDER, diffusers:FOLDER, file.py:FUNCTION"
    return tyro.conf.arg(help=f"{text}: {forms}, or the folder of a run or of unskip.save.", metavar="MODEL")


Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="Folder of the run.", metavar="RUN")]
Runs = Annotated[
    str, tyro.conf.Positional, tyro.conf.arg(help="Folder of a run, or of the runs of --seeds.", metavar="RUN")
]
Count = Annotated[int, tyro.conf.arg(help="Number of samples of --data.", metavar="N")]
Device = Annotated[str, tyro.conf.arg(help="Device to compute on.", metavar="DEVICE")]
DeviceOfRun = Annotated[str | None, option("Device to compute on (default: that of the run, else cpu).", "DEVICE")]
Blocks = Annotated[
    str,
    tyro.conf.arg(
        help="Blocks: all, last, indices such as 3,7,11, or module paths such as 'encoder.layers.*'.",
        metavar="BLOCKS",
    ),
]
PrecisionOption = Annotated[Literal["float32", "bf16", "fp16"], tyro.conf.arg(help="Precision of the forward pass.")]
Mean = Annotated[
    str | None,
    option("Mean of each channel, for values from 0 to 1, such as 0.5,0.5,0.5 (default: the model's own).", "NUMBERS"),
]
Std = Annotated[str | None, option("Standard deviation of each channel (default: the model's own).", "NUMBERS")]
Random = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Use random weights instead of pretrained ones.")]
Trust = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    option("Allow running the Python files that a folder names, of its model and its plugins."),
]
Json = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Print only JSON.")]
Quiet = Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Hide the progress.")]
ChangedData = Annotated[
    bool, tyro.conf.FlagCreatePairsOff, option("Continue even if the data have changed since the run began.")
]
Inputs = Annotated[
    tuple[tuple[str, ...], ...],  # both --input A B and --input A --input B
    tyro.conf.UseAppendAction,
    option(
        "Shape of the input, if the model does not define it: 2,3,32,32 for numbers, int:2,16 for token ids. "
        "Give several for several arguments.",
        "SHAPE",
    ),
]
