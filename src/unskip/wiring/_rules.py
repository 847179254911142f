"""The built-in shortcut rules: Keep, Cut, Scale, Learn, Decay, Anneal.

`Decay` is the rule of "Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947).
"""

from __future__ import annotations

import math
import reprlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

from unskip._checks import choice, number, whole
from unskip._words import nearest
from unskip.errors import BadInput
from unskip.wiring._effective_decay import effective_decay, run_counts
from unskip.wiring._shortcut import Per, Shortcut, Weight, parse, register

Shape = Literal["linear", "cosine", "geometric"]
Ease = Literal["linear", "cosine"]
Order = Literal["last-first", "first-last"]
Convention = Literal["sites", "paper"]
_WORDS: dict[str, Any] = {"shape": Ease, "order": Order}  # of Anneal


@register
@dataclass(frozen=True)
class Keep(Shortcut):
    """The plain model: alpha_l = beta_l = 1."""

    name = form = "keep"

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(1.0, 1.0)] * count


@register
@dataclass(frozen=True)
class Cut(Shortcut):
    """No shortcut: alpha_l = 0, beta_l = 1."""

    name = form = "cut"

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(0.0, 1.0)] * count


@register
@dataclass(frozen=True)
class Scale(Shortcut):
    """The same weights at every site: alpha_l = stream, beta_l = branch."""

    stream: float = 1.0
    branch: float = 1.0
    name = "scale"
    form = "scale:0.7071,0.7071"
    numbers = ("stream", "branch")

    def __post_init__(self) -> None:
        _put(self, stream=number("Scale", "stream", self.stream), branch=number("Scale", "branch", self.branch))

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(self.stream, self.branch)] * count


@register
@dataclass(frozen=True)
class Learn(Shortcut):
    """alpha_l is a parameter initialised at `start`, one per site or one per channel of each site; beta_l = 1.

    `weights` returns the initial values. In the paper learned alphas drift back to 1 and do worse than fixed ones.
    """

    start: float = 1.0
    per: Per = "site"
    name = "learn"
    form = "learn:1.0 or learn:1.0,channel"
    numbers = ("start",)
    words = dict.fromkeys(get_args(Per), "per")
    learnable = True

    def __post_init__(self) -> None:
        _put(self, start=number("Learn", "start", self.start))
        choice("Learn", "per", self.per, get_args(Per))

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(self.start, 1.0)] * count


@register
@dataclass(frozen=True)
class Decay(Shortcut):
    """alpha falls with depth from 1 to alpha_min; beta_l = 1. With position t_l in [0, 1],

        linear     alpha_l = 1 - t_l (1 - alpha_min)
        cosine     alpha_l = 1 - sin^2(pi t_l / 2) (1 - alpha_min), half a cosine between the same ends
        geometric  alpha_l = alpha_min ** t_l, for alpha_min > 0

    The relative depth is d_l = (l - 1) / (L - 1) as in the paper's code (first site exactly 1, last exactly alpha_min),
    or d_l = l / L with convention="paper" as in its text. t_l = min(1, d_l / until): alpha reaches the minimum at depth
    `until` and stays there. With back=True (default until=0.5), t_l = (1 - d_l) / (1 - until) beyond `until`: alpha
    returns to exactly 1 at the last site, and takes the minimum only if a site is exactly at `until`. A single site
    gets alpha_min.

    `Decay.to_product(p)`, or Decay(product=p), has no alpha_min: it is solved for the sites that the rule governs.
    """

    alpha_min: float | None = None
    shape: Shape = "linear"
    _: KW_ONLY
    convention: Convention = "sites"
    until: float | None = None  # set by __post_init__: 1.0, or 0.5 with back
    back: bool = False
    product: float | None = None
    name = "decay"
    form = "decay:0.6 or decay:product=5e-3, then any of ,cosine ,geometric ,paper ,until=0.5 ,back"
    numbers = ("alpha_min",)
    words = dict.fromkeys(get_args(Shape), "shape") | dict.fromkeys(get_args(Convention), "convention")
    words["back"] = "back"

    def __post_init__(self) -> None:
        choice("Decay", "shape", self.shape, get_args(Shape))
        choice("Decay", "convention", self.convention, get_args(Convention))
        if not isinstance(self.back, bool):
            raise BadInput(f"Decay: back must be True or False, got {reprlib.repr(self.back)}")
        if (self.alpha_min is None) == (self.product is None):
            raise BadInput("Decay: give either alpha_min or product, as in Decay(0.6), decay:0.6, decay:product=5e-3")
        if self.product is None:
            who, zero = f"Decay ({self.shape})", self.shape != "geometric"  # 0 ** t would be a step, not a decay
            _put(self, alpha_min=number(who, "alpha_min", self.alpha_min, high=1, zero=zero))
        else:
            _put(self, product=number("Decay", "product", self.product, high=1, zero=False))
        until = (0.5 if self.back else 1.0) if self.until is None else self.until
        _put(self, until=number("Decay", "until", until, high=1, zero=False))
        if self.back and self.until == 1:
            raise BadInput("Decay: back=True needs until below 1, got 1.0; no depth is left for the return to 1")

    @classmethod
    def to_product(
        cls,
        p: float,
        shape: Shape = "linear",
        *,
        convention: Convention = "sites",
        until: float | None = None,
        back: bool = False,
    ) -> Decay:
        """The decay whose effective decay over the sites it governs is p."""
        return cls(None, shape, convention=convention, until=until, back=back, product=p)

    def solve(self, count: int, runs: Sequence[int] | None = None) -> float:
        """The alpha_min for `count` sites: the given one, or the one whose effective decay is `product`."""
        count = whole("Decay.solve", "count", count, low=1)
        counts = run_counts(runs, count)
        return _solve(self, count, counts) if self.alpha_min is None else self.alpha_min

    def _alphas(self, count: int, low: float) -> list[float]:
        shift, last = (0, count - 1) if self.convention == "sites" else (1, count)
        until, out = self.until or 1.0, []
        for index in range(shift, count + shift):
            # Separate divisions, so that back=True is symmetric bit for bit. A single site is at depth `until`.
            depth, rest = (index / last, (last - index) / last) if count > 1 else (until, 0.0)
            t = rest / (1 - until) if self.back and depth > until else min(1.0, depth / until)
            fall = math.sin(math.pi * t / 2) ** 2 if self.shape == "cosine" else t
            alpha = low**t if self.shape == "geometric" else 1 - fall * (1 - low)
            out.append(low if t >= 1 else max(low, alpha))  # exact in spite of rounding
        return out

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(alpha, 1.0) for alpha in self._alphas(count, self.solve(count, runs))]

    def __str__(self) -> str:
        parts = [f"product={self.product!r}" if self.alpha_min is None else repr(self.alpha_min)]
        parts += [self.shape] * (self.shape != "linear") + ["paper"] * (self.convention == "paper")
        parts += [f"until={self.until!r}"] * (self.until != 1) + ["back"] * self.back
        return "decay:" + ",".join(parts)


@register
@dataclass(frozen=True)
class Anneal(Shortcut):
    """Anneals from one rule to another over training: w = (1 - g) * first + g * last, for alpha and beta,

    with g = t, or g = sin^2(pi t / 2) for shape="cosine", and t = step / steps clamped to [0, 1]. The weights are
    exactly those of first at step <= 0 and of last at step >= steps. With an `order` the sites change one by one, each
    over steps / L: t = L step / steps - n, clamped to [0, 1], for the n-th of L sites in that order, n = 0..L-1.
    """

    first: Shortcut
    last: Shortcut
    steps: int = field()  # without field() the None of the base class would become its default
    shape: Ease = "linear"
    order: Order | None = None  # None: all sites at once
    name = "anneal"
    form = "anneal:keep>cut@10000, then any of ,cosine ,last-first ,first-last"

    def __post_init__(self) -> None:
        for name, rule in (("first", self.first), ("last", self.last)):
            if not isinstance(rule, Shortcut) or rule.learnable or rule.steps is not None:
                raise BadInput(f"Anneal: {name} must be a rule of fixed weights such as Keep() or Cut(), got {rule!r}")
        _put(self, steps=whole("Anneal", "steps", self.steps, low=1))
        choice("Anneal", "shape", self.shape, get_args(Ease))
        if self.order is not None:
            choice("Anneal", "order", self.order, get_args(Order))

    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        pairs = zip(self.first.weights(count, runs=runs), self.last.weights(count, runs=runs), strict=True)
        return [self._mixed(first, last, self._time(site, count, step)) for site, (first, last) in enumerate(pairs)]

    def _time(self, site: int, count: int, step: int) -> float:
        """The annealing time t of a site, from 0 to 1."""
        if self.order is None:
            done = step
        else:
            done = count * step - self.steps * (site if self.order == "first-last" else count - 1 - site)
        return min(max(done, 0), self.steps) / self.steps

    def _mixed(self, first: Weight, last: Weight, t: float) -> Weight:
        if t in (0, 1):
            return last if t else first
        g = t if self.shape == "linear" else math.sin(math.pi * t / 2) ** 2
        return Weight(_between(first.alpha, last.alpha, g), _between(first.beta, last.beta, g))

    @classmethod
    def from_text(cls, body: str | None) -> Anneal:
        """ "FIRST>LAST@STEPS", optionally with ",cosine" and an order."""
        rules, at, end = (body or "").rpartition("@")
        if not at:
            cls.refuse(f"'@' and the number of steps are missing in {body or ''!r}")
        if rules.count(">") != 1:
            cls.refuse(f"give two rules with one '>' between them, neither an anneal, got {rules!r}")
        first, last = rules.split(">")
        number, *words = (part.strip() for part in end.split(","))
        try:
            steps = int(number)
        except ValueError:
            cls.refuse(f"the steps must be a whole number, got {number!r}")
        given: dict[str, Any] = {}
        for word in words:
            name = next((name for name, kind in _WORDS.items() if word in get_args(kind)), None)
            if name is None or name in given:
                known = [option for kind in _WORDS.values() for option in get_args(kind)]
                cls.refuse(f"{word!r} is not a shape or order, or a second one{nearest(word, known)}")
            given[name] = word
        return cls(parse(first), parse(last), steps, **given)

    def __str__(self) -> str:
        words = f",{self.shape}" * (self.shape != "linear") + f",{self.order}" * (self.order is not None)
        return f"anneal:{self.first}>{self.last}@{self.steps}{words}"


@lru_cache(maxsize=256)  # an annealed rule is solved at every step
def _solve(rule: Decay, count: int, runs: tuple[int, ...]) -> float:
    target = rule.product or 1.0
    if target == 1:
        return 1.0

    def alpha_min(bits: int) -> float:
        return float(struct.unpack("<d", struct.pack("<q", bits))[0])

    def product(bits: int) -> float:  # increases with alpha_min
        return effective_decay(rule._alphas(count, alpha_min(bits)), runs)

    # Positive floats sort like their bit patterns: bisection of those finds the nearest float in 62 steps at any scale.
    least, one = 1 if rule.shape == "geometric" else 0, struct.unpack("<q", struct.pack("<d", 1.0))[0]
    best = least + bisect_left(range(least, one), target, key=product)
    if not math.isclose(product(best), target, rel_tol=1e-9):
        raise BadInput(
            f"{rule}: no alpha_min gives {count} sites ({sum(runs)} runs) an effective decay of {target:g}; "
            f"reachable is [{product(least):.6g}, 1], nearest {product(best):.6g}; "
            "choose that, or change the shape, until or back"
        )
    return alpha_min(best)


def _between(first: float, last: float, g: float) -> float:
    # Clamped, because rounding may exceed the end.
    return min(max(first + (last - first) * g, min(first, last)), max(first, last))


def _put(rule: Shortcut, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(rule, name, value)  # allows a frozen dataclass to normalise its fields
