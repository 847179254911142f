"""Settings for all tests: environment variables (before torch is imported), threads, hypothesis and the seed."""

import os

# Some CPUs meet an illegal instruction in oneDNN's bfloat16 kernels without this cap; see the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from tests.tables import pytest_configure  # noqa: F401  (a hook: `make test-all` writes its tables into the docs)

# Models are tiny and pytest workers share the cores, so more threads would be slower.
torch.set_num_threads(1)
# The same examples on every machine. No deadline, because the first example may import or compile something.
# `make test-all` uses more examples (--hypothesis-profile thorough).
hypothesis.settings.register_profile("unskip", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("unskip")


@pytest.fixture(autouse=True)
def fresh_seed() -> Iterator[None]:
    """Seeds torch for each test, and restores its generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
