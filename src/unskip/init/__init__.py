"""Start without it: initialisations for models whose skips are cut or decayed."""

from unskip.init._check import Check, Row
from unskip.init._skipless import PRESETS, skipless_
from unskip.init._text import start_
from unskip.init._verify import PARTS, verify_skipless
from unskip.init._zero import verify_zero_branches, zero_branches_

__all__ = [
    "PARTS",
    "PRESETS",
    "Check",
    "Row",
    "skipless_",
    "start_",
    "verify_skipless",
    "verify_zero_branches",
    "zero_branches_",
]
