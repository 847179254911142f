"""The options that several commands have, worded once."""

from __future__ import annotations

from typing import Annotated

import tyro

_SAYS_IT = ""  # no "(default: ...)" behind a text that says it, or where there is nothing to say

Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help="The folder of the run.", metavar="RUN")]
Device = Annotated[str, tyro.conf.arg(help="Where to compute.", metavar="DEVICE")]
DeviceOfRun = Annotated[
    str | None,
    tyro.conf.arg(help="Where to compute (default: as the run).", metavar="DEVICE", help_behavior_hint=_SAYS_IT),
]
Random = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(help="Random weights instead of pretrained ones.", help_behavior_hint=_SAYS_IT),
]
Json = Annotated[
    bool,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.arg(help="Print JSON and nothing else.", help_behavior_hint=_SAYS_IT),
]
Quiet = Annotated[
    bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Show no progress.", help_behavior_hint=_SAYS_IT)
]
Inputs = Annotated[
    tuple[tuple[str, ...], ...],  # both --input A B and --input A --input B
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        help="The shape of what the model takes, for one that does not say: 2,3,32,32 of numbers or int:2,16 of token "
        "ids. Several for several arguments.",
        metavar="SHAPE",
        help_behavior_hint="",
    ),
]
