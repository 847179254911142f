"""A run is a folder: everything about one training run, from which every other view is made.

    config.json                  the resolved config, facts of the data, preprocessing, versions, device, seed
    metrics.jsonl                a line a logged step, the truth about the run
    evals.jsonl                  a line an evaluation
    warnings.jsonl               a line a named warning
    health.jsonl                 a line a look: token cosine and self-attention by block, or relative step size by role
    checkpoints/step-N/          model, optimizer and EMA weights, with checksums
    original/                    the teacher of a distillation

Checkpoints are written aside and renamed, and the last two are kept: a run that is killed at any moment has a whole
one, or none yet.
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
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not know, as a log holds them


class RunFolder:
    """Reads and writes one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], device: str, **about: Any) -> RunFolder:
        """A new run; `about` is further plain data for config.json. A folder that holds a run already is refused."""
        run = cls(path)
        run.check_free()
        record = {"config": config, "device": device, **about, "versions": _versions(), "git": _commit()}
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run._write("config.json", record)
        except OSError as error:
            raise BadInput(f"{run.path}: no run can be written there ({error}); choose another --out") from error
        return run

    def check_free(self) -> None:
        """Raises BadInput where the folder holds a run."""
        if (self.path / "config.json").exists():
            other = "choose another --out" if self._steps() else "remove the folder: it has no checkpoint yet"
            raise BadInput(f"{self.path} holds a run already: continue it with `unskip resume {self.path}`, or {other}")

    def discard_unbegun(self) -> None:
        """Frees the folder of a run that failed before it logged a step or wrote a checkpoint."""
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
        """The resolved config of the run."""
        return dict(self._section("config"))

    @property
    def facts(self) -> dict[str, Any]:
        """What the model needs to know of its data."""
        return dict(self._section("facts"))

    @property
    def preprocess(self) -> dict[str, Any] | None:
        """How images are made for its model: mean, std, size, interpolation and crop; None where it takes no images."""
        made: dict[str, Any] | None = self._section("preprocess")
        return made

    @property
    def data(self) -> dict[str, Any]:
        """The splits the run was trained and evaluated on: their sizes and fingerprints."""
        return dict(self._section("data"))

    @property
    def plugins(self) -> list[str]:
        """The plugins that were loaded when the run began."""
        return list(self._section("plugins"))

    @property
    def resume_command(self) -> str:
        """What continues the run on the command line."""
        try:
            plugins = self.plugins
        except LoadError:  # it stands in messages about a disk that cannot be read, too
            plugins = []
        options = (f" --plugin {shlex.quote(name)}" for name in plugins)
        return f"unskip resume {shlex.quote(str(self.path))}{''.join(options)}"

    def _section(self, name: str) -> Any:
        try:
            return json.loads((self.path / "config.json").read_text())[name]
        except KeyError:
            raise LoadError(f"{self.path / 'config.json'}: it has no {name!r}; the run is of another version") from None
        except (OSError, ValueError) as error:
            raise LoadError(f"{self.path / 'config.json'}: damaged ({error})") from error

    def update(self, **about: Any) -> None:
        """Replaces sections of config.json."""
        record = json.loads((self.path / "config.json").read_text())
        self._write("config.json", {**record, **about})

    def _write(self, name: str, data: object) -> None:
        aside = self.path / f".{name}.tmp"
        aside.write_text(json.dumps(data, indent=1) + "\n")
        aside.replace(self.path / name)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a line to a .jsonl file, which outlives the process from then on. What is not finite is text in it."""
        with (self.path / name).open("a") as file:
            file.write(json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) + "\n")

    def read(self, name: str) -> list[dict[str, Any]]:
        """The lines of a .jsonl file; a line that was cut off is left out."""
        rows = []
        file = self.path / name
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def rewind(self, step: int) -> None:
        """Forgets what was logged after a step, because those steps will be taken again."""
        for name in ("metrics.jsonl", "evals.jsonl", "warnings.jsonl", "health.jsonl"):
            if (self.path / name).exists():
                # From the start everything is written again, what was noted before the first step too.
                kept = [row for row in self.read(name) if 0 < step >= row.get("step", 0)]
                aside = self.path / f".{name}.tmp"
                aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
                aside.replace(self.path / name)

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> Path:
        """Writes a checkpoint aside, renames it, and drops the oldest."""
        target = self.checkpoints / f"step-{step}"
        aside = self.checkpoints / f".step-{step}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            write(aside)
            seal(aside)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(self.checkpoints / f"step-{old}", ignore_errors=True)
        return target

    def _steps(self) -> list[int]:
        names = [folder.name for folder in self.checkpoints.glob("step-*") if folder.is_dir()]
        return sorted(int(name.partition("-")[2]) for name in names if name.partition("-")[2].isdigit())

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """The newest whole checkpoint, or None before the first. A damaged one is passed over with a warning."""
        for step in reversed(self._steps()):
            folder = self.checkpoints / f"step-{step}"
            try:
                check(folder)
                return step, folder
            except LoadError as error:
                before = "the checkpoint before it is used" if step != self._steps()[0] else "the run starts anew"
                warn(f"{error}: {before}")
        return None


def _versions() -> dict[str, str]:
    """The versions a result depends on."""
    own = {"python": platform.python_version(), "torch": torch.__version__}
    return own | versions_of(("unskip", "timm", "accelerate"))


def _commit() -> str | None:
    """The commit of the working directory, where it is a repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
