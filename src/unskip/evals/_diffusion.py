"""Features of a diffusion model's blocks at a noise level: what `evaluate` and `extract` take as `inputs`.

    x_t = a_t x + s_t e   ->   network(x_t, t, no label)   ->   the output of each block, pooled

Every image has a noise of its own, made from its place in the set: the same for every block, protocol and model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unskip._table import table
from unskip.errors import BadInput
from unskip.evals._evaluate import Result
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


def by_time(results: Sequence[Result], name: str) -> str:
    """A table of one number: a row for each block, a column for each time."""
    cells: dict[int | None, dict[float | None, float]] = {}
    for each in results:
        if name in each.values:
            cells.setdefault(each.block, {})[each.time] = each.values[name]
    if not cells:
        known = sorted({key for each in results for key in each.values})
        raise BadInput(f"no number {name!r}; there are {', '.join(known)}")
    times = list(dict.fromkeys(each.time for each in results))
    rows = [[block, *(row.get(time) for time in times)] for block, row in cells.items()]
    return table(("block", *(f"t = {time:g}" for time in times if time is not None)), rows)
