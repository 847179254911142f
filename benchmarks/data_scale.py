"""How data on disk are opened and read at ImageNet's number of images: folder, WebDataset tars, parquet files.

    python benchmarks/data_scale.py --count 1281167       # ImageNet's number; about 1.5 GB as tiny JPEGs, three times
    python benchmarks/data_scale.py --count 50000
    python benchmarks/data_scale.py --count 1281167 --sources tar parquet --batches 400     # memory, in minutes

The set is generated under --root (default: a temporary folder) and deleted at the end. Each measurement is a process of
its own. Images a second are those of an epoch in random order with --workers workers, as normalised batches on the CPU:

    unskip        Feed over folder, tars, parquet files
    imagefolder   torchvision's ImageFolder + DataLoader(shuffle=True)
    webdataset    the package webdataset: shards shuffled, a buffer of 1,000 samples

Also: seconds to open, first (making the index) and later; memory above that of the imports, of the process and its
workers together; and an epoch that is killed with SIGKILL in the middle and resumed, batch by batch against one that is
not. --cold repeats the reading after the page cache has been emptied. JSON goes to docs/results/data-scale.json.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SIDE, CLASSES, POOL = 40, 1000, 4096
SOURCES = ("folder", "tar", "parquet")


def pictures() -> list[bytes]:
    """Encoded images of noise over a gradient, of about 1.1 kB each."""
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
    """The image of a row; a comment in the file makes it unique."""
    return b"\xff\xd8\xff\xfe\x00\x0a%08d" % row + pool[row * 2654435761 % POOL][2:]


def generate(root: Path, count: int, sources: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    pool, each = pictures(), 10_000
    for label in range(min(CLASSES, count)) if "folder" in sources else ():
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
                if "folder" in sources:
                    (root / "folder" / "train" / f"n{label:08d}" / f"n{label:08d}_{row}.JPEG").write_bytes(encoded)
                for name, content in ((f"{row:08d}.cls", b"%d" % label), (f"{row:08d}.jpg", encoded)):
                    about = tarfile.TarInfo(name)
                    about.size = len(content)
                    shard.addfile(about, io.BytesIO(content))
        column = pyarrow.array([{"bytes": encoded, "path": None} for encoded in data])
        table = pyarrow.table({"image": column, "label": pyarrow.array(labels)})
        table = table.replace_schema_metadata({"huggingface": json.dumps(schema)})
        parquet.write_table(table, root / "parquet" / f"train-{start // each:05d}.parquet", row_group_size=1000)


def source(root: Path, kind: str) -> str:
    return {"folder": f"{root}/folder", "tar": f"{root}/tar/{{split}}-*.tar", "parquet": f"{root}/parquet/*.parquet"}[
        kind
    ]


def empty_cache(root: Path) -> str:
    """Empties the page cache: all of it where that is permitted, else file by file."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        for file in root.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        return "posix_fadvise"


class Memory:
    """The largest proportional set size of this process and its children, sampled, in MB above that at the start."""

    def __init__(self) -> None:
        self.base, self.most, self.ended = self._now(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _now(self) -> float:
        total = 0
        for process in [os.getpid(), *self._children()]:
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue  # it has ended
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1000

    def _children(self) -> list[int]:
        return [int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            self.most = max(self.most, self._now() - self.base)

    def stop(self) -> float:
        self.ended.set()
        self.thread.join()
        return self.most


def opened(root: Path, kind: str) -> Any:
    from unskip.data import _parquet, _tar, open_images

    # Sets of any size are read from disk here, so that a small --count shows what a large one does.
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


def task(name: str, root: Path, options: argparse.Namespace) -> dict[str, float]:
    """One measurement, in this process."""
    import torchvision.datasets
    import torchvision.transforms.v2  # noqa: F401
    from pyarrow import parquet  # noqa: F401

    import unskip.data  # noqa: F401

    torch.set_num_threads(1)
    kind, _, what = name.partition(":")
    if what == "open":
        begin = time.perf_counter()
        opened(root, kind)
        return {"seconds": time.perf_counter() - begin}
    memory, begin, before = Memory(), time.perf_counter(), time.process_time()
    if kind in SOURCES:
        found = feed(root, kind, options)
        batches: Iterator[Any] = (images for images, _ in found.iterate(0, min(found.steps_per_epoch, options.batches)))
    else:
        batches = normalised((torchvision_batches if kind == "imagefolder" else webdataset_batches)(root, options))
    first = seen = 0.0
    for images in itertools.islice(batches, options.batches):
        assert images.shape[1:] == (3, SIDE, SIDE)
        first = first or time.perf_counter()
        seen += len(images)
    ended = time.perf_counter()
    rate = (seen - options.batch) / (ended - first)  # from the first batch on: opening is measured apart
    del batches  # ends the workers
    spent = time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    found = {"images a second": rate, "images": seen, "seconds to the first batch": first - begin}
    return found | {"CPU microseconds an image": spent / seen * 1e6, "MB": memory.stop()}


def hashes(root: Path, kind: str, options: argparse.Namespace, start: int, stop: int) -> None:
    """Prints a digest of each batch."""
    for images, labels in feed(root, kind, options).iterate(start, stop):
        digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()
        print(digest, flush=True)


def child(options: argparse.Namespace, root: Path, *words: str) -> list[str]:
    shared = ["--root", str(root), "--batch", str(options.batch), "--workers", str(options.workers)]
    shared += ["--batches", str(options.batches)]
    return [sys.executable, __file__, *shared, *words]


def run(options: argparse.Namespace, root: Path, name: str) -> dict[str, float]:
    done = subprocess.run(child(options, root, "--task", name), check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(name, {key: round(value, 2) for key, value in found.items()}, flush=True)
    return found


def killed(options: argparse.Namespace, root: Path, kind: str, count: int) -> dict[str, Any]:
    """Kills an epoch in the middle, resumes it, and compares with one that is not killed."""
    middle, more = count // options.batch // 2, 20
    command = child(options, root, "--task", f"{kind}:hashes", "--steps")
    with subprocess.Popen([*command, "0", str(2 * middle)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().strip() for _ in range(middle)]
        process.send_signal(signal.SIGKILL)

    def whole(start: int, stop: int) -> list[str]:
        done = subprocess.run([*command, str(start), str(stop)], check=True, capture_output=True, text=True)
        return done.stdout.split()

    resumed, reference = whole(middle, middle + more), whole(0, middle + more)
    return {"killed at": middle, "batches equal": seen + resumed == reference, "compared": len(reference)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000, help="images")
    parser.add_argument("--root", type=Path, help="where the set is, or is generated; it is deleted unless --keep")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=[*SOURCES])
    parser.add_argument("--batches", type=int, default=sys.maxsize, help="of each reading; a whole epoch by default")
    parser.add_argument("--rounds", type=int, default=3, help="of each reading; the median is compared")
    parser.add_argument("--cold", action="store_true", help="also with an empty page cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        if options.steps:
            hashes(options.root, options.task.partition(":")[0], options, *options.steps)
        else:
            print(json.dumps(task(options.task, options.root, options)))
        return
    root = options.root or Path(tempfile.mkdtemp(prefix="data-scale-"))
    try:
        if not (root / "parquet").is_dir():
            begin = time.perf_counter()
            root.mkdir(parents=True, exist_ok=True)
            generate(root, options.count, options.sources)
            print(f"generated in {time.perf_counter() - begin:.0f} s", flush=True)
        results = measured(options, root)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(results["summary"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def measured(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"load before": os.getloadavg()}
    for kind in options.sources:
        found[f"{kind}: first opening"] = run(options, root, f"{kind}:open")["seconds"]
        found[f"{kind}: later opening"] = run(options, root, f"{kind}:open")["seconds"]
    peers = {"folder": "imagefolder", "tar": "webdataset"}
    names = [*options.sources, *(peer for kind, peer in peers.items() if kind in options.sources)]
    for state in ("warm", "cold") if options.cold else ("warm",):
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in names:  # in turn, so that whatever else the machine does meets all of them
                if state == "cold":
                    found["cache emptied by"] = empty_cache(root)
                rounds[name].append(run(options, root, name))
        found[state] = rounds
    within = min(options.count, options.batches * options.batch)  # images
    found["killed and resumed"] = {kind: killed(options, root, kind, within) for kind in options.sources}
    found["load after"] = os.getloadavg()

    def median(state: str, name: str, key: str) -> float:
        return float(numpy.median([each[key] for each in found[state][name]]))

    summary: dict[str, Any] = {}
    for state in ("warm", "cold") if options.cold else ("warm",):
        rates = {name: median(state, name, "images a second") for name in names}
        summary[f"{state}: images a second"] = rates
        key = "CPU microseconds an image"  # of all processes, which other work on the machine changes little
        summary[f"{state}: {key}"] = {name: median(state, name, key) for name in names}
        for ours, peer in itertools.product(options.sources, peers.values()):
            if peer in rates:
                summary[f"{state}: {ours} over {peer}"] = rates[ours] / rates[peer]
    summary["MB above the imports"] = {name: max(each["MB"] for each in found["warm"][name]) for name in names}
    summary["seconds to open"] = {key: value for key, value in found.items() if key.endswith("opening")}
    summary["killed and resumed"] = found["killed and resumed"]
    about = {"count": options.count, "batch": options.batch, "workers": options.workers, "side": SIDE}
    about |= {"batches": min(options.batches, options.count // options.batch)}
    about |= {"bytes": sum(file.stat().st_size for file in (root / "tar").glob("*.tar"))}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    return {"summary": summary, "set": about, "machine": versions, "measured": found}


if __name__ == "__main__":
    main()
