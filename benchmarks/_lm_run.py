"""One run of the language-model study (lm.py): training, test bits per byte, and measurements of each block."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _study import attempt

Config = dict[str, Any]
_SEQUENCES = 256  # test sequences for the measurements by block and for quantisation


def work(config: Config) -> dict[str, Any] | None:
    """Trains and evaluates one run in this process."""
    return attempt(config, trained, ("data", "device", "cache"))


def trained(config: Config) -> dict[str, Any] | None:
    """The loss by step and second, the evaluation at the end, and for final runs the analysis of `looks`."""
    import torch

    import unskip
    from unskip.training import RunFolder, run_task

    warnings.simplefilter("ignore")
    fields = model_of({key: entry for key, entry in config.items() if key != "looks"})
    planned = unskip.recipes.lm("stdlib-small", health=False, checkpoint_every=10**9, **fields)
    torch.manual_seed(planned.seed)
    task, schedule = unskip.recipes.build_task(planned)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(f"{folder}/run", {}, config["device"])
        try:
            outcome = run_task(task, schedule, run, quiet=True)
        except unskip.errors.TrainingError as error:
            return {"diverged": str(error).partition(". ")[0][-200:]}
        if not outcome.finished:
            return None
        rows = run.read("metrics.jsonl")
    seconds = [sum(row["seconds"] for row in rows[: index + 1]) for index in range(len(rows))]
    result: dict[str, Any] = {**outcome.evaluations, "data": task.record["data"]}
    result["curve"] = [[row["step"], round(row["loss"], 4), round(s, 2)] for row, s in zip(rows, seconds, strict=True)]
    result["tokens_per_second"] = rows[-1]["samples_per_second"] * planned.context
    if config.get("looks"):
        result |= looks(task.model, planned)
    return result


def model_of(fields: Config) -> Config:
    """Fields of the recipe, in which a "wide" model is that of gpt.py with twice as many heads of the same size."""
    if not fields.pop("wide", False):
        return fields
    sizes = {key: int(size) for key, size in (item.split("=") for item in fields["model_args"].split(","))}
    heads = sizes["num_attention_heads"]
    sizes |= {"num_attention_heads": 2 * heads, "head_dim": sizes["hidden_size"] // heads}
    sizes["context"] = fields.get("context", 256)
    fields["model"] = f"{Path(__file__).with_name('gpt.py')}:gpt"
    fields["model_args"] = ",".join(f"{key}={size}" for key, size in sizes.items())
    if fields["shortcut"] == "cut":
        fields |= {"init": fields["init"].format(heads=heads), "freeze_heads": heads}
    return fields


def looks(model: Any, planned: Any) -> dict[str, Any]:
    """Bits per byte without each block and after each block (logit lens); effective rank by block; quantisation."""
    import torch

    import unskip
    from unskip.anatomy import Example, find_blocks
    from unskip.evals import evaluate

    device = next(model.parameters()).device
    objective = unskip.recipes.recipe_of(planned).objective(planned)
    train, test = objective.open_splits()
    feeds = [
        unskip.data.TextFeed(texts, planned.batch, planned.context, device=device, most=_SEQUENCES)
        for texts in (train, test)
    ]
    ids = next(iter(feeds[1].evaluate()))[0][:8]
    blocks = [model.get_submodule(block.path) for block in find_blocks(model, Example.of(ids[:1]))]

    def bits(*dropped: int) -> float:
        with left_out([blocks[index] for index in dropped]):
            return evaluate(model, None, feeds[1], ["bits-per-byte-v1"], precision=planned.precision)[0].values[
                "bits_per_byte"
            ]

    with torch.no_grad():
        count = len(blocks)
        result: dict[str, Any] = {"whole": bits(), "without_block": [bits(index) for index in range(count)]}
        result["logit_lens"] = [bits(*range(index + 1, count)) for index in range(count)]
        measured = unskip.measure(model, ids, jacobians="off").to_dict()
        result["blocks"] = measured["blocks"]
        ranks = evaluate(model, None, feeds[1], ["rank-v1"], precision=planned.precision)
        result["rank"] = [row.values["rank"] for row in ranks]
        result["quantised"] = evaluate(model, *feeds, ["quantised-bits-per-byte-v1"])[0].values
    return result


@contextlib.contextmanager
def left_out(blocks: list[Any]) -> Iterator[None]:
    """A context in which these blocks return their input unchanged."""

    def identity(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *output[1:]) if isinstance(output, tuple) else x

    hooks = [block.register_forward_hook(identity, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def value(row: dict[str, Any]) -> float:
    """Validation bits per byte, by which settings are chosen; infinite if the run did not finish."""
    bits = row.get("val_bits_per_byte")
    return float("inf") if bits is None else float(bits)


def tell(name: str, row: dict[str, Any]) -> str:
    """The result of a run in one line."""
    shown = {key: round(entry, 4) for key, entry in row.items() if key.endswith("bits_per_byte")}
    return f"{row.get('diverged') or row.get('failed') or shown}, {row.get('tokens_per_second', 0):.0f} tokens/s"
