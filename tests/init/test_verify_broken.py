"""Each weight that `skipless_` sets is changed, in every layout: `verify_skipless` names the site and the failure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.init.started import quietly, seeded, started, weights
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

from unskip.errors import BadInput, InitError
from unskip.init import verify_skipless

FUSED = (slice(16), slice(16, 32), slice(32, 48))  # queries, keys and values in one weight
APART = (slice(None),) * 3


@dataclass
class Layout:
    """The names of the parameters that `skipless_` sets in a block."""

    path: str
    qkv: tuple[str, str, str]
    rows: tuple[slice, slice, slice]
    out: str
    mlp: dict[str, str]
    biases: bool = True
    transposed: bool = False  # stored as (in, out)
    scales: dict[str, str] = field(default_factory=dict)
    drop: str | None = None

    def place(self, role: str) -> tuple[str, slice]:
        """The prefix of the parameter name of a role, and its slice of the outputs."""
        if role in ("query", "key", "value"):
            index = ("query", "key", "value").index(role)
            return f"{self.path}.{self.qkv[index]}", self.rows[index]
        return f"{self.path}.{self.out if role == 'output' else self.mlp[role]}", slice(None)

    def weight(self, model: nn.Module, role: str) -> Tensor:
        name, rows = self.place(role)
        stored = model.get_parameter(name + "weight").detach()
        return (stored.T if self.transposed else stored)[rows]

    def bias(self, model: nn.Module, role: str) -> Tensor:
        name, rows = self.place(role)
        return model.get_parameter(name + "bias").detach()[rows]


LAYOUTS = {
    "timm_vit_layerscale_droppath": Layout(
        "blocks.1",
        ("attn.qkv.",) * 3,
        FUSED,
        "attn.proj.",
        {"up": "mlp.fc1.", "down": "mlp.fc2."},
        scales={"attention": "ls1.gamma", "mlp": "ls2.gamma"},
        drop="drop_path1",
    ),
    "torchvision_vit": Layout(
        "encoder.layers.encoder_layer_1",
        ("self_attention.in_proj_",) * 3,
        FUSED,
        "self_attention.out_proj.",
        {"up": "mlp.0.", "down": "mlp.3."},
    ),
    "hf_vit": Layout(
        "layers.1",
        ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
        APART,
        "attention.o_proj.",
        {"up": "mlp.fc1.", "down": "mlp.fc2."},
    ),
    "hf_dinov2": Layout(
        "encoder.layer.1",
        ("attention.q_proj.", "attention.k_proj.", "attention.v_proj."),
        APART,
        "attention.o_proj.",
        {"up": "mlp.up_proj.", "gate": "mlp.gate_proj.", "down": "mlp.down_proj."},
        scales={"attention": "layer_scale1.lambda1", "mlp": "layer_scale2.lambda1"},
        drop="drop_path",
    ),
    "hf_gpt2": Layout(
        "h.1",
        ("attn.c_attn.",) * 3,
        FUSED,
        "attn.c_proj.",
        {"up": "mlp.c_fc.", "down": "mlp.c_proj."},
        transposed=True,
    ),
    "hf_llama": Layout(
        "layers.1",
        ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
        APART,
        "self_attn.o_proj.",
        {"up": "mlp.up_proj.", "gate": "mlp.gate_proj.", "down": "mlp.down_proj."},
        biases=False,
    ),
}
ROLES = {name: ["query", "key", "value", "output", *layout.mlp] for name, layout in LAYOUTS.items()}
CACHE: dict[str, nn.Module] = {}


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[tuple[Layout, nn.Module, str]]:
    """A layout and an initialised model of it, which is shared by all tests and restored after each."""
    name = request.node.callspec.params["name"]
    if name not in CACHE:
        CACHE[name], _, _ = started(name)
    before = weights(CACHE[name])
    with torch.no_grad():
        yield LAYOUTS[name], CACHE[name], name
    CACHE[name].load_state_dict(before)


def fails(broken: tuple[Layout, nn.Module, str], kind: str, *expected: str, **options: Any) -> None:
    """Asserts that one site fails, and that the error names it and these failures."""
    layout, model, name = broken
    found = verify_skipless(model, FAMILIES[name].inputs(1), check=False, **options)
    assert [(row.site.path, row.site.kind) for row in found.failed] == [(layout.path, kind)]
    with pytest.raises(InitError) as caught:
        found.raise_if_failed()
    assert f"1 of 4 sites fail ({layout.path} [{kind}])" in str(caught.value)
    failures = found.failed[0].failed
    assert len(failures) == len(expected)
    for fact, failure in zip(expected, failures, strict=True):
        assert fact in failure
        assert failure in str(caught.value)


def kind(role: str) -> str:
    return "mlp" if role in ("up", "gate", "down") else "attention"


def layout_case(*case: str) -> Any:
    """A test case. Those of torchvision, a Hugging Face ViT and Llama resemble others and run in the full tests."""
    return pytest.param(*case, marks=pytest.mark.full if case[0] in ("torchvision_vit", "hf_vit", "hf_llama") else ())


layouts = pytest.mark.parametrize("name", [layout_case(name) for name in LAYOUTS])


@layouts
def test_an_initialised_model_passes(broken: tuple[Layout, nn.Module, str], name: str) -> None:
    assert not verify_skipless(broken[1], FAMILIES[name].inputs(1)).failed


# --- W_V W_O: scale, condition number, and equal factors --------------------------------------------------------------


@layouts
@pytest.mark.parametrize("role", ["value", "output"])
def test_a_wrong_scale_fails(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    layout.weight(model, role).mul_(1.0001)
    factor = "W_V is 0.0002 from" if role == "value" else "W_O is 0.0002 from"
    fails(broken, "attention", "W_V W_O has scale 9.0009, expected vo_gain^2 = 9", factor)


@layouts
@pytest.mark.parametrize("role", ["value", "output"])
def test_a_wrong_condition_number_fails(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    layout.weight(model, role)[1].mul_(1.01)
    factor = "W_V is" if role == "value" else "W_O is"
    fails(broken, "attention", "W_V W_O has condition 1.0", "W_V W_O has scale", factor)


@layouts
def test_unequal_factors_fail(broken: tuple[Layout, nn.Module, str], name: str) -> None:
    layout, model, _ = broken
    layout.weight(model, "value").mul_(1.01)
    layout.weight(model, "output").div_(1.01)
    fails(broken, "attention", "W_V is 0.02 from 3 times an isometry", "W_O is 0.02 from")


def test_another_c_is_verified_with_its_value() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    quietly(model, c=0.7, generator=seeded(), example=family.inputs(2))
    assert not verify_skipless(model, family.inputs(1), c=0.7).failed
    with pytest.raises(InitError, match=r"W_V W_O has scale 0\.49"):
        verify_skipless(model, family.inputs(1))
    assert not verify_skipless(model, family.inputs(1), parts=("query-key", "mlp")).failed
    for c in (0.0, -1.0, float("nan"), "3"):
        with pytest.raises(BadInput, match="vo_gain"):
            verify_skipless(model, family.inputs(1), c=c)  # type: ignore[arg-type]


# --- Queries and keys -------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("role", ["query", "key"])
def test_queries_and_keys_of_unequal_norm_fail(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    layout.weight(model, role).mul_(1.001)
    fails(broken, "attention", "W_Q and W_K are 0.002 from equal weight")


@layouts
def test_attention_far_from_the_identity_fails(broken: tuple[Layout, nn.Module, str], name: str) -> None:
    layout, model, _ = broken
    for role in ("query", "key"):
        layout.weight(model, role).mul_(0.125)
    fails(broken, "attention", "self-attention")


# --- MLPs -------------------------------------------------------------------------------------------------------------

MLP = [layout_case(name, role) for name, layout in LAYOUTS.items() for role in layout.mlp]


@pytest.mark.parametrize(("name", "role"), MLP)
def test_a_wrong_gain_fails(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    weight = layout.weight(model, role)
    gain = max((weight.shape[0] / weight.shape[1]) ** 0.5, 1.0)
    weight.mul_(1.0001)
    fails(broken, "mlp", f"the MLP's {role} has gain {1.0001 * gain:.5g}, expected {gain:.5g}")


@pytest.mark.parametrize(("name", "role"), MLP)
def test_a_matrix_that_is_not_orthogonal_fails(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    """One row or column is rotated towards another without a change of its norm, so the gain is right."""
    layout, model, _ = broken
    weight = layout.weight(model, role)
    few = weight if weight.shape[0] <= weight.shape[1] else weight.T
    few[1] = 0.8 * few[1] + 0.6 * few[0]
    fails(broken, "mlp", f"the MLP's {role} is 0.6 from orthogonal")


# --- Biases, LayerScale, drop path ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role"), [layout_case(n, role) for n in LAYOUTS if LAYOUTS[n].biases for role in ROLES[n]]
)
def test_nonzero_biases_fail(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    layout.bias(model, role)[-1] = 1e-6
    fails(broken, kind(role), f"the bias of {role} reaches 1e-06")


@pytest.mark.parametrize(("name", "role"), [("hf_vit", role) for role in ROLES["hf_vit"]])
def test_non_finite_biases_fail(broken: tuple[Layout, nn.Module, str], name: str, role: str) -> None:
    layout, model, _ = broken
    layout.bias(model, role)[-1] = torch.nan
    with pytest.raises(InitError, match=f"bias of {role} reaches nan"):
        verify_skipless(model, FAMILIES[name].inputs(1))


@pytest.mark.parametrize(("name", "where"), [(n, where) for n in LAYOUTS for where in LAYOUTS[n].scales])
def test_a_layer_scale_other_than_one_fails(broken: tuple[Layout, nn.Module, str], name: str, where: str) -> None:
    layout, model, _ = broken
    model.get_parameter(f"{layout.path}.{layout.scales[where]}")[3] = 0.75
    fails(broken, where, "LayerScale is 0.25 away from 1")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].drop])
def test_active_drop_path_fails(broken: tuple[Layout, nn.Module, str], name: str) -> None:
    layout, model, _ = broken
    module: Any = model.get_submodule(f"{layout.path}.{layout.drop}")
    before = module.drop_prob
    try:
        module.drop_prob = 0.1
        found = verify_skipless(model, FAMILIES[name].inputs(1), check=False)
        assert {row.site.path for row in found.failed} == {layout.path}
        with pytest.raises(InitError, match=r"drop path is 0\.1"):
            found.raise_if_failed()
    finally:
        module.drop_prob = before


def test_drop_path_of_a_refused_model_is_restored() -> None:
    """The model is refused by the check of attention, after drop path was switched off."""
    family = FAMILIES["timm_vit_layerscale_droppath"]
    model: Any = family.build()
    rates = [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")]
    assert any(rates)
    with pytest.raises(InitError, match="self-attention"):
        quietly(model, alpha=0.0, beta=0.0, generator=seeded(), example=family.inputs(2))
    assert [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")] == rates


@layouts
def test_only_initialised_parts_are_verified(broken: tuple[Layout, nn.Module, str], name: str) -> None:
    """Each part is verified alone, so the others may have any weights."""
    layout, model, _ = broken
    own = {"value-output": ("value", "output"), "query-key": ("query", "key"), "mlp": tuple(layout.mlp)}
    for part, roles in own.items():
        for role in set(ROLES[name]) - {*roles}:
            layout.weight(model, role).mul_(1.5)
            if layout.biases:
                layout.bias(model, role).add_(1)
        assert not verify_skipless(model, FAMILIES[name].inputs(1), parts=(part,)).failed  # type: ignore[arg-type]
        with pytest.raises(InitError, match=layout.path):
            verify_skipless(model, FAMILIES[name].inputs(1))
        for role in set(ROLES[name]) - {*roles}:
            layout.weight(model, role).div_(1.5)
            if layout.biases:
                layout.bias(model, role).zero_()


# --- Centred ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm_vit_layerscale_droppath", "torchvision_vit", "hf_vit", "hf_gpt2"])
def test_a_wrong_centring_bias_fails(name: str) -> None:
    model, check, _ = started(name, centre=True)
    assert not check.failed
    layout, inputs = LAYOUTS[name], FAMILIES[name].inputs(1)
    assert not verify_skipless(model, inputs, centre=True).failed
    with pytest.raises(InitError, match="the bias of down reaches"):
        verify_skipless(model, inputs)
    bias = layout.bias(model, "down")
    whole = bias.clone()
    bias.mul_(0.999)
    fails((layout, model, name), "mlp", "the bias of down leaves 0.001 of the mean", centre=True)
    bias.zero_()
    fails((layout, model, name), "mlp", "the bias of down leaves 1 of the mean", centre=True)
    bias.copy_(whole)
    layout.bias(model, "up")[0] = 1e-6
    fails((layout, model, name), "mlp", "the bias of up reaches 1e-06", centre=True)


def test_a_gated_mlp_is_not_centred_and_has_no_bias() -> None:
    model, _, _ = started("hf_dinov2", centre=True)
    layout, inputs = LAYOUTS["hf_dinov2"], FAMILIES["hf_dinov2"].inputs(1)
    assert not verify_skipless(model, inputs, centre=True).failed
    layout.bias(model, "down")[0] = 1e-6
    fails((layout, model, "hf_dinov2"), "mlp", "the bias of down reaches 1e-06", centre=True)


class Plain(nn.Module):
    """An MLP without a bias at its end, or with an activation that has no name."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(hidden.relu() if self.down.bias is None else hidden.relu().square().sin())


@pytest.mark.parametrize(("bias", "told"), [(False, "no output bias"), (True, "unknown activation is not known")])
def test_verification_of_centre_fails_for_an_mlp_that_is_not_centred(bias: bool, told: str) -> None:
    model = Plain(bias)
    x = torch.randn(2, 3, 4, generator=seeded())
    quietly(model, generator=seeded(), example=x)
    verify_skipless(model, x)
    with pytest.raises(InitError, match=told):
        verify_skipless(model, x, centre=True)
    with pytest.raises(BadInput, match="centre applies to mlp"):
        verify_skipless(model, x, centre=True, parts=("query-key",))


class OneEnd(nn.Module):
    """Parallel attention and MLP with a common output weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.out = nn.Linear(16, 32), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([mixed, nn.functional.gelu(self.up(x))], -1))


@pytest.mark.parametrize("centre", [False, True])
def test_the_bias_of_a_common_output_is_that_of_the_mlp(centre: bool) -> None:
    model = OneEnd()
    x = torch.randn(2, 5, 16, generator=seeded())
    quietly(model, generator=seeded(), example=x, centre=centre)
    assert bool(model.out.bias.any()) == centre
    with torch.no_grad():
        model.out.bias.add_(0.5)
    with pytest.raises(InitError, match="the bias of down"):
        verify_skipless(model, x, centre=centre)
