"""quantised-accuracy-v1: rounding against torch, ranges by brute force, and a rounded classifier."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.evals.digits import digits, vit
from torch import Tensor, nn

import unskip
from unskip import evals
from unskip.errors import BadInput, UnskipWarning
from unskip.evals._quantised import ranges, rounded


@given(st.integers(0, 1000), st.integers(2, 8), st.floats(1e-3, 1e3))
def test_rounding_matches_torch(seed: int, bits: int, scale: float) -> None:
    x = scale * torch.randn(40, 5, generator=torch.Generator().manual_seed(seed))
    low, high = x.amin().clamp_max(0), x.amax().clamp_min(0)
    step = float((high - low) / (2**bits - 1))
    expected = torch.fake_quantize_per_tensor_affine(x, step, round(-float(low) / step), 0, 2**bits - 1)
    # A value half-way between two levels may be rounded to either.
    torch.testing.assert_close(rounded(x, low, high, bits), expected, atol=1.01 * step, rtol=0)
    assert (rounded(x, low, high, bits) != expected).float().mean() < 0.02
    assert len(rounded(x, low, high, bits).unique()) <= 2**bits
    low, high = x.amin(0), x.amax(0)
    by_channel = rounded(x, low, high, bits)
    for channel in range(5):
        one = rounded(x[:, channel], low[channel], high[channel], bits)
        assert torch.equal(by_channel[:, channel], one)


@pytest.mark.parametrize("channel", [False, True])
def test_a_clipped_range_has_the_least_error(channel: bool) -> None:
    rows = torch.randn(5000, 3)
    rows[0] = torch.tensor([30.0, 1.0, 1.0])  # an outlier in the first channel
    low, high = rows.amin(0), rows.amax(0)

    def error(shares: Tensor) -> Tensor:
        least, most = (low, high) if channel else (low.amin(), high.amax())
        each = (rows - rounded(rows, shares * least, shares * most, 4)).square()
        return each.sum(0) if channel else each.sum()

    result = ranges(rows, low, high, 4, channel, clipped=True)
    best = (rows - rounded(rows, *result, 4)).square()
    for share in torch.linspace(0.2, 1, 33):
        assert (error(share) >= (best.sum(0) if channel else best.sum()) * (1 - 1e-5)).all()
    assert result[1].flatten()[0] < 15  # half of the outlier's range
    assert torch.equal(ranges(rows, low, high, 4, True, clipped=False)[1], high)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A classifier of digits after a short training."""
    torch.manual_seed(0)
    model = vit(num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(15):
        for inputs, labels in unskip.data.Feed(digits("train", 300), 50).evaluate():
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def test_accuracy_and_sqnr_by_bits(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    test = digits("test", 200)
    changes = {"quantised-accuracy-v1": {"bits": (16, 8, 2), "calibration": 300}}
    rounding, plain = evals.evaluate(model, digits(), test, ["quantised-accuracy-v1", "accuracy-v1"], changes=changes)
    values = rounding.values
    assert values["accuracy"] == plain.values["accuracy"] > 0.3
    assert values["accuracy_16_tensor_minmax"] == pytest.approx(values["accuracy"], abs=0.01)
    for way in ("tensor_minmax", "tensor_clipped", "channel_minmax", "channel_clipped"):
        assert values[f"sqnr_16_{way}"] > 35
        assert values[f"sqnr_16_{way}"] > values[f"sqnr_8_{way}"] > values[f"sqnr_2_{way}"]
    assert values["sqnr_2_tensor_minmax"] < 10
    assert set(rounding.intervals) == {name for name in values if name.startswith("accuracy")}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_rewired_model_keeps_its_wiring_when_rounded(model: nn.Module) -> None:
    model = copy.deepcopy(model)
    unskip.rewire(model, "decay:0.3", torch.zeros(1, 1, 8, 8))
    changes = {"quantised-accuracy-v1": {"bits": (16,), "calibration": 300}}
    rounding, plain = evals.evaluate(
        model, digits(), digits("test", 100), ["quantised-accuracy-v1", "accuracy-v1"], changes=changes
    )
    assert rounding.values["accuracy"] == plain.values["accuracy"]
    assert rounding.values["sqnr_16_channel_minmax"] > 35


def test_bad_input_is_refused() -> None:
    block = nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, batch_first=True))
    with pytest.raises(BadInput, match="MultiheadAttention"):
        evals.evaluate(block, digits(), digits("test", 20), ["quantised-accuracy-v1"])
    for bits in (1, 40):
        changes = {"quantised-accuracy-v1": {"bits": (8, bits)}}
        with pytest.raises(BadInput, match=f"{bits} bits: .* 2 to 16"):
            evals.evaluate(
                vit(num_classes=10), digits(), digits("test", 20), ["quantised-accuracy-v1"], changes=changes
            )


def test_a_layer_that_is_used_without_a_call_is_refused() -> None:
    shape = {"img_size": 8, "patch_size": 2, "in_chans": 1, "depth": 2, "embed_dim": 16, "num_heads": 2}
    beit = timm.create_model("beit_base_patch16_224", **shape, num_classes=10)  # uses qkv.weight in F.linear
    with pytest.raises(BadInput, match=r"blocks\.0\.attn\.qkv and 1 more"):
        evals.evaluate(beit, digits(), digits("test", 20), ["quantised-accuracy-v1"])


def test_a_layer_that_is_not_used_is_ignored(model: nn.Module) -> None:
    changes = {"quantised-accuracy-v1": {"bits": (8,)}}
    spare = copy.deepcopy(model)
    spare.spare = nn.Linear(3, 3)
    results = [
        evals.evaluate(each, digits(), digits("test", 50), ["quantised-accuracy-v1"], changes=changes)[0].values
        for each in (model, spare)
    ]
    assert results[0] == results[1]


def test_calibration_on_images_sorted_by_class_warns(model: nn.Module) -> None:
    train = digits("train", 300)
    in_order = train.select(train.labels.argsort(stable=True).tolist())
    changes = {"quantised-accuracy-v1": {"bits": (8,), "calibration": 20}}
    with pytest.warns(UnskipWarning, match="1 of 10 classes"):
        evals.evaluate(model, in_order, digits("test", 20), ["quantised-accuracy-v1"], changes=changes)
