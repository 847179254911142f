"""Callbacks that save and restore a wiring with the checkpoints of other trainers.

`unskip.integrations.transformers` and `unskip.integrations.lightning`, each with `WiringCallback`.
"""

__all__: list[str] = []
