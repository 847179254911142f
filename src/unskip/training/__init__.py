"""The loop: steps, checkpoints, the run folder, and the engine (accelerate)."""

from unskip.training._folder import RunFolder
from unskip.training._loop import Outcome, train
from unskip.training._task import Batches, Evaluation, Precision, Schedule, Task

__all__ = ["Batches", "Evaluation", "Outcome", "Precision", "RunFolder", "Schedule", "Task", "train"]
