"""The training loop: steps, checkpoints, the run folder, and the engine (accelerate)."""

from unskip.training._ema import ema_weights
from unskip.training._engine import device_of, engine, is_main
from unskip.training._find import find_runs
from unskip.training._folder import RunFolder
from unskip.training._graph import Graphed, Pass, why_not
from unskip.training._health import COLLAPSE
from unskip.training._loop import Outcome, run_task
from unskip.training._task import Batches, Evaluation, Precision, Schedule, Task
from unskip.training._trackers import tracker_names

__all__ = [
    "COLLAPSE",
    "Batches",
    "Evaluation",
    "Graphed",
    "Outcome",
    "Pass",
    "Precision",
    "RunFolder",
    "Schedule",
    "Task",
    "device_of",
    "ema_weights",
    "engine",
    "find_runs",
    "is_main",
    "run_task",
    "tracker_names",
    "why_not",
]
