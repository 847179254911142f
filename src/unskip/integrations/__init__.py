"""Callbacks that carry a wiring through the checkpoints of other trainers: one file a library.

from unskip.integrations.transformers import WiringCallback    # transformers.Trainer
from unskip.integrations.lightning import WiringCallback       # Lightning
"""

__all__: list[str] = []
