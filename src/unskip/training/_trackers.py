"""Experiment trackers (W&B, MLflow, TensorBoard, ...), through accelerate.

They get a copy of metrics.jsonl and evals.jsonl. The user installs and configures a tracker: WANDB_MODE=offline,
MLFLOW_TRACKING_URI. Files of a tracker are written to the run's folder.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Any

from unskip._extras import need
from unskip._warn import warn
from unskip._words import nearest
from unskip.errors import BadInput
from unskip.training._folder import RunFolder

_PROJECT = "unskip"
_INSTALL = {"mlflow": "mlflow-skinny"}  # if package and tracker have different names


class Trackers:
    """The trackers of a run, from step `start` on. TensorBoard and W&B continue an interrupted run."""

    def __init__(self, names: str, folder: RunFolder, start: int) -> None:
        tracking = need("accelerate.tracking")
        path = folder.path.resolve()
        options: dict[str, dict[str, Any]] = {
            # Hides the steps after `start`, which are logged again.
            "tensorboard": {"logging_dir": str(path), "purge_step": start + 1},
            "wandb": {"dir": str(path), "name": path.name, "id": _id(path), "resume": "allow"},
        }
        self.trackers = []
        for name in tracker_names(names):
            kind = tracking.LOGGER_TYPE_TO_CLASS[name]
            arguments = options.get(name, {"logging_dir": str(path)} if kind.requires_logging_directory else {})
            try:
                tracker = kind(_PROJECT, **arguments)
                tracker.start()
                tracker.store_init_configuration({key: _plain(value) for key, value in folder.config.items()})
            except Exception as error:  # trackers raise errors of many kinds: not logged in, no server
                raise BadInput(f"tracker {name} cannot be started: {error}; fix it, or leave out --tracker") from error
            self.trackers.append(tracker)

    def write(self, row: dict[str, Any]) -> None:
        """Logs the numbers of a row as train/NAME or EVALUATION/NAME."""
        group = row.get("evaluation", "train")
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        for tracker in [*self.trackers]:
            try:
                tracker.log({f"{group}/{name}": value for name, value in numbers.items()}, step=row["step"])
            except Exception as error:  # the server is down, the disk is full: the run continues
                self.trackers.remove(tracker)
                warn(f"tracker {tracker.name} stops at step {row['step']}: {error}; metrics.jsonl has all numbers")

    def close(self) -> None:
        for tracker in self.trackers:
            with contextlib.suppress(Exception):  # the run is over, and metrics.jsonl is complete
                tracker.finish()


def tracker_names(text: str) -> list[str]:
    """The names in a text such as "wandb,tensorboard". Raises BadInput if one is unknown or not installed."""
    tracking = need("accelerate.tracking")
    known = [str(name) for name in tracking.LOGGER_TYPE_TO_CLASS]
    installed = [str(name) for name in tracking.get_available_trackers()]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BadInput(f"tracker is {name!r}{nearest(name, known)}; accelerate has {', '.join(known)}")
        if name not in installed:
            raise BadInput(f"tracker {name} is not installed: pip install {_INSTALL.get(name, name)}")
    return names


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _id(folder: Path) -> str:
    """The run's id, which stays the same when it is resumed."""
    file = folder / "tracker-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()
