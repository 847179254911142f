"""Protocols: frozen, named, versioned evaluations. An evaluator is a function registered under a protocol's name.

    @unskip.evals.register("spread-v1", needs="features", about="Mean distance to the mean.", samples=1000)
    def spread(train, test, samples):
        x = test.features[:samples]
        return {"spread": float((x - x.mean(0)).norm(dim=1).mean())}

From then on `unskip.evals.evaluate`, `unskip eval` and the report can use it. Keywords that `register` does not name,
such as `samples`, are the protocol's settings: they never change under this name, and different settings need a new
name, spread-v2. Settings that a caller changes are recorded with the name. The setting `samples` limits an evaluation
to that many test samples, from the start of the set.

An evaluator gets two splits (see `Split`) and returns plain numbers. The registry adds n, the number of test samples,
and a 95% Wilson interval for each number in `fractions`. An evaluator that computes its own 95% interval returns
(number, low, high).
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

Z = 1.959963984540054  # 95% of a normal distribution lie within this many standard deviations


@dataclass(frozen=True)
class Protocol:
    """One way to evaluate: a function, the inputs it needs, and its frozen settings."""

    name: str
    needs: Needs
    function: Evaluator
    settings: Mapping[str, Any]
    about: str = ""
    fractions: tuple[str, ...] = ()  # the numbers that are fractions of the test samples, as names or patterns (knn*)
    pool: Pool = "mean"  # of features: the mean of all tokens, or the class token
    norm: TokenNorm = "none"  # of features: "layer" brings every token to mean 0 and variance 1 before pooling
    what: What = "tokens"  # of patches: which vectors
    truth: Truth = "labels"  # the ground truth that the splits must have
    exact: bool = False  # of patches: computed in float32 without TF32, regardless of the caller's precision
    whole: bool = False  # of a model: a run's whole model instead of its encoder
    train: bool = True  # whether it uses training samples
    batched: bool = False  # whether it takes features (blocks, n, dim) and returns a mapping for each block
    fixed: tuple[str, ...] = ()  # settings that define the protocol and cannot be changed
    positive: tuple[str, ...] = ()  # settings that must be above 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data: everything that determines the numbers."""
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()}
        view: dict[str, Any] = {"pool": self.pool, "norm": self.norm} if self.needs == "features" else {}
        view |= {"what": self.what} if self.needs == "patches" else {}
        return {"name": self.name, "needs": self.needs, **view, "settings": settings}

    def settings_with(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The settings with some changed. Raises BadInput for an unknown setting or a bad value."""
        changes = changes or {}
        unknown = sorted(set(changes) - set(self.settings))
        if unknown:
            near = nearest(unknown[0], self.settings)
            known = f"it has {', '.join(self.settings)}" if self.settings else "it has none"
            raise BadInput(f"{self.name} has no setting {', '.join(unknown)}{near}; {known}")
        for setting, value in changes.items():
            if setting in self.fixed:
                others = ", ".join(each for each in self.settings if each not in self.fixed)
                raise BadInput(f"{self.name}: {setting} cannot be changed; {others} can")
            _check(self, setting, value)
        return {**self.settings, **changes}

    def intervals(self, values: Mapping[str, float], n: int) -> dict[str, tuple[float, float]]:
        """The 95% Wilson interval of every number in `fractions`, for n samples."""
        for pattern in self.fractions:
            if not any(fnmatchcase(name, pattern) for name in values):
                raise BadInput(f"{self.name}: fractions has {pattern!r}, but it returns {', '.join(values)}")
        fractions = [name for name in values if any(fnmatchcase(name, pattern) for pattern in self.fractions)]
        for name in fractions:
            if values[name] < 0 or values[name] > 1:
                raise BadInput(f"{self.name}: {name} is {values[name]:g}, but is declared a fraction")
        return {name: wilson(values[name], n) for name in fractions if not math.isnan(values[name])}


_PROTOCOLS: dict[str, Protocol] = {}
# All protocols by name, as `unskip eval --protocol` takes them.
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
    """Registers a function as the evaluator of a protocol; one function can serve several protocols.

    It is called as function(train, test, **settings), with `needs="model"` as function(model, train, test, **settings),
    and returns a mapping from names to numbers. `Protocol` documents the other keywords.
    """
    if not re.fullmatch(r"[a-zA-Z0-9][\w.-]*", name):
        raise BadInput(f"{name!r} is not a valid protocol name; use letters, digits, dots and hyphens, as in spread-v1")
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
            raise BadInput(f"{name}: {option} is the string {names!r}; pass a tuple of names, ({names!r},)")

    def enter(function: F) -> F:
        before = _PROTOCOLS.get(name)
        owners = [f"{each.__module__}.{each.__qualname__}" for each in (before.function, function)] if before else []
        if len({*owners}) > 1:
            raise BadInput(f"{name} is already registered by {owners[0]}; choose another name")
        arguments = [*(["model"] if needs == "model" else []), "train", "test"]
        try:
            inspect.signature(function).bind(*arguments, **settings)
        except TypeError as error:
            names = ", ".join([*arguments, *settings])
            raise BadInput(f"{name}: its function is called with ({names}): {error}") from error
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
    """The protocol of this name, optionally only among those of some functions; BadInput suggests the nearest name."""
    known = [each.name for each in PROTOCOLS.values() if not functions or each.function in functions]
    if name not in known:
        other = f" ({name} is another kind of protocol)" if name in PROTOCOLS else nearest(name, known)
        raise BadInput(f"no protocol {name!r} here{other}; there are {', '.join(known)}")
    return PROTOCOLS[name]


def find_protocols(names: Sequence[str], changes: Mapping[str, Mapping[str, Any]] | None = None) -> list[Protocol]:
    """The protocols of these names. Raises BadInput for bad changes, or changes to a protocol not among them."""
    protocols = [protocol(name) for name in names]
    for name, values in (changes or {}).items():
        if name not in names:
            raise BadInput(f"changes are for {name}, but the evaluated protocols are {', '.join(names)}")
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
    """Raises BadInput unless a value has the type of the frozen one: a number, a list, a boolean or a string."""
    default = protocol.settings[setting]
    if default is None:
        return
    several = isinstance(default, tuple)
    one = default[0] if several and default else default
    above = " above 0" if setting in protocol.positive else ""
    values = value if several and isinstance(value, list | tuple) else [value]
    if isinstance(one, bool):
        form, fits = "true or false", all(isinstance(each, bool) for each in values)
    elif isinstance(one, int | float):
        kinds: Any = int if isinstance(one, int) else (int, float)
        form = ("whole numbers" if several else "a whole number") if kinds is int else "a number"
        fits = all(isinstance(each, kinds) and not isinstance(each, bool) and math.isfinite(each) for each in values)
        fits = fits and (not above or all(each > 0 for each in values))
    else:
        form, fits = f"of the type of {one!r}", all(isinstance(each, type(one)) for each in values)
    if not fits or (several and (not isinstance(value, list | tuple) or not value)):
        like = f", as in {', '.join(map(str, default))}" if several else f", by default {default}"
        raise BadInput(f"{protocol.name}: {setting} is {value!r}; it must be {form}{above}{like}")
