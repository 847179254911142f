"""Whether a branch computes what the views on its weights say, on the numbers that were recorded.

    branch = scale * out_norm(W_down phi(W_up norm(x) + b_up) + b_down)

Views name the weights, the activation and the norms. What else a model does on the way, as turning the sign, bending
the input or moving tokens, has no weight to be seen by: so the whole branch is compared with the formula.
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

UNSEEN = "steps besides its weights"
_CLOSE = 1e-2  # relative: above the rounding of TF32, far below what another function differs by
_CLOSE_HALF = 1e-1
_CASTS = frozenset({"_to_copy", "to"})
_PLAIN = _ops.VIEW | frozenset("_unsafe_view reshape _to_copy to clone contiguous copy cat native_dropout".split())


def unseen(graph: Graph, run: SiteRun, part: MlpParts) -> str | None:
    """What to say where the branch of an MLP is not the formula; None where it is, or where that cannot be told."""
    if part.site.kind != "mlp" or len(run.findings) > 1 or part.gated or part.function is None or part.extras:
        return None
    stream, root, branch = (graph.values[i].detach() for i in (run.stream, run.root, run.findings[0].branch))
    if "meta" in (stream.device.type, branch.device.type) or part.site.projected or stream.shape != branch.shape:
        return None
    if not bool(branch.isfinite().all()):
        return None
    dtype = torch.promote_types(stream.dtype, torch.float32)
    close = _CLOSE if torch.promote_types(stream.dtype, branch.dtype).itemsize >= 4 else _CLOSE_HALF
    wanted = branch.to(dtype).movedim(part.site.axis, -1)
    # The stream as it is added lies as the branch does; a number may have scaled it on its way.
    x = stream.to(dtype).movedim(part.site.axis, -1)
    size, given = x.norm(), root.to(dtype).norm()
    candidates = (x, x * (given / size)) if bool(size) else (x,)
    for candidate in candidates if _fits(part, wanted.shape[-1]) else ():
        got = _branch(part, candidate)
        if got is None or bool((got - wanted).norm() <= close * wanted.norm()):
            return None
    between = [node.op for node in run.steps if node.op not in _PLAIN and not in_norm(node) and not _weighs(node.op)]
    return f"{UNSEEN} (among {', '.join(dict.fromkeys(between))})"


def more_steps(graph: Graph, run: SiteRun, part: MlpParts) -> tuple[str, ...]:
    """What a branch computes besides its weights, norms and activation. On the example it may have done nothing."""
    if part.curve is None or part.extras or part.site.kind != "mlp":
        return ()
    kept = [node for node in run.steps if not in_norm(node) and not _by_one(node)]
    found = Counter(node.op for node in kept if node.op not in _PLAIN and not _ops.is_matmul(node.op))
    found -= Counter(name for name, _ in part.curve.operators)
    fused = sum(node.op in ("addmm", "baddbmm", "linear") for node in run.steps)  # which add a bias themselves
    found -= Counter({"add": max(0, len(part.biases) - fused)})
    found -= Counter({"mul": (part.gate is not None) + (part.scale is not None) + (part.beta != 1)})
    # Norms may run in float32 whatever the model's dtype.
    least = min(4, *(each.dtype.itemsize for each in (graph.values[run.stream], part.up, part.down)))
    values = [graph.values[node.index] for node in run.steps if node.op in _CASTS]
    casts = {str(value.dtype).removeprefix("torch.") for value in values if value.dtype.itemsize < least}
    return (*sorted(found), *sorted(casts))


def _by_one(node: Node) -> bool:
    """A product with the number 1, as of a factor that a config leaves out."""
    factor = node.step.args[1] if node.op in _ops.SCALE and node.step is not None and len(node.step.args) > 1 else None
    return isinstance(factor, int | float) and factor == 1


def same_stream(graph: Graph, run: SiteRun) -> bool:
    """Whether the branch reads what is added to it, entry by entry up to rounding."""
    stream, root = (graph.values[index].detach() for index in (run.stream, run.root))
    if "meta" in (stream.device.type, root.device.type):
        return True
    if stream.numel() != root.numel():
        return False
    near = 4 * max(torch.finfo(each.dtype).eps for each in (stream, root))
    added, read = stream.double().flatten(), root.double().flatten()
    if stream.shape != root.shape:  # tokens in another order, as in windows
        added, read = added.sort().values, read.sort().values
    return bool(((added - read).abs() <= near * read.abs()).all())


def _weighs(op: str) -> bool:
    return _ops.is_matmul(op) or op in _ops.ADD


def _fits(part: MlpParts, width: int) -> bool:
    """Whether all weights are of a token's features, and not of a head's, of several tokens' or of each token."""
    all_norms = [norm for norm in (part.norm, part.out_norm) if norm is not None]
    norms = [norm for norm in all_norms if norm.kind != "other" and norm.place != "post"]
    vectors = [part.scale, *(norm.gain for norm in norms), *(norm.bias for norm in norms)]
    sizes = {1, width}
    return part.up.shape[1] == len(part.down) == width and all(v is None or v.numel() in sizes for v in vectors)


def _branch(part: MlpParts, x: Tensor) -> Tensor | None:
    """The formula on the stream, features last; None where a norm is none that is known."""
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
