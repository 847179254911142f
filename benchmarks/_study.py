"""Runs a study: many short training runs in parallel worker processes, with each result appended to one JSON file.

Workers are reused, so imports, image decoding and GPU start-up are paid once per worker and not once per run. A study
that is restarted skips the runs that are already in its JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_MARK = "result: "
Job = tuple[str, dict[str, Any]]
Row = dict[str, Any]


def arguments(about: str | None, out: str) -> argparse.ArgumentParser:
    """The command-line options that all studies share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the data set; without it a smoke test with tiny models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs in parallel")
    parser.add_argument("--limit", type=float, default=float("inf"), help="time limit in seconds")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only runs whose name contains one of these, in this order"
    )
    parser.add_argument("--begin", action="store_true", help="also start runs that may not finish within the limit")
    parser.add_argument("--out", type=Path, help=f"the JSON file (default docs/results/{out})")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "runs", help="folder of the run folders")
    parser.add_argument(
        "--show", action="store_true", help="print tables and draw figures of the recorded runs, and run nothing"
    )
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


def results(data: str | None) -> Path:
    """The folder of the JSON: docs/results, or build for the smoke test on digits."""
    return ROOT / ("build" if data is None else "docs/results")


def opened(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record in a JSON file, or a new one. Refuses a file whose runs had other settings."""
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    if data.get("settings", settings) != settings:
        raise SystemExit(f"{out} has runs with other settings, {data['settings']}; choose another --out")
    return data


def about(script: str, device: str, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The metadata of a record: script, device, versions and settings."""
    from _record import made_with  # imports torch, which takes seconds; not needed if nothing is run

    return {**made_with(script, device), "settings": settings, **more}


def folder_of(runs: Path, name: str, config: dict[str, Any]) -> Path:
    """The folder of a run, unique for each configuration."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    words = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name.replace(" | ", "-"))
    return runs / f"{words}-{digest}"


def drawing(salt: str) -> Any:
    """pyplot in the style of all figures: headless, reproducible SVG, Okabe-Ito colours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from unskip.report.figures._style import COLOURS

    pyplot.rcParams["svg.hashsalt"] = salt
    pyplot.rcParams["axes.prop_cycle"] = pyplot.cycler(color=[*COLOURS, "#000000"])
    pyplot.rcParams |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    pyplot.rcParams |= {"font.size": 10, "axes.titlesize": 11, "legend.fontsize": 9, "lines.markersize": 4}
    return pyplot


def seeds_and_mean(panel: Any, curves: list[list[float]], **style: Any) -> None:
    """Plots the mean over seeds as a line, and each seed as points."""
    x = range(len(curves[0]))
    panel.plot(x, [sum(values) / len(values) for values in zip(*curves, strict=True)], **style)
    for curve in curves:
        panel.plot(x, curve, "o", color=style.get("color"), alpha=0.6)


# --- Worker processes -------------------------------------------------------------------------------------------------


def serve(work: Callable[[Any], Row | None]) -> None:
    """The loop of a worker: reads one task per line from stdin and prints its result, until stdin closes or a run is
    stopped."""
    decode_once()
    for line in sys.stdin:
        result = work(json.loads(line))
        print(_MARK + json.dumps(result), flush=True)
        if result is None:
            return
        release()


def attempt(config: Row, train: Callable[[Row], Row | None], unrecorded: tuple[str, ...]) -> Row | None:
    """Trains one run in this process. An exception is recorded as "failed"; None if the run was stopped.

    `unrecorded` names the config fields that are left out of the record.
    """
    import torch

    begun = time.perf_counter()
    recorded = {key: entry for key, entry in config.items() if key not in unrecorded}
    try:
        result = train(config)
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA" in str(error):
            raise  # the CUDA context of this process is unusable
        result = {"failed": traceback.format_exc()[-1500:]}
    return None if result is None else {**result, "seconds": round(time.perf_counter() - begun, 1), "config": recorded}


def release() -> None:
    """Frees device memory and compiled code after a run.

    Otherwise torch.compile stops at its limit of eight recompilations per class, and a shortcut weight that changed
    would become an input of the compiled model.
    """
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decode_once() -> None:
    """Keeps decoded images in memory, since runs and their evaluations open the same sets repeatedly."""
    import unskip.recipes

    cached = functools.cache(unskip.data.open_images)
    for name, module in list(sys.modules.items()):
        if name == "unskip.data" or (name.startswith("unskip.recipes") and hasattr(module, "open_images")):
            vars(module)["open_images"] = cached


# --- Hyperparameter search --------------------------------------------------------------------------------------------


def search(
    job: Callable[[int, Any], Job], options: Sequence[Any], edges: int, score: Callable[[Row], float], done: Row
) -> tuple[list[Job], Row | None]:
    """Searches an option such as weight decay, then the learning rate.

    Returns the runs still missing, and the best config once none is. `job(step, option)` is the run at step `step` of
    the learning-rate grid; its middle is 0. The option is chosen at the middle rate, then the rate at the best option.
    A best rate at the edge of the grid extends the grid, up to `edges` steps from the middle. The highest `score` wins.
    """

    def missing(points: list[tuple[int, Any]]) -> list[Job]:
        return [trial for point in points if (trial := job(*point))[0] not in done]

    def scored(step: int, option: Any) -> float:
        return score(done[job(step, option)[0]])

    if trials := missing([(0, option) for option in options]):
        return trials, None
    best_option = max(options, key=lambda option: scored(0, option))
    steps = [-1, 0, 1]
    while True:
        if trials := missing([(step, best_option) for step in steps]):
            return trials, None
        best = max(steps, key=lambda step: scored(step, best_option))
        if best not in (min(steps), max(steps)) or abs(best) >= edges:
            return [], job(best, best_option)[1]
        steps.append(best + (1 if best > 0 else -1))


# --- Scheduling -------------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, script: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read after the process has ended)
        command = [sys.executable, script, "--work"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)

    def run(self, task: Any) -> Row | None:
        """Runs a task and returns its result; None if the run was stopped."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(_MARK):
                result: Row | None = json.loads(line[len(_MARK) :])
                return result
        self.errors.seek(0)
        raise RuntimeError(self.errors.read()[-3000:])


def study(
    script: str,
    data: dict[str, Any],
    jobs: Callable[[], list[Job]],
    task_of: Callable[[str, dict[str, Any]], Any],
    options: argparse.Namespace,
    tell: Callable[[str, Row], str],
) -> None:
    """Runs all jobs, `options.workers` at a time, until none is left or the time limit is reached.

    `jobs` returns the remaining runs in order of priority, and is called again after each result. A run is not started
    if the longest run of its kind so far (the first word of its name) would not finish within the limit, unless
    `options.begin` is set. Runs still going at the limit are stopped with a checkpoint in their folder, and the same
    command resumes them.
    """
    start_time, stopping = time.perf_counter(), False
    longest: dict[str, float] = {}
    idle = [_Worker(script) for _ in range(options.workers)]
    running: dict[Future[Row | None], tuple[str, _Worker, float]] = {}
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        while True:
            now = time.perf_counter()
            busy = {name for name, _, _ in running.values()}
            pending = [job for job in jobs() if job[0] not in busy | failed.keys()]
            pending = [*{job[0]: job for word in options.only for job in pending if word in job[0]}.values()]
            time_left = options.limit - (now - start_time)
            queue = [job for job in pending if time_left > (0 if options.begin else _expected(longest, job[0]))]
            while queue and idle:
                name, config = queue.pop(0)
                worker = idle.pop()
                running[pool.submit(worker.run, task_of(name, config))] = (name, worker, now)
            if now - start_time > options.limit and not stopping:
                stopping = True
                for _, worker, _ in running.values():
                    worker.process.terminate()  # a run in training writes a checkpoint first
            if not running:
                break
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                name, worker, start = running.pop(future)
                if stopping and (future.exception() is not None or future.result() is None):
                    print(f"{name}: stopped; the same command resumes it", flush=True)
                    continue
                if future.exception() is not None:
                    failed[name] = str(future.exception())
                    data.setdefault("failed", {})[name] = failed[name][-1000:]
                    print(f"{name} failed:\n{failed[name]}", flush=True)
                    idle.append(_Worker(script))
                    continue
                row = future.result()
                assert row is not None
                kind = name.partition(" | ")[0]
                longest[kind] = max(longest.get(kind, 0.0), time.perf_counter() - start)
                data["runs"][name] = row
                idle.append(worker)
                write(data, options.out)
                print(f"{name}: {tell(name, row)} in {row['seconds']:.0f} s", flush=True)
    for worker in idle:
        worker.process.terminate()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _expected(longest: dict[str, float], name: str) -> float:
    """The longest time so far, in seconds, of a run of the same kind, or of any run if there was none."""
    return longest.get(name.partition(" | ")[0], max(longest.values(), default=0.0))


def write(data: dict[str, Any], out: Path) -> None:
    """Writes the JSON atomically, with one run per line."""
    runs = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(_finite(row), separators=(',', ':'))}" for name, row in data["runs"].items()
    )
    rest = json.dumps({key: value for key, value in data.items() if key != "runs"}, indent=1)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".tmp")
    temporary.write_text(f'{rest[:-2]},\n "runs": {{\n{runs}\n}}}}\n')
    temporary.replace(out)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
