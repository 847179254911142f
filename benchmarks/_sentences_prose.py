"""More sentences of the docs with measured numbers, for `_sentences`: numbers of a study repeated in prose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

from _tables import FROZEN, record, runs
from _tables_claims import accuracy

Sentences = Iterator[tuple[str, str]]


def prose() -> Sentences:
    """Yields (page, part of a sentence), without line breaks."""
    yield from _which_shortcut()
    yield from _skipless()
    yield from _generation()
    yield from _cost()


def _mean(study: str, name: str, *keys: str | int, scale: float = 100) -> float:
    """The mean over seeds of one entry of the runs."""

    def entry(row: Any) -> float:
        for key in keys:
            row = row[key]
        return scale * float(row)

    return statistics.mean(entry(row) for row in runs(study, name))


def _which_shortcut() -> Sentences:
    page = "which-shortcut"
    finals = ("residual, weight decay 0.3", "MLPs cut", f"{FROZEN}, weight decay 0.3")
    kept, mlps, frozen = (f"{_mean('skipless-long', f'final | {name}', 'test_accuracy'):.1f}" for name in finals)
    yield page, f"| `keep` | [{kept}]"
    yield page, f"[{mlps} against {kept}]"
    yield page, f"[{frozen} against {kept}]"

    wirings = ("residual", "skipless + init", "skipless")
    soap, adamw = ([accuracy(wiring, way).split()[0] for wiring in wirings] for way in ("soap", "adamw"))
    decayed, mlp, attention = (
        accuracy(name).split()[0] for name in ("decayed", "mlp cut + init", "attention cut + init")
    )
    yield page, f"[{decayed} against {soap[0]}]"
    yield page, f"Cutting only the MLPs' skips gives {mlp} against {soap[0]}, cutting only attention's {attention}."
    yield page, f"Decaying to a product of 0.001 gives {decayed} against {soap[0]}."
    tuned = ("grid | decay | 0.003 | 1", "grid | MLPs cut, shaped | 0.003 | 0.3", "grid | residual | 0.003 | 1")
    best = (f"{_mean('skipless-gap', name, 'val_accuracy'):.1f}" for name in tuned)
    yield page, "decayed skips and cut MLP skips give {} and {}, residual {}".format(*best)
    yield page, f"Under SOAP accuracy is {soap[0]} with skips, {soap[1]} without skips from `skipless_`, and {soap[2]}"
    yield page, "Under AdamW: {}, {} and {}.".format(*adamw)

    fade = record("fade-digits")["results"]
    control, cut = ([statistics.mean(values) for values in fade.values()][index] for index in (0, 1))
    yield page, f"[{cut:.3f} against {control:.3f}]"

    plain, skips, decayed = (
        f"{_mean('mae-cifar', f'final | {name}', 'depth', 'knn20', -1):.1f}"
        for name in ("plain", "long skips", "decay 0.8")
    )
    yield page, f"[{skips} against {plain}]"
    yield page, f"kNN is {plain} for plain MAE, {skips} with long skips, and {decayed} with long skips and `decay:0.8`"
    learned = runs("mae-cifar", "ablation | learnable")[0]["effective_decay"]
    yield page, f"[product {learned:.2f}, no gain]"
    kept, cut = (
        f"{_mean('dino-64', f'main | {name} | soap', 'segment', 'single'):.1f}" for name in ("residual", "skipless")
    )
    yield page, f"the last block is {kept} with skips and {cut} without"

    plain, skips, decayed, uvit, fallen = (
        _mean("sit-cifar", name, "generation", "1", "FD-judge", scale=1)
        for name in ("sit | plain", "sit | long skips", "sit | decay 0.8", "uvit | plain", "uvit | decay 0.8")
    )
    yield page, f"[FD {decayed:.1f} against {plain:.1f}]"
    yield page, f"Long skips alone have {skips:.2f}, one seed. U-ViT has {fallen:.1f} against {uvit:.1f}, one seed."


def _skipless() -> Sentences:
    def held_out(name: str) -> str:
        return f"{_mean('skipless-gap', name, 'val_accuracy'):.1f}"

    ways = ("skipless + init", "soap"), ("skipless", "soap"), ("skipless + init", "adamw")
    start, default, adamw = (_mean("skipless-cifar", f"final | {' | '.join(way)}", "test_accuracy") for way in ways)
    yield "skipless", f"near-uniform attention and {start - default:.1f} points less accuracy"
    yield "skipless", f"AdamW gives {start - adamw:.1f} points less at equal epochs"

    strong, usual = (held_out(f"grid | cut, shaped | 0.003 | {decay}") for decay in ("1", "0.3"))
    parts, failed = "skipless-parts", "what-did-not-work"
    yield parts, f"0.3 is best for the shaped start, and 1 gives {strong}."
    biases = [held_out(f"factor | biases decay, too{more}") for more in ("", *_DECAYS)]
    yield parts, f"0.15 to 0.6 give {min(biases)} to {max(biases)}:"
    more = [_mean("skipless-gap", name, "val_accuracy") for name in _BIASES]
    yield "optim", f"decaying biases too gained {more[0] - more[1]:.1f} points"
    slow = held_out("factor | value-output x 0.1")
    yield (
        parts,
        f"refreshed every step {held_out('factor | refresh every step')}, W_V and W_O at a tenth of the rate {slow}, "
        f"qkv split {held_out('factor | split qkv')}.",
    )
    heads = ", ".join(held_out(f"factor | {name}") for name in ("1 head", "2 heads", "6 heads"))
    sharp, muon = (held_out(f"factor | {name}") for name in ("self-attention 0.97", "Muon 3e-3"))
    yield parts, f"1, 2 or 6 heads ({heads}), attention calibrated to 0.97 in every head {sharp}, Muon at 3e-3 {muon},"

    yield failed, f"Weight decay 1 on matrices gives {strong} and 2 gives chance, where 0.3 gives {usual}."
    yield failed, f"A learning rate of 6e-3 gives {held_out('grid | cut, shaped | 0.006 | 0.3')}."
    yield failed, f"Twelve heads give {held_out('factor | 12 heads, self-attention 0.9')}."
    cut = [
        row["val_accuracy"]
        for name, row in record("skipless-gap")["runs"].items()
        if name.startswith(("grid | cut", "factor"))
    ]
    best = float(held_out("grid | residual | 0.003 | 1")) - 100 * max(cut)
    yield failed, f"the best stay {best:.1f} points behind"
    attention = max(held_out(f"grid | attention cut, {name} | 0.003 | 0.3") for name in ("paper", "shaped"))
    yield failed, f"if attention has none: {attention} at best, against {usual} with all skips cut"
    steep, flat = (
        _mean("skipless-gap", name, "watch", "cosine", -1, -1, scale=1)
        for name in ("factor | self-attention 0.97", "grid | cut, shaped | 0.003 | 0.3")
    )
    yield failed, f"token cosine of {steep:.1f} in the last block instead of {flat:.2f}"
    tried = [_mean("skipless-cifar", f"try | {name} | soap", "val_accuracy") for name in ("centred", "skipless + init")]
    yield failed, "accuracy: {:.1f} against {:.1f} on CIFAR-10".format(*tried)
    starts = record("conditioning")["results"]["gpt2-shaped"]
    cosines = [starts[f"skipless + init{more}"]["tokens"][-1]["mean_cosine"] for more in ("", ", centred")]
    yield failed, "after 8 blocks falls from {:.2f} to {:.2f}".format(*cosines)

    collapsed = [_mean("skipless-long", "final | no skips", "watch", "cosine", -1, block, scale=1) for block in (8, 11)]
    frozen = _mean("skipless-long", f"final | {FROZEN}, weight decay 0.3", "watch", "cosine", -1, -1, scale=1)
    long = "skipless-results"
    yield long, "tokens is {:.1f} after block 9 and {:.2f} after the last".format(*collapsed)
    yield long, f"With frozen heads it ends at {frozen:.1f}."
    pairs, residual = (
        _mean("skipless-long", f"long | {name}", "train_loss", scale=1)
        for name in ("no skips, pairs, carrying weights x 0.1 | 0.3", "residual | 0.3")
    )
    more = "skipless-ablations"
    yield more, f"the training loss to {pairs:.2f}, near the {residual:.2f} of residual"
    hundred = [row["val_accuracy"] for name, row in record("skipless-long")["runs"].items() if name.startswith("long")]
    yield more, f"standard error {_standard_error(hundred, 5000)} points"
    ends = [
        float(held_out(f"grid | {name} | 0.003 | {decay}")) / 100
        for name, decay in (("residual", 1), ("attention cut, shaped", 0.3))
    ]
    yield parts, f"(standard error {_standard_error(ends, 5000)} points;"
    lost = [
        row["quantised"]["accuracy"] - row["quantised"]["accuracy_8_tensor_clipped"]
        for row in record("skipless-long")["runs"].values()
        if "quantised" in row
    ]
    yield more, f"at most {100 * max(lost):.1f} points are lost at 8 bits"
    names = ("no skips", f"{FROZEN}, weight decay 0.3", "residual", "residual, weight decay 0.3", "MLPs cut")
    clipped, whole = (
        [_mean("skipless-long", f"final | {name}", "quantised", f"accuracy_4_tensor_{way}") for name in names]
        for way in ("clipped", "minmax")
    )
    cut, kept = clipped[:2], clipped[2:]
    yield more, f"skips keep {cut[0]:.1f} and {cut[1]:.1f}%, the others {min(kept):.1f} to {max(kept):.1f}%."
    yield more, f"residual model at weight decay 0.3 keeps {whole[3]:.1f}%"
    yield more, f"models without skips {whole[0]:.1f} and {whole[1]:.1f}%"


def _standard_error(shares: list[float], count: int) -> str:
    """The smallest and largest standard error of accuracies on `count` images, in points."""
    found = sorted({f"{100 * math.sqrt(share * (1 - share) / count):.1f}" for share in shares})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


_BIASES = ("factor | biases decay, too; weight decay 0.6", "grid | cut, shaped | 0.003 | 0.3")
_DECAYS = ("; weight decay 0.6", "; weight decay 0.15")


def _generation() -> Sentences:
    page = "generate-results"
    names = ("sit | plain", "sit | long skips", "sit | decay 0.8", "uvit | plain", "uvit | decay 0.8")
    found = {
        number: [
            100 * statistics.mean(each["test"][each["block"]] for each in (row["features"][number] for row in rows))
            for rows in (runs("sit-cifar", name) for name in names)
        ]
        for number in ("knn20", "probe_lbfgs")
    }
    knn, probe = found.values()
    yield page, f"improve by {knn[2] - knn[0]:.1f} points of kNN and {probe[2] - probe[0]:.1f} of the probe for SiT,"
    yield page, f"for SiT, {knn[4] - knn[3]:.1f} and {probe[4] - probe[3]:.1f} for U-ViT."
    yield page, f"are enough ({knn[1]:.1f}, one seed); of the probe's gain they have {probe[1] - probe[0]:.1f}."
    judge = record("sit-cifar")["runs"]["judge"]
    yield page, f"a test accuracy of {100 * judge['test_accuracy']:.1f}%"
    spreads = [
        max(statistics.stdev(row["generation"]["1"][key] for row in runs("sit-cifar", name)) for name in names[::2][:2])
        for key in ("precision", "recall")
    ]
    yield page, "precision up to {:.3f}, recall up to {:.3f}.".format(*spreads)
    kept = [math.prod(1 - 0.2 * site / (count - 1) for site in range(count)) for count in (24, 56)]
    yield "generate", "24 sites keep {:.2f} of the first stream, the 56 sites of SiT-XL {:.4f}.".format(*kept)
    rates = record("train-sit-gpu")["sampling, images a second at 50 steps of Heun's"]
    yield page, f"makes {rates['compiled']:.0f} images a second compiled"
    yield page, f"and {rates['eager']:.0f} without."


def _cost() -> Sentences:
    bars = {name: bar["measured"] for name, bar in record("optim-gpu")["bars_on_vit_b"].items()}
    page = "optim-cost"
    yield page, f"Its slowest step takes {bars['soap_max_over_mean (alone)']:.1f} times the mean."
    yield page, f"Muon takes {bars['muon_ms (alone)']:.1f} ms, {bars['muon_ratio (alone)']:.1f} times less than"
    yield page, f"in device time {bars['muon_ratio (queued)']:.1f} times less."
    sizes = record("optim-gpu")["results"]
    soap, muon = (sizes["vit_large_patch16_224"][f"unskip {name}"]["queued_mean_ms"] for name in ("SOAP", "Muon"))
    yield page, f"ViT-L: SOAP {soap:.1f} ms queued, Muon {muon:.1f}."
    first = [sizes["vit_base_patch16_224"]["unskip SOAP"][f"{step}_ms"] / 1000 for step in ("first", "second")]
    yield page, "compile kernels ({:.1f} and {:.1f} s)".format(*first)
    yield "optim", f"[{bars['soap_ms (alone)']:.1f} ms per step"
    adamw = sizes["vit_base_patch16_224"]["torch AdamW, fused"]["alone_mean_ms"]
    yield "optim", f"where fused AdamW takes {adamw:.1f}."
    yield "how-do-i", f"{bars['soap_ms (alone)']:.1f} ms per step of ViT-B on an H200,"
    yield "how-do-i", f"where fused AdamW takes {adamw:.1f} |"
    yield "optim", f"[{record('roofline-gpu')['results']['supervised']['ms a step']:.0f} ms at a batch of"
    digits = {name: row["accuracy"] for name, row in record("optim-digits")["results"].items()}
    lost = {name: digits[f"residual, {name}"] - digits[f"skipless, {name}"] for name in ("soap", "adamw", "muon")}
    yield page, "costs {soap:.3f} under SOAP, {adamw:.3f} under AdamW and {muon:.3f} under Muon".format(**lost)
    behind = {f"{digits[f'{wiring}, soap'] - digits[f'{wiring}, adamw']:.1f}" for wiring in ("residual", "skipless")}
    yield page, f"AdamW is {behind.pop()} behind SOAP with and without skips"

    asked = [site for model in record("absorb-models")["models"].values() for site in model["sites"]]
    local = [block["approximate"] for run in record("absorb-domain")["runs"] for block in run["blocks"]]
    errors = [site["approximation"] for site in asked if site.get("approximation")] + local
    yield "absorb-results", f"is off by {min(errors):.3f} to {max(errors):.2f} of the spread"
    assert max(record("absorb-gpu")["cases"][name]["seconds"] for name in ("large", "large-hard")) < 0.1
    yield "absorb-cost", "below 0.1 s on an H200 |"
    yield "absorb-results", f"is off by {100 * min(local):.1f} % to {100 * max(local):.1f} % on held-out inputs"

    shares = record("compatibility")["shares"]
    yield "README", f"About {round(shares['timm']['rewired'] + shares['transformers']['done'], -2)} architectures were"

    near = record("knn-gpu")["results"]
    yield "evals", f"takes {near['knn']:.1f} s in float32 and {near['GiB at most']:.1f} GiB on one H200"
    yield "evals", f"where a plain top-k takes {near['topk']:.1f} s"
    gpu, cpu = (record(f"measure-{name}")["peak_gib"] for name in ("gpu", "cpu"))
    yield "measure", f"a peak of {gpu:.1f} GiB"
    yield "measure", f"with {cpu:.1f} GiB"
