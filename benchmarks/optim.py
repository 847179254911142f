"""Measures the cost of an optimizer step: SOAP and Muon compared with other implementations, on timm ViTs.

    python benchmarks/optim.py                         # CUDA: vit_small and vit_base, all optimizers; then the sizes
    python benchmarks/optim.py --models vit_base_patch16_224 --steps 20
    python benchmarks/optim.py --figure                # draws docs/img/optim-cost.svg from the JSON; needs no GPU

Gradients are random, and each step uses another one of a small set. Steps are timed by CUDA events between them, with
nothing else on the device, after the first steps (which build bases, stacks and kernels). `alone` is a loop of steps,
which includes host time if the host is slower than the device. `queued` delays the device while the host launches a
step, as the backward pass of a training step does, and measures device time only. pytorch_optimizer is included if it
is installed. The breakdown of the time is from profiles of steps with and without refreshes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import timm
import torch
from _record import made_with, write_json
from torch import Tensor, nn

import unskip
from unskip.optim import SOAP, Muon, build

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
Make = Callable[[nn.Module], torch.optim.Optimizer]
BARS = {
    "soap_ms": 15.0,
    "soap_ratio": 8.0,
    "soap_max_over_mean": 3.0,
    "state_gib": 3.1,
    "muon_ms": 6.0,
    "muon_ratio": 4.0,
}
KINDS = {  # words in kernel names; the first match decides
    "orthogonalisation": ("f64", "potrf", "trsm_left", "unskip_pick", "unskip_inner"),
    "rotations": ("_hss_", "_hsh_"),
    "statistics": ("tf32f32", "s1688gemm", "splitKreduce"),
    "moments and parameters": ("unskip_", "multi_tensor", "CatArray"),
}
REFRESH = ("refresh: orthogonalisation", "refresh: power iteration, moments turned")


def hidden(model: nn.Module) -> list[Tensor]:
    return [row.param for row in unskip.optim.groups(model) if row.role == "hidden"]


def optimizers(full: bool) -> dict[str, Make]:
    """Functions that build each optimizer for a model, by name."""
    makers: dict[str, Make] = {
        "unskip SOAP": lambda model: SOAP(model.parameters()),
        "unskip SOAP, bfloat16 state": lambda model: SOAP(model.parameters(), state_dtype="bfloat16"),
        "unskip SOAP, float32 products": lambda model: SOAP(model.parameters(), precision="float32"),
        "unskip SOAP, no stagger": lambda model: SOAP(model.parameters(), stagger=False),
        "unskip Muon": lambda model: Muon(hidden(model)),
        "torch Muon": lambda model: torch.optim.Muon(hidden(model)),
        "torch AdamW, fused": lambda model: build(model, "adamw", lr=1e-3),
    }
    if importlib.util.find_spec("pytorch_optimizer"):
        makers["pytorch_optimizer SOAP"] = peer
    elif full:
        print("pytorch_optimizer is not installed; its SOAP is not measured")
    if not full:
        makers = {name: makers[name] for name in ("unskip SOAP", "unskip Muon", "torch Muon", "torch AdamW, fused")}
    return makers


def peer(model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import SOAP as Peer

    return Peer(model.parameters())


class Gradients:
    """Assigns random gradients to parameters, cycling through a small set."""

    def __init__(self, model: nn.Module, seed: int, count: int = 4) -> None:
        self.params = list(model.parameters())
        generator = torch.Generator(self.params[0].device).manual_seed(seed)
        self.sets = [
            [0.01 * torch.randn(p.shape, device=p.device, generator=generator) for p in self.params]
            for _ in range(count)
        ]
        self.step = 0

    def next(self) -> None:
        for param, grad in zip(self.params, self.sets[self.step % len(self.sets)], strict=True):
            param.grad = grad
        self.step += 1


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer state; views of one storage are counted once."""
    seen: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item)

    for entry in optimizer.state.values():
        visit(entry)
    return sum(seen.values())


def timed(optimizer: torch.optim.Optimizer, gradients: Gradients, steps: int, hold: float) -> list[float]:
    """Milliseconds of each of `steps` steps; the device is delayed by `hold` milliseconds before each."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(steps)]
    torch.cuda.synchronize()
    for begin, end in events:
        gradients.next()
        if hold:
            torch.cuda.synchronize()
            torch.cuda._sleep(int(hold * 1.8e6))  # about 1.8 GHz
        begin.record()
        optimizer.step()
        end.record()
    torch.cuda.synchronize()
    if hold:
        return [begin.elapsed_time(end) for begin, end in events]
    ends = [begin for begin, _ in events] + [events[-1][1]]
    return [a.elapsed_time(b) for a, b in pairwise(ends)]


def measure(make: Make, name: str, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = timm.create_model(name).cuda()
    optimizer, gradients = make(model), Gradients(model, seed)
    first = timed(optimizer, gradients, 1, 0)[0]
    second = timed(optimizer, gradients, 1, 0)[0]
    early = timed(optimizer, gradients, 12, 0)  # the first interval, in which libraries are still loaded
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    alone = timed(optimizer, gradients, steps, 0)
    peak = torch.cuda.max_memory_allocated() - before
    host = max(60.0, 1.5 * max(alone)) if max(alone) < 150 else 0.0  # no delay for steps that are limited by the device
    queued = timed(optimizer, gradients, 20, host) if host else alone
    result = {
        "first_ms": first,
        "second_ms": second,
        "third_to_fourteenth_max_ms": max(early),
        **{f"alone_{key}": value for key, value in summary(alone).items()},
        **{f"queued_{key}": value for key, value in summary(queued).items()},
        "state_gib": state_bytes(optimizer) / 2**30,
        "temporary_gib": peak / 2**30,
        "steps": {"alone": [round(ms, 3) for ms in alone], "queued": [round(ms, 3) for ms in queued]},
    }
    if isinstance(optimizer, SOAP):
        result["refreshes_held"] = sum(optimizer.held().values())
    return result


def summary(times: list[float]) -> dict[str, float]:
    return {"mean_ms": statistics.fmean(times), "median_ms": statistics.median(times), "max_ms": max(times)}


def profile(name: str, seed: int) -> dict[str, dict[str, float]]:
    """Device milliseconds by kind of work: for a step without refreshes, and the mean over a refresh interval."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    torch.manual_seed(seed)
    model = timm.create_model(name).cuda()
    optimizer, gradients = SOAP(model.parameters()), Gradients(model, seed)
    timed(optimizer, gradients, 22, 0)
    seen = []
    for steps in (1, 10):
        while optimizer.param_groups[0]["updates"] % 10:  # so that the next step has no refreshes
            timed(optimizer, gradients, 1, 0)
        with recorded(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
            timed(optimizer, gradients, steps, 0)
        kinds = dict.fromkeys([*KINDS, "other"], 0.0)
        for event in record.key_averages():
            if event.device_type.name == "CUDA" and not event.key.startswith(("Optimizer", "ProfilerStep")):
                kind = next((k for k, words in KINDS.items() if any(word in event.key for word in words)), "other")
                kinds[kind] += event.self_device_time_total / 1e3 / steps
        seen.append(kinds)
    plain = {kind: ms for kind, ms in seen[0].items() if kind != "orthogonalisation"}
    refresh = seen[1]["orthogonalisation"]
    rest = sum(seen[1].values()) - sum(seen[0].values()) - refresh
    return {
        "step without refreshes": {**plain, **dict.fromkeys(REFRESH, 0.0)},
        "mean step": {**plain, **dict(zip(REFRESH, (refresh, rest), strict=True))},
    }


def verdicts(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For ViT-B: each measurement, its target (bar) and whether it is met, for both ways of timing."""
    base = results.get("vit_base_patch16_224", {})
    soap, reference = base.get("unskip SOAP"), base.get("pytorch_optimizer SOAP")
    muon, torch_muon = base.get("unskip Muon"), base.get("torch Muon")
    result: dict[str, Any] = {}
    for way in ("alone", "queued"):
        if soap:
            result[f"soap_ms ({way})"] = (soap[f"{way}_mean_ms"], BARS["soap_ms"], "<=")
            share = soap[f"{way}_max_ms"] / soap[f"{way}_mean_ms"]
            result[f"soap_max_over_mean ({way})"] = (share, BARS["soap_max_over_mean"], "<=")
        if soap and reference:
            ratio = reference[f"{way}_mean_ms"] / soap[f"{way}_mean_ms"]
            result[f"soap_ratio ({way})"] = (ratio, BARS["soap_ratio"], ">=")
        if muon and torch_muon:
            result[f"muon_ms ({way})"] = (muon[f"{way}_mean_ms"], BARS["muon_ms"], "<=")
            result[f"muon_ratio ({way})"] = (
                torch_muon[f"{way}_mean_ms"] / muon[f"{way}_mean_ms"],
                BARS["muon_ratio"],
                ">=",
            )
    if soap:
        early = soap["third_to_fourteenth_max_ms"] / soap["alone_mean_ms"]
        result["soap_max_over_mean (steps 3 to 14)"] = (early, BARS["soap_max_over_mean"], "<=")
        result["state_gib"] = (soap["state_gib"], BARS["state_gib"], "<=")
    return {
        key: {"measured": value, "bar": bar, "holds": value <= bar if sign == "<=" else value >= bar}
        for key, (value, bar, sign) in result.items()
    }


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{name:31s} {'first':>8s} {'alone':>8s} {'max':>8s} {'queued':>8s} {'max':>8s} {'state':>6s} {'temp.':>6s}"
    )
    for key, row in rows.items():
        times = [row[k] for k in ("first_ms", "alone_mean_ms", "alone_max_ms", "queued_mean_ms", "queued_max_ms")]
        print(f"  {key:29s} {' '.join(f'{t:8.2f}' for t in times)} {row['state_gib']:6.2f} {row['temporary_gib']:6.2f}")


def figure(results: Path) -> None:
    """Draws the time of a step by model size, and the breakdown of SOAP's time."""
    from _study import drawing

    data = json.loads(results.read_text())
    size = data["parameters"]
    fig, (left, right) = drawing("optim").subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for name in ("unskip SOAP", "pytorch_optimizer SOAP", "unskip Muon", "torch Muon", "torch AdamW, fused"):
        rows = {model: result[name]["queued_mean_ms"] for model, result in data["results"].items() if name in result}
        points = sorted((size[model] / 1e6, ms) for model, ms in rows.items())
        if not points:
            continue
        ours = name.startswith("unskip")
        left.plot(*zip(*points, strict=True), "o-" if ours else "s--", label=name, lw=2 if ours else 1)
    left.set(xscale="log", yscale="log", xlabel="parameters (millions)", ylabel="device time of a step (ms)")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    parts = data["where_the_time_goes"]
    kinds = list(next(iter(parts.values())))
    bottom = [0.0] * len(parts)
    for kind in kinds:
        values = [row[kind] for row in parts.values()]
        right.barh(list(parts), values, left=bottom, label=kind, height=0.5)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.set(xlabel="ms, SOAP on ViT-B")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    target = ROOT / "docs" / "img" / "optim-cost.svg"
    fig.savefig(target, metadata={"Date": None})
    print(f"wrote {target.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["vit_base_patch16_224", "vit_small_patch16_224"])
    parser.add_argument("--sizes", nargs="*", default=["vit_tiny_patch16_224", "vit_large_patch16_224"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--figure", action="store_true", help="only draw the figure from the JSON")
    parser.add_argument("--resume", action="store_true", help="keep the models in the JSON, and add the others")
    options = parser.parse_args()
    target = options.out / "optim-gpu.json"
    if options.figure:
        figure(target)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --figure draws from docs/results/optim-gpu.json")
    about: dict[str, Any] = {
        **made_with(__file__, "cuda", "timm", "pytorch_optimizer"),
        "seed": options.seed,
        "steps": options.steps,
    }
    record = json.loads(target.read_text()) if options.resume and target.exists() else {}
    results: dict[str, dict[str, Any]] = record.get("results", {})
    about["parameters"] = record.get("parameters", {})
    for full, names in ((True, options.models), (False, options.sizes)):
        for name in [name for name in names if name not in results]:
            about["parameters"][name] = sum(p.numel() for p in timm.create_model(name).parameters())
            results[name] = {}
            for key, make in optimizers(full).items():
                slow = key == "pytorch_optimizer SOAP"
                results[name][key] = measure(make, name, 20 if slow else options.steps, options.seed)
                gc.collect()
                torch.cuda.empty_cache()
            show(name, results[name])
            record = {**about, "bars_on_vit_b": verdicts(results), "results": results}
            write_json(target, record)
    if "vit_base_patch16_224" in results:
        record["where_the_time_goes"] = profile("vit_base_patch16_224", options.seed)
        write_json(target, record)
        for label, kinds in record["where_the_time_goes"].items():
            print(f"{label}: " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in kinds.items()))
    for key, row in record["bars_on_vit_b"].items():
        print(f"  {key:34s} {row['measured']:8.2f}  bar {row['bar']:6.2f}  {'holds' if row['holds'] else 'missed'}")


if __name__ == "__main__":
    main()
