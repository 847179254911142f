"""`measure` on many kinds of models: text, odd grids, two towers, shared layers, half precision, large Jacobians."""

from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import timm
import torch
from tests.measures.stacks import matrices, stack, strict
from tests.zoo.families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip import Scale

# --- Many kinds of models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hf_bert", "hf_gpt2", "diffusers_dit", "timm_swin", "timm_convnext", "hf_clip"])
def test_a_family_is_measured(name: str) -> None:
    family = FAMILIES[name]
    measurement = unskip.measure(family.build(), family.inputs(3), jacobians="off")
    assert measurement.samples == 3
    assert len(measurement.sites) == len(family.sites)
    strict(measurement)
    assert all(row.norm > 0 for row in measurement.blocks)
    assert measurement.model in str(measurement)
    assert measurement.model in repr(measurement)
    attentions = [row for row in measurement.sites if row.kind == "attention"]
    assert all(row.entropy is not None for row in attentions)
    assert all(row.entropy is None for row in measurement.sites if row.kind in ("mlp", "conv"))


def test_text_has_no_spatial_frequencies() -> None:
    """Nine tokens would fill a square grid, but they are words."""
    family = FAMILIES["hf_bert"]
    ids = torch.randint(4, 32, (2, 9))
    measurement = unskip.measure(family.build(), {"input_ids": ids}, jacobians="off")
    assert all(row.high_frequency is None for row in measurement.blocks)
    assert any("spatial" in note for note in measurement.notes)


def test_a_grid_that_is_not_square_can_be_passed() -> None:
    model = stack(depth=1)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    assert unskip.measure(model, x, jacobians="off").blocks[0].high_frequency is None
    measurement = unskip.measure(model, x, jacobians="off", grid=(2, 3))  # after one other token
    sums = x + F.linear(x, matrices(model)[0])
    shares = [unskip.measures.high_frequency_share(one[None, 1:], (2, 3)) for one in sums]
    assert measurement.blocks[0].high_frequency == pytest.approx(sum(shares) / 2)


@pytest.mark.parametrize("size", [(32, 128), (128, 32), (64, 64)])
def test_the_patch_grid_follows_the_image(size: tuple[int, int]) -> None:
    """Sixteen patches of an oblong image do not form a square."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 1, "embed_dim": 24, "num_heads": 3, "img_size": size}
    model = timm.create_model("vit_tiny_patch16_224", **options)
    images = torch.randn(2, 3, *size)
    result = unskip.measure(model, images, jacobians="off").blocks[0].high_frequency
    assert result is not None
    grid = (size[0] // 16, size[1] // 16)
    assert result == unskip.measure(model, images, jacobians="off", grid=grid).blocks[0].high_frequency
    assert (result == unskip.measure(model, images, jacobians="off", grid=(4, 4)).blocks[0].high_frequency) == (
        grid == (4, 4)
    )


def test_two_towers_are_not_compared_with_each_other() -> None:
    """T5's decoder and CLIP's second tower are separate streams."""
    for name, starts in (("hf_t5", 2), ("hf_clip", 2)):
        family = FAMILIES[name]
        model = family.build()
        inputs = family.inputs(2)
        unskip.rewire(model, Scale(0.5, 1.0), inputs)
        measurement = unskip.measure(model, inputs, jacobians="off")
        assert [row.carried for row in measurement.blocks[:2]] == [0.25, 0.0625]
        decay = 0.125 if name == "hf_t5" else 0.25
        assert [row.carried for row in measurement.blocks[2:4]] == [decay, decay**2]
        assert any(note.startswith(f"{starts} streams") for note in measurement.notes)
        assert sum(row.cka_previous is None for row in measurement.blocks) == starts


def test_a_site_that_runs_several_times_is_measured_at_its_last_run() -> None:
    family = FAMILIES["hf_albert"]
    model = family.build()
    unskip.rewire(model, Scale(0.5, 1.0), family.inputs(2))
    measurement = unskip.measure(model, family.inputs(2))
    assert len(measurement.sites) == 2
    assert measurement.blocks[0].carried == pytest.approx(0.5**6)
    assert measurement.network is not None
    streams: list[Tensor] = []
    outputs: list[Tensor] = []
    layer = model.get_submodule("encoder.albert_layer_groups.0.albert_layers.0")
    norm = layer.get_submodule("full_layer_layer_norm")  # after the second sum
    with (
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0])),
        norm.register_forward_hook(lambda _, args, output: outputs.append(output)),
        torch.no_grad(),
    ):
        model(**family.inputs(2))
    assert len(streams) == len(outputs) == 3
    assert measurement.blocks[0].cosine == pytest.approx(
        float(F.cosine_similarity(outputs[-1], streams[0], dim=-1).mean())
    )
    assert measurement.blocks[0].norm == pytest.approx(float(outputs[-1].norm(dim=-1).mean()))


@pytest.mark.parametrize(
    "name",
    [
        "timm_vit",
        "nn_encoder_pre",
        "nn_encoder_post",
        "hf_bert",
        "hf_gpt2",
        "timm_swinv2",
        "timm_convnext",
        "hf_albert",
    ],
)
def test_block_outputs_match_features(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build().eval(), family.inputs(2)
    measurement = unskip.measure(model, inputs, jacobians="off")
    with torch.no_grad():
        outputs = unskip.features(model, inputs, pool=None)
    assert [row.norm for row in measurement.blocks] == pytest.approx(
        [float(x.norm(dim=-1).mean()) for x in outputs.values()], rel=1e-4
    )
    ranks = [unskip.measures.effective_rank(x.flatten(0, 1)) for x in outputs.values()]
    assert [row.token_rank for row in measurement.blocks] == pytest.approx(ranks, rel=1e-4)


def test_one_sample_is_enough() -> None:
    family = FAMILIES["timm_vit"]
    measurement = unskip.measure(family.build(), family.inputs(1), jacobians="off")
    assert measurement.samples == 1
    assert all(row.pooled_rank is None and row.echo is None for row in measurement.blocks)
    assert any("one sample" in note for note in measurement.notes)
    assert "on 1 sample of 5 tokens" in str(measurement)


def test_samples_are_measured_with_their_own_conditions() -> None:
    family = FAMILIES["diffusers_dit"]
    model = family.build()
    together = unskip.measure(model, family.inputs(2), jacobians="off")
    whole = family.inputs(2)
    separate = [
        unskip.measure(model, {key: value[i : i + 1] for key, value in whole.items()}, jacobians="off")
        for i in range(2)
    ]
    for index, row in enumerate(together.sites):
        assert row.ratio == pytest.approx(sum(one.sites[index].ratio for one in separate) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build().to(dtype)
    images = family.inputs(2).to(dtype)
    measurement = unskip.measure(model, images)
    wide = unskip.measure(model.double(), images.double())
    strict(measurement)
    for row, expected in zip(measurement.sites, wide.sites, strict=True):
        assert row.branch.precision == "float64"
        assert row.branch.sigma_max == pytest.approx(expected.branch.sigma_max, rel=0.05)
        assert row.ratio == pytest.approx(expected.ratio, rel=0.05)


def test_a_branch_that_writes_in_place_has_a_note_instead_of_a_jacobian() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.f(x)
            y[..., :2] = 0.0
            return x + y

    measurement = unskip.measure(Block(), torch.randn(2, 3, 4))
    assert measurement.sites[0].branch is None
    assert any("no Jacobian of the branch" in note and "in place" in note for note in measurement.notes)
    assert measurement.sites[0].ratio > 0


# --- Matrix-free ------------------------------------------------------------------------------------------------------


def test_a_large_jacobian_is_estimated_and_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.measures import _site_rows

    model, x = stack(), torch.randn(1, 3, 6, dtype=torch.float64)
    exact = unskip.measure(model, x)
    monkeypatch.setattr(_site_rows, "largest_built", lambda x: 4)
    free = unskip.measure(model, x)
    for a, b in zip(exact.sites, free.sites, strict=True):
        assert not b.sublayer.exact
        assert b.sublayer.sigma_max == pytest.approx(a.sublayer.sigma_max, rel=0.05)
        assert b.sublayer.condition <= a.sublayer.condition * 1.01
    assert ">" in str(free)
    forced = unskip.measure(model, x, jacobians="exact")
    assert forced.sites[0].sublayer is not None
    assert forced.sites[0].sublayer.exact


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int, str]] = []
    unskip.measure(stack(), torch.randn(2, 3, 6, dtype=torch.float64), progress=lambda *args: calls.append(args))
    assert calls[0][2] == "tracing"
    assert "Jacobian of the network" in calls[-1][2]
    assert all(done <= total for done, total, _ in calls)
