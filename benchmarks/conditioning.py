"""Measures the conditioning of transformers at initialisation: with skips, without, and with each part of the init.

    python benchmarks/conditioning.py                              # three small language models, on the CPU
    python benchmarks/conditioning.py --device cuda --limit 420    # also timm ViT-S and ViT-B at 64 px

For every model and variant, on one image or sequence, the script computes the exact singular values of the Jacobian of
chosen attention branches with respect to their normalised input, of sub-layers with respect to the residual stream, and
of the whole stack of blocks; and also self-attention, the condition number of W_V W_O, and the cosine similarity of the
tokens by depth. Singular values of the stack are also estimated matrix-free, for comparison. The JSON is written after
each variant; an interrupted run continues when it is started again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import made_with, write_json
from torch import nn

import unskip
from unskip import Cut
from unskip.anatomy import Sample, example_for, trace_parts
from unskip.measures import jacobian_spectrum, self_attention_mass

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
VARIANTS: dict[str, tuple[bool, tuple[str, ...]]] = {  # name: (skips cut, parts of the initialisation)
    "residual": (False, ()),
    "skipless": (True, ()),
    "skipless + init": (True, ("value-output", "query-key", "mlp")),
    "skipless + init, centred": (True, ("value-output", "query-key", "mlp", "centre")),
    "value-output alone": (True, ("value-output",)),
    "query-key alone": (True, ("query-key",)),
    "mlp alone": (True, ("mlp",)),
}
SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def timm_model(name: str) -> Callable[[], tuple[nn.Module, object]]:
    def make() -> tuple[nn.Module, object]:
        import timm

        model = timm.create_model(name, img_size=64)
        return model, torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))

    return make


def hf_model(kind: str) -> Callable[[], tuple[nn.Module, object]]:
    """A small transformers model (8 blocks, width 192) with random weights, and an example of 12 tokens."""

    def make() -> tuple[nn.Module, object]:
        import transformers as hf

        sizes = {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000}
        if kind == "gpt2":
            config = hf.GPT2Config(n_embd=192, n_layer=8, n_head=8, vocab_size=1000, bos_token_id=1, eos_token_id=2)
            model = hf.GPT2Model(config)
        elif kind == "bert":
            model = hf.BertModel(hf.BertConfig(**sizes, intermediate_size=768))
        else:
            model = hf.LlamaModel(hf.LlamaConfig(**sizes, intermediate_size=512))
        ids = torch.randint(4, 1000, (1, 12), generator=torch.Generator().manual_seed(1))
        return model, {"input_ids": ids}

    return make


# name: (function that builds it, init preset, relative depths of the blocks whose Jacobians are decomposed)
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, object]], str, tuple[float, ...]]] = {
    "gpt2-shaped": (hf_model("gpt2"), "vit-base", (0, 0.5, 1)),
    "bert-shaped": (hf_model("bert"), "vit-base", (0, 0.5, 1)),
    "llama-shaped": (hf_model("llama"), "vit-base", (0, 0.5, 1)),
    "vit_small_patch16_224 at 64 px": (timm_model("vit_small_patch16_224"), "vit-small", (0, 0.5, 1)),
    "vit_base_patch16_224 at 64 px": (timm_model("vit_base_patch16_224"), "vit-base", (0, 1)),
}


def study(name: str, variant: str, device: str) -> dict[str, Any]:
    """The results of one model in one variant."""
    make, preset, depths = MODELS[name]
    cut, parts = VARIANTS[variant]
    torch.manual_seed(0)
    model, example = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
        if parts:
            constants = unskip.init.PRESETS[preset]
            generator = torch.Generator().manual_seed(0)
            named, centre = tuple(part for part in parts if part != "centre"), "centre" in parts
            unskip.init.skipless_(model, **constants, generator=generator, example=example, parts=named, centre=centre)
        if cut:
            unskip.rewire(model, Cut(), example)
    model.to(device).eval()
    moved = {k: v.to(device) for k, v in example.items()} if isinstance(example, dict) else example.to(device)
    traced = trace_parts(model, example_for(model, moved), weighted=True)
    sample = Sample(traced.trace)
    blocks = list(dict.fromkeys(site.block for site in sample.sites))
    chosen = {blocks[round(depth * (len(blocks) - 1))] for depth in depths}
    result: dict[str, Any] = {"blocks": len(blocks), "tokens": [], "sites": [], "preset": preset if parts else None}
    for block in blocks:
        last = [site for site in sample.sites if site.block == block][-1]
        x = sample.sum(last)[0].double()
        similarity = torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=-1)
        count = len(x)
        mean = float((similarity.sum() - count) / (count * (count - 1)))
        result["tokens"].append({"block": block, "mean_cosine": mean})
    for site in sample.sites:
        row: dict[str, Any] = {"site": site.index, "path": site.path, "kind": site.kind}
        if site.index in traced.attentions:
            row["self_attention"] = float(self_attention_mass(traced.probabilities(site.index)).mean())
            part = traced.parts[site.index]
            assert isinstance(part, unskip.anatomy.AttentionParts)
            row["value_output"] = float(unskip.measures.condition(part.value_output()))
        if site.block in chosen:
            if site.kind == "attention":
                row["branch"] = spectrum(*sample.branch(site, torch.float64))
            row["sublayer"] = spectrum(*sample.sublayer(site, torch.float64))
        result["sites"].append(row)
    result["network"] = spectrum(*sample.network(torch.float64), compare=True)
    return result


def spectrum(function: Any, value: torch.Tensor, null: int, compare: bool = False) -> dict[str, Any]:
    start = time.perf_counter()
    result = jacobian_spectrum(function, value, exact=True, null=null)
    assert result.values is not None
    data = result.to_dict()
    flipped = result.values.flip(0)
    data["curve"] = {str(share): float(flipped[int(share * (len(flipped) - 1))]) for share in SHARES}
    data["seconds"] = round(time.perf_counter() - start, 2)
    if compare:
        start = time.perf_counter()
        free = jacobian_spectrum(function, value, exact=False, null=null)
        data["matrix_free"] = free.to_dict() | {"seconds": round(time.perf_counter() - start, 2)}
    return data


def figure(data: dict[str, Any], file: Path) -> None:
    """Draws, for ViT-S, the singular values of the model, token cosines by block and the condition of attention."""
    from _study import drawing

    pyplot = drawing("conditioning")
    drawn = ("residual", "skipless", "skipless + init", "skipless + init, centred")
    singular = 1e18
    grid, (spectrum, similarity, condition) = pyplot.subplots(1, 3, figsize=(11, 3.8), constrained_layout=True)
    for variant in drawn:
        result = data["results"]["vit_small_patch16_224 at 64 px"][variant]
        curve, top = result["network"]["curve"], result["network"]["sigma_max"]
        heights = [max(value / top, 1 / singular) for value in curve.values()]
        spectrum.semilogy([float(share) for share in curve], heights, label=variant)
        cosines = [row["mean_cosine"] for row in result["tokens"]]
        similarity.plot(range(1, len(cosines) + 1), cosines)
        blocks = [row["block"] for row in result["tokens"]]
        rows = [row for row in result["sites"] if "sublayer" in row and row["kind"] == "attention"]
        places = [[f"{row['path']}.".startswith(f"{block}.") for block in blocks].index(True) + 1 for row in rows]
        condition.semilogy(places, [row["sublayer"]["condition"] or singular for row in rows], marker="o")
    spectrum.set(title="singular values of the model / largest", xlabel="share of directions")
    similarity.set(title="mean cosine between tokens", xlabel="block")
    condition.set(title="condition of attention (1e18: singular)", xlabel="block")
    grid.legend(*spectrum.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    file.parent.mkdir(parents=True, exist_ok=True)
    grid.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="start no further variant after this many seconds"
    )
    parser.add_argument("--models", nargs="*", choices=[*MODELS], help="only these models (default by device)")
    parser.add_argument("--variants", nargs="*", choices=[*VARIANTS], default=[*VARIANTS], help="only these variants")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON (default docs/results)")
    parser.add_argument("--figure", type=Path, help="draw the figure from the JSON into this file without measuring")
    options = parser.parse_args()
    if options.figure:
        figure(json.loads((options.out / "conditioning.json").read_text()), options.figure)
        return
    models = options.models or [name for name in MODELS if options.device == "cuda" or not name.startswith("vit")]
    file = options.out / "conditioning.json"
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"results": {}}
    metadata = made_with(__file__, options.device)
    data["script"] = metadata.pop("script")
    data["seed"] = {"weights": 0, "input": 1}
    data["protocol"] = "one sample of noise (images) or random token ids, run in float32; built Jacobians in float64"
    started = time.perf_counter()
    for name in models:
        for variant in options.variants:
            if variant in data["results"].setdefault(name, {}):
                continue
            if time.perf_counter() - started > options.limit:
                print("time limit reached; run again for the remaining variants")
                return
            start = time.perf_counter()
            result = study(name, variant, options.device) | metadata
            data["results"][name][variant] = result
            write_json(file, data)
            network = result["network"]
            last = [row for row in result["sites"] if "branch" in row][-1]
            whole, branch = (part["condition"] or float("inf") for part in (network, last["branch"]))
            print(
                f"{name:32s} {variant:20s} condition of the network {whole:9.3g}, of its last attention {branch:9.3g}, "
                f"cosine at the end {result['tokens'][-1]['mean_cosine']:5.2f}, {time.perf_counter() - start:6.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
