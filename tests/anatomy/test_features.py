"""Features of blocks in one pass."""

from __future__ import annotations

import numpy
import pytest
import timm
import torch
from tests.anatomy import doubtful as d
from tests.anatomy import handmade as h
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

import unskip
from unskip.errors import BadInput, NoResidualError

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=3)
    return model.eval()


@torch.no_grad()
def test_agrees_with_the_blocks_run_by_hand(vit: nn.Module) -> None:
    x = vit.norm_pre(vit._pos_embed(vit.patch_embed(IMAGES)))
    expected = []
    for block in vit.blocks:
        x = block(x)
        expected.append(x)
    found = unskip.features(vit, IMAGES, pool=None)
    assert list(found) == [0, 1, 2]
    assert all(torch.equal(found[i], expected[i]) for i in range(3))
    means = unskip.features(vit, IMAGES)
    assert all(torch.allclose(means[i], expected[i].mean(1), atol=1e-6) for i in range(3))
    assert torch.equal(unskip.features(vit, IMAGES, pool="cls")[2], expected[2][:, 0])


@torch.no_grad()
def test_takes_some_blocks_and_counts_from_the_end(vit: nn.Module) -> None:
    every = unskip.features(vit, IMAGES)
    assert list(unskip.features(vit, IMAGES, blocks=[0, -1])) == [0, 2]
    assert torch.equal(unskip.features(vit, IMAGES, blocks=1)[1], every[1])


@torch.no_grad()
def test_indices_of_numpy_and_torch_are_indices(vit: nn.Module) -> None:
    for blocks in (numpy.arange(1, 3), [numpy.int64(1), -1], torch.tensor([2, 1])):
        found = unskip.features(vit, IMAGES, blocks=blocks)
        assert [(type(index), index) for index in found] == [(int, 1), (int, 2)]
    assert list(unskip.features(vit, IMAGES, blocks=torch.tensor(1))) == [1]


@pytest.mark.parametrize("blocks", [None, 1.5, "last", "0,1", [0, 1.5]])
def test_a_wrong_index_is_refused_with_the_accepted_forms(vit: nn.Module, blocks: object) -> None:
    with pytest.raises(BadInput, match="blocks"):
        unskip.features(vit, IMAGES, blocks=blocks)  # type: ignore[arg-type]


def test_leaves_no_hooks_even_after_a_fault(vit: nn.Module) -> None:
    unskip.features(vit, IMAGES)
    with pytest.raises(unskip.errors.ForwardError):
        unskip.features(vit, torch.randn(2, 1, 32, 32))
    assert not any(module._forward_hooks for module in vit.modules())


def test_keeps_gradients_and_mode(vit: nn.Module) -> None:
    vit.train()
    unskip.features(vit, IMAGES, blocks=0)[0].sum().backward()
    assert vit.blocks[0].attn.qkv.weight.grad is not None
    assert vit.blocks[1].attn.qkv.weight.grad is None
    assert vit.training


@torch.no_grad()
def test_feature_maps_become_tokens() -> None:
    model = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)).eval()
    images = torch.randn(2, 3, 64, 64)
    tokens = unskip.features(model, images, pool=None)
    assert [tuple(value.shape) for value in tokens.values()] == [(2, 256, 8), (2, 64, 8), (2, 16, 16), (2, 4, 16)]
    final = model.forward_features(images)  # (images, dim, rows, cols)
    means = unskip.features(model, images, blocks=-1)[3]
    assert torch.allclose(model.norm_pre(final).mean((2, 3)), means, atol=1e-5)


class FeatureMaps(nn.Module):
    """(images, channels, rows, columns), with a Linear over the channels at the end, as in torchvision's ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.mix = nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Pooled(nn.Module):
    """The same layout, with a branch without weights, as in PoolFormer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.avg_pool2d(x, 3, 1, 1)


class Sequence(nn.Module):
    """(images, tokens, channels), with a convolution over the tokens, as the positions of wav2vec 2."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.over_time(x.transpose(1, 2)).transpose(1, 2).relu()


class Normalised(nn.Module):
    """(images, channels, times), with a norm over the channels before a convolution over the times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.over_time = nn.LayerNorm(6), nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.over_time(self.norm(x.transpose(1, 2)).transpose(1, 2))


class TokensOut(nn.Module):
    """Adds to a feature map and returns tokens, as in Twins."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = x.transpose(1, 2).unflatten(2, (2, -1))
        return (maps + self.position(maps)).flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("block", "shape"),
    [
        (FeatureMaps, (2, 6, 3, 4)),
        (FeatureMaps, (2, 6, 6, 6)),
        (Pooled, (2, 6, 3, 4)),
        (Sequence, (2, 5, 6)),
        (Sequence, (2, 6, 6)),
        (Normalised, (2, 6, 5)),
        (TokensOut, (2, 8, 6)),
    ],
)
@torch.no_grad()
def test_the_feature_axis_of_any_layout(block: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = nn.Sequential(block(), block()), torch.randn(shape)
    expected = model[0](x)
    if block in (FeatureMaps, Pooled):
        expected = expected.flatten(2).transpose(1, 2)
    if block is Normalised:
        expected = expected.transpose(1, 2)
    assert torch.equal(unskip.features(model, x, pool=None)[0], expected)
    assert torch.allclose(unskip.features(model, x)[0], expected.mean(1), atol=1e-6)
    wiring = unskip.rewire(model, "learn:0.5,channel", x)
    assert [parameter.numel() for parameter in wiring.parameters.values()] == [6, 6]


class Stage(nn.Module):
    """A residual of its own, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.layers = h.mlp(), nn.Sequential(h.PreNorm(), h.PreNorm())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.f(x))


@torch.no_grad()
def test_nested_blocks_have_the_order_of_the_audit() -> None:
    model, x = nn.Sequential(Stage(), Stage()), torch.randn(2, 5, h.DIM)
    blocks = unskip.audit(model, x).blocks
    outputs: dict[str, Tensor] = {}
    for path in blocks:
        model.get_submodule(path).register_forward_hook(lambda _, __, out, path=path: outputs.update({path: out}))
    found = unskip.features(model, x, pool=None)
    assert blocks == ("0", "0.layers.0", "0.layers.1", "1", "1.layers.0", "1.layers.1")
    assert all(torch.equal(found[index], outputs[path]) for index, path in enumerate(blocks))


@torch.no_grad()
def test_works_on_text_and_after_rewiring() -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    model = BertModel(config).eval()
    batch = {"input_ids": torch.randint(0, 50, (2, 7))}
    states = model(**batch, output_hidden_states=True).hidden_states
    found = unskip.features(model, batch, pool=None)
    assert all(torch.equal(found[i], states[i + 1]) for i in range(2))
    unskip.rewire(model, unskip.Scale(0.5))
    assert not torch.equal(unskip.features(model, batch, pool=None)[1], found[1])


@torch.no_grad()
def test_an_argument_without_a_row_for_each_image() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, mask = torch.randn(3, 5, 16), torch.zeros(5, 5)
    found = unskip.features(encoder, (x, mask), pool=None)
    assert torch.allclose(found[1], encoder(x, mask), atol=1e-5)


def test_bad_requests(vit: nn.Module) -> None:
    with pytest.raises(BadInput, match=r"not among .* 3 blocks"):
        unskip.features(vit, IMAGES, blocks=[7])
    with pytest.raises(BadInput, match="pool is 'max'"):
        unskip.features(vit, IMAGES, pool="max")  # type: ignore[arg-type]
    with pytest.raises(NoResidualError):
        unskip.features(d.LowRank(), torch.randn(2, 5, h.DIM))
