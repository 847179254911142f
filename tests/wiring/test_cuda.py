"""Rewired models on a GPU: the formula, autocast, CUDA graphs and torch.compile."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import unskip
from unskip import Anneal, Cut, Decay, Keep, Scale

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, num_heads=2, depth=3)
    return model.cuda().eval()


def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, device="cuda")


@torch.no_grad()
def test_forward_matches_the_formula() -> None:
    model, x = vit(), images()
    wiring = unskip.rewire(model, Scale(0.5, 0.7))
    assert wiring.verified
    state = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    for block in model.blocks:
        state = 0.5 * state + 0.7 * block.attn(block.norm1(state))
        state = 0.5 * state + 0.7 * block.mlp(block.norm2(state))
    expected = model.forward_head(model.norm(state))
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_autocast_keeps_the_stream_dtype() -> None:
    model, x = vit(), images()
    with torch.autocast("cuda", torch.bfloat16):
        plain = {i: value.dtype for i, value in unskip.features(model, x, pool=None).items()}
        for rule in (Decay(0.6), Cut(), Anneal(Keep(), Cut(), steps=10)):
            unskip.rewire(model, rule).step(5)
            assert {i: value.dtype for i, value in unskip.features(model, x, pool=None).items()} == plain


@torch.no_grad()
def test_cuda_graph_follows_annealed_weights() -> None:
    model, x = vit(), images()
    wiring = unskip.rewire(model, Anneal(Keep(), Decay(0.2), steps=10))
    wiring.step(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    for step in (3, 8):
        wiring.step(step)
        graph.replay()
        assert torch.allclose(out, model(x), atol=1e-4)


def test_compiled_training_steps_match_eager() -> None:
    model, x = vit(), images()
    wiring = unskip.rewire(model, Anneal(Keep(), Cut(), steps=10))
    compiled = torch.compile(model)
    for step in (0, 5, 10):
        wiring.step(step)
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(x).square().sum().backward()
            gradients.append(model.blocks[0].attn.qkv.weight.grad.clone())
        assert torch.allclose(*gradients, rtol=1e-2, atol=1e-4)
