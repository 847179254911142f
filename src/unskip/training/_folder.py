"""The folder of a run, with everything about it.

    config.json                  the resolved config, facts of the data, preprocessing, versions, device, seed
    metrics.jsonl                one line per logged step
    evals.jsonl                  one line per evaluation
    warnings.jsonl               one line per named warning
    health.jsonl                 token cosine and self-attention by block, or relative step size by role
    checkpoints/step-N/          model, optimizer and EMA weights, with checksums
    original/                    the teacher of a distillation

A checkpoint is written under a temporary name and renamed, and the last two are kept. So a run that is killed at any
moment has an intact checkpoint, or none yet.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unskip._provenance import versions_of
from unskip._warn import warn
from unskip.errors import BadInput, LoadError
from unskip.training._state import check, seal

KEPT = 2
NOT_FINITE = ("nan", "inf", "-inf")  # as text in logs: JSON has no such numbers


class RunFolder:
    """Reads and writes the folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], device: str, **about: Any) -> RunFolder:
        """A new run; `about` is more plain data for config.json. Raises BadInput if the folder already has a run."""
        run = cls(path)
        run.check_free()
        record = {"config": config, "device": device, **about, "versions": _versions(), "git": _commit()}
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run._write("config.json", record)
        except OSError as error:
            raise BadInput(f"{run.path}: a run cannot be written there ({error}); choose another --out") from error
        return run

    def check_free(self) -> None:
        """Raises BadInput if the folder has a run."""
        if (self.path / "config.json").exists():
            other = "choose another --out" if self._steps() else "remove the folder: it has no checkpoint yet"
            raise BadInput(f"{self.path} already has a run: continue it with `unskip resume {self.path}`, or {other}")

    def discard_unbegun(self) -> None:
        """Removes a run that failed before it logged a step or wrote a checkpoint."""
        if not self.read("metrics.jsonl") and not self._steps():
            for name in ("config.json", "warnings.jsonl"):
                (self.path / name).unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run."""
        run = cls(path)
        if not (run.path / "config.json").is_file():
            raise BadInput(f"{path}: no run there (it has no config.json)")
        return run

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config."""
        return dict(self._section("config"))

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the data that building the model needs: classes, channels, image size."""
        return dict(self._section("facts"))

    @property
    def preprocess(self) -> dict[str, Any] | None:
        """The model's image preprocessing: mean, std, size, interpolation and crop; None without images."""
        section: dict[str, Any] | None = self._section("preprocess")
        return section

    @property
    def data(self) -> dict[str, Any]:
        """Sizes and fingerprints of the training and evaluation splits."""
        return dict(self._section("data"))

    @property
    def plugins(self) -> list[str]:
        """The plugins loaded when the run began."""
        return list(self._section("plugins"))

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        try:
            plugins = self.plugins
        except LoadError:  # the command is part of messages about an unreadable disk, too
            plugins = []
        options = (f" --plugin {shlex.quote(name)}" for name in plugins)
        return f"unskip resume {shlex.quote(str(self.path))}{''.join(options)}"

    def _section(self, name: str) -> Any:
        try:
            return json.loads((self.path / "config.json").read_text())[name]
        except KeyError:
            raise LoadError(
                f"{self.path / 'config.json'}: no {name!r}; it is not that of a run, or another version's"
            ) from None
        except (OSError, ValueError) as error:
            raise LoadError(f"{self.path / 'config.json'}: damaged ({error})") from error

    def update(self, **about: Any) -> None:
        """Replaces sections of config.json."""
        record = json.loads((self.path / "config.json").read_text())
        self._write("config.json", {**record, **about})

    def _write(self, name: str, data: object) -> None:
        self._replace(name, json.dumps(data, indent=1) + "\n")

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text)
        temporary.replace(self.path / name)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a line to a .jsonl file and closes it, so that the line is kept if the process is killed."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) + "\n")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a .jsonl file, without lines that were cut off."""
        rows = []
        file = self.path / name
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def rewind(self, step: int) -> None:
        """Removes log lines after a step, because these steps are trained again."""
        for name in ("metrics.jsonl", "evals.jsonl", "warnings.jsonl", "health.jsonl"):
            if (self.path / name).exists():
                # Step 0 keeps no lines: notes from before the first step are written again, too.
                kept = [row for row in self.read(name) if 0 < step >= row.get("step", 0)]
                self._replace(name, "".join(json.dumps(row) + "\n" for row in kept))

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Writes a checkpoint under a temporary name, renames it, and deletes the oldest."""
        target = self.checkpoints / f"step-{step}"
        temporary = self.checkpoints / f".step-{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            seal(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(self.checkpoints / f"step-{old}", ignore_errors=True)
        return target

    def _steps(self) -> list[int]:
        names = [folder.name for folder in self.checkpoints.glob("step-*") if folder.is_dir()]
        return sorted(int(name.partition("-")[2]) for name in names if name.partition("-")[2].isdigit())

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """The newest intact checkpoint, or None. Warns of a damaged one and skips it."""
        for step in reversed(self._steps()):
            folder = self.checkpoints / f"step-{step}"
            try:
                check(folder)
                return step, folder
            except LoadError as error:
                first = step == self._steps()[0]
                warn(f"{error}: {'training starts from step 0' if first else 'the checkpoint before it is used'}")
        return None


def _versions() -> dict[str, str]:
    """The versions of packages that results depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return versions | versions_of(("unskip", "timm", "accelerate"))


def _commit() -> str | None:
    """The git commit of the working directory; None if it is not a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
