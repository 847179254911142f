"""The most memory that a run has held: of the device that trains, or of the process where that is the CPU."""

from __future__ import annotations

import sys

import torch


def forget_peak(kind: str) -> None:
    """What was held before does not count, where the system can forget it: a process does not."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(kind: str) -> dict[str, float]:
    """{"peak_memory_gib": ...}, or nothing where the system does not report it."""
    if kind == "cuda":
        return {"peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, kibibytes on Linux
    return {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
