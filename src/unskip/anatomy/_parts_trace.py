"""Finds the parts of every site in a trace: the weights of its branch, its norms and its scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.anatomy import _ops
from unskip.anatomy._agree import mismatch, more_steps, same_stream
from unskip.anatomy._attention import Attention, find_attention
from unskip.anatomy._example import Example, example_for
from unskip.anatomy._graph import Graph, Node, Ref
from unskip.anatomy._mlp import Mlp, find_mlp
from unskip.anatomy._model_trace import ModelTrace, SiteRun, mean_weight, trace_model
from unskip.anatomy._norms import norm_at
from unskip.anatomy._parts import AttentionParts, MlpParts, NormParts, ParallelParts, Part, Parts
from unskip.anatomy._products import Unviewable
from unskip.anatomy._sites import Site
from unskip.anatomy._walk import in_norm
from unskip.errors import UnskipError


@dataclass(frozen=True, eq=False)
class PartsTrace:
    """A model trace with the parts of every site and the graph nodes of each attention."""

    trace: ModelTrace
    parts: Parts
    attentions: dict[int, Attention]  # by site index

    def probabilities(self, index: int) -> Tensor:
        """The attention probabilities at a site: (samples, heads, queries, keys)."""
        attention = self.attentions[index]
        values = self.trace.graph.values[attention.softmax]
        values = values.reshape(-1, *values.shape[-2:])
        return torch.stack([values[attention.q.head_of == head] for head in range(attention.q.heads)], 1)


def parts(model: nn.Module, example: object = None) -> Parts:
    """Views on the weights of every site's branch. `example` is as for audit."""
    whole = example_for(model, example)
    try:  # the layout does not depend on the batch
        return trace_parts(model, whole.rows(0, 1)).parts
    except UnskipError:  # an argument without a row for each sample, such as a mask
        return trace_parts(model, whole).parts


def trace_parts(model: nn.Module, example: Example, weighted: bool = False) -> PartsTrace:
    """Traces the model on the example and finds the parts of every site."""
    trace = trace_model(model, example, weighted)
    finder = _Finder(model, trace)
    views: list[Part | None] = []
    reasons: dict[int, str] = {}
    for site, run in zip(trace.sites, trace.last_runs, strict=True):
        try:
            views.append(finder.part(site, run))
        except Unviewable as reason:
            views.append(None)
            reasons[site.index] = str(reason)
    return PartsTrace(trace, Parts(type(model).__name__, trace.sites, views, reasons), finder.attentions)


@dataclass
class _Scaling:
    scale: Tensor | None = None
    gated: bool = False
    closed: bool = False
    extras: list[str] = field(default_factory=list)


class _Finder:
    def __init__(self, model: nn.Module, trace: ModelTrace) -> None:
        self.graph: Graph = trace.graph
        self.readers = trace.readers
        self.trace = trace
        self.names = {id(module): name for name, module in model.named_modules()}
        self.attentions: dict[int, Attention] = {}

    def part(self, site: Site, run: SiteRun) -> Part:
        if site.kind == "parallel":
            attention = find_attention(self.graph, self.readers, run.steps)
            mlp = find_mlp(self.graph, self.readers, run.steps, attention.context)
            return ParallelParts(self._attention(site, run, attention), self._mlp(site, run, mlp))
        if site.kind == "attention":
            return self._attention(site, run, find_attention(self.graph, self.readers, run.steps))
        if site.kind == "mlp":
            return self._mlp(site, run, find_mlp(self.graph, self.readers, run.steps))
        raise Unviewable(f"neither attention nor MLP, but {site.kind}")

    def _attention(self, site: Site, run: SiteRun, attention: Attention) -> AttentionParts:
        self.attentions[site.index] = attention
        products = {id(p): p for p in (attention.q.of, attention.k.of, attention.v.of, attention.out)}.values()
        return AttentionParts(
            **self._common(site, run, [attention.q.of.source], attention.out.result, attention.extras),
            parameters=tuple({id(p.weight): p.weight for p in products}.values()),
            biases=tuple({id(b): b for p in products for b in p.biases}.values()),
            q=attention.q.weight,
            k=attention.k.weight,
            v=attention.v.weight,
            q_bias=attention.q.bias,
            k_bias=attention.k.bias,
            v_bias=attention.v.bias,
            out=attention.out.matrix[:, attention.columns],
            out_bias=attention.out.bias,
            cross=attention.cross,
            softmax_scale=attention.scale,
        )

    def _mlp(self, site: Site, run: SiteRun, mlp: Mlp) -> MlpParts:
        halves = [mlp.up] if mlp.gate is None else [mlp.up, mlp.gate]
        products = {id(p): p for p in (*(half.of for half in halves), mlp.down)}.values()
        part = MlpParts(
            **self._common(site, run, [half.of.source for half in halves], mlp.down.result, mlp.extras),
            parameters=tuple({id(p.weight): p.weight for p in products}.values()),
            biases=tuple({id(b): b for p in products for b in p.biases}.values()),
            up=mlp.up.weight,
            gate=None if mlp.gate is None else mlp.gate.weight,
            down=mlp.down.matrix[:, mlp.columns],
            up_bias=mlp.up.bias,
            gate_bias=None if mlp.gate is None else mlp.gate.bias,
            down_bias=mlp.down.bias,
            activation=mlp.activation,
            curve=mlp.curve,
        )
        extra = mismatch(self.graph, run, part)
        part = part if extra is None else replace(part, extras=(extra,))
        return replace(part, steps=more_steps(self.graph, run, part), reads_stream=same_stream(self.graph, run))

    def _common(
        self, site: Site, run: SiteRun, inputs: Sequence[int], output: int, extras: tuple[str, ...]
    ) -> dict[str, Any]:
        scaling = self._scaling(run, output)
        alpha, beta = self.trace.weights[site.index]
        return {
            "site": site,
            "norm": self._norm(site, run, inputs, output),
            "out_norm": self._out_norm(site, run, output),
            "scale": scaling.scale,
            "gated": scaling.gated,
            "closed": scaling.closed,
            "alpha": mean_weight(alpha),
            "beta": mean_weight(beta),
            "extras": tuple(dict.fromkeys([*extras, *scaling.extras])),
        }

    def _scaling(self, run: SiteRun, output: int) -> _Scaling:
        """The factors of the branch after its last weight: a stored vector, or a gate computed from the input."""
        scaling = _Scaling()
        for node in run.steps:
            if output not in node or in_norm(node) or node.index == output:
                continue
            if node.op in _ops.ACTIVATION:
                scaling.extras.append(f"output {node.op}")
            if node.op not in _ops.SCALE:
                continue
            side = [p for p in node.parents if output not in self.graph.nodes[p]]
            leaf = self._leaf(side[0]) if side else None
            if not side:
                scaling.extras += ["output factor"] if node.step is None or node.step.args[1] != 1 else []
            elif leaf is not None and node.op == "mul" and scaling.scale is None:
                scaling.scale = leaf.detach()
            else:
                moving = not self.graph.nodes[side[0]].fixed
                scaling.gated = scaling.gated or moving
                scaling.extras += [] if moving else ["computed scale"]
                value = self.graph.values[side[0]]
                scaling.closed = scaling.closed or (value.device.type != "meta" and not value.any())
        return scaling

    def _leaf(self, index: int) -> nn.Parameter | None:
        """The parameter that a tensor is a rearranged copy of, if any."""
        node = self.graph.nodes[index]
        while node.op != "weight" and node.parents and node.op in _ops.IDENTITY:
            node = self.graph.nodes[node.parents[0]]
        value = self.graph.values.get(node.index)
        return value if isinstance(value, nn.Parameter) else None

    def _norm(self, site: Site, run: SiteRun, inputs: Sequence[int], output: int) -> NormParts | None:
        """The norm before the part's first weights, or else the one at its end or after the sum."""
        if site.norm in ("pre", "sandwich"):
            before = [n for n in run.steps if in_norm(n) and any(n.index in self.graph.nodes[i] for i in inputs)]
            return self._norm_at("pre", before[:1])
        if site.norm == "post":
            later = self.graph.nodes[run.add.index + 1 :]
            return self._norm_at("post", [n for n in later if in_norm(n) and run.add.index in n][:1])
        return self._out_norm(site, run, output)

    def _out_norm(self, site: Site, run: SiteRun, output: int) -> NormParts | None:
        if site.norm not in ("out", "sandwich"):
            return None
        return self._norm_at("out", [node for node in run.steps if in_norm(node) and output in node][-1:])

    def _norm_at(self, place: Literal["pre", "out", "post"], nodes: list[Node]) -> NormParts | None:
        norm = norm_at(self.graph, self.readers, nodes[0]) if nodes else None
        if norm is None:
            return None
        gain, bias = getattr(norm.module, "weight", None), getattr(norm.module, "bias", None)
        step = nodes[0].step
        if nodes[0].op == "native_layer_norm" and step is not None:  # also without a module
            stored = [self._leaf(ref.index) if isinstance(ref, Ref) else None for ref in step.args[2:4]]
            # The operator may get 1 + weight; the module then has the weight, and `offset` is 1.
            computed = norm.offset != 0 and stored[0] is None
            gain, bias = gain if computed else stored[0], stored[1]
        return NormParts(
            self.names.get(id(norm.module), ""),
            norm.kind,
            place,
            norm.eps,
            gain.detach() if isinstance(gain, Tensor) else None,
            bias.detach() if isinstance(bias, Tensor) else None,
            norm.offset,
        )
