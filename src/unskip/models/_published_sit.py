"""Loads checkpoints of SiT in the layout of the published code.

Names are equal. If the published model has an unused variance output (learn_sigma), its last layer is twice as wide,
and the half that predicts the velocity is loaded:

    final_layer.linear  (patch * patch * 2 channels, width)  ->  the first `channels` of every pixel

A training checkpoint has weights under "ema" and "model"; the EMA weights are loaded.
"""

from __future__ import annotations

from unskip.models._published import Weights, check_fit, read_tensors
from unskip.models._sit import SiT

_HEAD = "final_layer.linear."


def load_published_sit(model: SiT, weights: Weights) -> None:
    """Fills a SiT from a published checkpoint: a .pt file or its state dict. Long skips stay at zero.

    Raises LoadError if names or shapes differ, without changing the model.
    """
    state = read_tensors(weights, "ema", "model")
    wanted = model.state_dict()
    for name in (f"{_HEAD}weight", f"{_HEAD}bias"):
        if name in state and len(state[name]) == 2 * len(wanted[name]):
            by_pixel = state[name].reshape(model.patch**2, 2, model.channels, *state[name].shape[1:])
            state[name] = by_pixel[:, 0].flatten(0, 1)
    long_skips = {name for name in wanted if ".skip." in name}
    advice = "Build the SiT with its width, depth, patch, size of latents and number of classes."
    check_fit(state, wanted, wanted.keys() - long_skips, long_skips, advice)
    model.load_state_dict(state, strict=False)
