"""Bad input raises a specific exception with the path and the next step, and leaves the model unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.anatomy import doubtful as d
from tests.anatomy import handmade as h
from torch import Tensor, nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Scale
from unskip.errors import BadInput, ForwardError, NoResidualError, RewireError, UnskipError, WrappedError
from unskip.wiring import _verify

X = torch.randn(2, 5, h.DIM)


def snapshot(model: nn.Module) -> object:
    """Everything in a model that rewiring could change."""
    modules = [(name, type(module), id(module), module.training) for name, module in model.named_modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    state = [(key, value.clone()) for key, value in model.state_dict().items()]
    return modules, attributes, hooks, [key for key, _ in state], [value.tolist() for _, value in state]


@contextmanager
def left_unchanged(model: nn.Module) -> Iterator[None]:
    before, random = snapshot(model), torch.get_rng_state()
    yield
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("build", "example", "error", "message"),
    [
        (d.LowRank, X, NoResidualError, "LowRank: no residual additions"),
        (d.Subtraction, X, NoResidualError, r"no residual addition .*minus sign"),
        (h.PreNorm, torch.randn(2, 5, 3), ForwardError, "PreNorm: .* failed .*Pass example="),
        (h.PreNorm, None, BadInput, "PreNorm: .* Pass example="),
        (h.PreNorm, 3, BadInput, "example is a int"),
        (d.BuiltinSum, X, RewireError, r"\(model\) \[mlp\] \(doubtful.py:\d+\).*sum.*where="),
        (d.SometimesResidual, X, RewireError, r"1 of its 3 runs"),
        (h.Projected, X, BadInput, "governs no site"),
    ],
)
def test_models_that_cannot_be_rewired(
    build: Callable[[], nn.Module], example: object, error: type, message: str
) -> None:
    model = build()
    with left_unchanged(model), pytest.raises(error, match=message):
        unskip.rewire(model, Cut(), example)


def test_the_where_in_the_message_selects_the_sites_that_can_be_rewired() -> None:
    """It governs the same sites as no `where`, except for the site that cannot be rewired."""
    model = nn.Sequential(h.PreNorm(), h.Projected(), d.BuiltinSum())
    with pytest.raises(RewireError) as refused:
        unskip.rewire(model, Cut(), X)
    where = eval(str(refused.value).partition("Leave these out: where=")[2])
    wiring = unskip.rewire(model, Cut(), X, where)
    alphas = {site.path: alpha for site, alpha in zip(wiring.sites, wiring.alphas, strict=True)}
    assert alphas == {"0": 0, "1": 1, "2": 1}


@pytest.mark.parametrize(
    ("shortcut", "where", "message"),
    [
        (Decay, None, "Decay is a class"),
        (0.5, None, "is not a shortcut"),
        ("decai:0.6", None, "nearest: decay"),
        ("decay", None, "give either alpha_min or product"),
        ({}, None, "mapping of rules is empty"),
        ({"atention": Cut()}, None, "nearest: attention"),
        (Cut(), "mpl", "nearest: mlp"),
        (Cut(), 3, "one of attention, mlp"),
        ({"mlp": Cut()}, "mlp", "leave where out"),
        (Cut(), "conv", r"where='conv' .* \(kinds: mlp\)"),
        (Cut(), lambda site: False, "governs no site"),
    ],
)
def test_bad_rules_and_where_are_refused(shortcut: object, where: object, message: str) -> None:
    model = h.PreNorm()
    with left_unchanged(model), pytest.raises(BadInput, match=message):
        unskip.rewire(model, shortcut, X, where=where)  # type: ignore[arg-type]


def test_an_exception_in_a_predicate_propagates_and_the_model_is_unchanged() -> None:
    model = h.PreNorm()
    with left_unchanged(model), pytest.raises(AttributeError, match="knid"):
        unskip.rewire(model, Cut(), X, where=lambda site: site.knid == "mlp")  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, True, "0.5", None, 1 + 1j])
@pytest.mark.parametrize("rule", [Decay, Learn, lambda v: Scale(v), lambda v: Scale(1.0, v), lambda v: Scale(stream=v)])
def test_invalid_weights_are_refused(rule: Callable[[object], object], value: object) -> None:
    with pytest.raises(BadInput):
        rule(value)


def test_a_failed_set_keeps_the_current_rules() -> None:
    model = nn.Sequential(h.PreNorm(), h.PreNorm())
    wiring = unskip.rewire(model, Decay(0.6), X)
    out = model(X)
    with pytest.raises(BadInput):
        wiring.set(Cut(), where="conv")
    with pytest.raises(BadInput):
        unskip.rewire(model, Cut(), where="conv")
    with pytest.raises(BadInput, match="whole number"):
        wiring.step(0.5)  # type: ignore[arg-type]
    assert wiring.alphas == [1.0, 0.6]
    assert torch.equal(model(X), out)


def test_a_class_without_source_is_refused() -> None:
    text = "class Hidden(nn.Module):\n    def __init__(self):\n        super().__init__(); self.f = nn.Linear(8, 8)\n"
    text += "    def forward(self, x):\n        return x + self.f(x)\n"
    space = {"nn": nn, "__name__": "hidden"}
    exec(compile(text, "<typed in>", "exec"), space)
    model = space["Hidden"]()  # type: ignore[operator]
    assert len(unskip.audit(model, X)) == 1
    with left_unchanged(model), pytest.raises(RewireError, match=r"Hidden\.forward .*source is not available"):
        unskip.rewire(model, Cut(), X)


class DependsOnItsClass(nn.Module):
    """Its output depends on the number of its base classes, which rewiring changes."""

    def __init__(self) -> None:
        super().__init__()
        self.f = h.linear()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x * len(type(self).__mro__)


def test_a_rewiring_that_fails_verification_is_undone() -> None:
    model = DependsOnItsClass()
    with (
        left_unchanged(model),
        pytest.raises(RewireError, match=r"does not compute .*left as it was"),
    ):
        unskip.rewire(model, Cut(), X)
    assert unskip.rewire(model, Keep(), X, verify=False).verified is False


def test_verification_finds_swapped_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of two sites are swapped after the trace; the reference of the verification has the right ones."""
    from dataclasses import replace

    from unskip.wiring import _rewire

    original = _rewire.survey

    def survey_with_swapped_places(model: nn.Module, example: object) -> object:
        survey = original(model, example)  # type: ignore[arg-type]
        a, b = survey.sites
        return replace(survey, sites=(replace(a, places=b.places), replace(b, places=a.places)))

    model = h.Nested()
    real = _verify.Oracle

    def correct(paths: object, sites: object, weights: object) -> object:
        return real(paths, original(model, _rewire.example_for(model, X)).sites, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(_rewire, "survey", survey_with_swapped_places)
    monkeypatch.setattr(_verify, "Oracle", correct)
    with left_unchanged(model), pytest.raises(RewireError, match="does not compute"):
        unskip.rewire(model, Cut(), X)


def test_an_interrupt_while_weights_are_set_undoes_the_rewiring(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.wiring import _fastpath

    model = nn.Sequential(h.PreNorm(), h.PreNorm())

    def fault(*_: object) -> None:
        raise KeyboardInterrupt

    with left_unchanged(model):
        calls = iter([None, None, fault])  # probe, undo, set
        real = _fastpath.switch
        monkeypatch.setattr(_fastpath, "switch", lambda *a: (next(calls, None) or real)(*a))
        with pytest.raises(KeyboardInterrupt):
            unskip.rewire(model, Cut(), X)
        monkeypatch.setattr(_fastpath, "switch", real)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda m: torch.compile(m, backend="eager"), r"torch\.compile\. Rewire the plain model"),
        (
            lambda m: nn.Sequential(torch.compile(m, backend="eager")),
            r"0 \(OptimizedModule\) .* torch\.compile",
        ),
        (nn.DataParallel, "wrapped by DataParallel"),
    ],
)
def test_wrapped_models_are_refused_with_the_right_order(wrap: Callable[[nn.Module], nn.Module], message: str) -> None:
    model = wrap(h.PreNorm())
    for example in (X, None):  # None: no inputs can be inferred from the wrapper
        with left_unchanged(model), pytest.raises(WrappedError, match=message):
            unskip.rewire(model, Cut(), example)


def test_a_wrapped_rewired_model_is_refused_with_the_attribute_to_pass(tmp_path: Path) -> None:
    model = h.PreNorm()
    unskip.rewire(model, Cut(), X)
    for wrapped, message in (
        (
            torch.compile(model, backend="eager"),
            r"is a rewired model in torch\.compile\. Pass the model inside: \._orig_mod",
        ),
        (nn.DataParallel(model), r"is a rewired model in DataParallel\. Pass the model inside: \.module"),
    ):
        with pytest.raises(WrappedError, match=message):
            unskip.save(cast(nn.Module, wrapped), tmp_path / "x")
        with pytest.raises(WrappedError, match=message):
            unskip.measure(cast(nn.Module, wrapped), X)


def test_measure_of_a_rewired_model_needs_an_example_if_none_can_be_inferred() -> None:
    model = h.PreNorm()
    unskip.rewire(model, Cut(), X)
    with pytest.raises(BadInput, match="inputs cannot be inferred"):
        unskip.measure(model)


def test_a_module_compiled_in_place_is_refused() -> None:
    model = h.PreNorm()
    model.compile(backend="eager")
    with pytest.raises(WrappedError, match=r"Rewire first, then compile"):
        unskip.rewire(model, Cut(), X)


def test_hooks_of_accelerate_are_refused_before_rewiring_and_work_afterwards() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model = h.PreNorm()
    add_hook_to_module(model, ModelHook())
    with left_unchanged(model), pytest.raises(WrappedError, match="accelerate"):
        unskip.rewire(model, Cut(), X)
    remove_hook_from_module(model)
    with left_unchanged(model), pytest.raises(RewireError, match=r"self\.forward = "):
        unskip.rewire(model, Cut(), X)
    del model.forward  # accelerate leaves the restored method on the instance
    unskip.rewire(model, Cut(), X)
    cut = model(X)
    add_hook_to_module(model, ModelHook())
    assert torch.equal(model(X), cut)


def test_forward_hooks_work_on_a_rewired_model() -> None:
    model = h.PreNorm()
    seen = []
    model.register_forward_hook(lambda module, arguments, output: seen.append(output))
    unskip.rewire(model, Cut(), X)
    seen.clear()
    out = model(X)
    assert len(seen) == 1
    assert torch.equal(out, model.f(model.norm(X)))


def test_part_of_a_rewired_model_is_refused() -> None:
    model = nn.Sequential(h.PreNorm(), h.PreNorm())
    unskip.rewire(model, Cut(), X)
    with pytest.raises(WrappedError, match="belongs to a rewired model"):
        unskip.rewire(model[0], Cut(), X)
    with pytest.raises(WrappedError, match=r"0\.0 \(PreNorm\) .* rewired"):
        unskip.rewire(nn.Sequential(model, h.PreNorm()), Cut(), X)


class OwnPickle(h.PreNorm):
    def __reduce__(self) -> tuple[object, ...]:
        return OwnPickle, ()


def test_a_class_with_custom_pickling_is_refused() -> None:
    model = OwnPickle()
    with left_unchanged(model), pytest.raises(RewireError, match=r"OwnPickle .* pickled"):
        unskip.rewire(model, Cut(), X)


def test_a_rule_that_cannot_be_applied_keeps_the_previous_one() -> None:
    model = nn.Sequential(h.PreNorm(), OwnPickle())
    with pytest.raises(RewireError, match="OwnPickle"):
        unskip.rewire(model, Cut(), X, verify=False)
    assert type(model[0]) is h.PreNorm
    wiring = unskip.rewire(model, Learn(0.5), X, where=lambda site: site.path == "0", verify=False)
    (alpha,) = wiring.parameters.values()
    before, shown = model(X), str(wiring)
    for change in (wiring.set, lambda rule, where: unskip.rewire(model, rule, where=where, force=True)):
        with pytest.raises(RewireError, match="OwnPickle"):
            change(Cut(), lambda site: True)
        assert str(wiring) == shown
        assert torch.equal(model(X), before)
        assert [*wiring.parameters.values()] == [alpha]
    wiring.step(3)  # works, since force=True of the failed call has no effect
    wiring.set(Cut(), lambda site: site.path == "0")
    assert type(model[1]) is OwnPickle


def test_a_pickle_whose_source_has_changed_is_refused() -> None:
    from dataclasses import replace

    from unskip.wiring._bind import Patch, patched

    (site,) = unskip.audit(h.PreNorm(), X)
    hop = replace(site.places[0].hops[0], digest="0" * 16)
    stale = Patch(((replace(site.places[0], hops=(hop,)),),))
    with pytest.raises(RewireError, match=r"PreNorm\.forward: .*another version"):
        patched(h.PreNorm, stale)


def helper_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def other_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class UsesHelper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = h.linear()

    def forward(self, x: Tensor) -> Tensor:
        return helper_add(x, self.f(x))


def test_a_helper_that_is_replaced_after_rewiring_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = UsesHelper()
    unskip.rewire(model, Cut(), X)
    assert torch.equal(model(X), model.f(X))
    monkeypatch.setitem(globals(), "helper_add", other_add)
    with pytest.raises(RewireError, match="helper_add was replaced by other_add"):
        model(X)


def test_all_errors_are_subclasses_of_unskip_error() -> None:
    import unskip.errors as errors

    names = [name for name in vars(errors) if name.endswith(("Error", "Input")) and name != "UnskipError"]
    assert len(names) >= 6
    assert all(issubclass(getattr(errors, name), UnskipError) for name in names)


def test_a_deepcopy_after_a_failed_rewire_computes_the_same() -> None:
    model = d.BuiltinSum()
    with pytest.raises(RewireError):
        unskip.rewire(model, Cut(), X)
    assert torch.equal(copy.deepcopy(model)(X), model(X))


def test_anneal_refuses_learned_weights() -> None:
    with pytest.raises(BadInput, match="rule of fixed weights"):
        Anneal(Keep(), Learn(), steps=10)
