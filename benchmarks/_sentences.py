"""Sentences of the docs with measured numbers, each made from its record; tests/test_results.py looks for them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import _mae_results
from _sentences_prose import prose
from _tables import FROZEN, dino_cells, record, runs
from _tables_studies import STARTS, start
from lm import CARRYING


def sentences() -> Iterator[tuple[str, str]]:
    """Yields (page, part of a sentence), without line breaks."""
    yield from prose()
    gpu, cpu = ([row[part]["times"] for row in record(name)["results"] for part in ("solver", "whole")]
                for name in ("discover-gpu", "discover-cpu"))  # fmt: skip
    yield "dense", f"On one H200 that is {gpu[0]:.0f} times as fast as"
    yield "dense", f"at 14 x 14 tokens and {gpu[2]:.0f} times at 28 x 28"
    yield "dense", f"reading the mask off, {gpu[1]:.0f} and {gpu[3]:.0f} times"
    yield "dense", f"On two CPU cores it is {cpu[0]:.1f} and {cpu[2]:.1f} times, and {cpu[1]:.1f} and {cpu[3]:.1f} with"

    bars = record("optim-gpu")["bars_on_vit_b"]
    soap, ratio = bars["soap_ms (alone)"]["measured"], bars["soap_ratio (alone)"]["measured"]
    yield "optim-cost", f"a step of SOAP takes {soap:.1f} ms alone, {ratio:.1f} times less than"

    for name, seconds in (("gpu", "takes {:.0f} s on one H200"), ("cpu", "{:.0f} s on two CPU cores")):
        yield "measure", seconds.format(record(f"measure-{name}")["seconds"])

    plain, fallen = (
        statistics.mean(row["generation"]["1"]["FD-judge"] for row in runs("sit-cifar", f"sit | {name}"))
        for name in ("plain", "decay 0.8")
    )
    yield "which-shortcut", f"a distance of {fallen:.1f} against {plain:.1f}, two seeds each"

    carrying, control = (
        runs("skipless-long", f"mix | {name}")[0] for name in ("3 of 6 wide heads carry", "residual; 6 wide heads")
    )
    scores = [f"{100 * row['val_accuracy']:.1f}" for row in (carrying, control)]
    yield (
        "skipless-parts",
        f"skips reach {scores[0]}, and the residual model with the same heads {scores[1]}; their training",
    )
    yield "skipless-parts", f"losses are {carrying['train_loss']:.2f} and {control['train_loss']:.2f}."

    long = {
        name: statistics.mean(100 * row["test_accuracy"] for row in runs("skipless-long", f"final | {name}"))
        for name in ("residual, weight decay 0.3", "MLPs cut", f"{FROZEN}, weight decay 0.3", "no skips")
    }
    best, mlps, frozen, without = long.values()
    yield "skipless-results", f"the model without skips is {best - frozen:.1f} points behind the residual one**"
    yield "skipless-results", f"with trained heads it is {best - without:.1f} behind"
    yield "what-did-not-work", f"collapse: {best - without:.1f} points behind residual after 100 epochs"
    yield "what-did-not-work", f"keep tokens apart: {best - frozen:.1f} behind"
    yield "skipless-results", f"MLP skips alone it is {best - mlps:.1f} points behind"
    yield "fade", f"a ViT on CIFAR-10 is [{best - mlps:.1f} points behind]"
    yield "README", f"is {best - mlps:.1f} points behind, and one without any skips {best - frozen:.1f} points"
    scores = [
        [100 * row[key] for row in (runs("skipless-long", f"long | {name}")[0] for name in _HELD_OUT)]
        for key in ("val_accuracy", "ema_val_accuracy")
    ]
    (kept, frozen, trained), (kept_ema, frozen_ema, _) = scores
    yield "skipless-ablations", f"the gap is {kept - frozen:.1f} points ({kept_ema - frozen_ema:.1f} with EMA weights)"
    yield "skipless-ablations", f"and {kept - trained:.1f} with trained heads"
    slow = [_slower_steps(f"no skips, carrying heads fixed | {decay}") for decay in ("0.03", "0.1")]
    yield "skipless-ablations", "these directions change {:.0f} to {:.0f} times more slowly".format(*slow[0])
    yield "skipless-ablations", "(at 0.1, {:.0f} to {:.0f} times)".format(*slow[1])

    sit = {name: runs("sit-cifar", name) for name in ("sit | plain", "sit | long skips", "sit | decay 0.8")}
    uvit = {name: runs("sit-cifar", name) for name in ("uvit | plain", "uvit | decay 0.8")}
    far = {name: [row["generation"]["1"]["FD-judge"] for row in rows] for name, rows in [*sit.items(), *uvit.items()]}
    plain, skips, fallen = (far[name] for name in sit)
    share = 1 - statistics.mean(fallen) / statistics.mean(plain)
    yield "generate-results", f"Fréchet distance of SiT on CIFAR-10 by {100 * share:.0f}%"
    yield "generate", f"Fréchet distance of a small SiT by {100 * share:.0f}%"
    yield "generate-results", f"by {100 * (1 - far['uvit | decay 0.8'][0] / far['uvit | plain'][0]):.0f}% for U-ViT"
    yield "generate-results", f"{skips[0]:.2f}, one seed, lies between the two seeds of plain SiT ("
    yield "generate-results", f"({min(plain):.2f} and {max(plain):.2f})"
    losses = [statistics.mean(row["test_loss"] for row in rows) for rows in (*sit.values(), *uvit.values())]
    yield "generate-results", "({:.4f} plain, {:.4f} long skips, {:.4f} decayed)".format(*losses[:3])
    yield "generate-results", "rises from {:.4f} to {:.4f} while".format(*losses[3:])

    first = {wiring: start("gpt2-shaped", wiring)[1]["h.0"] for wiring in STARTS}
    yield (
        "init-results",
        f"attention of block 1 has condition {first['residual']} with its skip, {first['skipless']} without, "
        f"{first['value-output alone']} with value-output alone and {first['skipless + init']} with the whole "
        f"initialisation: the query-key part ({first['query-key alone']} alone)",
    )

    sharded = record("fsdp-gpu")["results"]
    lost = {name: f"{100 * (1 - row['fsdp over plain']):.0f}%" for name, row in sharded.items()}
    apart = {name: f"{row['apart after 10 steps in float32']['weights']:.0e}" for name, row in sharded.items()}
    yield "many-gpus", f"costs {lost['adamw']} of the images per second with AdamW, {lost['soap']} with SOAP and"
    yield "many-gpus", f"and {lost['muon']} with Muon (ViT-B"
    bare = record("train-gpu")["results"]["vit_base_patch16_224, 224 px, batch 256"]["loop over bare"]
    yield "training", f"The loop reaches {100 * bare:.0f}% of a bare compiled step"
    yield "performance", f"the loop around a supervised step costs {100 * (1 - bare):.0f}%"
    steps = [record("roofline-gpu")["results"][name] for name in ("supervised", "sit")]
    kinds = ("norms and residuals", "pointwise and reductions")
    some = sorted(100 * sum(step["ms a step by kind"][kind] for kind in kinds) / step["ms a step"] for step in steps)
    yield "performance", f"other pointwise work are {some[0]:.0f} to {some[1]:.0f}%"
    gained = sorted(_top("skipless + init", each) - _top("skipless", each) for each in ("adamw", "muon", "soap"))
    second = sorted(_top("skipless + init", each) - _top("skipless + init", "adamw") for each in ("muon", "soap"))
    eigen = record("discover-gpu")["results"][0]["solver"]
    yield "what-did-not-work", f"matrix is {eigen['scipy_ms'] / eigen['ours_ms']:.0f} times as fast"
    yield "skipless-parts", f"without skips by {gained[0]:.0f} to {gained[-1]:.0f} points"
    yield "skipless-parts", f"optimizer by another {second[0]:.0f} to {second[1]:.0f} points"
    yield (
        "many-gpus",
        f"within {apart['adamw']} of a plain run with AdamW, {apart['muon']} with Muon and {apart['soap']}",
    )

    cases = {name: case["beside"]["seconds"] for name, case in record("absorb-cpu")["cases"].items()}
    least, most = (
        pick(cases[name] for name in ("generic", "trained-scale", "heavy", "planted")) for pick in (min, max)
    )
    yield "absorb-cost", f"{least:.1f} to {most:.1f} s at 768 → 3072 and {cases['large']:.0f} to"
    yield "absorb-cost", f"to {cases['large-hard']:.0f} s at 4096 → 16384 on two CPU cores"
    large, hard = (record("absorb-gpu")["cases"][name]["seconds"] for name in ("large", "large-hard"))
    yield "absorb-cost", f"4096, 16384 takes {large:.2f} and {hard:.2f} s"
    small = [record("absorb-gpu")["cases"][name]["seconds"] for name in ("generic", "trained-scale", "heavy")]
    planted = record("absorb-gpu")["cases"]["planted"]["seconds"]
    yield (
        "absorb-cost",
        f"768, 3072 takes {min(small):.2f} to {max(small):.2f} s, and {planted:.2f} s where a flip set is found",
    )
    blocks = [
        case for name in ("cpu", "gpu") for case in record(f"absorb-cost-{name}")["cases"] if "block" in case["what"]
    ]
    ratios = [
        [run["ratio"] for case in blocks for what, run in case.items() if isinstance(run, dict) and word in what]
        for word in ("cut", "widened")
    ]
    (low, high), (least, most) = ((min(each), max(each)) for each in ratios)
    yield "absorb-cost", f"{low:.2f} to {high:.2f} of its time, with the same peak memory"
    yield "what-did-not-work", f"{low:.2f} to {high:.2f} of a block's time, no memory"
    yield "absorb-cost", f"widened by d, {least:.2f} to {most:.2f} of it"

    cut = statistics.mean(row["test_accuracy"] for row in runs("skipless-cifar", "final | skipless | soap | 0.001"))
    whole = statistics.mean(row["test_accuracy"] for row in runs("skipless-cifar", "final | residual | soap | 0.003"))
    yield "what-did-not-work", f"{100 * (whole - cut):.1f} points behind a residual model"
    near, far = (
        runs("mae-cifar", name)[0]["depth"]["knn20"][-1] for name in ("ablation | long skips", "sweep | alpha_min 0.6")
    )
    yield "what-did-not-work", f"kNN {100 * (near - far):.1f} points below long skips alone"
    learned = runs("mae-cifar", "ablation | learnable")[0]["effective_decay"]
    yield "what-did-not-work", f"the product rose to {learned:.2f}"
    asked = sum(len(model["sites"]) for model in record("absorb-models")["models"].values())
    asked += sum(len(run["blocks"]) for run in record("absorb-domain")["runs"])
    yield "what-did-not-work", f"impossible in all {asked} MLPs tested"
    yield from _scanned_models()
    campaign = record("absorb-campaign")
    assert not campaign["wrong"]
    for page, word in (("absorb-results", "none"), ("absorb-tested", "None")):
        yield page, f"{word} of {campaign['counts']['blocks']:,} adversarial blocks"

    yield from _dino()
    yield from _mae()
    yield from _rank()
    yield from _tiny()
    yield from _decayed_classifiers()
    exits = record("faults")["exits"]
    yield "many-gpus", f"{exits['runs'] - len(exits['failures'])} of {exits['runs']} sharded runs of two processes"

    fade = record("fade-digits")
    yield "fade", f"reaches {fade['original']:.3f}, and {fade['original, skips cut, not trained']:.3f} (chance)"
    control, *students = (statistics.mean(found) for found in [*fade["results"].values()][:-1])
    lost = f"{control - max(students):.2f} to {control - min(students):.2f}"
    yield "fade", f"A student is {lost} behind the control"
    yield "how-do-i", f"those of MLPs; {lost} of accuracy for all, on digits (n = 359, three seeds)"


def _dino() -> Iterator[tuple[str, str]]:
    kept, cut = (runs("dino-64", f"main | {name} | soap") for name in ("residual", "skipless"))
    ridge = [100 * row["segment"]["by block (ridge)"][-1] for row in cut]
    background = 100 * runs("dino-64", "labels | residual | soap")[0]["segment"]["always background"]
    yield "dino-results", "falls to {:.1f} and {:.1f} in the last block".format(*ridge)
    yield "dino-results", f"background everywhere has {background:.1f}."
    empty = [100 * share for row in cut for share in row["discover"]["empty"][6:]]
    yield "dino-results", f"no object in {min(empty):.0f} to {max(empty):.0f}% of images from block 6 on"
    first, third = (row["warnings"]["collapsed-patches"] for row in cut)
    assert third == 3 * first
    yield "dino-results", f"at the first evaluation for one seed ({first} of 3,000 steps) and at the third"
    ranks = [row["depth"]["rank"][-1] for row in (*cut, *kept)]
    yield "dino-results", "rank in the last block is {:.0f} and {:.0f}, with skips {:.0f} and {:.0f}.".format(*ranks)

    probes = {name: [row["depth"]["probe_lbfgs"] for row in rows] for name, rows in (("kept", kept), ("cut", cut))}
    best = {name: sorted(each.index(max(each)) for each in found) for name, found in probes.items()}
    (decayed,) = runs("dino-64", "remedy | decay 0.6 | soap")
    tops = [100 * max(each) for each in (decayed["depth"]["probe_lbfgs"], *probes["kept"])]
    block = decayed["depth"]["probe_lbfgs"].index(max(decayed["depth"]["probe_lbfgs"]))
    yield "dino-ablations", f"block {block} has a probe accuracy of {tops[0]:.1f}; the best"
    yield "dino-ablations", "the two residual seeds have {:.1f} and {:.1f}.".format(*tops[1:])
    yield "which-shortcut", "its block {} has the best probe, {:.1f} against {:.1f} and {:.1f}".format(block, *tops)
    corloc = 100 * runs("dino-64", "remedy | MLPs' skips cut | soap")[0]["discover"]["corloc"][-1]
    yield "dino-ablations", f"(CorLoc {corloc:.1f} there)"
    nine = "{} in the last block, {} from four, CorLoc {}, kNN {}, probe {}."
    yield "dino-ablations", nine.format(*dino_cells("depth | skipless, 9 blocks | soap", last_corloc=False))

    ways = ("skipless | soap", "residual | soap", "skipless | adamw", "residual | adamw")
    cka = [_mean_cka(f"main | {way}") for way in ways]
    labels = "; ".join(_mean_cka(f"labels | {way}") for way in ways[:2])
    yield "dino-ablations", f"under SOAP ({cka[0]}; with skips {cka[1]}) and with labels ({labels})"
    yield "dino-ablations", f"Under AdamW it is not ({cka[2]}; {cka[3]})."
    yield "dino-ablations", "without skips fall from block {} or {} on".format(*best["cut"])
    yield "dino-ablations", "with skips they rise up to block {} or {}.".format(*best["kept"])


def _mean_cka(name: str) -> str:
    """Linear CKA between blocks, averaged over pairs, for each seed."""
    return " and ".join(
        f"{statistics.mean(value for block, values in enumerate(row['cka']) for value in values[:block]):.2f}"
        for row in runs("dino-64", name)
    )


def _mae() -> Iterator[tuple[str, str]]:
    done = record("mae-cifar")["runs"]
    found = _mae_results.answers(done)
    gains = [found[f"{key}, decayed less long skips"] for key in ("probe_lbfgs", "probe_mae", "probe_decayed")]
    tuned = -found["finetune, decayed less long skips"]
    yield "mae-results", f"linear probes by {min(gains):.1f} to {max(gains):.1f} points, and lowers fine-tuning"
    yield "mae-results", f"fine-tuning by {tuned:.1f} points."
    knn = {name: 100 * row["depth"]["knn20"][-1] for name, row in done.items()}
    short, long = knn["ablation | long skips"] - knn["sweep | alpha_min 0.8"], found[_LONGER.format(1)]
    yield "mae-results", f"is {short:.1f} points of kNN behind after 25 epochs"
    yield "mae-results", f"and {long:.1f} ahead after 180."
    yield "which-shortcut", f"the decay is {long:.1f} ahead of long skips alone"
    slow = knn["longer | long skips | x 1"] - knn["longer | long skips | x 2"]
    yield "mae-results", f"long skips are {slow:.1f} points better at 1e-3"
    strong = knn["ablation | long skips"] - knn["sweep | alpha_min 0.6"]
    yield "which-shortcut", f"0.6 is {strong:.1f} points below long skips alone after 25 epochs"

    costs = [
        [f"{-found[f'knn20, {run} less long skips']:.1f}"
         for run in (f"depth | 6 | {way}", "sweep | alpha_min 0.8", f"depth | 24 | {way}")]
        for way in ("alpha_min 0.8", "product 0.076")  # the same at 12 blocks
    ]  # fmt: skip
    yield "mae-ablations", "alpha_min = 0.8 costs {}, {} and {} points of kNN".format(*costs[0])
    yield "mae-ablations", "product of 0.076 costs {}, {} and {}, so".format(*costs[1])
    alone = knn["ablation | plain"] - knn["ablation | decay without long skips"]
    yield "mae-ablations", f"without them the decay costs {alone:.0f} points against plain MAE"
    peaks = [max(done[f"sweep | alpha_min {alpha}"]["loss"], key=lambda row: row[2]) for alpha in ("0.6", "0.4")]
    norms, last = [f"{row[2]:.0f}" for row in peaks], max(row[0] for row in peaks)
    yield "mae-ablations", f"norm of {norms[0]} (alpha_min 0.6) and {norms[1]} (0.4) within {last} steps"
    higher = [
        f"{knn[f'start | alpha_min {alpha} without zero start'] - knn[f'sweep | alpha_min {alpha}']:.1f}"
        for alpha in ("0.6", "0.4")
    ]
    yield "mae-ablations", f"without them kNN is {higher[0]} and {higher[1]} points higher"
    related = _mae_results.correlations(done)
    other, final = ([*related[f"over configurations, {kind} runs"].values()] for kind in ("other", "final"))
    yield "mae-ablations", f"correlation of {min(other):.1f} to {max(other):.1f}"
    yield "mae-ablations", f"runs of 60 epochs it falls from {final[0]:.1f} to {final[-1]:.1f}"
    usual, fast = knn["sweep | alpha_min 0.8"], knn["rate | plain | x 2"]
    yield (
        "mae-ablations",
        f"at 1e-3 the decay is {usual - knn['ablation | plain']:.1f} points of kNN above plain MAE, at 2e-3 "
        f"{fast - knn['rate | decay 0.8 | x 2']:.1f} below, each at its best {usual - fast:.1f} above.",
    )


def _rank() -> Iterator[tuple[str, str]]:
    """By how much decay lowers the effective rank, with Welch's 95% interval over three seeds."""
    from scipy.stats import ttest_ind

    decayed, kept, plain = (
        [row["depth"]["rank"][-1] for row in runs("mae-cifar", f"final | {name}")]
        for name in ("decay 0.8", "long skips", "plain")
    )
    for control, words in ((kept, "by {:.1f} against long skips alone (95% interval {:.1f} to {:.1f})"),
                           (plain, "by {:.1f} against plain MAE ({:.1f} to {:.1f})")):  # fmt: skip
        interval = ttest_ind(control, decayed, equal_var=False).confidence_interval()
        yield "results", words.format(statistics.mean(control) - statistics.mean(decayed), *interval)


_LONGER = "knn20, longer: decayed less long skips | x {}"


def _top(wiring: str, optimizer: str) -> float:
    """Test accuracy after 20 epochs of CIFAR-10, in points."""
    done = runs("skipless-cifar", f"final | {wiring} | {optimizer}")
    return statistics.mean(100 * row["test_accuracy"] for row in done)


def _tiny() -> Iterator[tuple[str, str]]:
    names = ("residual", "residual, lr 0.0015", "no skips", "no skips, paired units, lr 0.0015")
    kept, slow, cut, paired = (runs("skipless-tiny", f"final | {name} | 0")[0] for name in names)
    top, loss, dense = (
        {name: row[key] for name, row in zip(names, (kept, slow, cut, paired), strict=True)}
        for key in ("test_accuracy", "train_loss", "mean_iou")
    )
    behind = [100 * (top[name] - top[names[3]]) for name in names[:2]]
    yield "skipless-results", "{:.1f} points behind the better residual run and {:.1f} behind".format(*behind)
    yield "skipless-results", f"the training loss is {loss[names[3]]:.2f} against {loss[names[1]]:.2f}"
    last, best = ([100 * pick(dense[name]) for name in (names[3], names[1])] for pick in (lambda row: row[-1], max))
    yield "skipless-results", "{:.1f} against {:.1f} in the last block and {:.1f} against {:.1f}".format(*last, *best)
    yield "skipless-results", f"{100 * (top[names[0]] - top[names[2]]):.1f} points behind"
    course = [value for step, value in cut["loss"] if 1960 <= step <= 5800]
    yield "skipless-results", f"loss stays between {min(course):.2f} and {max(course):.2f} from step 1,960 to 5,800"
    held_out = {name: max(row["val_accuracy"] for row in runs("skipless-tiny", f"rate | {name}"))
                for name in ("residual", "no skips", "no skips, paired units")}  # fmt: skip
    shaped, pairs = (100 * (held_out["residual"] - held_out[name]) for name in ("no skips", "no skips, paired units"))
    yield "skipless-results", f"{pairs:.1f} behind after 20 epochs with paired units and {shaped:.1f} without them"
    only_mlps = max(row["val_accuracy"] for row in runs("skipless-tiny", "rate | MLPs cut, paired units"))
    less = 100 * (held_out["residual"] - only_mlps)
    yield "skipless-results", f"is {less:.1f} behind, and without any {pairs:.1f}"
    wide, narrow = (100 * runs("skipless-tiny", f"rate | {name} | 0.0015")[0]["val_accuracy"]
                    for name in ("wider, no skips", "narrower, residual"))  # fmt: skip
    yield "skipless-results", f"{100 * held_out['residual'] - wide:.1f} behind residual at twelve heads and 1536 units"
    yield (
        "skipless-results",
        f"{100 * held_out['no skips, paired units'] - narrow:.1f} ahead at six heads and 768 units",
    )
    error = 100 * math.sqrt(2 * wide / 100 * (1 - wide / 100) / 10_000)
    yield "skipless-results", f"the standard error of such a difference is {error:.1f}"
    (slower,) = runs("skipless-tiny", "not evaluated | no skips, lr 0.0015 | 0")
    yield "skipless-results", f"({slower['train_loss']:.2f} at 1.5e-3, a run that was not evaluated)"


def _decayed_classifiers() -> Iterator[tuple[str, str]]:
    short = [_top(name, "soap") for name in ("decayed", "residual")]
    yield "decay", f"{short[0] - short[1]:.1f} points ahead"
    low, high = (statistics.mean(100 * row["test_accuracy"] for row in runs("skipless-long", f"final | residual{more}"))
                 for more in (", weight decay 0.3", ""))  # fmt: skip
    yield "decay", f"[{low:.1f} at 0.3 and {high:.1f} at 1]"
    decayed, residual = (
        100 * runs("decay-classifier", f"long | {name} | seed 0")[0]["test_accuracy"]
        for name in ("decay to 1e-3 | soap | 0.3", "residual | soap | 1")
    )
    yield "decay", f"the {decayed - residual:.1f} points that residual is"


def _scanned_models() -> Iterator[tuple[str, str]]:
    models = record("absorb-models")["models"]
    asked = [site for model in models.values() for site in model["sites"]]
    assert all(site["status"] == site["alone"] == "impossible" for site in asked)
    yield "lm", f"Trained MLPs cannot absorb their skips either: impossible in all {len(asked)} tested"
    loss, cut, near = ((row := models["GPT-2 residual"]["rewritten"])["loss"], row["cut"], row["approximate"])
    yield "lm", f"that costs {near['loss'] - loss:.2f} nats a token ({loss:.2f} before)"
    yield "fade", f"that costs {near['loss'] - loss:.2f} nats a token in a small GPT-2"
    yield "lm", f"cut skips bring the loss to {cut['loss']:.1f} ({row['outputs']} test sequences, one seed)"
    best = {
        (wiring, optimizer): min(
            row["val_bits_per_byte"] for row in runs("lm-stdlib-cpu", f"search | {wiring} | {optimizer}")
        )
        for wiring in ("residual", "MLP skips cut", "all cut + init", "wide, residual", CARRYING, "decay to 0.1")
        for optimizer in ("adamw", "soap")
    }
    behind = {pair: bits - best["residual", pair[1]] for pair, bits in best.items()}
    mlp, every = (
        [behind[wiring, each] for each in ("soap", "adamw")] for wiring in ("MLP skips cut", "all cut + init")
    )
    yield "lm", f"under SOAP {mlp[0]:.2f} bits per byte behind residual, under AdamW {mlp[1]:.2f}"
    less = best[CARRYING, "soap"] - best["wide, residual", "soap"]
    final = [runs("lm-stdlib-cpu", f"final | {wiring} | soap | seed 0")[0] for wiring in (CARRYING, "wide, residual")]
    longer = [row["test_bits_per_byte"] for row in final]
    rounded = [row["quantised"]["bits_per_byte_4_tensor_clipped"] for row in final]
    yield "lm", f"have {rounded[1]:.2f} with skips and {rounded[0]:.2f} without"
    yield "lm", f"to 0.1 it costs {best['decay to 0.1', 'soap'] - best['residual', 'soap']:.2f} under SOAP"
    attention = min(row["val_bits_per_byte"] for row in runs("lm-stdlib-cpu", "search | attention skips cut | soap"))
    yield "lm", f"cutting them alone costs {attention - best['residual', 'soap']:.2f} under SOAP"
    yield "lm", "1,200 steps {:.2f} (test split, {:.2f} against {:.2f}".format(longer[0] - longer[1], *longer)
    yield "lm", f"{every[0]:.2f} behind under SOAP, and with carrying heads {less:.2f} behind"
    yield (
        "lm",
        f"{best['residual', 'adamw'] - best['residual', 'soap']:.2f} bits per byte better than AdamW with all skips",
    )

    peak = [max(block[key] for block in models["SmolLM2-135M"]["blocks"]) for key in ("kurtosis", "outlier_channels")]
    yield (
        "measure",
        f"SmolLM2-135M reaches {peak[0]:,.0f} and {peak[1]:.0f} ({models['SmolLM2-135M']['samples']} texts).",
    )

    text, images = models["all-MiniLM-L6-v2"], models["ViT on digits"]
    errors = [[site["approximation"] for site in model["sites"]] for model in (text, images)]
    (low, high), (least, most) = ((min(each), max(each)) for each in errors)
    yield "absorb-results", f"is {low:.2f} to {high:.2f} for the first, {least:.2f} to {most:.2f} for the second"
    near, wide = text["rewritten"]["approximate"], text["rewritten"]["widen"]
    yield (
        "absorb-results",
        f"a cosine of {near['cosine']:.2f} with the original's in the mean, {near['least']:.2f} at",
    )
    yield "absorb-results", f"worst ({text['rewritten']['outputs']} texts)"
    more = wide["parameters"][1] / wide["parameters"][0] - 1
    yield "absorb-results", f"exact with 384 more units each, {100 * more:.1f} % more parameters"
    same = images["rewritten"]["approximate"]["same_class"]
    yield "absorb-results", f"the same class to {100 * same:.0f} % of {images['rewritten']['outputs']} test images"


_HELD_OUT = ("residual | 0.3", f"{FROZEN} | 0.3", "no skips | 0.1")


def _slower_steps(name: str) -> tuple[float, float]:
    """The smallest and largest ratio, over W_V, W_O and W_down, of the residual model's relative step to a run's."""
    (row,), (residual,) = (runs("skipless-long", f"long | {start}") for start in (name, "residual | 0.3"))
    ratios = [
        residual["steps"]["step / weight"][-2][weight] / row["steps"]["step / weight"][-2][weight]
        for weight in ("v", "out", "down")
    ]
    return min(ratios), max(ratios)
