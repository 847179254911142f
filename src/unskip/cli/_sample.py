"""`unskip sample RUN`: images of a generative run, as PNG files and a grid, or text of a language model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro

import unskip
from unskip.cli._options import DeviceOfRun, Json, PrecisionOption, Run, Trust, option
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput

_CACHE = "~/.cache/unskip/statistics"  # statistics of the data that samples are compared with
_EVALUATE = "Compare with the run's data by the features of inception, timm:NAME, or the folder of a classifier."


def sample_command(
    run: Run,
    n: Annotated[int | None, option("Number of samples (default: 64 images, or one text).", "N")] = None,
    cfg: Annotated[float, tyro.conf.arg(help="Scale of classifier-free guidance; 1 turns it off.", metavar="W")] = 1.0,
    sampler: Annotated[
        Literal["euler", "heun", "dopri5", "euler-maruyama"], tyro.conf.arg(help="Sampler of the ODE or the SDE.")
    ] = "heun",
    steps: Annotated[int, tyro.conf.arg(help="Steps of the sampler, except for dopri5.", metavar="N")] = 50,
    tolerance: Annotated[float, tyro.conf.arg(help="Error tolerance of dopri5.", metavar="X")] = 1e-5,
    label: Annotated[int | None, option("Class of all samples (default: each class in turn).", "CLASS")] = None,
    seed: Annotated[int, tyro.conf.arg(help="Random seed of the samples.", metavar="N")] = 0,
    batch: Annotated[int, tyro.conf.arg(help="Samples per batch.", metavar="N")] = 256,
    precision: PrecisionOption = "float32",
    compile: Annotated[  # noqa: A002
        bool,
        tyro.conf.FlagCreatePairsOff,
        option("Compile the network; pays off for hundreds of samples on a GPU."),
    ] = False,
    evaluate: Annotated[str | None, option(_EVALUATE, "EXTRACTOR")] = None,
    prompt: Annotated[str | None, option("For language models: text to continue.", "TEXT")] = None,
    length: Annotated[int, tyro.conf.arg(help="For language models: largest number of tokens.", metavar="N")] = 256,
    temperature: Annotated[
        float, tyro.conf.arg(help="For language models: 0 takes the most likely token.", metavar="T")
    ] = 0.8,
    top_k: Annotated[
        int | None, option("For language models: sample among the K most likely tokens (default: all).", "K")
    ] = None,
    device: DeviceOfRun = None,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Sample images with the EMA weights of a run, as PNG files and a grid in RUN/samples, or text after a prompt.

    Example: unskip sample runs/x --n 64 --cfg 1.5
    """
    from unskip.models import Sampling
    from unskip.recipes import evaluate_samples, open_run
    from unskip.training import RunFolder

    if RunFolder.open(run).config.get("recipe") == "lm":
        for_images = (cfg, sampler, steps, tolerance, label, batch, evaluate, compile)
        if for_images != (1.0, "heun", 50, 1e-5, None, 256, None, False):
            raise BadInput(f"{run} is a language model: --cfg, --sampler, --steps, --batch and the like are for images")
        chosen = {"seed": seed, "length": length, "temperature": temperature, "top_k": top_k, "precision": precision}
        return _text(run, prompt or "", 1 if n is None else n, device, trust, json, chosen)
    if prompt is not None:
        raise BadInput(
            f"--prompt is for language models, and {run} is a run of {RunFolder.open(run).config.get('recipe')}"
        )
    n = 64 if n is None else n
    sampling = Sampling(sampler, steps, cfg, tolerance, seed)  # checked before the model is built
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


def _text(run: str, prompt: str, n: int, device: str | None, trust: bool, json: bool, options: dict[str, Any]) -> int:
    """Samples text of a language model."""
    from unskip.recipes import open_run, sample_text

    with busy(f"sampling {run}"):
        trained = open_run(run, device, trust=trust)
        result = sample_text(trained, prompt, n, **options)
    if json:
        print_json(
            {"run": run, "step": trained.step, "prompt": prompt, "texts": result.texts, "file": str(result.file)}
        )
        return 0
    for text in result.texts:
        print(f"{prompt}{text}\n{'-' * 20}" if n > 1 else f"{prompt}{text}")
    return 0
