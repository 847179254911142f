"""Runs launched by torchrun or accelerate: on two nodes, with a restarted worker, with a lost node."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import on_ranks
from torch import Tensor

from unskip import cli

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed"),
]

STEPS = 60
TRAIN = ["train", "supervised", "--preset=digits", "--model-args=depth=2,embed_dim=16,num_heads=2", "--batch=32"]
TRAIN += [f"--steps={STEPS}", "--checkpoint-every=4", "--log-every=4", "--device=cpu", "--no-health", "--quiet"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    on_ranks(2, folder, partial(cli.main, [*TRAIN, "--out=run"]))
    return folder / "run"


def launched(out: Path, *flags: str, by: str = "torch.distributed.run") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", by, *flags, "-m", "unskip", *TRAIN, f"--out={out}"]
    settings = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | settings)


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{STEPS}" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def two_nodes(out: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [launched(out, *flags, f"--node-rank={rank}") for rank in range(2)]


def worker_of(agent: subprocess.Popen[str], run: Path) -> int:
    """The last worker of an agent, once the run has a checkpoint."""
    end = time.monotonic() + 200
    while not (run / "checkpoints" / "step-8").is_dir() and time.monotonic() < end:
        time.sleep(0.005)
    return int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[-1])


def test_two_nodes_match_two_processes(tmp_path: Path, uninterrupted: Path) -> None:
    for node in two_nodes(tmp_path / "run"):
        errors = node.communicate(timeout=250)[1]
        assert node.returncode == 0, errors[-2000:]
    assert same(tmp_path / "run", uninterrupted)


def test_settings_of_accelerate_launch_have_no_effect(tmp_path: Path, uninterrupted: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = f"--main_process_port={free.getsockname()[1]}"
    flags = ["--multi_gpu", "--num_machines=1", "--num_processes=2", port]  # "--cpu" would start one process
    flags += ["--mixed_precision=bf16", "--gradient_accumulation_steps=2", "--dynamo_backend=inductor"]
    run = launched(tmp_path / "run", *flags, by="accelerate.commands.launch")
    errors = run.communicate(timeout=250)[1]
    assert run.returncode == 0, errors[-2000:]
    assert same(tmp_path / "run", uninterrupted)


def test_a_killed_worker_is_restarted(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    agent = launched(run, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1")
    os.kill(worker_of(agent, run), signal.SIGKILL)
    assert not (run / "checkpoints" / f"step-{STEPS}").exists()
    errors = agent.communicate(timeout=250)[1]
    assert agent.returncode == 0, errors[-2000:]
    assert same(run, uninterrupted)


def test_a_run_that_lost_a_node_resumes_with_fewer_processes(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    kept, lost = two_nodes(run)
    worker = worker_of(lost, run)
    lost.kill()
    os.kill(worker, signal.SIGKILL)
    errors = kept.communicate(timeout=250)[1]
    lost.communicate(timeout=250)
    assert kept.returncode != 0
    assert not (run / "checkpoints" / f"step-{STEPS}").exists(), errors[-2000:]
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    ends, wanted = weights(run), weights(uninterrupted)
    off = max(float((ends[name] - value).abs().max()) for name, value in wanted.items())
    assert off < 1e-3  # the order of sums differs
