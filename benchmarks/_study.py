"""What the studies share: many short runs side by side, each result added to a JSON when it is there.

Workers are processes that stay: importing, decoding images and finding a GPU is done once each, not once a run. A study
that is started again goes on: what its JSON holds is not run again.
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
    """The options that every study has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the images; without them digits and tiny models, to see that it runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--only", nargs="*", default=[""], help="runs whose name holds one of these, in this order")
    parser.add_argument("--begin", action="store_true", help="begin what may not end in time, too, to go on later")
    parser.add_argument("--out", type=Path, help=f"the JSON (default docs/results/{out})")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "runs", help="where the run folders go")
    parser.add_argument("--show", action="store_true", help="tables and figures of what is there; run nothing")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser


def opened(out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds; runs of other settings are not mixed with these."""
    data: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    if data.get("settings", settings) != settings:
        raise SystemExit(f"{out} holds runs of other settings, {data['settings']}; choose another --out")
    return data


def about(script: str, device: str, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a JSON says beside its runs."""
    from _record import made_with  # torch takes seconds, and a study may have nothing to do

    return {**made_with(script, device), "settings": settings, **more}


def folder_of(runs: Path, name: str, config: dict[str, Any]) -> Path:
    """A folder of its own for every configuration."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    words = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name.replace(" | ", "-"))
    return runs / f"{words}-{digest}"


def drawing(salt: str) -> Any:
    """matplotlib's pyplot in the style of all figures: no screen, the same file each time, colours of Okabe and Ito."""
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
    """A line through the means over seeds, and a point for each seed."""
    places = range(len(curves[0]))
    panel.plot(places, [sum(values) / len(values) for values in zip(*curves, strict=True)], **style)
    for curve in curves:
        panel.plot(places, curve, "o", color=style.get("color"), alpha=0.6)


# --- In a worker ------------------------------------------------------------------------------------------------------


def serve(work: Callable[[Any], Row | None]) -> None:
    """Does the tasks that come in, a line each, until none comes or a run was told to stop."""
    decode_once()
    for line in sys.stdin:
        result = work(json.loads(line))
        print(_MARK + json.dumps(result), flush=True)
        if result is None:
            return
        release()


def attempt(config: Row, train: Callable[[Row], Row | None], unrecorded: tuple[str, ...]) -> Row | None:
    """One run in this process; None where it was told to stop. What goes wrong is part of the result."""
    import torch

    begun = time.perf_counter()
    recorded = {key: entry for key, entry in config.items() if key not in unrecorded}
    try:
        result = train(config)
    except Exception as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or "CUDA" in str(error):
            raise  # the process is of no use any more
        result = {"failed": traceback.format_exc()[-1500:]}
    return None if result is None else {**result, "seconds": round(time.perf_counter() - begun, 1), "config": recorded}


def release() -> None:
    """Gives back what a run has held on the device, for the next one and for the other workers.

    What was compiled goes too: past eight models of a class nothing would be compiled any more, and a shortcut that has
    changed since would become an input of the compiled model.
    """
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decode_once() -> None:
    """Runs, and their evaluations, open the same images again and again: keep them decoded."""
    import unskip.recipes

    kept = functools.cache(unskip.data.open_images)
    for name, module in list(sys.modules.items()):
        if name == "unskip.data" or (name.startswith("unskip.recipes") and hasattr(module, "open_images")):
            vars(module)["open_images"] = kept


# --- Choosing settings ------------------------------------------------------------------------------------------------


def search(
    job: Callable[[int, float], Job], decays: Sequence[float], edges: int, score: Callable[[Row], float], done: Row
) -> tuple[list[Job], Row | None]:
    """The runs that a choice still needs, and the config that is chosen where it needs none.

    `job(step, decay)` is the run at 2^step times the middle learning rate. Weight decay is chosen at the middle rate,
    then the rate at the best weight decay; a best rate at the edge adds the next one, up to 2^edges. The highest
    `score` wins.
    """

    def missing(places: list[tuple[int, float]]) -> list[Job]:
        return [each for place in places if (each := job(*place))[0] not in done]

    def scored(step: int, decay: float) -> float:
        return score(done[job(step, decay)[0]])

    if waiting := missing([(0, decay) for decay in decays]):
        return waiting, None
    decay = max(decays, key=lambda each: scored(0, each))
    steps = [-1, 0, 1]
    while True:
        if waiting := missing([(step, decay) for step in steps]):
            return waiting, None
        best = max(steps, key=lambda step: scored(step, decay))
        if best not in (min(steps), max(steps)) or abs(best) >= edges:
            return [], job(best, decay)[1]
        steps.append(best + (1 if best > 0 else -1))


# --- Side by side -----------------------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, script: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has gone)
        command = [sys.executable, script, "--work"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True)

    def run(self, task: Any) -> Row | None:
        """The result of a task; None where the run was stopped."""
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
    """Keeps `options.workers` runs going until nothing is left, or until the limit.

    `jobs` names what is still to be run, what matters most first; it is asked again after each result. Nothing is begun
    that, by the longest run of its kind so far (the first word of a name), would not end in time, unless
    `options.begin`. What still runs at the limit is stopped: its folder holds a checkpoint, from which the same command
    goes on.
    """
    begun, stopping = time.perf_counter(), False
    longest: dict[str, float] = {}
    idle = [_Worker(script) for _ in range(options.workers)]
    running: dict[Future[Row | None], tuple[str, _Worker, float]] = {}
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(options.workers) as pool:
        while True:
            now = time.perf_counter()
            busy = {name for name, _, _ in running.values()}
            waiting = [job for job in jobs() if job[0] not in busy | failed.keys()]
            waiting = [*{job[0]: job for word in options.only for job in waiting if word in job[0]}.values()]
            left = options.limit - (now - begun)
            fitting = [job for job in waiting if left > (0 if options.begin else _expected(longest, job[0]))]
            while fitting and idle:
                name, config = fitting.pop(0)
                worker = idle.pop()
                running[pool.submit(worker.run, task_of(name, config))] = (name, worker, now)
            if now - begun > options.limit and not stopping:
                stopping = True
                for _, worker, _ in running.values():
                    worker.process.terminate()  # in training it writes a checkpoint first
            if not running:
                break
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                name, worker, start = running.pop(future)
                if stopping and (future.exception() is not None or future.result() is None):
                    print(f"{name}: stopped; the same command goes on with it", flush=True)
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
    """The seconds a run may take: those of its kind, or of any other where there was none."""
    return longest.get(name.partition(" | ")[0], max(longest.values(), default=0.0))


def write(data: dict[str, Any], out: Path) -> None:
    """The JSON, a run a line; written aside and renamed."""
    runs = ",\n".join(
        f"{json.dumps(name)}:{json.dumps(_finite(row), separators=(',', ':'))}" for name, row in data["runs"].items()
    )
    rest = json.dumps({key: value for key, value in data.items() if key != "runs"}, indent=1)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_suffix(".tmp")
    aside.write_text(f'{rest[:-2]},\n "runs": {{\n{runs}\n}}}}\n')
    aside.replace(out)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
