"""Initialisations for models whose skips are cut or decayed."""

from unskip.init._calibrate import Solved, calibrate_
from unskip.init._check import Check, Row
from unskip.init._freeze import freeze_heads
from unskip.init._position import PositionCode, position_code_, sine_cosine
from unskip.init._skipless import PRESETS, skipless_
from unskip.init._text import has_pairs, start_
from unskip.init._verify import PARTS, verify_skipless
from unskip.init._zero import verify_zero_branches, zero_branches_

__all__ = [
    "PARTS",
    "PRESETS",
    "Check",
    "PositionCode",
    "Row",
    "Solved",
    "calibrate_",
    "freeze_heads",
    "has_pairs",
    "position_code_",
    "sine_cosine",
    "skipless_",
    "start_",
    "verify_skipless",
    "verify_zero_branches",
    "zero_branches_",
]
