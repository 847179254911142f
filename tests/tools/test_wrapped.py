"""Blocks that are wrapped or replaced by another tool after rewiring: the model still uses the weights that were set,
and methods of the wiring report them correctly, work, or raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.tools.models import images, vit
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import unskip
from unskip import Cut, Decay, Wiring
from unskip.errors import UnskipError, WrappedError

CLOSE = 1e-5
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda block: torch.compile(block, backend="eager"),
    "checkpoint_wrapper": checkpoint_wrapper,
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wrap(model: Any, name: str) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = WRAPPERS[name](block)


@torch.no_grad()
def output(rule: Any = None) -> Tensor:
    model = vit()
    if rule is not None:
        unskip.rewire(model, rule)
    return model(images())


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
@torch.no_grad()
def test_wrapped_blocks_use_the_weights_that_were_set(name: str, rule: Any) -> None:
    model = vit()
    unskip.rewire(model, rule)
    wrap(model, name)
    assert torch.allclose(model(images()), output(rule), atol=CLOSE)
    assert not torch.allclose(output(rule), output(), atol=1e-2)


def attempt(action: Callable[[], object]) -> bool:
    """Whether the action succeeded; if not, it must raise one of unskip's errors."""
    try:
        action()
    except UnskipError:
        return False
    return True


@pytest.mark.parametrize("name", WRAPPERS)
@torch.no_grad()
def test_the_wiring_reports_the_weights_of_wrapped_blocks(name: str) -> None:
    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    wanted = wiring.alphas
    wrap(model, name)
    told: list[float] = []
    if attempt(lambda: told.extend(wiring.alphas)):
        assert told == wanted


@pytest.mark.parametrize("name", WRAPPERS)
@torch.no_grad()
def test_undo_with_wrapped_blocks_works_or_refuses(name: str) -> None:
    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    wrap(model, name)
    if attempt(wiring.undo):
        assert torch.allclose(model(images()), output(), atol=CLOSE)
    else:
        assert torch.allclose(model(images()), output(Decay(0.3)), atol=CLOSE)
        assert Wiring.of(model) is wiring


@pytest.mark.parametrize("name", WRAPPERS)
@torch.no_grad()
def test_set_with_wrapped_blocks_works_or_refuses(name: str) -> None:
    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    wrap(model, name)
    done = attempt(lambda: wiring.set(Cut()))
    assert torch.allclose(model(images()), output(Cut() if done else Decay(0.3)), atol=CLOSE)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_refused_set_keeps_the_rule(name: str) -> None:
    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    wrap(model, name)
    done = attempt(lambda: wiring.set(Cut()))
    assert wiring.to_dict()["rules"][0]["rule"] == ("cut" if done else "decay:0.3")


def test_compiled_blocks_are_refused() -> None:
    model = vit()
    wrap(model, "compile")
    with pytest.raises(WrappedError, match=r"blocks\.0.*torch\.compile"):
        unskip.rewire(model, Cut())


@torch.no_grad()
def test_the_wiring_works_after_compiling_in_place() -> None:
    """module.compile() does not replace the module, unlike torch.compile(module)."""
    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    for block in model.blocks:
        block.compile(backend="eager")
    assert wiring.alphas[-1] == 0.3
    wiring.set(Cut())
    assert torch.allclose(model(images()), output(Cut()), atol=CLOSE)
    wiring.undo()
    assert torch.allclose(model(images()), output(), atol=CLOSE)


@torch.no_grad()
def test_an_ema_model_has_a_separate_wiring() -> None:
    from timm.utils import ModelEmaV3
    from torch.optim.swa_utils import AveragedModel

    model = vit()
    wiring = unskip.rewire(model, Decay(0.3))
    averages = [ModelEmaV3(model, decay=0.5).module, AveragedModel(model).module]
    wiring.set(Cut())
    for average in averages:
        assert torch.allclose(average(images()), output(Decay(0.3)), atol=CLOSE)
        Wiring.of(average).set(Cut())
        assert torch.allclose(average(images()), output(Cut()), atol=CLOSE)
