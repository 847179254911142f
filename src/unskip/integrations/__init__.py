"""Callbacks that carry a wiring through the checkpoints of other trainers.

One file a library: `unskip.integrations.transformers` and `unskip.integrations.lightning`, each with `WiringCallback`.
"""

__all__: list[str] = []
