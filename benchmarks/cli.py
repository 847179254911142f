"""Compares the time of `unskip --help` with that of importing torch: python benchmarks/cli.py

If the help imported torch, it would take at least as long as the import. Every command runs in a new process,
alternating with the others, and the median of five runs is printed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from time import perf_counter

REPEATS = 5
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import torch'": ["-c", "import torch"],
    "unskip --help": ["-m", "unskip", "--help"],
    "unskip --version": ["-m", "unskip", "--version"],
    "unskip audit --help": ["-m", "unskip", "audit", "--help"],
}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS + 1):
        for name, arguments in COMMANDS.items():
            begin = perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(perf_counter() - begin)
    medians = {
        name: statistics.median(values[1:]) for name, values in seconds.items()
    }  # the first run fills the caches
    torch = medians["python -c 'import torch'"]
    for name, median in medians.items():
        print(f"{name:<26} {median:6.3f} s   {median / torch:5.2f} of importing torch")
    slow = [name for name in medians if name.startswith("unskip") and medians[name] > 1]
    if slow:
        raise SystemExit(f"more than a second: {', '.join(slow)}")


if __name__ == "__main__":
    main()
