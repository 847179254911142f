"""Which sites a rule governs: all, those of a kind, or those a predicate picks."""

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
# What None picks, less what cannot be rewired: a predicate sees projected shortcuts and long skips as well.
_REST = "where=lambda site: site.regular and not (site.problem or site.projected)"


def normalise(rules: Rules, where: Where) -> tuple[tuple[Where, Shortcut], ...]:
    """(selector, rule) pairs, the first that matches a site governs it."""
    if isinstance(rules, Mapping):
        if where is not None:
            raise BadInput("a mapping of rules says where each applies: leave where out")
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
    """The selector itself, where it is one. Raises BadInput."""
    kinds = get_args(Kind)
    if (
        where is None
        or (isinstance(where, str) and where in kinds)
        or (callable(where) and not isinstance(where, type))
    ):
        return where
    raise BadInput(
        f"where is {where!r}{nearest(str(where), kinds)}; it can be one of {', '.join(kinds)}, or a function of a Site"
    )


def picks(where: Where, site: Site) -> bool:
    """A predicate sees every site; None and a kind leave out projected shortcuts, long skips, copies of the stream."""
    if callable(where):
        return bool(where(site))
    return site.regular and not site.projected and where in (None, site.kind)


@dataclass(frozen=True)
class Assignment:
    """A rule and the sites it governs. The selector is kept as text: a predicate would not survive pickling."""

    rule: Shortcut
    sites: tuple[Site, ...]
    where: str | None

    def weights(self, step: int = 0) -> dict[int, Weight]:
        """The weights of its sites at a training step, by site index."""
        values = self.rule.weights(len(self.sites), runs=[site.runs for site in self.sites], step=step)
        return {site.index: value for site, value in zip(self.sites, values, strict=True)}


def assign(pairs: Sequence[tuple[Where, Shortcut]], sites: Sequence[Site]) -> tuple[Assignment, ...]:
    """Each rule with the sites it governs. Raises BadInput for a rule that governs none, RewireError for a site that
    cannot be rewired.
    """
    taken: set[int] = set()
    result = []
    for where, rule in pairs:
        mine = tuple(site for site in sites if site.index not in taken and picks(where, site))
        if not mine and not isinstance(rule, Keep):
            present = ", ".join(sorted({site.kind for site in sites}))
            apart = sum(site.projected or not site.regular for site in sites)
            kept = f"; {apart} are projected shortcuts, long skips or copies, which only a function picks" * bool(apart)
            raise BadInput(
                f"{rule} governs no site: where={where!r} picks none of the model's {len(sites)} (kinds: "
                f"{present}{kept})"
            )
        if not isinstance(rule, Keep):
            _refuse([site for site in mine if site.problem])
        taken |= {site.index for site in mine}
        text = where if isinstance(where, str) or where is None else getattr(where, "__name__", repr(where))
        result.append(Assignment(rule, mine, text))
    return tuple(result)


def _refuse(broken: list[Site]) -> None:
    if broken:
        each = "; ".join(f"{site.name} ({site.source}): {(site.problem or '').rstrip('.')}" for site in broken[:3])
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise RewireError(f"cannot be rewired: {each}{more}. Leave these out: {_REST}")
