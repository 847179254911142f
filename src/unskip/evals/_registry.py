"""Protocols: frozen, named, versioned evaluations. An evaluator is a function that registers itself under a name.

    @unskip.evals.register("spread-v1", needs="features", about="Mean distance to the mean.", samples=1000)
    def spread(train, test, samples):
        x = test.features[:samples]
        return {"spread": float((x - x.mean(0)).norm(dim=1).mean())}

From then on `unskip.evals.evaluate`, `unskip eval` and the report know it. The keywords after `about` and those that
are named below are its settings: they never change under this name, and what should be otherwise gets a new one,
spread-v2. Settings that a caller changes are recorded beside the name. A setting `samples` limits an evaluation to the
first so many test samples.

An evaluator gets two splits (see `Split`) and returns plain numbers. The registry adds n, the number of test samples,
and a 95% Wilson interval to those that are fractions of it. One that knows its own 95% interval returns (number, low,
high).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from unskip._checks import choice
from unskip._words import nearest
from unskip.errors import BadInput

Needs = Literal["features", "tokens", "patches", "logits", "predictions", "samples", "model"]
Pool = Literal["mean", "cls"]
TokenNorm = Literal["none", "layer"]
What = Literal["tokens", "keys", "queries", "values"]
Truth = Literal["labels", "masks", "boxes"]
Evaluator = Callable[..., Any]
F = TypeVar("F", bound=Evaluator)

Z = 1.959963984540054  # of a normal distribution, 95% lie within so many standard deviations


@dataclass(frozen=True)
class Protocol:
    """One way of evaluating: a function, what it is given, and its frozen settings."""

    name: str
    needs: Needs
    function: Evaluator
    settings: Mapping[str, Any]
    about: str = ""
    fractions: tuple[str, ...] = ()  # the numbers that are fractions of the test samples, as names or patterns (knn*)
    pool: Pool = "mean"  # of features: the mean of all tokens, or the class token
    norm: TokenNorm = "none"  # of features: "layer" brings every token to mean 0 and variance 1 before pooling
    what: What = "tokens"  # of patches: which vectors
    truth: Truth = "labels"  # what the splits have to have beside their images
    exact: bool = False  # of patches: made in float32 without TF32, whatever precision the caller asks for
    whole: bool = False  # of a model: of a run's whole one, and not of the part that makes features
    train: bool = True  # whether it looks at training samples at all
    batched: bool = False  # whether it takes features (blocks, n, dim) and returns a mapping for each block
    fixed: tuple[str, ...] = ()  # settings that make it this protocol, and cannot be changed
    positive: tuple[str, ...] = ()  # settings that are above 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data: everything that decides the number."""
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()}
        view: dict[str, Any] = {"pool": self.pool, "norm": self.norm} if self.needs == "features" else {}
        view |= {"what": self.what} if self.needs == "patches" else {}
        return {"name": self.name, "needs": self.needs, **view, "settings": settings}

    def settings_with(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings with some changed. Raises BadInput for one that it does not have, or that cannot be so."""
        changes = changes or {}
        unknown = sorted(set(changes) - set(self.settings))
        if unknown:
            near = nearest(unknown[0], self.settings)
            known = f"it has {', '.join(self.settings)}" if self.settings else "it has none"
            raise BadInput(f"{self.name} has no setting {', '.join(unknown)}{near}; {known}")
        for setting, value in changes.items():
            if setting in self.fixed:
                others = ", ".join(each for each in self.settings if each not in self.fixed)
                raise BadInput(f"{self.name}: {setting} cannot be changed; of its settings {others} can")
            _check(self, setting, value)
        return {**self.settings, **changes}

    def intervals(self, values: Mapping[str, float], n: int) -> dict[str, tuple[float, float]]:
        """The 95% interval of every number that is a fraction of n samples."""
        for pattern in self.fractions:
            if not any(fnmatchcase(name, pattern) for name in values):
                raise BadInput(f"{self.name}: fractions has {pattern!r}, and it returns {', '.join(values)}")
        some = [name for name in values if any(fnmatchcase(name, pattern) for pattern in self.fractions)]
        for name in some:
            if values[name] < 0 or values[name] > 1:
                raise BadInput(f"{self.name}: {name} is {values[name]:g}, and it is declared a fraction")
        return {name: wilson(values[name], n) for name in some if not math.isnan(values[name])}


_PROTOCOLS: dict[str, Protocol] = {}
# All evaluators by the name of their protocol, as `unskip eval --protocol` takes them.
PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(_PROTOCOLS)


def register(
    name: str,
    /,
    *,
    needs: Needs,
    about: str = "",
    fractions: Sequence[str] = (),
    pool: Pool = "mean",
    norm: TokenNorm = "none",
    what: What = "tokens",
    truth: Truth = "labels",
    exact: bool = False,
    whole: bool = False,
    train: bool = True,
    batched: bool = False,
    fixed: Sequence[str] = (),
    positive: Sequence[str] = (),
    **settings: Any,
) -> Callable[[F], F]:
    """Enters a function as the evaluator of a protocol; one function can be that of several.

    It is called as function(train, test, **settings), with `needs="model"` as function(model, train, test, **settings),
    and returns a mapping from names to numbers. `Protocol` says what the other keywords mean.
    """
    if not re.fullmatch(r"[a-zA-Z0-9][\w.-]*", name):
        raise BadInput(f"{name!r} is no name of a protocol; take letters, digits, dots and hyphens, as in near-v1")
    for option, value, known in (
        ("needs", needs, Needs),
        ("pool", pool, Pool),
        ("norm", norm, TokenNorm),
        ("what", what, What),
        ("truth", truth, Truth),
    ):
        choice(name, option, value, get_args(known))
    for option, names in (("fractions", fractions), ("fixed", fixed), ("positive", positive)):
        if isinstance(names, str):
            raise BadInput(f"{name}: {option} is the text {names!r}; give a tuple of names, ({names!r},)")

    def enter(function: F) -> F:
        before = _PROTOCOLS.get(name)
        places = [(each.__module__, each.__qualname__) for each in (before.function, function)] if before else []
        if len({*places}) > 1:
            raise BadInput(f"{name} is registered by {'.'.join(places[0])} already; take another name")
        try:
            inspect.signature(function).bind(*(["model"] if needs == "model" else []), "train", "test", **settings)
        except TypeError as error:
            given = ", ".join([*(["model"] if needs == "model" else []), "train", "test", *settings])
            raise BadInput(f"{name}: its function is called with ({given}): {error}") from error
        _PROTOCOLS[name] = Protocol(
            name=name,
            needs=needs,
            function=function,
            settings=MappingProxyType(settings),
            about=about,
            fractions=tuple(fractions),
            pool=pool,
            norm=norm,
            what=what,
            truth=truth,
            exact=exact,
            whole=whole,
            train=train,
            batched=batched,
            fixed=tuple(fixed),
            positive=tuple(positive),
        )
        return function

    return enter


def protocol(name: str, *functions: Evaluator) -> Protocol:
    """The protocol of a name, among those of some functions if given. Raises BadInput with the nearest names."""
    known = [each.name for each in PROTOCOLS.values() if not functions or each.function in functions]
    if name not in known:
        other = f" ({name} is another kind of protocol)" if name in PROTOCOLS else nearest(name, known)
        raise BadInput(f"no protocol {name!r} here{other}; there are {', '.join(known)}")
    return PROTOCOLS[name]


def find_protocols(names: Sequence[str], changes: Mapping[str, Mapping[str, Any]] | None = None) -> list[Protocol]:
    """The protocols of some names. Raises BadInput for changes of any other one, or that one does not take."""
    protocols = [protocol(name) for name in names]
    for name, values in (changes or {}).items():
        if name not in names:
            raise BadInput(f"changes of {name}, which is not asked for; asked for are {', '.join(names)}")
        protocol(name).settings_with(values)
    return protocols


def wilson(share: float, n: int) -> tuple[float, float]:
    """The 95% interval of a fraction of n samples (Wilson 1927)."""
    if n < 1 or not 0 <= share <= 1:
        return (math.nan, math.nan)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return (max(0.0, middle - half), min(1.0, middle + half))


def _check(protocol: Protocol, setting: str, value: Any) -> None:
    """Raises where a value is not of the kind of the frozen one: a number, several, true or false, or text."""
    usual = protocol.settings[setting]
    if usual is None:
        return
    several = isinstance(usual, tuple)
    one = usual[0] if several and usual else usual
    above = " above 0" if setting in protocol.positive else ""
    values = value if several and isinstance(value, list | tuple) else [value]
    if isinstance(one, bool):
        form, fits = "true or false", all(isinstance(each, bool) for each in values)
    elif isinstance(one, int | float):
        kinds: Any = int if isinstance(one, int) else (int, float)
        form = f"{'whole numbers' if several else 'a whole number'}" if kinds is int else "a number"
        fits = all(isinstance(each, kinds) and not isinstance(each, bool) and math.isfinite(each) for each in values)
        fits = fits and (not above or all(each > 0 for each in values))
    else:
        form, fits = f"of the kind of {one!r}", all(isinstance(each, type(one)) for each in values)
    if not fits or (several and (not isinstance(value, list | tuple) or not value)):
        like = f", as in {', '.join(map(str, usual))}" if several else f", by default {usual}"
        raise BadInput(f"{protocol.name}: {setting} is {value!r}; it is {form}{above}{like}")
