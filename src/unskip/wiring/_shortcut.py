"""The base class of shortcut rules, and the registry of rules by name.

At the residual sites l = 1..L that it governs, in execution order, a rule sets the (alpha_l, beta_l) of

    x  <-  alpha_l * x  +  beta_l * f_l(x)

Rules are plain values: they compare, hash, pickle, and convert to text ("decay:0.6") and JSON and back. A custom rule
is a registered frozen dataclass:

    @unskip.wiring.register
    @dataclass(frozen=True)
    class Halve(unskip.Shortcut):
        factor: float = 0.5
        name = "halve"
        form = "halve:0.5"
        numbers = ("factor",)

        def weights_at(self, count, runs, step):
            return [(self.factor**l, 1.0) for l in range(count)]
"""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

from unskip._checks import whole
from unskip._words import nearest
from unskip.errors import BadInput
from unskip.wiring._effective_decay import run_counts

Per = Literal["site", "channel"]
_NAME = re.compile(r"[a-z][a-z0-9_-]*")  # without the separators of the text form, : , = > @


class Weight(NamedTuple):
    """The weights of one site: x <- alpha * x + beta * f(x)."""

    alpha: float
    beta: float


class Shortcut(ABC):
    """A rule: the weights of the sites it governs, as a frozen value."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # every rule is a dataclass
    name: ClassVar[str]
    form: ClassVar[str]  # an example of the text form, shown in errors
    numbers: ClassVar[tuple[str, ...]] = ()  # fields set by bare numbers of the text form, in order
    words: ClassVar[Mapping[str, str]] = {}  # word of the text form -> field it sets
    learnable: ClassVar[bool] = False  # alpha is a parameter, initialised at the rule's weight
    per: Per = "site"  # of a learnable rule: one parameter per site, or one per channel of each site
    steps: int | None = None  # training step from which the weights are constant; None if they always are

    @abstractmethod
    def weights_at(self, count: int, runs: tuple[int, ...], step: int) -> Iterable[tuple[float, float]]:
        """The pairs (alpha, beta) of `count` > 0 sites at a training step; site i runs runs[i] times per forward."""

    def weights(self, count: int, *, runs: Sequence[int] | None = None, step: int = 0) -> list[Weight]:
        """The weights of `count` sites in execution order; site i runs runs[i] times per forward (default 1)."""
        who = type(self).__name__
        count, step = whole(who, "count", count, low=0), whole(who, "step", step)
        counts = run_counts(runs, count)
        if not count:
            return []
        pairs = _pairs(who, self.weights_at(count, counts, step), count)
        if self.steps is None and pairs != _pairs(who, self.weights_at(count, counts, step + 1), count):
            raise BadInput(f"{who}: its weights change after step {step}; set `steps`, when they become constant")
        return pairs

    def cuts(self, count: int, *, runs: Sequence[int] | None = None) -> bool:
        """Whether alpha is 0 at any of `count` sites at any of the `moments` of training."""
        return any(weight.alpha == 0 for step in self.moments() for weight in self.weights(count, runs=runs, step=step))

    def moments(self) -> list[int]:
        """Up to 65 training steps, evenly spaced from 0 to `steps`."""
        return sorted({round(part * (self.steps or 0) / 64) for part in range(65)})

    def __str__(self) -> str:
        """The text form: the numbers in order, then the other fields with non-default values."""
        by_word = {(name, True if word == name else word): word for word, name in self.words.items()}
        parts = [repr(value) for name in self.numbers if (value := getattr(self, name)) is not None]
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in self.numbers and value != item.default:
                parts.append(by_word.get((item.name, value), f"{item.name}={value!r}"))
        return self.name + (":" + ",".join(parts) if parts else "")

    @classmethod
    def from_text(cls, body: str | None) -> Shortcut:
        """The rule with the text form "name:body", or "name" if `body` is None."""
        given: dict[str, Any] = {}
        free = list(cls.numbers)
        kinds = {item.name: item.type for item in fields(cls) if item.name not in cls.words.values()}
        for item in (part.strip() for part in body.split(",")) if body is not None else ():
            name, equals, value = (part.strip() for part in item.partition("="))
            if item in cls.words:
                name = cls.words[item]
                result: Any = True if name == item else item  # the word of a flag is the field's name
            else:
                keyed = equals and name in kinds
                number = _number(value if keyed else item)
                if number is None:
                    cls.refuse(f"{item!r} is neither a number nor an option{nearest(name, [*cls.words, *kinds])}")
                if not keyed:
                    name = free.pop(0) if free else cls.refuse(f"{item!r} is one number too many")
                result = int(number) if kinds[name] in ("int", int) and number.is_integer() else number
            if name in given:
                cls.refuse(f"{name} is given twice, the second time as {item!r}")
            given[name] = result
        return cls._create(given)

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> Shortcut:
        """The rule with these fields; the others take their defaults. Raises BadInput for an unknown field."""
        known = [item.name for item in fields(cls)]
        if strange := [str(name) for name in data if name not in known]:
            has = ", ".join(known) or "none"
            raise BadInput(f"{cls.name}: unknown argument {strange[0]!r}{nearest(strange[0], known)}; it has: {has}")
        return cls._create(dict(data))

    @classmethod
    def _create(cls, given: dict[str, Any]) -> Shortcut:
        required = [item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING]
        if missing := [name for name in required if name not in given]:
            cls.refuse(f"{', '.join(missing)} is missing")
        try:
            return cls(**given)
        except BadInput:
            raise
        except (ValueError, TypeError) as error:  # of a custom rule
            raise BadInput(f"{cls.name}: {error}; write {cls.form}") from error

    @classmethod
    def refuse(cls, why: str) -> NoReturn:
        """Raises BadInput with the reason and an example of the text form."""
        raise BadInput(f"{cls.name}: {why}; write {cls.form}")

    def to_dict(self) -> dict[str, Any]:
        """{"rule": name, **fields} as JSON values, the inverse of `from_dict`."""
        data: dict[str, Any] = {"rule": self.name}
        for item in fields(self):
            if (value := getattr(self, item.name)) is not None:
                data[item.name] = value.to_dict() if isinstance(value, Shortcut) else value
        return data


def _pairs(who: str, given: Iterable[tuple[float, float]], count: int) -> list[Weight]:
    """The pairs as weights. Raises BadInput unless there is one finite pair per site."""
    pairs = list(given) if isinstance(given, Iterable) else [given]
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_finite, pair))):
            raise BadInput(f"{who}: weights_at must return pairs (alpha, beta) of finite numbers, got {pair!r}")
    if len(pairs) != count:
        raise BadInput(f"{who}: weights_at must return one pair for each of the {count} sites, got {len(pairs)}")
    return [Weight(float(alpha), float(beta)) for alpha, beta in pairs]


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- The registry -----------------------------------------------------------------------------------------------------

RuleClass = TypeVar("RuleClass", bound=type[Shortcut])
_RULES: dict[str, type[Shortcut]] = {}


class UnknownShortcut(BadInput):
    """No rule of this name is registered."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"no shortcut is called {name!r}{nearest(name, _RULES)}; there are: {', '.join(_RULES)}. To use a custom "
            "rule, import the file that registers it (--plugin FILE on the command line)"
        )


def register(cls: RuleClass) -> RuleClass:
    """Class decorator: registers a rule by its name, for text, JSON, saved folders, configs and commands.

    A class that is not a dataclass becomes a frozen one. The name must be free, but a class may be defined again, as in
    a notebook cell.
    """
    if not (isinstance(cls, type) and issubclass(cls, Shortcut)):
        raise BadInput(f"register takes a class on unskip.Shortcut, got {reprlib.repr(cls)}")
    if "__dataclass_fields__" not in vars(cls):
        cls = dataclass(frozen=True)(cls)  # type: ignore[assignment]
    who, names = cls.__qualname__, [item.name for item in fields(cls)]
    name, form = getattr(cls, "name", None), getattr(cls, "form", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(f"{who}: name must be a lower-case word such as 'halve', got {name!r}")
    if not isinstance(form, str) or form.partition(":")[0] != name:
        raise BadInput(f"{who}: form must be a text form such as '{name}:0.5', shown in errors, got {form!r}")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise BadInput(f"{who}: must be a frozen dataclass, because rules are compared and hashed by value")
    if inspect.isabstract(cls):
        raise BadInput(f"{who}: must have a method weights_at(self, count, runs, step)")
    try:
        inspect.signature(cls.weights_at).bind(None, 1, (1,), 0)
    except TypeError as error:
        raise BadInput(f"{who}: weights_at is called as weights_at(count, runs, step): {error}") from error
    if strange := [field for field in (*cls.numbers, *cls.words.values()) if field not in names]:
        raise BadInput(f"{who}: numbers and words must name fields ({', '.join(names) or 'none'}), got {strange[0]!r}")
    before = _RULES.get(name)
    if before is not None and (before.__module__, before.__qualname__) != (cls.__module__, cls.__qualname__):
        raise BadInput(f"{who}: the name {name!r} is taken by {before.__module__}.{before.__qualname__}")
    _RULES[name] = cls
    return cls


def is_registered(name: str) -> bool:
    """Whether a rule of this name is registered."""
    return name in _RULES


def parse(text: str) -> Shortcut:
    """The rule of a text form such as "decay:0.6,cosine"; parse(str(rule)) == rule."""
    if not isinstance(text, str):
        raise BadInput(f"a shortcut as text must be a string such as 'decay:0.6', got {reprlib.repr(text)}")
    name, colon, body = text.partition(":")
    return _class_of(name.strip()).from_text(body if colon else None)


def from_dict(data: Mapping[str, Any]) -> Shortcut:
    """The rule of a dict from `to_dict`."""
    if not isinstance(data, Mapping) or not isinstance(data.get("rule"), str):
        raise BadInput(f"a shortcut as a dict must have its rule, as in {{'rule': 'cut'}}, got {reprlib.repr(data)}")
    given = {name: from_dict(v) if isinstance(v, Mapping) else v for name, v in data.items() if name != "rule"}
    return _class_of(data["rule"]).from_fields(given)


def defined_in(rule: Shortcut) -> dict[str, str]:
    """The modules of custom rules by rule name, for a rule and the rules inside it."""
    modules = {} if type(rule).__module__.startswith("unskip.") else {rule.name: type(rule).__module__}
    for item in fields(rule):
        if isinstance(inner := getattr(rule, item.name), Shortcut):
            modules |= defined_in(inner)
    return modules


def _class_of(name: str) -> type[Shortcut]:
    if name not in _RULES:
        raise UnknownShortcut(name)
    return _RULES[name]
