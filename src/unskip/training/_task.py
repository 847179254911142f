"""What a recipe passes to the loop: the task to train, and the schedule of the run."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from torch import Tensor, nn

from unskip._checks import choice, number, whole
from unskip.errors import TrainingError
from unskip.wiring import Wiring

Batch = Any
Precision = Literal["float32", "bf16", "fp16"]  # of the forward under autocast; weights and optimizer stay float32
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
Warnings = Callable[[dict[str, Any], float], Iterable[tuple[str, str]]]  # (row, finished fraction of the run)
Evaluation = Callable[[nn.Module], Mapping[str, float | None]]  # None: no result


class Batches(Protocol):
    """Batches that depend on the step alone; each is returned in `parts` successive parts."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        ...

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[Batch]:
        """This process's share of the batches of steps `start_step` to `stop_step` - 1."""
        ...


@dataclass
class Task:
    """A training task: an initialised and rewired model, with its batches, loss and optimizer."""

    model: nn.Module
    feed: Batches
    loss: Loss  # (model, batch) -> (loss, numbers to log)
    optimizer: Any
    wirings: tuple[Wiring, ...] = ()  # of the model, or of a student and its teacher
    baseline_loss: float | None = None  # of a constant prediction, such as log(classes)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)  # called on all processes; the first one logs
    notes: tuple[str, ...] = ()  # for the reader of the run, such as images that were left out
    sample: Any = None  # a few inputs for the health checks of features and attention
    encoder: nn.Module | None = None  # the part whose health is checked; the whole model by default
    before_step: Callable[[int], object] | None = None  # called with the step, for example to set a schedule
    after_step: Callable[[int], object] | None = None  # called after the optimizer, for example to update a teacher
    warnings: Warnings | None = None  # names and texts of warnings about a logged row or an evaluation
    save: Callable[[nn.Module, Any], object] | None = None  # how a checkpoint stores the model; unskip.save by default
    keep: Callable[[Any], object] | None = None  # writes what resuming needs into a new run folder
    record: dict[str, Any] = field(default_factory=dict)  # plain data for config.json, next to the config


@dataclass(frozen=True)
class Schedule:
    """The settings of the training loop, the same for every recipe."""

    steps: int
    warmup: int = 0
    lr_end: float = 0.0  # as a fraction of lr
    precision: Precision = "float32"
    accumulate: int = 1
    clip: float | None = None
    compile: bool = False
    graph: bool = False  # replay forward and backward as a CUDA graph, on one GPU without gradient accumulation
    fsdp: bool = False  # shard the weights over several processes (FSDP2)
    ema: float | None = None  # decay of the exponential moving average of the weights
    log_every: int = 10
    checkpoint_every: int = 500
    evaluate_every: int | None = None
    tracker: str | None = None  # trackers of accelerate, separated by commas
    seed: int = 0

    def __post_init__(self) -> None:
        choice("schedule", "precision", self.precision, get_args(Precision))
        for name in ("steps", "accumulate", "log_every", "checkpoint_every"):
            whole("schedule", name, getattr(self, name), low=1)
        whole("schedule", "warmup", self.warmup, low=0)
        if self.evaluate_every is not None:
            whole("schedule", "evaluate_every", self.evaluate_every, low=0)
        if self.ema is not None:
            number("schedule", "ema", self.ema, below=1)
        if self.clip is not None:
            number("schedule", "clip", self.clip, zero=False)


def checked_loss(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The result of a loss function. Raises TrainingError unless it is a scalar and a dict of tensors to log."""
    match returned:
        case (Tensor(ndim=0) as loss, dict() as numbers) if all(isinstance(each, Tensor) for each in numbers.values()):
            return loss, numbers
    raise TrainingError(
        "loss(model, batch) must return a scalar tensor and a dict of tensors to log, such as (error.mean(), {}); it "
        f"returned {reprlib.repr(returned)}"
    )


def checked_numbers(name: str, values: Any) -> dict[str, float]:
    """The numbers of an evaluation; None becomes nan, which is logged and does not end the run."""
    if not isinstance(values, Mapping):
        raise TrainingError(f"evaluation {name} returned {reprlib.repr(values)}; return a mapping of numbers")
    return {key: math.nan if value is None else value for key, value in values.items()}
