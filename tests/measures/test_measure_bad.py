"""`measure` refuses bad input, and numbers that cannot be measured are None, with a note."""

import math
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import timm
import torch
from tests.measures.stacks import stack, strict
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip import Cut
from unskip.errors import BadInput, ForwardError, NoResidualError, UnskipWarning


def test_nan_weights_name_the_site() -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    with torch.no_grad():
        model.get_parameter("blocks.1.attn.qkv.weight")[0, 0] = torch.nan
    with pytest.raises(BadInput, match=r"blocks\.1 \[attention\]: its branch"):
        unskip.measure(model, family.inputs(2))


def test_nan_input_names_the_first_site() -> None:
    family = FAMILIES["timm_vit"]
    with pytest.raises(BadInput, match=r"blocks\.0 \[attention\]: its stream"):
        unskip.measure(family.build(), torch.full((2, 3, 16, 16), torch.nan))


def test_a_sum_that_overflows_names_the_site() -> None:
    model = stack(depth=1).half()
    with torch.no_grad():
        model[0].f.weight.copy_(torch.eye(6))
    with pytest.raises(BadInput, match=r"its sum is not finite"):
        unskip.measure(model, torch.full((2, 3, 6), 6e4, dtype=torch.float16))


def test_constant_features_have_rank_zero_and_no_similarity() -> None:
    model = stack(depth=2)
    x = torch.ones(3, 5, 6, dtype=torch.float64)
    measurement = unskip.measure(model, x)
    for row in measurement.blocks:
        assert row.token_rank == 0
        assert row.cka_first is None
        assert row.cka_previous is None
        assert row.echo is None
    strict(measurement)


@pytest.mark.parametrize("samples", [1, 4])
def test_numbers_of_rounding_noise_are_left_out(samples: int) -> None:
    """Without skips the tokens of a sample soon differ only in their last digits. Different samples still differ."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=96, num_heads=3, img_size=64)
    x = torch.randn(samples, 3, 64, 64)
    unskip.rewire(model, Cut(), x)
    measurement = unskip.measure(model, x, jacobians="off")
    exact = unskip.measure(model.double(), x.double(), jacobians="off")
    first, *_, last = measurement.blocks
    assert first.token_rank == pytest.approx(exact.blocks[0].token_rank, rel=1e-3)
    assert first.high_frequency == pytest.approx(exact.blocks[0].high_frequency, rel=1e-3)
    assert last.high_frequency is None
    assert any(last.path in note and "rounding" in note for note in measurement.notes)
    assert not any("rounding" in note for note in exact.notes)
    if samples == 1:
        assert (last.token_rank, last.cka_first, last.cka_previous) == (None,) * 3
    else:
        assert last.token_rank == pytest.approx(exact.blocks[-1].token_rank, rel=1e-2)
        assert last.pooled_rank == pytest.approx(exact.blocks[-1].pooled_rank, rel=1e-2)


@pytest.mark.parametrize(
    "options", [{"steps": 1}, {"grid": (4,)}, {"grid": (1, 9)}, {"grid": (2.0, 4.0)}, {"grid": 4}, {"generator": 3}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        unskip.measure(stack(1), torch.randn(2, 8, 6, dtype=torch.float64), **options)


def test_a_zero_branch_has_no_condition_number() -> None:
    model = stack(depth=1)
    nn.init.zeros_(model[0].f.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    row = unskip.measure(model, x).sites[0]
    assert math.isnan(row.branch.condition)
    assert row.sublayer.condition == pytest.approx(1.0)
    assert row.ratio == 0
    with pytest.warns(UnskipWarning, match="near-zero branch"):
        unskip.rewire(model, Cut(), x)
    measurement = unskip.measure(model, x)
    strict(measurement)
    assert measurement.blocks[0].norm == 0
    assert measurement.blocks[0].cosine is None
    assert measurement.blocks[0].token_rank == 0
    assert str(measurement)


def test_a_rank_deficient_branch_has_an_infinite_condition_number() -> None:
    model = stack(depth=1)
    with torch.no_grad():
        model[0].f.weight[-1] = 0
    row = unskip.measure(model, torch.randn(2, 3, 6, dtype=torch.float64)).sites[0]
    assert row.branch.condition == math.inf
    assert row.branch.null == 0
    assert row.branch.to_dict()["condition"] is None


def test_wrong_batches_are_refused() -> None:
    model = FAMILIES["timm_vit"].build()
    with pytest.raises(ForwardError, match="forward failed"):
        unskip.measure(model, torch.randn(2, 3, 20, 20))
    with pytest.raises(BadInput, match="samples along its first axis"):
        unskip.measure(stack(), torch.randn(6, dtype=torch.float64))
    with pytest.raises(BadInput, match="samples along its first axis"):
        unskip.measure(stack(), torch.randn(0, 5, 6, dtype=torch.float64))
    with pytest.raises(BadInput, match="jacobians"):
        unskip.measure(model, jacobians="some")  # type: ignore[arg-type]
    with pytest.raises(NoResidualError, match="no residual sites"):
        unskip.measure(nn.Linear(4, 4), torch.randn(2, 4))


def test_samples_along_another_axis_are_refused() -> None:
    """With (tokens, batch, dim) tokens would be measured as samples, without attention between them."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)
    with pytest.raises(BadInput, match="batch_first"):
        unskip.measure(layer, torch.randn(5, 2, 8), jacobians="off")
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)
    assert unskip.measure(layer, torch.randn(5, 2, 8), jacobians="off").samples == 5


def test_attention_with_fully_masked_queries_is_not_measured() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask)
            return x + self.o(out)

    mask = torch.ones(2, 3, 3, dtype=torch.bool)
    mask[:, 0] = False
    measurement = unskip.measure(Masked(), (torch.randn(2, 3, 4), mask), jacobians="off")
    assert measurement.sites[0].entropy is None
    assert any("attention not measured" in note for note in measurement.notes)
