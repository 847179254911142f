"""`measure`: what a model does to a batch, site by site and block by block.

Each sample is recorded once, with the weights of the model's wiring; the numbers come from the plain functions of this
package. Memory: all activations of one sample, the stream after every block for all samples, what 4096 tokens take in
float64, and what a Jacobian takes (`jacobian_spectrum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip._checks import whole
from unskip._modes import quiet
from unskip.anatomy import (
    AttentionParts,
    Example,
    ParallelParts,
    PartsTrace,
    ReplayError,
    Sample,
    Site,
    example_for,
    mean_weight,
    tokens,
    trace_again,
    trace_parts,
)
from unskip.errors import BadInput, NoResidualError
from unskip.measures._capture import gradient_norms, grid_of, refuse_not_finite
from unskip.measures._measurement import BlockRow, Measurement, SiteRow
from unskip.measures._rounding import Rounding
from unskip.measures.attention import (
    attention_condition,
    attention_entropy,
    self_attention_mass,
    value_output_condition,
)
from unskip.measures.echo import cosine, feature_norm, high_frequency_share, ridge_r2
from unskip.measures.quantise import excess_kurtosis, sqnr
from unskip.measures.rank import effective_rank, feature_matrix, rank_entropy
from unskip.measures.similarity import cka
from unskip.measures.spectrum import Spectrum, jacobian_spectrum, largest_built

_ROWS = 4096  # tokens that rank, echo and similarity are computed from

Jacobians = Literal["auto", "exact", "off"]
Progress = Callable[[int, int, str], None]


def measure(
    model: nn.Module,
    batch: object = None,
    *,
    jacobians: Jacobians = "auto",
    steps: int = 96,
    grid: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Rank, conditioning, attention, echo and quantisation of a model on a batch. Nothing in the model is changed.

    `batch` is a tensor, a tuple of arguments or a mapping, as for audit; samples lie along the first axis. Jacobians
    are those of the first sample: "auto" builds them where they are small and estimates them otherwise, in `steps`
    products each way; "exact" builds them all, "off" leaves them out. `grid` is (rows, columns) of the patches, where
    they do not lie on a square. `progress` is called with (done, total, what). The model runs in evaluation mode; a
    rewired one with its weights. What cannot be measured is left out, and the notes say why.
    """
    if jacobians not in ("auto", "exact", "off"):
        raise BadInput(f"jacobians is {jacobians!r}; it can be 'auto', 'exact' or 'off'")
    whole("measure", "steps", steps, low=2)
    if grid is not None and not (
        isinstance(grid, tuple) and len(grid) == 2 and all(isinstance(n, int) and n > 1 for n in grid)
    ):
        raise BadInput(f"measure: grid is {grid!r}; it is (columns) of the patches, two or more of each")
    if not isinstance(generator, torch.Generator | None):
        raise BadInput(f"measure: generator is {generator!r}; write torch.Generator().manual_seed({generator!r})")
    example = example_for(model, batch)
    count = _samples(example)
    _refuse_mixed(model, example, count)
    tick = progress or (lambda done, total, what: None)
    generator = generator or torch.Generator().manual_seed(0)
    total = count + (0 if jacobians == "off" else 1)
    tick(0, total, "recording")
    traced = trace_parts(model, example.rows(0, 1) if count > 1 else example, weighted=True)
    if not traced.trace.sites:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so nothing to measure")
    gather = _Gather(model, traced, grid, _image(example))
    if len({len(value) for value in _tensors(example) if value.ndim > 1}) > 1:
        gather.notes.append("arguments without a row for each sample: the batch is run whole, its first sample is seen")
    first = gather.sample
    for index in range(count):
        sample = first if index == 0 else Sample(trace_again(model, example.rows(index, index + 1), traced.trace))
        refuse_not_finite(sample)
        gather.add(sample)
        tick(index + 1, total, "samples")
    with quiet(model, training=False):
        spectra = _Spectra(first, jacobians, steps, gather.notes, progress)
        blocks = gather.blocks(generator)
        sites = gather.sites(spectra, generator)
        network = spectra.of("the network", first.network)
    return Measurement(
        type(model).__name__,
        count,
        gather.tokens,
        tuple(sites),
        tuple(blocks),
        network,
        tuple(dict.fromkeys(gather.notes)),
    )


def _tensors(tree: object) -> list[Tensor]:
    tree = tree.values if isinstance(tree, Example) else tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _image(example: Example) -> tuple[int, int] | None:
    """Height and width of the images, where there are some and all are of one size."""
    shapes = [value.shape for value in _tensors(example) if value.ndim == 4]
    sizes = {(s[1], s[2]) if s[-1] <= 4 < s[1] else (s[2], s[3]) for s in shapes}  # channels may come last
    return sizes.pop() if len(sizes) == 1 and 0 not in next(iter(sizes)) else None


def _samples(example: Example) -> int:
    counts = {len(value) for value in _tensors(example) if value.ndim > 1}
    if not counts or 0 in counts:
        raise BadInput("the batch holds no tensor with samples along its first axis, or none at all")
    if len(counts) > 1:
        return 1  # arguments without a row for each sample: taken as one
    return counts.pop()


def _refuse_mixed(model: nn.Module, example: Example, count: int) -> None:
    """Samples are measured one by one, which makes sense only where they don't see each other."""
    if count < 2:
        return
    try:
        with quiet(model, training=False):
            pair, alone = (example.rows(start, count).copy().run(model) for start in (count - 2, count - 1))
    except Exception:  # what is wrong is told where the model is recorded
        return
    for two, one in zip(_tensors(pair), _tensors(alone), strict=False):
        if two.dtype not in (torch.float32, torch.float64) or two.ndim < 2 or len(two) != 2:
            continue
        if two[1:].shape == one.shape and float((two[1:] - one).norm()) > 0.1 * float(one.norm()):
            raise BadInput(
                f"{type(model).__name__}: its answer for a sample changes with the sample before it. Samples must lie "
                "along the first axis (batch_first=True) and not see each other; else pass one at a time."
            )


class _Spectra:
    """The spectra of one sample's Jacobians."""

    def __init__(
        self, sample: Sample, jacobians: Jacobians, steps: int, notes: list[str], progress: Progress | None
    ) -> None:
        self.sample, self.jacobians, self.steps, self.notes = sample, jacobians, steps, notes
        self.progress, self.done = progress, 0

    def of(self, name: str, part: Callable[[torch.dtype], tuple[Any, Tensor, int]]) -> Spectrum | None:
        if self.jacobians == "off":
            return None
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, 2 * len(self.sample.sites) + 1, f"Jacobian of {name}")
        try:
            function, value, lost = part(torch.float64)
            exact = self.jacobians == "exact" or value.numel() <= largest_built(value)
            if not exact:  # float32 with the error bars of an estimate
                function, value, lost = part(torch.float32)
            return jacobian_spectrum(function, value, exact=exact, steps=self.steps, null=lost)
        except (ReplayError, BadInput) as reason:
            self.notes.append(f"no Jacobian of {name}: {reason}")
        except (NotImplementedError, RuntimeError) as error:
            self.notes.append(f"no Jacobian of {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None


class _Gather:
    """Collects what the samples give."""

    def __init__(
        self, model: nn.Module, traced: PartsTrace, grid: tuple[int, int] | None, image: tuple[int, int] | None
    ) -> None:
        self.model, self.traced, self.grid, self.image = model, traced, grid, image
        self.sample = Sample(traced.trace)
        self.all = [site for site in self.sample.sites if not site.long]
        ends: dict[str, Site] = {}
        for site in self.all:
            ends[site.block] = site  # the last site of each block
        self.ends = ends
        self.notes: list[str] = [
            f"{site.name}: parts unknown ({traced.parts.reasons[site.index]})"
            for site in self.all
            if site.index in traced.parts.reasons and site.kind in ("attention", "mlp", "parallel")
        ]
        self.origins = self.sample.origins()
        self.start: dict[int, list[Tensor]] = {}  # by the site where a stream begins: x_0 by sample, (tokens, dim)
        self.after: dict[str, list[Tensor]] = {block: [] for block in ends}
        self.maps: dict[str, list[float]] = {block: [] for block in ends}
        self.ratios: dict[int, list[float]] = {site.index: [] for site in self.all}
        self.attention: dict[int, list[tuple[Tensor, Tensor | None, Tensor | None]]] = {}
        self.tokens = 0
        self.rounding = Rounding()

    def add(self, sample: Sample) -> None:
        for site in {origin.index: origin for origin in self.origins.values()}.values():
            first = sample.trace.runs[site.index][0].stream
            self.start.setdefault(site.index, []).append(tokens(sample.value(first), site)[0])
        self.tokens = len(next(iter(self.start.values()))[0])
        self.rounding.add(sample, self.ends)
        for block, site in self.ends.items():
            self.after[block].append(sample.sum(site)[0])
            self.maps[block].append(self._high(site, sample.value(sample.run(site).add.index)))
        for site in self.all:
            self.ratios[site.index].append(sample.ratio(site))
            if site.index in self.traced.attentions:
                self._attend(site, sample)

    def _attend(self, site: Site, sample: Sample) -> None:
        p = PartsTrace(sample.trace, self.traced.parts, self.traced.attentions).probabilities(site.index)
        square = p.shape[-1] == p.shape[-2]
        try:
            entry = (
                attention_entropy(p),
                self_attention_mass(p) if square else None,
                attention_condition(p) if square else None,
            )
        except BadInput as reason:  # a token that may look at nothing
            self.notes.append(f"{site.name}: attention not measured: {reason}")
            return
        self.attention.setdefault(site.index, []).append(entry)

    def _high(self, site: Site, value: Tensor) -> float:
        found = grid_of(self.model, site, value, self.image) if self.image is not None else None
        flat = tokens(value, site)
        if self.grid is not None:
            found = (flat.shape[1] - self.grid[0] * self.grid[1], *self.grid)
        if found is None or found[0] < 0 or min(found[1:]) < 2:
            return math.nan
        prefix, height, width = found
        return high_frequency_share(flat[:, prefix:], (height, width))

    def blocks(self, generator: torch.Generator) -> list[BlockRow]:
        result: list[BlockRow] = []
        before: dict[int, Tensor] = {}  # the block before, by stream
        changed = False
        blurred: list[str] = []  # where what is measured would be rounding
        for index, (block, last) in enumerate(self.ends.items()):
            origin = self.origins[last.index].index
            first = torch.stack(self.start[origin])  # (samples, tokens, dim)
            x = torch.stack(self.after[block])
            same = x.shape == first.shape
            changed = changed or not same
            keep = self._rows(x, generator)
            flat = feature_matrix(x)[keep]
            clear, samples, patches = (
                not rounded(block, self.after[block])
                for rounded in (self.rounding.in_tokens, self.rounding.in_samples, self.rounding.in_patches)
            )
            blurred += [] if clear and samples and patches else [block]
            result.append(
                BlockRow(
                    index=index,
                    path=block,
                    norm=feature_norm(x),
                    token_rank=effective_rank(flat) if len(flat) > 1 and clear else None,
                    token_entropy=_finite(rank_entropy(flat)) if len(flat) > 1 and clear else None,
                    pooled_rank=effective_rank(feature_matrix(x, "pooled")) if len(x) > 1 and samples else None,
                    carried=self._carried(last),
                    cosine=_finite(cosine(first, x)) if same else None,
                    echo=self._echo(first, x, generator) if x.shape[:2] == first.shape[:2] else None,
                    high_frequency=_finite(_mean(self.maps[block])) if patches else None,
                    cka_first=self._cka(first, x, generator) if clear else None,
                    cka_previous=self._cka(before[origin], x, generator) if clear and origin in before else None,
                    kurtosis=_finite(excess_kurtosis(x)),
                    sqnr8=_finite(sqnr(x, 8)),
                    sqnr4=_finite(sqnr(x, 4)),
                )
            )
            before[origin] = x
        count = len(next(iter(self.start.values())))
        if count < 3:
            which = "no pooled rank and no held-out echo" if count < 2 else "no held-out echo, which takes three"
            self.notes.append(f"{'one sample' if count < 2 else 'two samples'}: {which}")
        if len(self.start) > 1:
            names = ", ".join(site.path or "(model)" for site in self.all if site.index in self.start)
            self.notes.append(f"{len(self.start)} streams, which begin at {names}: each block is compared with its own")
        if changed:
            self.notes.append("the stream changes its shape with depth: no cosine with the input where it does")
        if blurred:
            more = f" and {len(blurred) - 3} more blocks" if len(blurred) > 3 else ""
            self.notes.append(
                f"{', '.join(blurred[:3])}{more}: tokens have grown so alike that rounding sets them apart; what that "
                "decides (rank, similarity, frequencies) is left out. A model in float64 shows more."
            )
        if all(math.isnan(value) for values in self.maps.values() for value in values):
            self.notes.append("no images, or no grid of their form: no spatial frequencies (pass grid=)")
        return result

    def _carried(self, last: Site) -> float:
        """The product of the alphas of a stream from its beginning up to a site."""
        product = 1.0
        for site in self.all:
            if site.index <= last.index and self.origins[site.index] is self.origins[last.index]:
                alpha, _ = self.sample.trace.weights[site.index]
                product *= mean_weight(alpha) ** site.runs
        return product

    def _rows(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Which tokens are used: all, or as many as can be afforded, the same ones for tensors of one shape."""
        total = x.shape[0] * x.shape[1]
        if total <= _ROWS:
            return torch.arange(total, device=x.device)
        seed = torch.Generator().manual_seed(generator.initial_seed())
        self.notes.append(f"rank, echo and similarity from {_ROWS} of {total} tokens")
        return torch.randperm(total, generator=seed)[:_ROWS].sort().values.to(x.device)

    def _echo(self, first: Tensor, x: Tensor, generator: torch.Generator) -> float | None:
        if len(x) < 3:  # to fit, to choose the ridge and to judge
            return None
        keep = self._rows(x, generator)
        groups = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])[keep]
        seed = torch.Generator().manual_seed(generator.initial_seed())
        return _finite(ridge_r2(feature_matrix(x)[keep], feature_matrix(first)[keep], groups=groups, generator=seed))

    def _cka(self, a: Tensor, b: Tensor, generator: torch.Generator) -> float | None:
        if a.shape[:2] != b.shape[:2]:
            return None
        keep = self._rows(b, generator)
        x, y = feature_matrix(a)[keep], feature_matrix(b)[keep]
        if len(x) < 4:
            return None
        return _finite(cka(x, y))  # features that do not vary have none

    def sites(self, spectra: _Spectra, generator: torch.Generator) -> list[SiteRow]:
        try:
            gradients = dict(
                zip((s.index for s in self.sample.sites), gradient_norms(self.sample, generator), strict=True)
            )
        except (ReplayError, RuntimeError, NotImplementedError) as error:
            gradients = {}
            self.notes.append(f"no gradient norms: {str(error).splitlines()[0]}")
        return [self._site(site, spectra, gradients.get(site.index)) for site in self.all]

    def _site(self, site: Site, spectra: _Spectra, gradient: float | None) -> SiteRow:
        part = self.traced.parts[site.index]
        attention = part.attention if isinstance(part, ParallelParts) else part
        value_output = None
        if isinstance(attention, AttentionParts):
            value_output = float(value_output_condition(*_grouped(attention)))
        alpha, beta = map(mean_weight, self.sample.trace.weights[site.index])
        entropy, mass, cond = self._heads(site)
        return SiteRow(
            index=site.index,
            path=site.path,
            kind=site.kind,
            alpha=alpha,
            beta=beta,
            ratio=_mean(self.ratios[site.index]),
            branch=spectra.of(f"the branch of {site.name}", lambda dtype: self.sample.branch(site, dtype)),
            sublayer=spectra.of(f"{site.name} with its skip", lambda dtype: self.sample.sublayer(site, dtype)),
            entropy=entropy,
            self_attention=mass,
            attention_condition=cond,
            value_output=value_output,
            gradient=None if gradient is None else _finite(gradient),
        )

    def _heads(self, site: Site) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None, tuple[float, ...] | None]:
        entries = self.attention.get(site.index)
        if not entries:
            return None, None, None
        entropy = torch.stack([e for e, _, _ in entries]).mean(0)
        masses = [m for _, m, _ in entries if m is not None]
        conditions = [c for _, _, c in entries if c is not None]
        return (
            tuple(entropy.tolist()),
            tuple(torch.stack(masses).mean(0).tolist()) if masses else None,
            tuple(torch.stack(conditions).median(0).values.tolist()) if conditions else None,
        )


def _grouped(part: AttentionParts) -> tuple[Tensor, Tensor]:
    """W_V (inner, dim) and W_O (dim, inner); queries that share their values also share what they write."""
    out = part.out.double().unflatten(1, (part.v.shape[0], -1, part.v.shape[1])).sum(2).flatten(1)
    return part.v.flatten(0, 1).double(), out


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
