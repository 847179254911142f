"""Checks on recorded values that an MLP branch computes the formula given by its weights.

    branch = scale * out_norm(W_down phi(W_up norm(x) + b_up) + b_down)

The parts give weights, activation and norms. Steps without weights (a sign change, a nonlinearity on the input, a
permutation of tokens) are not among the parts, so the output of the whole branch is compared with the formula.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._model_trace import SiteRun
from unskip.anatomy._walk import in_norm

if TYPE_CHECKING:
    from unskip.anatomy._parts import MlpParts, NormParts

_TOLERANCE = 1e-2  # relative: above the rounding of TF32, far below the difference of another function
_TOLERANCE_HALF = 1e-1
_CASTS = frozenset({"_to_copy", "to"})
_NEUTRAL = _ops.VIEW | frozenset("_unsafe_view reshape _to_copy to clone contiguous copy cat native_dropout".split())


def mismatch(graph: Graph, run: SiteRun, part: MlpParts) -> str | None:
    """The extra step to report if the branch of an MLP does not match the formula; None if it does or is unchecked."""
    if part.site.kind != "mlp" or len(run.findings) > 1 or part.gated or part.function is None or part.extras:
        return None
    stream, root, branch = (graph.values[i].detach() for i in (run.stream, run.root, run.findings[0].branch))
    if "meta" in (stream.device.type, branch.device.type) or part.site.projected or stream.shape != branch.shape:
        return None
    if not bool(branch.isfinite().all()):
        return None
    dtype = torch.promote_types(stream.dtype, torch.float32)
    tolerance = _TOLERANCE if torch.promote_types(stream.dtype, branch.dtype).itemsize >= 4 else _TOLERANCE_HALF
    expected = branch.to(dtype).movedim(part.site.axis, -1)
    # The stream at the addition has the branch's layout, unlike the root, but may have been scaled by a number.
    x = stream.to(dtype).movedim(part.site.axis, -1)
    stream_norm, root_norm = x.norm(), root.to(dtype).norm()
    candidates = (x, x * (root_norm / stream_norm)) if bool(stream_norm) else (x,)
    for candidate in candidates if _fits(part, expected.shape[-1]) else ():
        output = _branch(part, candidate)
        if output is None or bool((output - expected).norm() <= tolerance * expected.norm()):
            return None
    steps = [node.op for node in run.steps if node.op not in _NEUTRAL and not in_norm(node) and not _is_affine(node.op)]
    return f"steps besides its weights (among {', '.join(dict.fromkeys(steps))})"


def more_steps(graph: Graph, run: SiteRun, part: MlpParts) -> tuple[str, ...]:
    """Operators of a branch besides its weights, norms and activation, also if they changed nothing on the example."""
    if part.curve is None or part.extras or part.site.kind != "mlp":
        return ()
    nodes = [node for node in run.steps if not in_norm(node) and not _multiplies_by_one(node)]
    counts = Counter(node.op for node in nodes if node.op not in _NEUTRAL and not _ops.is_matmul(node.op))
    counts -= Counter(name for name, _ in part.curve.operators)
    fused = sum(node.op in ("addmm", "baddbmm", "linear") for node in run.steps)  # these add the bias themselves
    counts -= Counter({"add": max(0, len(part.biases) - fused)})
    counts -= Counter({"mul": (part.gate is not None) + (part.scale is not None) + (part.beta != 1)})
    # Norms may run in float32 whatever the model's dtype.
    least = min(4, *(tensor.dtype.itemsize for tensor in (graph.values[run.stream], part.up, part.down)))
    values = [graph.values[node.index] for node in run.steps if node.op in _CASTS]
    casts = {str(value.dtype).removeprefix("torch.") for value in values if value.dtype.itemsize < least}
    return (*sorted(counts), *sorted(casts))


def _multiplies_by_one(node: Node) -> bool:
    """Whether a node multiplies by the number 1, as a config's unused factor does."""
    factor = node.step.args[1] if node.op in _ops.SCALE and node.step is not None and len(node.step.args) > 1 else None
    return isinstance(factor, int | float) and factor == 1


def same_stream(graph: Graph, run: SiteRun) -> bool:
    """Whether the branch reads the tensor that it is added to, entry by entry up to rounding."""
    stream, root = (graph.values[index].detach() for index in (run.stream, run.root))
    if "meta" in (stream.device.type, root.device.type):
        return True
    if stream.numel() != root.numel():
        return False
    tolerance = 4 * max(torch.finfo(tensor.dtype).eps for tensor in (stream, root))
    added, read = stream.double().flatten(), root.double().flatten()
    if stream.shape != root.shape:  # tokens in another order, as in windows
        added, read = added.sort().values, read.sort().values
    return bool(((added - read).abs() <= tolerance * read.abs()).all())


def _is_affine(op: str) -> bool:
    return _ops.is_matmul(op) or op in _ops.ADD


def _fits(part: MlpParts, width: int) -> bool:
    """Whether all weights act on the full feature axis, not per head, over several tokens, or per token."""
    all_norms = [norm for norm in (part.norm, part.out_norm) if norm is not None]
    norms = [norm for norm in all_norms if norm.kind != "other" and norm.place != "post"]
    vectors = [part.scale, *(norm.gain for norm in norms), *(norm.bias for norm in norms)]
    sizes = {1, width}
    return part.up.shape[1] == len(part.down) == width and all(v is None or v.numel() in sizes for v in vectors)


def _branch(part: MlpParts, x: Tensor) -> Tensor | None:
    """The formula applied to the stream, features last; None if the kind of a norm is unknown."""
    for norm in (part.norm, part.out_norm):
        if norm is not None and norm.kind == "other":
            return None
    assert part.function is not None
    if part.norm is not None and part.norm.place == "pre":
        x = _norm(part.norm, x)
    hidden = _linear(x, part.up, part.up_bias)
    if part.gate is None:
        hidden = part.function(hidden)
    else:
        hidden = part.function(_linear(x, part.gate, part.gate_bias)) * hidden
    out = _linear(hidden, part.down, part.down_bias)
    if part.out_norm is not None:
        out = _norm(part.out_norm, out)
    return out if part.scale is None else out * part.scale.flatten().to(out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight.detach().to(x), None if bias is None else bias.detach().to(x))


def _norm(norm: NormParts, x: Tensor) -> Tensor:
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    x = x - x.mean(-1, keepdim=True) if norm.kind == "layernorm" else x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x if norm.gain is None else x * (norm.offset + norm.gain.flatten().to(x))
    return x if norm.bias is None else x + norm.bias.flatten().to(x)
