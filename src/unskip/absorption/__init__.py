"""Decides whether an MLP can absorb its skip, with certificates, and builds the weights of the block without it."""

from unskip.absorption._activations import Activation, register
from unskip.absorption._applied import Applied
from unskip.absorption._apply import Mode, apply
from unskip.absorption._approximate import Approximation, approximate
from unskip.absorption._block import Block
from unskip.absorption._decide import absorb
from unskip.absorption._domain import Domain
from unskip.absorption._fold import fold
from unskip.absorption._module import AbsorbableMLP
from unskip.absorption._nearest import Nearest
from unskip.absorption._norm import Norm
from unskip.absorption._scan import Scan, ScanRow, scan
from unskip.absorption._verdict import Certificate, Obstruction, Verdict
from unskip.absorption._widen import Widened, nearest, widen

__all__ = [
    "AbsorbableMLP",
    "Activation",
    "Applied",
    "Approximation",
    "Block",
    "Certificate",
    "Domain",
    "Mode",
    "Nearest",
    "Norm",
    "Obstruction",
    "Scan",
    "ScanRow",
    "Verdict",
    "Widened",
    "absorb",
    "apply",
    "approximate",
    "fold",
    "nearest",
    "register",
    "scan",
    "widen",
]
