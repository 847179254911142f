"""Inputs of a diffusion model at one noise level, for the `inputs` of `evaluate` and `extract`.

    x_t = a_t x + s_t e   ->   network(x_t, t, no label)   ->   the output of each block, pooled

The noise of an image depends only on its index in the set, so it is the same for every block, protocol and model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.evals._extract import Inputs
from unskip.models import Flow, normal


def noised(flow: Flow, time: float, seed: int = 0) -> Inputs:
    """A function from images or latents to the model's arguments (x_t, t), at a time between 0 (noise) and 1 (data).

    Training and test images get different noise.
    """
    if not 0 <= time <= 1:
        raise BadInput(f"time is {time}; it must be between 0 (noise) and 1 (data)")

    def inputs(images: Tensor, indices: Tensor, split: str) -> tuple[Tensor, Tensor]:
        noise = normal(2 * seed + (split == "train"), indices, 0, images.shape[1:])
        times = torch.full((len(images),), time, device=images.device)
        return flow.mixed(images, noise, times), times

    return inputs
