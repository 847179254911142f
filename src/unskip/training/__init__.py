"""The loop: steps, checkpoints, the run folder, and the engine (accelerate)."""

from unskip.training._average import averaged_weights
from unskip.training._find import find_runs
from unskip.training._folder import RunFolder
from unskip.training._graph import Graphed, Pass, why_not
from unskip.training._loop import Outcome, train
from unskip.training._task import Batches, Evaluation, Precision, Schedule, Task

__all__ = [
    "Batches",
    "Evaluation",
    "Graphed",
    "Outcome",
    "Pass",
    "Precision",
    "RunFolder",
    "Schedule",
    "Task",
    "averaged_weights",
    "find_runs",
    "train",
    "why_not",
]
