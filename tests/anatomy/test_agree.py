"""The parts of an MLP are checked against the output of its branch: other steps are reported."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.absorption import apply
from unskip.anatomy import MlpParts
from unskip.errors import BadInput, RewireError

WIDTH = 8
Step = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class MlpBranch(nn.Module):
    """x + after(mlp(before(x)))."""

    def __init__(self, before: Step, after: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.before, self.after = Mlp(), before, after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.mlp(self.before(x)))


def inputs() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def identity(x: Tensor) -> Tensor:
    return x


def only(model: nn.Module, example: Tensor) -> MlpParts:
    (part,) = unskip.parts(model, example)
    assert isinstance(part, MlpParts)
    return part


STEPS: dict[str, Step] = {
    "neg": torch.neg,
    "sin": torch.sin,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.1, 0.1),
    "_softmax": lambda x: x.softmax(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, 1),  # tokens
    "index": lambda x: x[..., [1, 0, *range(2, WIDTH)]],
    "cumsum": lambda x: x.cumsum(1),
    "sub": lambda x: x - x.mean(-1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, 1.0),
}


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("op", STEPS)
def test_a_step_without_weights_is_reported(op: str, side: str) -> None:
    model = MlpBranch(**{"before": identity, "after": identity, side: STEPS[op]})
    (extra,) = only(model, inputs()).extras
    assert extra.startswith("steps besides its weights (among ")
    assert op in extra


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0])
def test_a_factor_on_the_input_is_reported(factor: float) -> None:
    assert only(MlpBranch(lambda x: factor * x, identity), inputs()).extras == (
        "steps besides its weights (among mul, relu)",
    )


def test_a_branch_with_other_steps_is_not_absorbed() -> None:
    model, x = MlpBranch(identity, torch.neg), inputs()
    before = model(x)
    with pytest.raises(BadInput, match=r"more than an MLP.*relu, neg"):
        unskip.absorb(only(model, x))
    applied = apply(model, mode="widen", example=x)
    assert not applied.done
    assert torch.equal(model(x), before)


def test_a_rewrite_that_changes_the_outputs_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of the whole model are compared as well."""
    monkeypatch.setattr("unskip.anatomy._parts_trace.mismatch", lambda *_: None)
    monkeypatch.setattr("unskip.anatomy._parts_trace.more_steps", lambda *_: ())
    model, x = MlpBranch(identity, torch.neg), inputs()
    before, weights = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RewireError, match="outputs differ by"):
        apply(model, mode="widen", example=x)
    assert torch.equal(model(x), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


PLAIN: dict[str, tuple[Step, Step]] = {
    "nothing": (identity, identity),
    "rows": (lambda x: x.reshape(-1, WIDTH), lambda y: y.reshape(3, 5, WIDTH)),
    "tokens moved and put back": (lambda x: x.roll(2, 1), lambda y: y.roll(-2, 1)),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), lambda y: F.dropout(y, 0.5, training=False)),
    "narrower numbers": (lambda x: x.bfloat16().float(), identity),
}


@pytest.mark.parametrize("form", PLAIN)
def test_a_plain_mlp_has_no_extras(form: str) -> None:
    assert only(MlpBranch(*PLAIN[form]), inputs()).extras == ()


def test_a_plain_mlp_has_no_extras_in_half_precision_and_when_rewired() -> None:
    model = MlpBranch(identity, identity).bfloat16()
    assert only(model, inputs().bfloat16()).extras == ()
    unskip.rewire(model, "scale:0.5,2.0", inputs().bfloat16())
    assert only(model, inputs().bfloat16()).extras == ()


def test_an_mlp_on_a_scaled_stream_has_no_extras() -> None:
    class DeepNorm(MlpBranch):
        def forward(self, x: Tensor) -> Tensor:
            return 1.5 * x + self.mlp(x)

    assert only(DeepNorm(identity, identity), inputs()).extras == ()


def test_an_mlp_on_one_token_is_reported() -> None:
    class ClassToken(MlpBranch):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cat([self.mlp(x[:, :1]), x[:, 1:]], 1)

    (extra,) = only(ClassToken(identity, identity), inputs()).extras
    assert extra.startswith("steps besides its weights")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_outputs_are_not_compared(value: float) -> None:
    model = MlpBranch(identity, identity)
    model.mlp.down.bias.data[0] = value
    assert only(model, inputs()).extras == ()


class Scaled(MlpBranch):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(identity, identity)
        self.scale = nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.mlp(x)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5, 1), (5, WIDTH)])
def test_a_scale_that_differs_by_token_is_reported(shape: tuple[int, ...]) -> None:
    model = Scaled(shape)
    assert only(model, inputs()).extras == ("steps besides its weights (among relu, mul)",)
    assert not apply(model, mode="widen", example=inputs()).done


FOLDS: dict[str, tuple[Step, Step]] = {
    "two tokens": (lambda x: x.reshape(-1, 2, 2 * WIDTH), lambda y: y.reshape(-1, 4, WIDTH)),
    "a head": (lambda x: x.unflatten(-1, (2, WIDTH // 2)), lambda y: y.flatten(-2)),
    "half the features": (lambda x: x[..., : WIDTH // 2], lambda y: torch.cat([y, torch.zeros_like(y)], -1)),
}


@pytest.mark.parametrize("form", FOLDS)
def test_an_mlp_of_another_width_than_the_stream_is_reported(form: str) -> None:
    model, x = MlpBranch(*FOLDS[form]), inputs()[:, :4]
    width = 2 * WIDTH if form == "two tokens" else WIDTH // 2
    model.mlp.up, model.mlp.down = nn.Linear(width, 16), nn.Linear(16, width)
    (extra,) = only(model, x).extras
    assert extra.startswith("steps besides its weights")


def test_a_norm_per_head_at_the_end_is_reported() -> None:
    norm = nn.LayerNorm(WIDTH // 2)
    (extra,) = only(MlpBranch(identity, lambda y: norm(y.unflatten(-1, (2, -1))).flatten(-2)), inputs()).extras
    assert extra.startswith("steps besides its weights")


@pytest.mark.parametrize("shape", [(), (1,), (WIDTH,), (1, 1, WIDTH)])
def test_a_scale_per_feature_is_not_an_extra(shape: tuple[int, ...]) -> None:
    assert only(Scaled(shape), inputs()).extras == ()


# --- Norms ------------------------------------------------------------------------------------------------------------


class NormPlusOne(nn.LayerNorm):
    """Stores its gain minus 1, as Nemotron does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gain_stored_minus_one_is_found(dtype: torch.dtype) -> None:
    norm = NormPlusOne(WIDTH)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    found = only(MlpBranch(norm, identity).to(dtype), inputs().to(dtype))
    assert found.norm is not None
    assert found.norm.gain is not None
    assert found.norm.offset == 1
    assert torch.equal(found.norm.gain, norm.weight)
    assert found.extras == ()


class NormWithOtherName(nn.Module):
    """An RMSNorm whose eps has another attribute name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.small = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.small)


def test_the_eps_of_a_norm_is_found_under_any_name() -> None:
    found = only(MlpBranch(NormWithOtherName(), identity), 0.01 * inputs())
    assert found.norm is not None
    assert found.norm.eps == 1e-3
    assert found.extras == ()


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = ChannelNorm(WIDTH), nn.Conv2d(WIDTH, 16, 1), nn.Conv2d(16, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_norm_over_channels_is_found() -> None:
    part = only(Pointwise(), torch.randn(2, WIDTH, 3, 3, generator=torch.Generator().manual_seed(1)))
    assert part.norm is not None
    assert (part.norm.kind, part.norm.place) == ("layernorm", "pre")
    assert part.extras == ()


def test_two_norms_in_a_row_are_reported() -> None:
    first, second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    for norm in (first, second):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    (extra,) = only(MlpBranch(nn.Sequential(first, second), identity), inputs()).extras
    assert extra.startswith("steps besides its weights")


# --- Labels -----------------------------------------------------------------------------------------------------------


class Summary(nn.Module):
    """Adds the weighted sum of all tokens, with one score per token, as in additive attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        score = score / score.norm(dim=1, keepdim=True)
        return x + self.out((score * x).sum(1, keepdim=True) * x)


def test_a_norm_over_tokens_leaves_parts_unknown() -> None:
    parts = unskip.parts(Summary(), inputs())
    assert len(parts) == 1  # and torch raises no error
