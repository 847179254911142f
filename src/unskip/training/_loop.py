"""The training loop: trains a task in a run folder, and can stop and resume at any step.

All randomness of a step follows from (seed, step, share of the batch): batches are drawn from it, and the global
generator is reseeded before each step and each accumulation part, for dropout. So a resumed run needs only its step
and no generator state, and on one CPU process reaches the same weights bit for bit. N processes draw the same random
numbers as one process that accumulates over N parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip._modes import evaluating
from unskip.errors import BadInput, TrainingError
from unskip.optim import schedules
from unskip.training import _health
from unskip.training._compiling import lasting_cache, timed_first_step
from unskip.training._ema import EMA
from unskip.training._engine import device_of_model, engine
from unskip.training._folder import NOT_FINITE, RunFolder
from unskip.training._fsdp import Sharded, local
from unskip.training._graph import Graphed, why_not
from unskip.training._memory import forget_peak, peak_memory
from unskip.training._progress import Reporter
from unskip.training._signals import Stop, stop_on_signal
from unskip.training._state import read_state, write_state
from unskip.training._step_sizes import StepSizes
from unskip.training._task import Schedule, Task, checked_loss, checked_numbers
from unskip.training._trackers import Trackers
from unskip.wiring import save as save_model

_FIRST_CHECK = 5  # without periodic evaluation, health is first checked after a fifth of the run


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    step: int
    finished: bool
    evaluations: dict[str, float]


def run_task(task: Task, schedule: Schedule, folder: RunFolder, quiet: bool = False) -> Outcome:
    """Trains from the folder's last checkpoint, or from the start, until the schedule ends or a signal stops it."""
    with engine(device_of_model(task.model)) as accelerator, contextlib.ExitStack() as stack:
        main = accelerator.is_main_process
        if schedule.compile:
            stack.enter_context(lasting_cache())
        trainer = _Trainer(task, schedule, folder, accelerator)
        with trainer.explained(OSError):
            start = trainer.restore()
        if schedule.tracker is not None and main:
            trainer.trackers = stack.enter_context(contextlib.closing(Trackers(schedule.tracker, folder, start)))
        reporter = stack.enter_context(Reporter(schedule.steps, start, quiet or not main))
        stop = stack.enter_context(stop_on_signal())
        for note in (*task.notes, *trainer.notes) if start == 0 else trainer.notes:
            reporter.say(note)
            if main and start == 0:
                folder.append("warnings.jsonl", {"step": 0, "warning": "note", "text": note})
        step = trainer.go(start, stop, reporter)
    return Outcome(folder.path, step, step >= schedule.steps, trainer.last_evaluations)


class _Trainer:
    def __init__(self, task: Task, schedule: Schedule, folder: RunFolder, accelerator: Any) -> None:
        self.task, self.schedule, self.folder, self.accelerator = task, schedule, folder, accelerator
        self.rank, self.world = int(accelerator.process_index), int(accelerator.num_processes)
        self.sharded: Sharded | None = None
        if schedule.fsdp and torch.distributed.is_initialized():
            if schedule.precision == "fp16":
                raise BadInput("precision fp16 does not work with fsdp; use bf16, or leave out fsdp")
            self.sharded = Sharded(task.model, task.optimizer)
            self.model, self.optimizer = task.model, self.sharded
        else:
            self.model, self.optimizer = accelerator.prepare(task.model, task.optimizer)
        self.forward: Any = torch.compile(self.model) if schedule.compile else self.model
        self.parameters: list[Any] = [*self.model.parameters()]  # walked once, not each step
        self.kind = device_of_model(task.model).type
        # fp16 gradients are scaled so that small ones do not underflow; a step whose gradients overflow is skipped.
        self.scaler = torch.amp.GradScaler(self.kind) if schedule.precision == "fp16" else None
        reason = why_not(self.kind, self.world, schedule.accumulate, schedule.precision)
        graphed = schedule.graph and reason is None
        self.graph = Graphed(lambda batch: self._passes(iter([batch]), 0), task.model) if graphed else None
        self.notes = (f"graph is off: {reason}",) if schedule.graph and reason is not None else ()
        self.ema = None if schedule.ema is None else EMA(task.model, schedule.ema)
        self.trackers: Trackers | None = None
        self.last_evaluations: dict[str, float] = {}
        self.saved, self.logged = 0, False  # step of the last checkpoint; whether any step is logged
        self.samples = 0  # since the last row of metrics
        self.reported: set[str] = set()  # texts of broken-image warnings
        self.health = _health.Watch(task, schedule, folder, accelerator.is_main_process)
        measured = accelerator.is_main_process and self.sharded is None
        self.step_sizes = StepSizes(task, schedule.steps if measured else 0, partial(folder.append, "health.jsonl"))

    def restore(self) -> int:
        """Loads the newest intact checkpoint into model and optimizer; returns its step."""
        from safetensors.torch import load_file, load_model

        checkpoint = self.folder.last_checkpoint()
        step = 0
        if checkpoint is not None:
            step, folder = checkpoint
            device = device_of_model(self.task.model)
            if self.sharded is not None:
                self.sharded.restore(load_file(folder / "model.safetensors"), read_state(folder, "optimizer"))
            else:
                load_model(self.task.model, folder / "model.safetensors", device=str(device))
                self.task.optimizer.load_state_dict(read_state(folder, "optimizer", device))
            if self.ema is not None:
                self.ema.load_state_dict(read_state(folder, "ema", "cpu" if self.sharded else device))
            if self.scaler is not None:
                self.scaler.load_state_dict(read_state(folder, "scaler"))
            self.health.load(read_state(folder, "health"))
        self.saved = step
        if self.accelerator.is_main_process:
            self.folder.rewind(step)
        logged = self.folder.read("warnings.jsonl")
        self.reported = {row["text"] for row in logged if row.get("warning") == "broken-image"}
        for row in self.folder.read("evals.jsonl"):
            if row.get("evaluation") not in self.task.evaluations or "seed" in row:
                continue  # written by `unskip eval`, not by the run
            numbers = {key: value for key, value in row.items() if isinstance(value, float) or value in NOT_FINITE}
            self.last_evaluations |= {key: float(value) for key, value in numbers.items()}
        return step

    def go(self, start: int, stop: Stop, reporter: Reporter) -> int:
        """Trains from step `start`; returns the step at which it ends."""
        from safetensors import SafetensorError

        parts = self.task.feed.iterate(start, self.schedule.steps, self.rank, self.world, self.schedule.accumulate)
        with self.explained(BadInput, OSError, SafetensorError):
            return self._steps(start, self._counted(parts), stop, reporter)

    @contextlib.contextmanager
    def explained(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raises errors of the disk or the data with how to continue."""
        try:
            yield
        except kinds as error:
            # A new run that fails before its first logged step leaves its folder free.
            begun = self.saved or self.logged
            then = f"continue with: {self.folder.resume_command}" if begun else "run the same command again"
            raise TrainingError(
                f"{self.folder.path}: training stopped: {error}. {self._last_good()}. Fix the cause (a full disk, "
                f"missing files), then {then}"
            ) from error

    def _last_good(self) -> str:
        return f"The last good checkpoint is that of step {self.saved}" if self.saved else "There is no checkpoint yet"

    def _counted(self, parts: Iterator[Any]) -> Iterator[Any]:
        for part in parts:
            self.samples += len(part[0]) * self.world
            yield part

    def _steps(self, start: int, parts: Iterator[Any], stop: Stop, reporter: Reporter) -> int:
        schedule, pending = self.schedule, []
        self.model.train()  # evaluations restore it
        forget_peak(self.kind)
        begun = time.perf_counter()
        for step in range(start, schedule.steps):
            if schedule.compile and step == start:
                with timed_first_step(self.task, self.kind, schedule.precision, parts, reporter.say) as first:
                    pending.append(self._step(step, first))
            else:
                pending.append(self._step(step, parts))
            done = step + 1
            last = done == schedule.steps
            stopping = self._stopping(stop, done)
            if done % schedule.log_every == 0 or last or stopping:
                row = self._row(step, pending)
                seconds = time.perf_counter() - begun
                row |= {"samples_per_second": self.samples / seconds, "seconds": seconds, **peak_memory(self.kind)}
                self._refuse_not_finite(row)
                self._log("metrics.jsonl", row)
                self.health.loss(done, row["loss"])
                self.health.row(done, row)
                reporter.show(done, row)
                self._report_broken(done)
                pending, self.samples, begun = [], 0, time.perf_counter()
            paused = time.perf_counter()
            if last or (schedule.evaluate_every and done % schedule.evaluate_every == 0):
                self._evaluate(done, reporter)
            elif not schedule.evaluate_every and done == -(-schedule.steps // _FIRST_CHECK):
                self._check_health(done)
            if last or done % schedule.checkpoint_every == 0 or stopping:
                self._checkpoint(done)
            begun += time.perf_counter() - paused  # evaluations and checkpoints do not count as training time
            if stopping and not last:
                reporter.say(f"stopped at step {done}; continue with: {self.folder.resume_command}")
                return done
        return schedule.steps

    def _report_broken(self, done: int) -> None:
        """Logs unreadable images of all processes; each feed then counts them all."""
        broken: dict[int, str] = getattr(self.task.feed, "broken", {})
        if self.world > 1:
            from accelerate.utils import gather_object

            for others in gather_object([broken]):
                broken.update(others)
        texts = {f"{text}; another image takes its place" for text in broken.values()}
        for text in sorted(texts - self.reported):
            self.reported.add(text)
            self.health.warn(done, "broken-image", text)

    def _step(self, step: int, parts: Iterator[Any]) -> tuple[Tensor, dict[str, Tensor]]:
        schedule = self.schedule
        seed = self._seed(step, 0)
        torch.manual_seed(seed)
        factor = schedules.warmup_cosine(step, total=schedule.steps, warmup=schedule.warmup, floor=schedule.lr_end)
        schedules.apply(self.task.optimizer, lr=factor)
        for wiring in self.task.wirings:
            wiring.step(step)
        if self.task.before_step is not None:
            self.task.before_step(step)
        if self.graph is not None:
            # An annealed shortcut weight is a tensor while it changes and a constant afterwards: a new graph.
            annealed = tuple(id(weight) for wiring in self.task.wirings for weight in wiring.tensors())
            loss, numbers = self.graph(next(parts), annealed, seed)
        else:
            loss, numbers = self._passes(parts, step)
        if self.scaler is not None:
            self.scaler.unscale_(self.task.optimizer)
        if schedule.clip is not None:
            norm: Any = nn.utils.clip_grad_norm_(self.parameters, schedule.clip)
            norm = norm if self.sharded is None else norm.full_tensor()
            numbers = {**numbers, "gradient_norm": norm.detach()}
        self.step_sizes.hold(step)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.task.optimizer)
            self.scaler.update()
        self.step_sizes.compare(step)
        if self.graph is None:  # a graph overwrites its gradients in place
            self.optimizer.zero_grad(set_to_none=True)
        if self.task.after_step is not None:
            self.task.after_step(step)
        if self.ema is not None:
            self.ema.update()
        return loss, numbers

    def _seed(self, step: int, part: int) -> int:
        return seed_of(self.schedule.seed, step, self.rank * self.schedule.accumulate + part)

    def _passes(self, parts: Iterator[Any], step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward over a batch, in parts under gradient accumulation."""
        count = self.schedule.accumulate
        total: Any = 0
        logged: list[dict[str, Tensor]] = []  # a dict for each part
        for index in range(count):
            if index:
                torch.manual_seed(self._seed(step, index))
            synchronise = index == count - 1
            with contextlib.nullcontext() if synchronise else self.accelerator.no_sync(self.model):
                part = next(parts)
                with self._autocast():
                    loss, numbers = checked_loss(self.task.loss(self.forward, part))
                loss = loss / count
                self.accelerator.backward(loss if self.scaler is None else self.scaler.scale(loss))
            total = loss.detach() + total
            logged.append(numbers)
        if len(logged) > 1:
            numbers = {name: torch.stack([part[name].detach().float() for part in logged]).mean() for name in numbers}
        return total, numbers

    def _autocast(self) -> Any:
        dtype = torch.float16 if self.schedule.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.kind, dtype, enabled=self.schedule.precision != "float32")

    def _row(self, step: int, pending: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Any]:
        """One row of metrics: means over the steps since the last row and over processes."""
        losses = torch.stack([loss for loss, _ in pending])
        values = {"loss": losses.mean()}
        for name in pending[-1][1]:
            values[name] = torch.stack([numbers[name].detach().float() for _, numbers in pending]).mean()
        if self.world > 1:
            values = {name: self.accelerator.reduce(value, "mean") for name, value in values.items()}
        row: dict[str, Any] = {"step": step + 1}
        row |= {name: float(value) for name, value in values.items()}
        row["lr"] = self.task.optimizer.param_groups[0]["lr"]
        if self.task.wirings:
            row["effective_decay"] = self.task.wirings[0].effective_decay
        return row

    def _refuse_not_finite(self, row: dict[str, Any]) -> None:
        if not math.isfinite(row["loss"]):
            self._log("metrics.jsonl", row)
            self._diverged(row["step"], f"the loss is {row['loss']} at step {row['step']}")

    def _refuse_broken_weights(self, done: int) -> None:
        """Checkpoints of non-finite weights would replace the last good one."""
        weights = (local(weight.detach()) for weight in self.parameters)
        broken = torch.stack([~weight.isfinite().all() for weight in weights]).any().float()
        if self.world > 1:
            broken = self.accelerator.reduce(broken, "sum")
        if broken > 0:
            self._diverged(done, f"some weights are not finite at step {done}")

    def _diverged(self, done: int, text: str) -> None:
        self.health.warn(done, "non-finite-loss", text)
        raise TrainingError(
            f"{self.folder.path}: {text}. {self._last_good()}. Lower the learning rate, lengthen the warm-up or clip "
            "the gradient, and start a new run."
        )

    def _evaluate(self, done: int, reporter: Reporter) -> None:
        self.accelerator.wait_for_everyone()
        model = self.task.model
        for name, evaluation in self.task.evaluations.items():
            means = contextlib.nullcontext() if self.ema is None else self.ema.swapped_in()
            # Only the run's own GPU: by default torch initialises all of them and warns.
            gpus = [torch.cuda.current_device()] if self.kind == "cuda" else []
            with means, torch.no_grad(), evaluating(model), torch.random.fork_rng(gpus):
                numbers = evaluation(model)
            values = checked_numbers(name, numbers)
            self.last_evaluations |= values
            # `about`: how the numbers were measured (n, split, intervals).
            self._log("evals.jsonl", {"step": done, "evaluation": name, **values, **getattr(numbers, "about", {})})
            self.health.row(done, values)
            reporter.say(f"step {done}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
        self._check_health(done)

    def _check_health(self, done: int) -> None:
        if self.accelerator.is_main_process and self.sharded is None:
            self.health.look(done)
        self.accelerator.wait_for_everyone()

    def _checkpoint(self, done: int) -> None:
        self._refuse_broken_weights(done)
        self.accelerator.wait_for_everyone()
        model, state = self.sharded.gathered() if self.sharded else (self.task.model, self.task.optimizer.state_dict())
        states = {"optimizer": state, "health": self.health.state()}
        if self.ema is not None:
            states["ema"] = self.ema.state_dict()
        if self.scaler is not None:
            states["scaler"] = self.scaler.state_dict()
        if self.accelerator.is_main_process:
            self.folder.save_checkpoint(done, lambda folder: self._write(folder, model, states))
        self.saved = done
        self.accelerator.wait_for_everyone()

    def _write(self, folder: Path, model: Any, states: dict[str, Any]) -> None:
        (self.task.save or save_model)(model, folder)
        for name, state in states.items():
            write_state(folder, name, state)

    def _stopping(self, stop: Stop, done: int) -> bool:
        """Whether to stop after this step; several processes agree on it at logged steps."""
        if self.world == 1:
            return stop.requested
        if done % self.schedule.log_every:
            return False
        flag = torch.tensor(float(stop.requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _log(self, name: str, row: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            self.folder.append(name, row)
            self.logged = True
            if self.trackers is not None:
                self.trackers.write(row)


def seed_of(*numbers: int) -> int:
    """A seed from several numbers; similar numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
