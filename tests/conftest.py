"""What holds for every test: the environment, set before torch is imported, and the seed."""

import os

# A cap that spares some CPUs an illegal instruction in oneDNN's bfloat16 kernels; see the Makefile.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from tests.tables import pytest_configure  # noqa: F401  (a hook: `make test-all` writes its tables into the docs)

# The pytest workers share the cores, and the models are tiny: more threads only wait for each other.
torch.set_num_threads(1)
# The same examples on every machine, and no time limit on one of them: the first may import or compile something.
# `make test-all` takes more of them (--hypothesis-profile thorough).
hypothesis.settings.register_profile("unskip", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
hypothesis.settings.load_profile("unskip")


@pytest.fixture(autouse=True)
def fresh_seed() -> Iterator[None]:
    """Every test starts from the same seed and leaves torch's generator as it found it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
