"""Example rules of every kind, and hypothesis strategies that draw rules."""

from hypothesis import strategies as st

from unskip.wiring import Anneal, Cut, Decay, Keep, Learn, Scale

SHAPES = ("linear", "cosine", "geometric")
RULES = [
    Keep(),
    Cut(),
    Scale(0.7071, 0.7071),
    Learn(),
    Learn(0.5, "channel"),
    Decay(0.6),
    Decay(0.0, "cosine"),
    Decay(0.6, "geometric", convention="paper", until=0.25, back=True),
    Decay.to_product(5e-3, "cosine", until=0.75),
    Anneal(Keep(), Cut(), steps=10_000),
    Anneal(Decay.to_product(1e-3), Scale(0.5, 2.0), 7, "cosine"),
    Anneal(Keep(), Cut(), 12, order="last-first"),
]
numbers = st.floats(0, 1e6)
shares = st.floats(1e-3, 1, exclude_max=True)
shapes = st.sampled_from(SHAPES)


@st.composite
def decays(draw: st.DrawFn, least: float = 0.0) -> Decay:
    shape, back = draw(shapes), draw(st.booleans())
    until = draw(st.one_of(st.none(), shares if back else st.floats(1e-3, 1)))
    low = draw(st.floats(max(least, 1e-6) if shape == "geometric" else least, 1))
    return Decay(low, shape, convention=draw(st.sampled_from(["sites", "paper"])), until=until, back=back)


@st.composite
def products(draw: st.DrawFn) -> Decay:
    rule = draw(decays())
    p = draw(st.floats(0, 1, exclude_min=True))
    return Decay.to_product(p, rule.shape, convention=rule.convention, until=rule.until, back=rule.back)


steady = st.one_of(st.just(Keep()), st.just(Cut()), st.builds(Scale, numbers, numbers), decays(), products())
orders = st.sampled_from([None, "last-first", "first-last"])
rules = st.one_of(
    steady,
    st.builds(Learn, numbers, st.sampled_from(["site", "channel"])),
    st.builds(Anneal, steady, steady, st.integers(1, 10**9), st.sampled_from(["linear", "cosine"]), orders),
)
