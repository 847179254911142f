"""What a run logs, as TensorBoard reads it: a second copy of metrics.jsonl and evals.jsonl, in the run's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from unskip.errors import BadInput


class Board:
    """Scalars by step. What an interrupted run wrote after `start` is hidden, as it will be written again."""

    def __init__(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadInput("tensorboard is asked for and not installed: pip install tensorboard") from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def write(self, row: dict[str, Any]) -> None:
        """One line of a log: a scalar for every number in it."""
        group = row.get("evaluation", "train")
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(f"{group}/{name}", value, row["step"])
        self.writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the run is over, and metrics.jsonl has it all
            self.writer.close()
