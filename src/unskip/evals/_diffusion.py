"""Features of a diffusion model's blocks at a noise level: what `evaluate` and `extract` take as `inputs`.

    x_t = a_t x + s_t e   ->   network(x_t, t, no label)   ->   the output of each block, pooled

Every image has a noise of its own, made from its place in the set: the same for every block, protocol and model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.evals._extract import Inputs
from unskip.models import Flow, normal


def noised(flow: Flow, time: float, seed: int = 0) -> Inputs:
    """Makes noisy images at a time from noise, 0, to data, 1, of images or latents: the model's arguments (x_t, t).

    Training and test images have noise of their own.
    """
    if not 0 <= time <= 1:
        raise BadInput(f"a time of {time}; times go from noise, 0, to data, 1")

    def inputs(images: Tensor, places: Tensor, split: str) -> tuple[Tensor, Tensor]:
        noise = normal(2 * seed + (split == "train"), places, 0, images.shape[1:])
        times = torch.full((len(images),), time, device=images.device)
        return flow.mixed(images, noise, times), times

    return inputs
