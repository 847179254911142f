"""What holds for every test: the environment, set before torch is imported, and the seed."""

import os

# A cap that spares some CPUs an illegal instruction in oneDNN's bfloat16 kernels; see the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["HF_HUB_OFFLINE"] = "1"
# The pytest workers share the cores; each would otherwise start a thread for every one of them.
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# The same examples on every machine, and no time limit on one of them: the first may import or compile something.
hypothesis.settings.register_profile("unskip", deadline=None, derandomize=True)
hypothesis.settings.load_profile("unskip")


@pytest.fixture(autouse=True)
def fresh_seed() -> Iterator[None]:
    """Every test starts from the same seed and leaves torch's generator as it found it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
