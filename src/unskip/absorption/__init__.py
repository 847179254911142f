"""Prove it away: whether a block can swallow its skip, a certificate either way, and the weights that do it."""

from unskip.absorption._activations import Activation, register
from unskip.absorption._block import Block, Norm
from unskip.absorption._decide import absorb, absorbable_alpha
from unskip.absorption._verdict import Certificate, Obstruction, Verdict

__all__ = [
    "Activation",
    "Block",
    "Certificate",
    "Norm",
    "Obstruction",
    "Verdict",
    "absorb",
    "absorbable_alpha",
    "register",
]
