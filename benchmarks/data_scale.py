"""Measures opening and reading of data sets with as many images as ImageNet: folder, WebDataset tars, parquet files.

    python benchmarks/data_scale.py --root FOLDER --out docs/results/data-scale.json
    python benchmarks/data_scale.py --root FOLDER --out docs/results/data-scale.json --states cold
    python benchmarks/data_scale.py --root SMALL --count 20000 --rounds 1 --seconds 3

The data set, 1,281,167 JPEGs of 40 x 40 pixels, is generated under --root if it is missing: this takes ten minutes and
11 GB. The measurements take a quarter of an hour on two otherwise idle cores. Each runs in its own process, and its
result is saved under --root immediately: a benchmark that is stopped and restarted continues with the missing
measurements.

    opening     seconds of the first opening, which builds the index, and of later ones
    reading     images per second in random order with 2 workers, as normalised batches on the CPU, for --seconds
                seconds; CPU time of all processes; memory of the process and its workers, less that after the imports
    killed      whether batches in the middle of an epoch are the same if the reader is killed (SIGKILL) and resumed

Readers: `Feed` over folder, tars and parquet files; torchvision's ImageFolder + DataLoader(shuffle=True); the package
webdataset with shards shuffled and a buffer of 1,000 samples. They alternate, so that other load on the machine affects
all of them. In the state `cold`, the page cache is emptied before each opening and reading. Measurements that the file
--out already contains are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

SIDE, CLASSES, POOL = 40, 1000, 4096
SOURCES, PEERS = ("folder", "tar", "parquet"), ("imagefolder", "webdataset")
ACROSS = 100  # batches read before the end of the first epoch
BEFORE, AFTER = 100, 20  # batches before the reader is killed, and after it is resumed


def pictures() -> list[bytes]:
    """POOL encoded JPEGs of noise over a smooth background, about 1.1 kB each."""
    from PIL import Image

    random, found = numpy.random.default_rng(0), []
    for _ in range(POOL):
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), numpy.uint8)).resize((SIDE, SIDE))
        fine = numpy.asarray(coarse) + random.normal(0, 6, (SIDE, SIDE, 3))
        out = io.BytesIO()
        Image.fromarray(fine.clip(0, 255).astype(numpy.uint8)).save(out, "JPEG", quality=80)
        found.append(out.getvalue())
    return found


def image(pool: list[bytes], row: int) -> bytes:
    """The JPEG of a row, made unique by a comment in the file."""
    return b"\xff\xd8\xff\xfe\x00\x0a%08d" % row + pool[row * 2654435761 % POOL][2:]


def generate(root: Path, count: int) -> None:
    import pyarrow
    from pyarrow import parquet

    shutil.rmtree(root, ignore_errors=True)
    pool, each = pictures(), 10_000
    for label in range(min(CLASSES, count)):
        (root / "folder" / "train" / f"n{label:08d}").mkdir(parents=True)
    for kind in ("tar", "parquet"):
        (root / kind).mkdir()
    schema = {"info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel"}}}}
    schema["info"]["features"]["label"]["names"] = [f"n{label:08d}" for label in range(CLASSES)]  # type: ignore[assignment]
    for start in range(0, count, each):
        rows = range(start, min(start + each, count))
        data = [image(pool, row) for row in rows]
        labels = [row % CLASSES for row in rows]
        with tarfile.open(root / "tar" / f"train-{start // each:05d}.tar", "w") as shard:
            for row, encoded, label in zip(rows, data, labels, strict=True):
                (root / "folder" / "train" / f"n{label:08d}" / f"n{label:08d}_{row}.JPEG").write_bytes(encoded)
                for name, content in ((f"{row:08d}.cls", b"%d" % label), (f"{row:08d}.jpg", encoded)):
                    about = tarfile.TarInfo(name)
                    about.size = len(content)
                    shard.addfile(about, io.BytesIO(content))
        column = pyarrow.array([{"bytes": encoded, "path": None} for encoded in data])
        table = pyarrow.table({"image": column, "label": pyarrow.array(labels)})
        table = table.replace_schema_metadata({"huggingface": json.dumps(schema)})
        parquet.write_table(table, root / "parquet" / f"train-{start // each:05d}.parquet", row_group_size=1000)
    (root / "count").write_text(str(count))  # written last: a set without this file is generated again


def source(root: Path, kind: str) -> str:
    return {"folder": f"{root}/folder", "tar": f"{root}/tar/{{split}}-*.tar", "parquet": f"{root}/parquet/*.parquet"}[
        kind
    ]


def empty_cache(root: Path) -> str:
    """Empties the page cache: all of it if permitted, otherwise file by file. Returns the method."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        for file in files(root):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        return "posix_fadvise"


def fill_cache(root: Path) -> None:
    """Reads every file once."""
    for file in files(root):
        with file.open("rb", buffering=0) as opened:
            while opened.read(2**24):
                pass


def files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


class Memory:
    """Samples the proportional set size of this process and its children; peak in MB above the value at the start."""

    def __init__(self) -> None:
        self.base, self.peak, self.stopped = self._now(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _now(self) -> float:
        total = 0
        for process in [os.getpid(), *self._children()]:
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue  # the process has ended
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1000

    def _children(self) -> list[int]:
        return [int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

    def _watch(self) -> None:
        while not self.stopped.wait(0.5):
            self.peak = max(self.peak, self._now() - self.base)

    def stop(self) -> float:
        self.stopped.set()
        self.thread.join()
        return self.peak


def opened(root: Path, kind: str) -> Any:
    from unskip.data import _parquet, _tar, open_images

    # Read sets of any size from disk, so that a small --count tests the same code as a large one.
    _parquet.SMALL = _tar.SMALL = 0
    return open_images(source(root, kind))


def feed(root: Path, kind: str, options: argparse.Namespace) -> Any:
    from unskip.data import Feed

    return Feed(opened(root, kind), options.batch, SIDE, seed=0, workers=options.workers)


def torchvision_batches(root: Path, options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms.v2 import PILToTensor

    data = ImageFolder(root / "folder" / "train", PILToTensor())
    loader: Any = torch.utils.data.DataLoader(
        data, options.batch, shuffle=True, num_workers=options.workers, drop_last=True
    )
    yield from loader


def webdataset_batches(root: Path, options: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    import webdataset
    from torchvision.transforms.v2 import PILToTensor

    shards = sorted(map(str, (root / "tar").glob("*.tar")))
    data: Any = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(1000).decode("pil")
    data = data.to_tuple("jpg", "cls").map_tuple(PILToTensor(), int).batched(options.batch, partial=False)
    yield from torch.utils.data.DataLoader(data, batch_size=None, num_workers=options.workers)


def normalised(batches: Iterator[tuple[Any, Any]]) -> Iterator[Any]:
    from unskip.data._augment import IMAGENET_MEAN, IMAGENET_STD

    mean, std = (torch.tensor(each)[:, None, None] * 255 for each in (IMAGENET_MEAN, IMAGENET_STD))
    for images, _ in batches:
        yield (images.float() - mean) / std


def opening(root: Path, kind: str) -> dict[str, float]:
    begin = time.perf_counter()
    opened(root, kind)
    return {"seconds": time.perf_counter() - begin}


def reading(root: Path, name: str, options: argparse.Namespace) -> dict[str, float]:
    memory, begin = Memory(), time.perf_counter()
    if name in SOURCES:
        found = feed(root, name, options)
        end = found.steps_per_epoch
        start = max(0, end - ACROSS)  # across the end of an epoch, where the next order is drawn
        batches: Any = (images for images, _ in found.iterate(start, start + end))
    else:
        batches = normalised((torchvision_batches if name == "imagefolder" else webdataset_batches)(root, options))
    images = next(batches)
    first, before, seen = time.perf_counter(), time.process_time(), len(images)  # opening is not included
    for images in batches:
        assert images.shape[1:] == (3, SIDE, SIDE)
        seen += len(images)
        if time.perf_counter() - first > options.seconds:
            break
    rate = (seen - options.batch) / (time.perf_counter() - first)
    batches.close()  # ends the workers, so that their CPU time is included
    spent = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    row = {"images a second": rate, "images": seen, "seconds to the first batch": first - begin}
    return row | {"CPU microseconds an image": spent / seen * 1e6, "MB": memory.stop()}


def hashes(root: Path, kind: str, options: argparse.Namespace, start: int, stop: int) -> None:
    """Prints a hash of each batch."""
    for images, labels in feed(root, kind, options).iterate(start, stop):
        digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        print(digest, flush=True)


def child(options: argparse.Namespace, *words: str) -> tuple[list[str], dict[str, str]]:
    """The command of a measurement, and its environment, in which the index of the folder is below --root."""
    shared = ["--root", str(options.root), "--batch", str(options.batch), "--workers", str(options.workers)]
    shared += ["--seconds", str(options.seconds)]
    return [sys.executable, __file__, *shared, *words], os.environ | {"HOME": str(options.root / "home")}


def run(options: argparse.Namespace, *words: str) -> dict[str, Any]:
    command, settings = child(options, "--task", *words)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settings)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def killed(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Kills a reader in the middle of an epoch, resumes it, and compares its batches with an uninterrupted reader."""
    middle = options.count // options.batch // 2
    start, stop = max(0, middle - BEFORE), middle + AFTER

    def command(begin: int) -> tuple[list[str], dict[str, str]]:
        return child(options, "--task", "hashes", kind, str(begin), str(stop))

    words, settings = command(start)
    quiet = subprocess.DEVNULL  # the workers report that their parent is gone
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=quiet, text=True, env=settings) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().strip() for _ in range(start, middle)]
        process.send_signal(signal.SIGKILL)

    def whole(begin: int) -> list[str]:
        words, settings = command(begin)
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=settings).stdout.split()

    resumed, reference = whole(middle), whole(start)
    return {"killed at": middle, "batches equal": seen + resumed == reference, "compared": len(reference)}


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yields the measurements: (state of the page cache, measurement, reader)."""
    for state in options.states:
        for kind in options.sources:
            yield state, "first opening", kind
            yield state, "later opening", kind
        for turn in range(options.rounds):
            for reader in (*options.sources, *PEERS):
                yield state, f"reading {turn + 1}", reader
        if state == "warm":
            for kind in options.sources:
                yield state, "killed", kind


def measured(options: argparse.Namespace, state: str, what: str, reader: str) -> dict[str, Any]:
    if what == "first opening":
        for index in (options.root / ("home" if reader == "folder" else reader)).rglob("*.index"):
            index.unlink()
    emptied = {"cache emptied by": empty_cache(options.root)} if state == "cold" else {}
    before = os.getloadavg()[0]
    if what == "killed":
        return killed(options, reader)
    found = run(options, "open" if what.endswith("opening") else "read", reader)
    return found | emptied | {"load before": before}


def summary(options: argparse.Namespace, done: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds, peak memory, and rates relative to the peers."""

    def rounds(state: str, reader: str, key: str) -> list[float]:
        names = (name for name in done if name.startswith(f"{state} | reading"))
        return [done[name][key] for name in names if name.endswith(f"| {reader}")]

    found: dict[str, Any] = {}
    readers = (*options.sources, *PEERS)
    states = dict.fromkeys(name.partition(" | ")[0] for name in done)
    for state in states:
        for key in ("images a second", "CPU microseconds an image"):
            found[f"{state}: {key}"] = {each: float(numpy.median(rounds(state, each, key))) for each in readers}
        rates = found[f"{state}: images a second"]
        for peer in PEERS:
            found[f"{state}: over {peer}"] = {each: rates[each] / rates[peer] for each in options.sources}
        for what in ("first opening", "later opening"):
            seconds = {each: done[f"{state} | {what} | {each}"]["seconds"] for each in options.sources}
            found[f"{state}: seconds, {what}"] = seconds
    if "warm" not in states:
        return found
    found["MB above the imports"] = {each: max(rounds("warm", each, "MB")) for each in readers}
    found["killed and resumed"] = {each: done[f"warm | killed | {each}"] for each in options.sources}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of the data set; generated if missing")
    parser.add_argument("--count", type=int, default=1_281_167, help="number of images")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=[*SOURCES])
    parser.add_argument("--seconds", type=float, default=15, help="length of each reading; inf for whole epochs")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each reading; medians are compared")
    parser.add_argument(
        "--states", nargs="+", choices=("warm", "cold"), default=["warm"], help="states of the page cache"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        for name in ("torchvision.datasets", "torchvision.transforms.v2", "pyarrow.parquet", "unskip.data"):
            importlib.import_module(name)  # imports are not measured
        torch.set_num_threads(1)
        what, reader, *steps = options.task
        if what == "hashes":
            hashes(options.root, reader, options, *map(int, steps))
        else:
            found = opening(options.root, reader) if what == "open" else reading(options.root, reader, options)
            print(json.dumps(found))
        return
    mark = options.root / "count"
    if not mark.is_file() or mark.read_text() != str(options.count):
        generate(options.root, options.count)
    about = {name: getattr(options, name) for name in ("count", "batch", "workers", "seconds")} | {"side": SIDE}
    about["bytes"] = sum(file.stat().st_size for file in (options.root / "parquet").glob("*.parquet"))
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    record: dict[str, Any] = {"set": about, "machine": machine, "measured": {}}
    progress = options.root / "measured.json"
    for file in (options.out, progress):
        if file is not None and file.is_file():
            before = json.loads(file.read_text())
            record = before if before["set"] == about else record
    done, filled = record["measured"], False
    for state, what, reader in plan(options):
        name = f"{state} | {what} | {reader}"
        if name in done:
            continue
        if state == "warm" and not filled:
            fill_cache(options.root)
            filled = True
        done[name] = measured(options, state, what, reader)
        print(name, {key: round(value, 2) for key, value in done[name].items() if isinstance(value, float)}, flush=True)
        progress.write_text(json.dumps(record))
    record = {**record, "summary": summary(options, done)}
    print(json.dumps(record["summary"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        progress.unlink()


if __name__ == "__main__":
    main()
