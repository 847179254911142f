"""A generative run judged: what it draws, against its own data, and what its blocks know at several noise levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.evals import Blocks, Extractor, Result, diffusion, extractor, generation, statistics
from unskip.models import Sampling
from unskip.recipes._data import cached_opener, evaluated_split, open_split, open_splits
from unskip.recipes._generative import Generative
from unskip.recipes._open import Trained, open_run
from unskip.recipes._sample import Samples, sampled


def judge_samples(
    run: str | Path | Trained,
    judge: str | Path | nn.Module | Extractor,
    n: int = 10_000,
    sampling: Sampling | None = None,
    *,
    samples: Samples | None = None,
    split: Literal["train", "test"] = "train",
    batch: int = 512,
    precision: Any = "float32",
    cache: str | Path | None = None,
) -> dict[str, float]:
    """Draws n samples and compares them with a split of the run's data; a row is added to its evals.jsonl.

    The classes are as often as each other. `sampling` is 50 steps of Heun's unless said otherwise. Where `samples` are
    there already, made as `sampling` and `precision` say, these are judged and none are drawn.
    """
    opener = cached_opener()
    trained = run if isinstance(run, Trained) else open_run(run)
    config = _generative(trained)
    sampling = sampling or Sampling()
    chosen = extractor(judge, device=next(trained.model.parameters()).device)
    images = open_split(config, split, opener)
    reference = statistics(images, chosen, size=config.size, batch=batch, cache=cache)
    if samples is not None:
        n = len(samples.images)
        found = generation(samples.images, reference, chosen, batch=batch)
        found["evaluations"] = samples.evaluations
    else:
        costs: list[Tensor] = []

        def batches() -> Any:
            for pixels, _, evaluations in sampled(trained, n, sampling, batch=batch, precision=precision):
                costs.append(evaluations.double())
                yield pixels

        found = generation(batches(), reference, chosen, batch=batch)
        found["evaluations"] = float(torch.cat(costs).mean())
    # In a row of evals.jsonl "precision" is that of the arithmetic, and must not push out that of the samples.
    numbers = {"sample_precision" if name == "precision" else name: value for name, value in found.items()}
    about = {"n": n, "split": split, "precision": precision, "extractor": chosen.key, **asdict(sampling)}
    trained.folder.append("evals.jsonl", {"step": trained.step, "evaluation": "generation-v1", **numbers, **about})
    return found


def judge_times(
    run: str | Path | Trained,
    protocols: Sequence[str],
    times: Sequence[float],
    *,
    blocks: Blocks = "all",
    split: Literal["val", "test"] | None = None,
    batch: int = 512,
    seed: int = 0,
    precision: Any = "float32",
    device: str | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Trained, dict[float, list[Result]]]:
    """Protocols over blocks and noise levels; a row for each result is added to the run's evals.jsonl."""
    opener = cached_opener()
    trained = run if isinstance(run, Trained) else open_run(run, device)
    config = _generative(trained)
    if config.latents is not None:
        raise BadInput(
            f"{trained.folder.path}: it was trained on latents; call unskip.evals.noised_features with those"
        )
    split = split or evaluated_split(config)
    train, test = open_splits(config, opener, split)
    found = diffusion(
        trained.model,
        train,
        test,
        protocols,
        times=times,
        blocks=blocks,
        flow=config.flow,
        size=config.size,
        batch=batch,
        seed=seed,
        precision=precision,
        changes={name: dict(values) for name, values in (changes or {}).items()},
    )
    for time, results in found.items():
        for each in results:
            row = {"step": trained.step, **each.to_dict(), "time": time, "split": split}
            row |= {"seed": seed, "precision": precision}
            trained.folder.append("evals.jsonl", row)
    return trained, found


def _generative(trained: Trained) -> Generative:
    if not isinstance(trained.config, Generative):
        raise BadInput(
            f"{trained.folder.path}: its recipe has no noise levels and does not draw; take one of sit or uvit"
        )
    return trained.config
