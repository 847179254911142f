"""`unskip sample RUN`: images of a generative run, as PNG files and a grid, and judged where an extractor is named."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import tyro

from unskip.cli._options import DeviceOfRun, Json, Run, told
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput
from unskip.evals import DTYPES, extractor
from unskip.models import Sampler, Sampling
from unskip.recipes import judge_samples, open_run
from unskip.recipes import sample as draw

_SAMPLERS = f"{', '.join(get_args(Sampler))}."
_CACHE = "~/.cache/unskip/statistics"  # of the data that samples are compared with
_JUDGE = "Compare with the run's data over this extractor: inception, timm:NAME, or the folder of a classifier."


def sample(
    run: Run,
    n: Annotated[int, tyro.conf.arg(help="How many.", metavar="N")] = 64,
    cfg: Annotated[float, tyro.conf.arg(help="Strength of guidance; 1 is none.", metavar="W")] = 1.0,
    sampler: Annotated[str, tyro.conf.arg(help=_SAMPLERS, metavar="NAME")] = "heun",
    steps: Annotated[int, tyro.conf.arg(help="Of all samplers but dopri5.", metavar="N")] = 50,
    tolerance: Annotated[float, tyro.conf.arg(help="Of dopri5.", metavar="X")] = 1e-5,
    label: Annotated[int | None, told("One class for all (default: each in turn).", "CLASS")] = None,
    seed: Annotated[int, tyro.conf.arg(help="Of the noise.", metavar="N")] = 0,
    batch: Annotated[int, tyro.conf.arg(help="How many at a time.", metavar="N")] = 256,
    precision: Annotated[str, tyro.conf.arg(help="float32, bf16 or fp16.", metavar="NAME")] = "float32",
    compile: Annotated[  # noqa: A002
        bool,
        tyro.conf.FlagCreatePairsOff,
        told("Compile the network: pays off for hundreds of samples on a GPU."),
    ] = False,
    judge: Annotated[str | None, told(_JUDGE, "EXTRACTOR")] = None,
    device: DeviceOfRun = None,
    json: Json = False,
) -> int:
    """Draw images with a run's averaged weights: PNG files and a grid under RUN/samples.

    Example: unskip sample runs/x --n 64 --cfg 1.5
    """
    if precision not in DTYPES:
        raise BadInput(f"--precision {precision}: it can be {', '.join(DTYPES)}")
    # Said before a model is built: what cannot be asked for.
    sampling = Sampling(sampler, steps, cfg, tolerance, seed)  # type: ignore[arg-type]  # it checks
    if n < 1:
        raise BadInput(f"--n {n}: ask for one sample or more")
    if judge is not None and label is not None:
        raise BadInput("--judge compares with images of all classes: leave --label out (--cfg 0 draws without a label)")
    with busy(f"drawing {n} samples of {run}"):
        trained = open_run(run, device)
        where = next(trained.model.parameters()).device
        chosen = extractor(judge, device=where) if judge else None
        found = draw(
            trained,
            n,
            cfg,
            sampler=sampling.sampler,
            steps=steps,
            tolerance=tolerance,
            labels=label,
            seed=seed,
            batch=batch,
            precision=precision,
            compile=compile,
        )
        judged: dict[str, float] = {}
        if chosen is not None:
            options: dict[str, Any] = {"samples": found, "batch": batch, "precision": precision, "cache": _CACHE}
            judged = judge_samples(trained, chosen, n, sampling, **options)
    data: dict[str, Any] = {"run": run, "step": trained.step, "n": n, "evaluations": found.evaluations}
    data |= {"seconds": found.seconds, "grid": str(found.grid), **judged}
    if json:
        print_json(data)
        return 0
    print(f"{n} samples of {run}, step {trained.step}: {found.evaluations:g} evaluations of the network each")
    for name, value in judged.items():
        if name != "evaluations":
            print(f"{name}  {value:.4g}")
    print(found.grid)
    return 0
