"""Selects the sites that a rule governs: all, those of a kind, or those of a predicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from unskip._words import nearest
from unskip.anatomy import Kind, Site
from unskip.errors import BadInput, RewireError
from unskip.wiring._rules import Keep
from unskip.wiring._shortcut import Shortcut, Weight, parse

Where = str | Callable[[Site], bool] | None  # the sites that a rule governs
Rule = Shortcut | str
Rules = Rule | Mapping[str | Callable[[Site], bool], Rule]
# None without the sites that cannot be rewired. A predicate applies to projected shortcuts and long skips as well.
_REGULAR = "where=lambda site: site.regular and not (site.problem or site.projected)"


def normalise(rules: Rules, where: Where) -> tuple[tuple[Where, Shortcut], ...]:
    """(selector, rule) pairs; the first whose selector matches a site governs it."""
    if isinstance(rules, Mapping):
        if where is not None:
            raise BadInput("a mapping of rules has its own selectors: leave where out")
        if not rules:
            raise BadInput("the mapping of rules is empty; pass Keep() to keep every shortcut")
        return tuple((check_selector(key), _rule(value)) for key, value in rules.items())
    return ((check_selector(where), _rule(rules)),)


def _rule(value: object) -> Shortcut:
    if isinstance(value, str):
        return parse(value)
    if isinstance(value, Shortcut):
        return value
    if isinstance(value, type) and issubclass(value, Shortcut):
        raise BadInput(f"{value.__name__} is a class: pass a rule, {value.__name__}(...)")
    raise BadInput(f"{value!r} is not a shortcut; pass a rule such as Decay(0.6), or its text 'decay:0.6'")


def check_selector(where: object) -> Where:
    """The selector itself. Raises BadInput if it is not one."""
    kinds = get_args(Kind)
    if isinstance(where, str) and where in kinds:
        return where
    if where is None or (callable(where) and not isinstance(where, type)):
        return where
    raise BadInput(
        f"where is {where!r}{nearest(str(where), kinds)}; it can be one of {', '.join(kinds)}, or a function of a Site"
    )


def picks(where: Where, site: Site) -> bool:
    """Whether a selector matches a site. Only predicates match projected shortcuts, long skips and stream copies."""
    if callable(where):
        return bool(where(site))
    return site.regular and not site.projected and where in (None, site.kind)


@dataclass(frozen=True)
class Assignment:
    """A rule and the sites it governs. The selector is text, because a predicate may not pickle."""

    rule: Shortcut
    sites: tuple[Site, ...]
    where: str | None

    def weights(self, step: int = 0) -> dict[int, Weight]:
        """The weights of its sites at a training step, by site index."""
        values = self.rule.weights(len(self.sites), runs=[site.runs for site in self.sites], step=step)
        return {site.index: value for site, value in zip(self.sites, values, strict=True)}


def assign(pairs: Sequence[tuple[Where, Shortcut]], sites: Sequence[Site]) -> tuple[Assignment, ...]:
    """Each rule with the sites it governs. Raises BadInput for a rule without sites, RewireError for a site that cannot
    be rewired.
    """
    assigned: set[int] = set()
    result = []
    for where, rule in pairs:
        governed = tuple(site for site in sites if site.index not in assigned and picks(where, site))
        if not governed and not isinstance(rule, Keep):
            present = ", ".join(sorted({site.kind for site in sites}))
            others = sum(site.projected or not site.regular for site in sites)
            note = f"; {others} are projected shortcuts, long skips or copies, which only a function picks"
            raise BadInput(
                f"{rule} governs no site: where={where!r} picks none of the model's {len(sites)} (kinds: "
                f"{present}{note if others else ''})"
            )
        if not isinstance(rule, Keep):
            _refuse([site for site in governed if site.problem])
        assigned |= {site.index for site in governed}
        text = where if isinstance(where, str) or where is None else getattr(where, "__name__", repr(where))
        result.append(Assignment(rule, governed, text))
    return tuple(result)


def _refuse(broken: list[Site]) -> None:
    if broken:
        first = "; ".join(f"{site.name} ({site.source}): {(site.problem or '').rstrip('.')}" for site in broken[:3])
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise RewireError(f"cannot be rewired: {first}{more}. Leave these out: {_REGULAR}")
