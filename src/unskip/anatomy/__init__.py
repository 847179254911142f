"""Know the model: its residual sites, its parts, the features of its blocks, and the audit that shows them."""

from unskip.anatomy._audit import Audit, audit
from unskip.anatomy._features import features
from unskip.anatomy._parts import AttentionParts, MlpParts, NormParts, ParallelParts, Parts, parts
from unskip.anatomy.sites import Site, Unknown

__all__ = [
    "AttentionParts",
    "Audit",
    "MlpParts",
    "NormParts",
    "ParallelParts",
    "Parts",
    "Site",
    "Unknown",
    "audit",
    "features",
    "parts",
]
