"""The recorded structure of a model: module settings, differences and non-persistent buffers."""

from __future__ import annotations

import copy
import enum
import functools
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unskip
from unskip import Cut, Learn
from unskip.wiring._structure import (
    buffer_difference,
    buffers,
    difference,
    pack,
    structure,
    unpack,
)


class Colour(enum.Enum):
    RED = 1


class Holder(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        vars(self).update(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def settings(**values: Any) -> dict[str, Any]:
    found = structure(Holder(**values))[""]
    found.pop("class")
    return found


def test_simple_values_are_settings() -> None:
    found = settings(
        a=1, b=0.5, c=True, d="x", e=None, f=(1, [2, None]), g=math.inf, h=F.silu, i=nn.Linear, j=Colour.RED,
        k=functools.partial(F.gelu, approximate="tanh"), l=functools.partial(F.gelu, approximate="none"),
    )  # fmt: skip
    assert found["k"] != found["l"]
    del found["k"], found["l"]
    assert found == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "x",
        "f": [1, [2, None]],
        "g": "inf",
        "h": "torch.nn.functional.silu",
        "i": "torch.nn.modules.linear.Linear",
        "j": "Colour.RED",
    }


def test_vocab_size_in_an_older_record_is_ignored() -> None:
    model = Holder()
    found = structure(model)
    wanted = {path: {**each, "vocab_size": 50} for path, each in found.items()}
    assert difference(wanted, found) is None


def test_attributes_without_effect_are_left_out() -> None:
    left_out = {"_private": 1, "unskip_alpha0": 0.5, "grad_checkpointing": True, "fused_attn": False}
    assert settings(**left_out, cfg={"url": "x"}, tensor=torch.ones(2), nested=(1, object())) == {}
    model = Holder()
    before = structure(model)
    model.register_forward_hook(lambda *_: None)
    assert structure(model.eval()) == before


class Caching(nn.Module):
    @functools.cached_property
    def pad(self) -> int:
        return 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return F.pad(x, (self.pad, 0))


def test_attributes_set_by_forward_are_left_out() -> None:
    model = Caching()
    vars(model)["last"] = None
    before = structure(model)
    model(torch.ones(2))
    assert vars(model)["pad"] == 3
    assert structure(model) == before


def test_long_settings_are_stored_as_digests() -> None:
    one, other = settings(a=list(range(1000))), settings(a=[*range(999), 0])
    assert len(one["a"]) == 64
    assert one != other


plain = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(values=st.dictionaries(st.sampled_from(["a", "b", "c"]), plain), other=plain)
def test_settings_json_round_trip_and_difference(values: dict[str, Any], other: Any) -> None:
    model = nn.Sequential(Holder(**values), Holder())
    wanted = structure(model)
    assert unpack(json.loads(json.dumps(pack(wanted)))) == wanted
    assert difference(wanted, structure(copy.deepcopy(model))) is None
    vars(model[1])["d"] = other
    assert (difference(wanted, structure(model)) or "").startswith("d of 1 is ")


def test_equal_modules_are_packed_once() -> None:
    packed = pack(structure(nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))))
    assert len(packed["kinds"]) == 2
    assert len(packed["modules"]) == 51


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (nn.GELU(), nn.ReLU(), "0 is a torch.nn.modules.activation.ReLU instead of a torch.nn.modules.activation.GELU"),
        (nn.GELU(), nn.GELU("tanh"), "approximate of 0 is 'tanh' instead of 'none'"),
        (nn.LayerNorm(4, eps=1e-6), nn.LayerNorm(4), "eps of 0 is 1e-05 instead of 1e-06"),
        (Holder(a=1), Holder(a=None), "a of 0 is not set instead of 1"),
        (Holder(a=None), Holder(a=1), "a of 0 is 1 instead of not set"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(), "it has no module 0.0, which was a "),
        (nn.Sequential(), nn.Sequential(nn.ReLU()), "it has an extra module, 0.0, a "),
        (
            nn.TransformerEncoderLayer(4, 2, activation=F.silu),
            nn.TransformerEncoderLayer(4, 2, activation=F.elu),
            "activation of 0 is 'torch.nn.functional.elu' instead of 'torch.nn.functional.silu'",
        ),
    ],
)
def test_difference_messages(one: nn.Module, other: nn.Module, message: str) -> None:
    assert (difference(structure(nn.Sequential(one)), structure(nn.Sequential(other))) or "").startswith(message)


@pytest.mark.parametrize("rule", [Cut(), Learn(0.5)], ids=str)
def test_rewiring_does_not_change_the_structure(rule: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")  # has an inference fast path
    model = nn.TransformerEncoder(layer, 2).eval()
    before = structure(model), buffers(model)
    unskip.rewire(model, rule, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)))
    assert (structure(model), buffers(model)) == before


class Table(nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("weight", torch.ones(2))
        self.register_buffer("none", None, persistent=False)


@pytest.mark.parametrize(
    "table",
    [
        torch.linspace(0, 1, 7),
        torch.full((3, 3), -math.inf).triu(1),
        torch.tensor([True, False]),
        torch.tensor([1j, 2.0]),
        torch.tensor([-3, 4]),
        torch.zeros(0),
    ],
    ids=["float", "mask", "bool", "complex", "int", "empty"],
)
def test_nonpersistent_buffers(table: torch.Tensor) -> None:
    wanted = json.loads(json.dumps(buffers(Table(table))))
    assert list(wanted) == ["table"]
    assert buffer_difference(wanted, Table(table.clone())) is None
    if table.numel():
        assert buffer_difference(wanted, Table(torch.zeros_like(table))) == "the buffer table has other values"
    assert "has shape" in (buffer_difference(wanted, Table(table[None])) or "")
    assert buffer_difference(wanted, Holder()) == "the buffer table is missing"
    assert buffer_difference({}, Table(table)) == "the buffer table is new"


def test_buffers_are_compared_in_the_saved_dtype() -> None:
    table = torch.linspace(0, 1, 1000)
    assert buffer_difference(buffers(Table(table.bfloat16())), Table(table)) is None
