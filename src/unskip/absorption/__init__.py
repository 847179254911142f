"""Prove it away: whether a block can swallow its skip, a certificate either way, and the weights that do it."""

from unskip.absorption._activations import Activation, register
from unskip.absorption._apply import Applied, Mode, apply
from unskip.absorption._approximate import Approximation, approximate
from unskip.absorption._block import Block, Norm
from unskip.absorption._decide import absorb, absorbable_alpha
from unskip.absorption._map import Cell, table
from unskip.absorption._module import AbsorbableMLP
from unskip.absorption._scan import Scan, ScanRow, scan
from unskip.absorption._stack import StackVerdict, stack
from unskip.absorption._streams import hyper_connection
from unskip.absorption._verdict import Certificate, Obstruction, Verdict
from unskip.absorption._widen import Nearest, Widened, nearest, widen

__all__ = [
    "AbsorbableMLP",
    "Activation",
    "Applied",
    "Approximation",
    "Block",
    "Cell",
    "Certificate",
    "Mode",
    "Nearest",
    "Norm",
    "Obstruction",
    "Scan",
    "ScanRow",
    "StackVerdict",
    "Verdict",
    "Widened",
    "absorb",
    "absorbable_alpha",
    "apply",
    "approximate",
    "hyper_connection",
    "nearest",
    "register",
    "scan",
    "stack",
    "table",
    "widen",
]
