"""Weights averaged over the steps, for evaluating and sampling: w_mean <- decay * w_mean + (1 - decay) * w."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average(AveragedModel):
    """torch's, buffers included; after the first step it moves all weights in one call and never waits for a device."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.share = 1 - decay
        mine, theirs = (chain(each.parameters(), each.buffers()) for each in (self.module, model))
        pairs = [*zip(mine, theirs, strict=True)]
        self.moving = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counting = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        if self.n_averaged == 0:  # the first is a copy
            super().update_parameters(model)
            return
        torch._foreach_lerp_([mean for mean, _ in self.moving], [value for _, value in self.moving], self.share)
        for mean, value in self.counting:
            mean.copy_(value)
        self.n_averaged += 1
