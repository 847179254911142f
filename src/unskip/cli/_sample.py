"""`unskip sample RUN`: images of a generative run, as PNG files and a grid, evaluated where an extractor is named."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro

import unskip
from unskip.cli._options import DeviceOfRun, Json, PrecisionOption, Run, Trust, told
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput

_CACHE = "~/.cache/unskip/statistics"  # of the data that samples are compared with
_EVALUATE = "Compare with the run's data over this extractor: inception, timm:NAME, or the folder of a classifier."


def sample_command(
    run: Run,
    n: Annotated[int, tyro.conf.arg(help="How many images.", metavar="N")] = 64,
    cfg: Annotated[float, tyro.conf.arg(help="Scale of classifier-free guidance; 1 is none.", metavar="W")] = 1.0,
    sampler: Annotated[
        Literal["euler", "heun", "dopri5", "euler-maruyama"], tyro.conf.arg(help="Of the ODE or the SDE.")
    ] = "heun",
    steps: Annotated[int, tyro.conf.arg(help="Of all samplers but dopri5.", metavar="N")] = 50,
    tolerance: Annotated[float, tyro.conf.arg(help="Of dopri5.", metavar="X")] = 1e-5,
    label: Annotated[int | None, told("One class for all (default: each in turn).", "CLASS")] = None,
    seed: Annotated[int, tyro.conf.arg(help="Of the noise.", metavar="N")] = 0,
    batch: Annotated[int, tyro.conf.arg(help="How many at a time.", metavar="N")] = 256,
    precision: PrecisionOption = "float32",
    compile: Annotated[  # noqa: A002
        bool,
        tyro.conf.FlagCreatePairsOff,
        told("Compile the network: pays off for hundreds of samples on a GPU."),
    ] = False,
    evaluate: Annotated[str | None, told(_EVALUATE, "EXTRACTOR")] = None,
    device: DeviceOfRun = None,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Draw images with a run's EMA weights: PNG files and a grid under RUN/samples.

    Example: unskip sample runs/x --n 64 --cfg 1.5
    """
    from unskip.models import Sampling
    from unskip.recipes import evaluate_samples, open_run

    sampling = Sampling(sampler, steps, cfg, tolerance, seed)  # checks them before a model is built
    if n < 1:
        raise BadInput(f"--n {n}: ask for one sample or more")
    if evaluate is not None and label is not None:
        raise BadInput(
            "--evaluate compares with images of all classes: leave --label out (--cfg 0 draws without a label)"
        )
    with busy(f"sampling {run}"):
        trained = open_run(run, device, trust=trust)
        where = next(trained.model.parameters()).device
        extractor = unskip.evals.extractor(evaluate, device=where) if evaluate else None
        samples = unskip.sample(
            trained,
            n,
            cfg,
            sampler=sampler,
            steps=steps,
            tolerance=tolerance,
            labels=label,
            seed=seed,
            batch=batch,
            precision=precision,
            compile=compile,
        )
        values: dict[str, float] = {}
        if extractor is not None:
            options: dict[str, Any] = {"samples": samples, "batch": batch, "precision": precision, "cache": _CACHE}
            values = evaluate_samples(trained, extractor, n, sampling, **options)
    data: dict[str, Any] = {"run": run, "step": trained.step, "n": n, "evaluations": samples.evaluations}
    data |= {"seconds": samples.seconds, "grid": str(samples.grid), **values}
    if json:
        print_json(data)
        return 0
    print(f"{n} samples of {run}, step {trained.step}: {samples.evaluations:g} evaluations of the network each")
    for name, value in values.items():
        if name != "evaluations":
            print(f"{name}  {value:.4g}")
    print(samples.grid)
    return 0
