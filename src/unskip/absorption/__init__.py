"""Prove it away: whether a block can swallow its skip, a certificate either way, and the weights that do it."""

from unskip.absorption._activations import Activation, register
from unskip.absorption._approximate import Approximation, approximate
from unskip.absorption._block import Block, Norm
from unskip.absorption._decide import absorb, absorbable_alpha
from unskip.absorption._module import AbsorbableMLP
from unskip.absorption._stack import StackVerdict, stack
from unskip.absorption._streams import hyper_connection
from unskip.absorption._verdict import Certificate, Obstruction, Verdict
from unskip.absorption._widen import Nearest, Widened, nearest, widen

__all__ = [
    "AbsorbableMLP",
    "Activation",
    "Approximation",
    "Block",
    "Certificate",
    "Nearest",
    "Norm",
    "Obstruction",
    "StackVerdict",
    "Verdict",
    "Widened",
    "absorb",
    "absorbable_alpha",
    "approximate",
    "hyper_connection",
    "nearest",
    "register",
    "stack",
    "widen",
]
