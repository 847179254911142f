"""A run judged by protocols: its model as the last checkpoint holds it, its data, and results beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from unskip.errors import BadInput
from unskip.evals import Result, evaluate
from unskip.recipes._data import Opener, cached_opener, evaluated_split, open_splits
from unskip.recipes._open import Trained, open_run


def judge_run(
    out: str | Path,
    protocols: Sequence[str],
    *,
    blocks: int | Iterable[int] | Literal["all"] = "all",
    pool: Literal["mean", "cls"] | None = None,
    split: Literal["val", "test"] | None = None,
    seed: int = 0,
    precision: Any = "float32",
    device: str | None = None,
    batch: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    opener: Opener | None = None,
) -> tuple[Trained, list[Result]]:
    """Judges a run on its own data and adds a row for each result to its evals.jsonl.

    Without a `split` it is the one the run itself was judged on: "val" where that held one out, otherwise "test".
    `batch` images at a time give their features, as many as in training by default; fine-tuning has its own batch.
    """
    opener = opener or cached_opener()
    run = open_run(out, device)
    config = run.config
    if getattr(config, "latents", None) is not None:
        raise BadInput(f"{out}: it was trained on latents; call unskip.evals.noised_features with batches of those")
    split = split or evaluated_split(config)
    train, test = open_splits(config, opener, split)
    results = evaluate(
        run.encoder,
        train,
        test,
        protocols,
        size=config.size,
        blocks=blocks,
        pool=pool,
        batch=batch or config.batch,
        seed=seed,
        precision=precision,
        workers=config.workers,
        graph=getattr(config, "graph", False),
        changes=changes,
    )
    for each in results:
        row = {"step": run.step, **each.to_dict(), "split": split, "seed": seed, "precision": precision}
        run.folder.append("evals.jsonl", row)
    return run, results
