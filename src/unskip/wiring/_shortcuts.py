"""The rules that say how strong each shortcut is.

At the residual sites l = 1..L that a rule governs, in execution order,

    x  <-  alpha_l * x  +  beta_l * f_l(x)

and a rule gives every site its (alpha_l, beta_l). Rules are plain values: they compare, hash, pickle, and go through
text (`parse`, `str`) and JSON (`from_dict`, `to_dict`) unchanged. `Decay` is the rule of "Residual Connections Harm
Generative Representation Learning" (arXiv 2404.10947).
"""

from __future__ import annotations

import math
import reprlib
import struct
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, get_args

from unskip._checks import choice, number, whole
from unskip._words import nearest
from unskip.errors import BadInput

Shape = Literal["linear", "cosine", "geometric"]
Ease = Literal["linear", "cosine"]
Convention = Literal["sites", "paper"]
Per = Literal["site", "channel"]

BAND = (1e-3, 1e-2)  # where the paper wants the effective decay: from the first, up to but without the second


class Weight(NamedTuple):
    """What one site gets: x <- alpha * x + beta * f(x)."""

    alpha: float
    beta: float


def run_counts(runs: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """How often each of `count` sites runs in one forward."""
    if runs is None:
        return (1,) * count
    each = tuple(whole("runs", "every entry", run, low=0) for run in runs)
    if len(each) != count:
        raise BadInput(f"runs: there must be one entry for each of the {count} sites, got {len(each)}")
    return each


def effective_decay(alphas: Iterable[float], runs: Iterable[int] | None = None) -> float:
    """prod_l alpha_l ** runs_l: how much of the first stream is left at the end.

    Zero only when an alpha that runs is zero: what a float cannot hold stops at the least or greatest positive one.
    """
    values = [number("effective_decay", "every alpha", alpha) for alpha in alphas]
    mantissa, exponent = 1.0, 0  # kept apart, so that nothing on the way under- or overflows
    for value, run in zip(values, run_counts(runs, len(values)), strict=True):
        if value == 0 and run:
            return 0.0
        part, shift = math.frexp(value)
        while run:
            power = min(run, 512)  # part >= 1/2, so part ** 512 is still a normal float
            mantissa, carry = math.frexp(mantissa * part**power)
            exponent += carry + shift * power
            run -= power
    if exponent > sys.float_info.max_exp:
        return sys.float_info.max
    return max(math.ldexp(mantissa, exponent), math.ulp(0.0))


def band(decay: float) -> str:
    """Where an effective decay lies relative to the paper's band."""
    decay = number("band", "decay", decay)
    place = "below" if decay < BAND[0] else "above" if decay >= BAND[1] else "in"
    return f"{place} the paper's band [1e-3, 1e-2)"


class Shortcut(ABC):
    """A rule: the weights of the sites it governs, as a frozen value."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # every rule is a dataclass
    name: ClassVar[str]
    form: ClassVar[str]  # a right text form, shown in errors
    numbers: ClassVar[tuple[str, ...]] = ()  # the arguments that bare numbers of the text form fill, in order
    words: ClassVar[dict[str, str]] = {}  # a word of the text form -> the argument it sets
    learnable: ClassVar[bool] = False
    steps: int | None = None  # training steps until the weights stand still; None where they never move

    def weights(self, count: int, *, runs: Sequence[int] | None = None, step: int = 0) -> list[Weight]:
        """The weights of `count` sites in execution order; site i runs runs[i] times in one forward (default 1)."""
        who = type(self).__name__
        count, step = whole(who, "count", count, low=0), whole(who, "step", step)
        each = run_counts(runs, count)
        return self._weights(count, each, step) if count else []

    @abstractmethod
    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]: ...

    def __str__(self) -> str:
        return self.name

    def to_dict(self) -> dict[str, Any]:
        """{"rule": name, **arguments}: JSON-able, and read by `from_dict`."""
        data: dict[str, Any] = {"rule": self.name}
        for item in fields(self):
            if (value := getattr(self, item.name)) is not None:
                data[item.name] = value.to_dict() if isinstance(value, Shortcut) else value
        return data


@dataclass(frozen=True)
class Keep(Shortcut):
    """The plain model: alpha_l = beta_l = 1."""

    name = form = "keep"

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(1.0, 1.0)] * count


@dataclass(frozen=True)
class Cut(Shortcut):
    """No shortcut at all: alpha_l = 0, beta_l = 1."""

    name = form = "cut"

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(0.0, 1.0)] * count


@dataclass(frozen=True)
class Scale(Shortcut):
    """The same weights everywhere: alpha_l = stream, beta_l = branch."""

    stream: float = 1.0
    branch: float = 1.0
    name = "scale"
    form = "scale:0.7071,0.7071"
    numbers = ("stream", "branch")

    def __post_init__(self) -> None:
        _put(self, stream=number("Scale", "stream", self.stream), branch=number("Scale", "branch", self.branch))

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(self.stream, self.branch)] * count

    def __str__(self) -> str:
        return f"scale:{self.stream!r},{self.branch!r}"


@dataclass(frozen=True)
class Learn(Shortcut):
    """alpha_l is a parameter that begins at `start`, one a site or one a channel of each site; beta_l = 1.

    `weights` gives where it begins. In the paper learnt alphas drift back to 1 and do worse than fixed ones.
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

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(self.start, 1.0)] * count

    def __str__(self) -> str:
        return f"learn:{self.start!r}" + (",channel" if self.per == "channel" else "")


@dataclass(frozen=True)
class Decay(Shortcut):
    """alpha falls with depth from 1 to alpha_min; beta_l = 1. With position t_l in [0, 1],

        linear     alpha_l = 1 - t_l (1 - alpha_min)
        cosine     alpha_l = 1 - sin^2(pi t_l / 2) (1 - alpha_min), half a cosine between the same ends
        geometric  alpha_l = alpha_min ** t_l, for alpha_min > 0

    The share of depth is d_l = (l - 1) / (L - 1) as in the paper's code (first site exactly 1, last exactly alpha_min),
    or d_l = l / L with convention="paper" as in its text. t_l = min(1, d_l / until): the minimum is reached at that
    share of depth and stays. With back=True (until is then 0.5 unless given) t_l = (1 - d_l) / (1 - until) beyond it:
    alpha returns to exactly 1 at the last site. The minimum itself then shows only if a site lies right at `until`.
    One site alone gets alpha_min.

    `Decay.to_product(p)`, or Decay(product=p), has no alpha_min of its own: it is solved for the sites it meets.
    """

    alpha_min: float | None = None
    shape: Shape = "linear"
    _: KW_ONLY
    convention: Convention = "sites"
    until: float | None = None  # a number once made: 1.0, or 0.5 with back
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
            who, zero = f"Decay ({self.shape})", self.shape != "geometric"  # 0 ** t is no decay but a cliff
            _put(self, alpha_min=number(who, "alpha_min", self.alpha_min, high=1, zero=zero))
        else:
            _put(self, product=number("Decay", "product", self.product, high=1, zero=False))
        until = (0.5 if self.back else 1.0) if self.until is None else self.until
        _put(self, until=number("Decay", "until", until, high=1, zero=False))
        if self.back and self.until == 1:
            raise BadInput("Decay: back=True needs until below 1, got 1.0; there is no depth left to return in")

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
        """The decay whose effective decay, over whatever sites it meets, is p."""
        return cls(None, shape, convention=convention, until=until, back=back, product=p)

    def solve(self, count: int, runs: Sequence[int] | None = None) -> float:
        """The alpha_min that `count` sites get: its own, or the one that makes their effective decay the product."""
        count = whole("Decay.solve", "count", count, low=1)
        each = run_counts(runs, count)
        return _solve(self, count, each) if self.alpha_min is None else self.alpha_min

    def _alphas(self, count: int, low: float) -> list[float]:
        shift, last = (0, count - 1) if self.convention == "sites" else (1, count)
        until, out = self.until or 1.0, []
        for index in range(shift, count + shift):
            # Each by its own division, so that back mirrors bit for bit; a site alone is all of the depth.
            depth, rest = (index / last, (last - index) / last) if count > 1 else (until, 0.0)
            t = rest / (1 - until) if self.back and depth > until else min(1.0, depth / until)
            fall = math.sin(math.pi * t / 2) ** 2 if self.shape == "cosine" else t
            alpha = low**t if self.shape == "geometric" else 1 - fall * (1 - low)
            out.append(low if t >= 1 else max(low, alpha))  # the formulas reach their end only up to rounding
        return out

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        return [Weight(alpha, 1.0) for alpha in self._alphas(count, self.solve(count, runs))]

    def __str__(self) -> str:
        parts = [f"product={self.product!r}" if self.alpha_min is None else repr(self.alpha_min)]
        parts += [self.shape] * (self.shape != "linear") + ["paper"] * (self.convention == "paper")
        parts += [f"until={self.until!r}"] * (self.until != 1) + ["back"] * self.back
        return "decay:" + ",".join(parts)


@dataclass(frozen=True)
class Anneal(Shortcut):
    """From one rule to another over training: w = (1 - g) * first + g * last, for alpha and beta alike,

    with g = step / steps held in [0, 1], or sin^2(pi step / (2 steps)) with shape="cosine". Exactly first's weights at
    step <= 0 and exactly last's at step >= steps.
    """

    first: Shortcut
    last: Shortcut
    steps: int = field()  # without field() the None of the base class would become its default
    shape: Ease = "linear"
    name = "anneal"
    form = "anneal:keep>cut@10000 or anneal:keep>decay:0.6@10000,cosine"

    def __post_init__(self) -> None:
        for name, rule in (("first", self.first), ("last", self.last)):
            if not isinstance(rule, Shortcut) or isinstance(rule, Learn | Anneal):
                raise BadInput(f"Anneal: {name} must be a rule of fixed weights such as Keep() or Cut(), got {rule!r}")
        _put(self, steps=whole("Anneal", "steps", self.steps, low=1))
        choice("Anneal", "shape", self.shape, get_args(Ease))

    def _weights(self, count: int, runs: tuple[int, ...], step: int) -> list[Weight]:
        if step >= self.steps:
            return self.last._weights(count, runs, 0)
        g = max(0, step) / self.steps
        g = g if self.shape == "linear" else math.sin(math.pi * g / 2) ** 2
        pairs = zip(self.first._weights(count, runs, 0), self.last._weights(count, runs, 0), strict=True)
        return [Weight(_between(a.alpha, b.alpha, g), _between(a.beta, b.beta, g)) for a, b in pairs]

    def __str__(self) -> str:
        return f"anneal:{self.first}>{self.last}@{self.steps}" + (",cosine" if self.shape == "cosine" else "")


def parse(text: str) -> Shortcut:
    """The rule that a text form such as "decay:0.6,cosine" names; parse(str(rule)) == rule."""
    if not isinstance(text, str):
        raise BadInput(f"a shortcut as text must be a string such as 'decay:0.6', got {reprlib.repr(text)}")
    head, colon, body = text.partition(":")
    kind = _kind(head.strip())
    if kind is Anneal:
        return _parse_anneal(body)
    given: dict[str, Any] = {}
    free = list(kind.numbers)
    keys = [item.name for item in fields(kind) if item.name not in kind.words.values()]
    for item in (part.strip() for part in body.split(",") if colon):
        name, equals, number = (part.strip() for part in item.partition("="))
        got: Any
        if item in kind.words:
            name = kind.words[item]
            got = True if name == item else item  # a flag's word is its own name
        else:
            keyed = equals and name in keys
            try:
                got = float(number if keyed else item)
            except ValueError:
                _wrong(kind, f"{item!r} is neither a number nor an option{nearest(name, [*kind.words, *keys])}")
            if not keyed:
                name = free.pop(0) if free else _wrong(kind, f"{item!r} is one number too many")
        if name in given:
            _wrong(kind, f"{name} is given twice, the second time as {item!r}")
        given[name] = got
    return kind(**given)


def _parse_anneal(body: str) -> Anneal:
    rules, at, end = body.rpartition("@")
    if not at:
        _wrong(Anneal, f"'@' and the number of steps are missing in {body!r}")
    if rules.count(">") != 1:
        _wrong(Anneal, f"it takes two rules with one '>' between them, neither an anneal itself, got {rules!r}")
    first, last = rules.split(">")
    number, comma, shape = (part.strip() for part in end.partition(","))
    try:
        steps = int(number)
    except ValueError:
        _wrong(Anneal, f"the steps must be a whole number, got {number!r}")
    return Anneal(parse(first), parse(last), steps, shape if comma else "linear")  # type: ignore[arg-type]  # it checks


def from_dict(data: Mapping[str, Any]) -> Shortcut:
    """The rule that `to_dict` wrote. What is left out takes its default; what is not known is refused."""
    if not isinstance(data, Mapping) or not isinstance(data.get("rule"), str):
        raise BadInput(f"a shortcut as a dict names its rule, as in {{'rule': 'cut'}}, got {reprlib.repr(data)}")
    kind = _kind(data["rule"])
    given = {name: from_dict(v) if isinstance(v, Mapping) else v for name, v in data.items() if name != "rule"}
    known = {item.name: item.default for item in fields(kind)}
    if strange := [str(name) for name in given if name not in known]:
        has = ", ".join(known) or "none"
        raise BadInput(f"{kind.name}: unknown argument {strange[0]!r}{nearest(strange[0], known)}; it has: {has}")
    if missing := [name for name, default in known.items() if default is MISSING and name not in given]:
        raise BadInput(f"{kind.name}: missing {', '.join(missing)}")
    return kind(**given)


@lru_cache(maxsize=256)  # an annealed rule asks again at every step
def _solve(rule: Decay, count: int, runs: tuple[int, ...]) -> float:
    wanted = rule.product or 1.0
    if wanted == 1:
        return 1.0

    def alpha_min(bits: int) -> float:
        return float(struct.unpack("<d", struct.pack("<q", bits))[0])

    def reached(bits: int) -> float:  # rises with alpha_min
        return effective_decay(rule._alphas(count, alpha_min(bits)), runs)

    # Positive floats sort as their bit patterns do: halving those finds the nearest float in 62 steps at any scale.
    least, one = 1 if rule.shape == "geometric" else 0, struct.unpack("<q", struct.pack("<d", 1.0))[0]
    best = least + bisect_left(range(least, one), wanted, key=reached)
    if not math.isclose(reached(best), wanted, rel_tol=1e-9):
        raise BadInput(
            f"{rule}: no alpha_min gives {count} sites ({sum(runs)} runs) an effective decay of {wanted:g}; "
            f"reachable is [{reached(least):.6g}, 1], nearest {reached(best):.6g}; "
            "ask for that, or change the shape, until or back"
        )
    return alpha_min(best)


def _between(first: float, last: float, g: float) -> float:
    # Rounding may step past the end, and a schedule must not.
    return min(max(first + (last - first) * g, min(first, last)), max(first, last))


def _kind(name: str) -> type[Shortcut]:
    kinds = {kind.name: kind for kind in (Keep, Decay, Cut, Scale, Learn, Anneal)}
    if name not in kinds:
        raise BadInput(f"no shortcut is called {name!r}{nearest(name, kinds)}; there are: {', '.join(kinds)}")
    return kinds[name]


def _wrong(kind: type[Shortcut], why: str) -> NoReturn:
    raise BadInput(f"{kind.name}: {why}; write {kind.form}")


def _put(rule: Shortcut, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(rule, name, value)  # the way a frozen dataclass normalises its own fields
