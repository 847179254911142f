"""Know the model: its residual sites, the features of its blocks, and the audit that shows them."""

from unskip.anatomy._audit import Audit, audit
from unskip.anatomy._features import features
from unskip.anatomy.sites import Site, Unknown

__all__ = ["Audit", "Site", "Unknown", "audit", "features"]
