"""What a GPU does in a training step: its kernels by kind of work, from a trace of torch.profiler.

Names are those that cuBLAS, cuDNN, flash attention, torch and the compiler give on Hopper. The compiler names a kernel
after the operations it fuses, so a name may hold "addmm" (the bias) or "flash_attention" (a copy of its input), and
only triton_tem kernels are matrix products.
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
DATA = "unskip: data"  # the name of a range in which batches are made
_PHASES = {DATA: "data", "Optimizer.step#": "optimizer"}  # ranges by the beginning of their names; torch adds the last
_NORMS = ("layer_norm", "layernorm", "rms_norm", "rmsnorm", "batch_norm", "gammabeta", "rowwisemoments")
# The first word that a name contains decides.
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
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    length: float
    phase: str = ""  # "data" or "optimizer", where the step was there


def kind_of(name: str, phase: str = "") -> str:
    """The kind of work of a kernel; inside a phase it is that of the phase."""
    if phase:
        return phase
    lowered = name.lower()
    rules = _FUSED if lowered.startswith("triton_") else _WRITTEN
    return next((kind for kind, words in rules if any(word in lowered for word in words)), "other")


def kernels_of(trace: Path) -> list[Kernel]:
    """The kernels of a trace of `export_chrome_trace`; without a GPU the operations of torch."""
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
    found = []
    for event in sorted(ran, key=lambda event: event["ts"]):
        place = bisect.bisect_right(starts, event["ts"]) - 1
        inside = place >= 0 and event["ts"] < spans[place][1]
        found.append(Kernel(event["name"], event["ts"], event["dur"], spans[place][2] if inside else ""))
    return found


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which a kernel ran; those that overlap count once. Kernels are in the order of their start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        end = kernel.start + kernel.length
        total += max(0.0, end - max(kernel.start, until))
        until = max(until, end)
    return total


def by_kind(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Microseconds of each kind, all kinds in their order."""
    times = Counter[str]()
    for kernel in kernels:
        times[kind_of(kernel.name, kernel.phase)] += kernel.length
    return {kind: times[kind] for kind in KINDS}


def largest(kernels: Iterable[Kernel], count: int) -> list[tuple[str, str, float]]:
    """Name, kind and microseconds of the kernels that took the most."""
    times = Counter[tuple[str, str]]()
    for kernel in kernels:
        times[kernel.name, kind_of(kernel.name, kernel.phase)] += kernel.length
    return [(name, kind, time) for (name, kind), time in times.most_common(count)]


def _own_time(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations of a CPU with the time that they do not spend in others they call; all as if they began with them."""
    around: list[dict[str, Any]] = []
    found = []
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        while around and (around[-1]["tid"] != event["tid"] or around[-1]["end"] <= event["ts"]):
            around.pop()
        if around:
            around[-1]["dur"] -= event["dur"]
        around.append({**event, "end": event["ts"] + event["dur"]})
        found.append(around[-1])
    return found
