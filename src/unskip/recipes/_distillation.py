"""Knowledge distillation from a frozen model (Hinton, Vinyals and Dean 2015, arXiv 1503.02531).

    loss = T^2 KL(softmax(teacher / T) || softmax(student / T))

The factor T^2 makes the size of the gradients independent of the temperature T. The loss is 0 for equal outputs.
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
    """A frozen copy of a model with its current shortcuts. It is not part of the trained model."""

    def __init__(self, model: nn.Module, temperature: float, compiled: bool = False) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.temperature = temperature
        self.forward: Any = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """The teacher's logits."""
        logits: Tensor = self.forward(images).float()
        return logits

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The divergence between a student's logits and the teacher's, averaged over the batch."""
        student, teacher = ((values / self.temperature).log_softmax(-1) for values in (logits, target))
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.temperature**2

    def save(self, run: Path, builder: Any) -> None:
        """Writes the teacher into a run folder, so that the run resumes without the teacher's source."""
        temporary = run / f".{ORIGINAL}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        save(self.model, temporary, builder)
        shutil.rmtree(run / ORIGINAL, ignore_errors=True)
        temporary.rename(run / ORIGINAL)
