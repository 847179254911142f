"""Trackers of experiments (W&B, MLflow, TensorBoard, ...), by accelerate's interface to them.

They get a second copy of metrics.jsonl and evals.jsonl. The package of a tracker is the user's own installation, and so
are its settings: WANDB_MODE=offline, MLFLOW_TRACKING_URI. Files that a tracker writes lie in the run's folder.
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
_INSTALL = {"mlflow": "mlflow-skinny"}  # where the package is not called as its tracker is


class Trackers:
    """The trackers of a run, from step `start` on. TensorBoard and W&B continue an interrupted run."""

    def __init__(self, names: str, folder: RunFolder, start: int) -> None:
        tracking = need("accelerate.tracking")
        path = folder.path.resolve()
        options: dict[str, dict[str, Any]] = {
            # What was written after `start` is hidden, as it will be written again.
            "tensorboard": {"logging_dir": str(path), "purge_step": start + 1},
            "wandb": {"dir": str(path), "name": path.name, "id": _id(path), "resume": "allow"},
        }
        self.trackers = []
        for name in tracker_names(names):
            kind = tracking.LOGGER_TYPE_TO_CLASS[name]
            given = options.get(name, {"logging_dir": str(path)} if kind.requires_logging_directory else {})
            try:
                tracker = kind(_PROJECT, **given)
                tracker.start()
                tracker.store_init_configuration({key: _plain(value) for key, value in folder.config.items()})
            except Exception as error:  # each has its own: not logged in, a server that is not there
                raise BadInput(
                    f"tracker {name} cannot be started: {error}; leave out --tracker, or mend that"
                ) from error
            self.trackers.append(tracker)

    def write(self, row: dict[str, Any]) -> None:
        """One line of a log: a number under train/NAME, or under the name of its evaluation."""
        group = row.get("evaluation", "train")
        numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        for tracker in [*self.trackers]:
            try:
                tracker.log({f"{group}/{name}": value for name, value in numbers.items()}, step=row["step"])
            except Exception as error:  # a server that is gone, a full disk: the run itself goes on
                self.trackers.remove(tracker)
                warn(
                    f"tracker {tracker.name} gets nothing from step {row['step']} on: {error}; metrics.jsonl has it all"
                )

    def close(self) -> None:
        for tracker in self.trackers:
            with contextlib.suppress(Exception):  # the run is over, and metrics.jsonl has it all
                tracker.finish()


def tracker_names(text: str) -> list[str]:
    """The trackers of a text such as "wandb,tensorboard". Raises BadInput for one that is unknown or not installed."""
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
    """A name for the run that stays the same when it is resumed."""
    file = folder / "tracker-id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()
