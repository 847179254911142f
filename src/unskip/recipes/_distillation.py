"""Knowledge distillation from a frozen model (Hinton, Vinyals and Dean 2015, arXiv 1503.02531).

    loss = T^2 KL(softmax(teacher / T) || softmax(student / T))

T^2 makes the size of the gradients independent of the temperature T. It is 0 where both have the same outputs.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.wiring import save

ORIGINAL = "original"  # the teacher's folder in a run


class Teacher:
    """A frozen copy of a model, with the shortcuts that it has now. It is no part of the model that is trained."""

    def __init__(self, model: nn.Module, temperature: float, compiled: bool = False) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.temperature = temperature
        self.forward: Any = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Its logits."""
        logits: Tensor = self.forward(images).float()
        return logits

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The distance of a student's logits from those of the teacher, a mean over the batch."""
        student, teacher = ((each / self.temperature).log_softmax(-1) for each in (logits, target))
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.temperature**2

    def save(self, run: Path, builder: Any) -> None:
        """Writes it into a run folder, which can then be resumed without what it was read from."""
        aside = run / f".{ORIGINAL}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        save(self.model, aside, builder)
        shutil.rmtree(run / ORIGINAL, ignore_errors=True)
        aside.rename(run / ORIGINAL)
