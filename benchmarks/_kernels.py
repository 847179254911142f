"""Reads the GPU kernels of a training step from a torch.profiler trace, and classifies them by kind of work.

Kernel names are those of cuBLAS, cuDNN, flash attention, torch and torch.compile on Hopper GPUs. The compiler names a
kernel after the operations it fuses, so a name may contain "addmm" (the bias) or "flash_attention" (a copy of its
input), and only triton_tem kernels are matrix products.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (
    "matrix products",
    "attention",
    "norms and residuals",
    "pointwise and reductions",
    "optimizer",
    "data",
    "copies",
    "other",
)
DATA = "unskip: data"  # the profiler range around batch creation
_PHASES = {DATA: "data", "Optimizer.step#": "optimizer"}  # profiler ranges by name prefix; torch adds the second
_NORMS = ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "batch_norm", "gammabeta", "rowwisemoments")
# The first entry with a word that the name contains decides.
_FUSED = (
    ("attention", ("flex_attention",)),
    ("matrix products", ("triton_tem", "triton_mm", "triton_bmm")),
    ("norms and residuals", _NORMS),
    ("pointwise and reductions", ("triton_",)),
)
_WRITTEN = (
    ("optimizer", ("unskip_", "multi_tensor_apply")),  # clipping and the EMA too
    ("copies", ("memcpy", "memset", "direct_copy", "catarray", "nchwtonhwc", "nhwctonchw")),
    ("attention", ("flash", "fmha", "sdpa", "cudnn::fusion")),
    ("norms and residuals", _NORMS),
    ("matrix products", ("nvjet", "gemm", "gemv", "cutlass", "wgmma", "xmma", "cublas", "splitkreduce", "convolution")),
    ("matrix products", ("aten::mm", "aten::bmm", "aten::addmm")),
    ("pointwise and reductions", ("at::native", "aten::", "elementwise", "reduce", "cub::", "at_cuda_detail")),
)


class Kernel(NamedTuple):
    """One kernel launch, with times in microseconds."""

    name: str
    start: float
    length: float
    phase: str = ""  # "data" or "optimizer" if it ran in one of these ranges


def kind_of(name: str, phase: str = "") -> str:
    """The kind of work of a kernel; the phase if there is one."""
    if phase:
        return phase
    lowered = name.lower()
    rules = _FUSED if lowered.startswith("triton_") else _WRITTEN
    return next((kind for kind, words in rules if any(word in lowered for word in words)), "other")


def kernels_of(trace: Path) -> list[Kernel]:
    """The kernels in a trace of `export_chrome_trace`; without a GPU, torch's CPU operations."""
    events = [event for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if "dur" in event]
    ran = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = "gpu_user_annotation"
    if not ran:
        ran, ranges = _own_time(event for event in events if event.get("cat") == "cpu_op"), "user_annotation"
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], phase)
        for event in events
        if event.get("cat") == ranges
        for start, phase in _PHASES.items()
        if event["name"].startswith(start)
    )
    starts = [span[0] for span in spans]
    kernels = []
    for event in sorted(ran, key=lambda event: event["ts"]):
        index = bisect.bisect_right(starts, event["ts"]) - 1
        inside = index >= 0 and event["ts"] < spans[index][1]
        kernels.append(Kernel(event["name"], event["ts"], event["dur"], spans[index][2] if inside else ""))
    return kernels


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds with at least one kernel running. Kernels are sorted by start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        end = kernel.start + kernel.length
        total += max(0.0, end - max(kernel.start, until))
        until = max(until, end)
    return total


def by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Microseconds by kind of work, in the order of KINDS."""
    times = Counter[str]()
    for kernel in kernels:
        times[kind_of(kernel.name, kernel.phase)] += kernel.length
    return {kind: times[kind] for kind in KINDS}


def largest(kernels: Iterable[Kernel], count: int) -> list[tuple[str, str, float]]:
    """Name, kind and total microseconds of the most expensive kernels."""
    times = Counter[tuple[str, str]]()
    for kernel in kernels:
        times[kernel.name, kind_of(kernel.name, kernel.phase)] += kernel.length
    return [(name, kind, time) for (name, kind), time in times.most_common(count)]


def _own_time(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """CPU operations with their self time: the duration without that of the operations they call."""
    stack: list[dict[str, Any]] = []
    operations = []
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        while stack and (stack[-1]["tid"] != event["tid"] or stack[-1]["end"] <= event["ts"]):
            stack.pop()
        if stack:
            stack[-1]["dur"] -= event["dur"]
        stack.append({**event, "end": event["ts"] + event["dur"]})
        operations.append(stack[-1])
    return operations
