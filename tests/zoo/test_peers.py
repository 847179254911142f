"""Models of vit-pytorch and x-transformers: their sites, their blocks, and their outputs when rewired.

Expected kinds and blocks are taken from the libraries' source. A few models run in `make test`, all in the full tests.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from tests.zoo.peers import VIT_PYTORCH, X_TRANSFORMERS, Peer
from torch import Tensor, nn

import unskip
from unskip.anatomy import Example
from unskip.errors import NoResidualError

pytestmark = [  # warnings of the libraries, and of rewire about unclassified additions
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (".torch.jit.script. is deprecated", ".torch.backends.cuda.sdp_kernel", "flex_attention called without")
]

FAST = {"vit", "simple_vit_with_hyper_connections", "levit", "decoder", "post-norm", "hyper-connections"}
PEERS = {f"{name}, vit-pytorch": peer for name, peer in VIT_PYTORCH.items()}
PEERS |= {f"{name}, x-transformers": peer for name, peer in X_TRANSFORMERS.items()}


def _each(names: list[str]) -> pytest.MarkDecorator:
    marks = {name: () if name.rpartition(", ")[0] in FAST else pytest.mark.full for name in names}
    return pytest.mark.parametrize("peer", [pytest.param(PEERS[n], id=n, marks=mark) for n, mark in marks.items()])


each_peer = _each(list(PEERS))
each_that_rewires = _each([name for name, peer in PEERS.items() if peer.kinds and not peer.stuck])
LETTERS = {"attention": "A", "mlp": "M", "conv": "C", "parallel": "P", "ssm": "S", "other": "O"}


@each_peer
@torch.no_grad()
def test_sites_and_blocks_match_the_source(peer: Peer) -> None:
    model, example = peer.build()
    audit = unskip.audit(model, example)
    assert "".join(LETTERS[site.kind] for site in audit if not site.long) == peer.kinds
    assert {site.norm for site in audit if site.regular} <= set(peer.norms.split())
    reasons = " ".join(unknown.reason for unknown in audit.unknown)
    assert (peer.unknown in reasons) if peer.unknown else not reasons
    if peer.kinds:
        assert len(unskip.features(model, example)) == peer.blocks == len(audit.blocks)
    else:
        assert audit.unknown or audit.notes
        with pytest.raises(NoResidualError):
            unskip.rewire(model, "cut", example)


@each_that_rewires
@pytest.mark.filterwarnings("ignore:additions that could not be decided")
@torch.no_grad()
def test_rewiring_is_verified_and_undo_restores_the_outputs(peer: Peer) -> None:
    model, example = peer.build()
    run = Example.of(example).run
    before = _first(run(model))
    with unskip.rewired(model, "scale:0.6,0.8", example):  # rewire verifies the outputs
        assert not torch.equal(_first(run(model)), before)
    assert torch.equal(_first(run(model)), before)


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = output[0]
    return output


# --- Handwritten forwards ---------------------------------------------------------------------------------------------

Weights = list[tuple[float, float]]


def pairs(self: Any, weights: Weights, x: Tensor) -> Tensor:
    """vit-pytorch's Transformer: pairs of attention and MLP, and a final norm."""
    left = iter(weights)
    for attention, feed_forward in self.layers:
        for branch in (attention, feed_forward):
            a, b = next(left)
            x = a * x + b * branch(x)
    return self.norm(x)


def keel(self: Any, weights: Weights, x: Tensor) -> Tensor:
    """From the second layer on, the stream is multiplied by the number of layers and the sum is normalised."""
    for index, (layer, (a, b)) in enumerate(zip(self.layers, weights, strict=True)):
        scale = 1 if index == 0 else self.keel_residual_scale
        x = a * (scale * x) + b * layer(x)
        x = x if index == 0 else self.post_norms[index - 1](x)
    return x


@pytest.mark.parametrize(("name", "forward"), [("vit", pairs), ("vit_with_keel_post_ln", keel)])
@torch.no_grad()
def test_a_rewired_vit_matches_the_handwritten_forward(name: str, forward: Callable[..., Tensor]) -> None:
    model, images = VIT_PYTORCH[name].build()
    wiring = unskip.rewire(model, "decay:0.5", images)
    weights = list(zip(wiring.alphas, wiring.betas, strict=True))
    found, decay = model(images), wiring.effective_decay
    wiring.undo()
    by_hand = lambda self, x: forward(self, weights, x)  # noqa: E731
    model.transformer.forward = MethodType(by_hand, model.transformer)  # type: ignore[method-assign, union-attr]
    torch.testing.assert_close(found, model(images))
    own = 4.0**3 if forward is keel else 1.0  # factors that the model itself has on its stream
    assert decay == pytest.approx(own * torch.tensor([a for a, _ in weights]).prod().item())


@pytest.mark.parametrize("name", ["decoder", "post-norm", "scale_residual_constant", "macaron"])
@torch.no_grad()
def test_a_rewired_language_model_matches_the_handwritten_forward(name: str) -> None:
    model, ids = X_TRANSFORMERS[name].build()
    wiring = unskip.rewire(model, "scale:0.6,0.8", ids)
    found = model(ids)
    wiring.undo()

    def forward(self: Any, x: Tensor, residual: Tensor, **kwargs: Any) -> Tensor:
        return 0.6 * (self.scale_residual_constant * residual) + 0.8 * x

    adds: list[nn.Module] = [each for each in model.modules() if type(each).__name__ == "Residual"]
    for each in adds:
        each.forward = MethodType(forward, each)  # type: ignore[method-assign]
    assert len(adds) == len(wiring.sites)
    torch.testing.assert_close(found, model(ids))
