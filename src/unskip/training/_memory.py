"""The peak memory of a run: of the GPU, or of the process on other devices."""

from __future__ import annotations

import sys

import torch


def forget_peak(kind: str) -> None:
    """Resets the peak of a GPU; that of a process cannot be reset."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(kind: str) -> dict[str, float]:
    """{"peak_memory_gib": ...}, or {} if the system does not report it."""
    if kind == "cuda":
        return {"peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30}
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes on macOS, kibibytes on Linux
    return {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
