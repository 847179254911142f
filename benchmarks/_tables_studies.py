"""Tables for the docs: Tiny-ImageNet-200, ablations of MAE and DINO, initialisation, and language models."""

from __future__ import annotations

from typing import Any

from _lm_run import value
from _tables import best_corloc, lines, record, runs, spread, table
from lm import CARRYING, WIRINGS, chosen_of


@table
def skipless_tiny() -> str:
    names = {
        "residual, 3e-3": "residual",
        "residual, 1.5e-3": "residual, lr 0.0015",
        "no skips, 3e-3": "no skips",
        "no skips, paired units, 1.5e-3": "no skips, paired units, lr 0.0015",
        "MLPs' skips cut": "MLPs cut",
        "MLPs' skips cut, paired units": "MLPs cut, paired units",
        "decayed to a product of 0.01": "decay to 1e-2",
    }
    rows = []
    for label, name in names.items():
        done = [row for run, row in record("skipless-tiny")["runs"].items() if run.startswith(f"final | {name} |")]
        if not done:  # not run
            continue
        scores = [[row[key] for row in done] for key in ("test_accuracy", "top5")]
        dense = [[pick(row["mean_iou"]) for row in done] for pick in (max, lambda blocks: blocks[-1])]
        loss = spread([row["train_loss"] for row in done], 2, 1)
        rows.append([label, *map(spread, scores), loss, *map(spread, dense), str(len(done))])
    return lines(" | top 1 | top 5 | training loss | mean IoU, best block | last block | seeds", rows)


@table
def skipless_tiny_rates() -> str:
    names = {
        "residual": "residual",
        "no skips, carrying heads frozen": "no skips",
        "no skips, paired units": "no skips, paired units",
        "no skips, paired units, 18 heads, 2304 units": "wider, no skips",
        "residual, 6 heads, 768 units": "narrower, residual",
        "MLPs' skips cut": "MLPs cut",
        "MLPs' skips cut, paired units": "MLPs cut, paired units",
        "decayed to a product of 0.01": "decay to 1e-2",
    }
    done, rates = record("skipless-tiny")["runs"], {"3e-3": "0.003", "1.5e-3": "0.0015", "7.5e-4": "0.00075"}
    rows = []
    for label, name in names.items():
        tried = [done.get(f"rate | {name} | {rate}") for rate in rates.values()]
        if any(tried):
            best = max((row for row in tried if row), key=lambda row: row["val_accuracy"])
            cells = [spread([row["val_accuracy"]]) if row else "" for row in tried]
            rows.append([label, *cells, f"{best['train_loss']:.2f}"])
    return lines(f"held out, 20 epochs | {' | '.join(rates)} | training loss at the best", rows)


@table
def decay_classifier() -> str:
    done = record("decay-classifier")["runs"]
    columns = ("short | {} | adamw", "short | {} | soap", "long | {} | soap | 0.3", "long | {} | soap | 1")
    rows = []
    for label in ("residual", "decay to 1e-2", "decay to 1e-3"):
        cells = [label]
        for column in columns:
            found = [row for name, row in done.items() if name.startswith(f"{column.format(label)} |")]
            cells.append(spread(row["test_accuracy"] for row in found) if found else "")
            if column.startswith("short"):
                cells.append("{lr:g}, {weight_decay:g}".format(**found[0]["config"]) if found else "")
        rows.append(cells)
    head = "AdamW, 20 epochs | lr, weight decay | SOAP, 20 epochs | lr, weight decay"
    return lines(f" | {head} | SOAP, 100 epochs, weight decay 0.3 | the same, weight decay 1", rows)


@table
def mae_ablations() -> str:
    names = {
        "plain MAE": "ablation | plain",
        "long skips, all shortcuts kept": "ablation | long skips",
        **{f"decayed to {alpha}": f"sweep | alpha_min {alpha}" for alpha in ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4")},
        "0.8, branches not zero-initialised": "ablation | without zero start",
        **{f"{alpha}, branches not zero-initialised": f"start | alpha_min {alpha} without zero start"
           for alpha in ("0.6", "0.4")},
        "0.8, attention only": "ablation | attention only",
        "0.8, MLPs only": "ablation | mlp only",
        "0.8, no long skips": "ablation | decay without long skips",
        "learnable alpha": "ablation | learnable",
        "branches x 0.7071": "ablation | branch x 0.7071",
        "stream and branches x 0.7071": "ablation | both branches x 0.7071",
        "plain MAE, twice as wide": "size | plain, twice as wide",
        "plain MAE, lr 5e-4": "rate | plain | x 0.5",
        "plain MAE, lr 2e-3": "rate | plain | x 2",
        "long skips, lr 5e-4": "rate | long skips | x 0.5",
        "long skips, lr 2e-3": "rate | long skips | x 2",
        "decayed to 0.8, lr 5e-4": "rate | decay 0.8 | x 0.5",
        "decayed to 0.8, lr 2e-3": "rate | decay 0.8 | x 2",
        "decayed to 0.6, lr 5e-4": "rate | decay 0.6 | x 0.5",
        "decayed to 0.6, lr 2e-3": "rate | decay 0.6 | x 2",
    }  # fmt: skip
    rows = []
    for label, name in names.items():
        row = record("mae-cifar")["runs"][name]
        depth = row["depth"]
        probes = [f"{100 * depth[key][-1]:.1f}" for key in ("knn20", "probe_lbfgs")]
        rows.append([label, f"{row['effective_decay']:.2g}", *probes, f"{depth['rank'][-1]:.1f}"])
    return lines(" | effective decay | kNN | probe, L-BFGS | effective rank", rows)


@table
def mae_inside() -> str:
    done = [runs("mae-cifar", f"final | {name}") for name in ("plain", "long skips", "decay 0.8")]
    numbers = {"R² of the first stream from the last": "echo", "energy in high frequencies": "high_frequency"}
    rows = [
        [label, *(spread([row["measure"][-1][key] for row in rows], 2, 1) for rows in done)]
        for label, key in numbers.items()
    ]
    return lines("last block | plain MAE | long skips | long skips, decayed to 0.8", rows)


@table
def dino_patches() -> str:
    names = {
        "mean of patches instead of the class token": "remedy | mean of patches | soap",
        "supervised training instead of DINO": "labels | skipless | soap",
        "attention's skips kept, MLPs' cut": "remedy | MLPs' skips cut | soap",
    }
    rows = []
    for label, name in names.items():
        (row,) = runs("dino-64", name)
        rows.append([label, *(f"{row['depth']['patch_rank'][block]:.1f}" for block in (0, 5, 11))])
    return lines("without skips, changed by | block 0 | block 5 | block 11", rows)


@table
def dino_simclr() -> str:
    done = [runs("dino-64", f"contrast | {rule} | adamw")[0] for rule in ("keep", "decay:0.6")]
    read = {
        "effective rank": lambda row: row["depth"]["rank"][-1] / 100,
        "kNN, class token": lambda row: row["depth"]["knn20_cls"][-1],
        "kNN, mean token": lambda row: row["depth"]["knn20"][-1],
        "probe": lambda row: row["depth"]["probe_lbfgs"][-1],
        "mean IoU, last block": lambda row: row["segment"]["single"],
        "CorLoc, last block": lambda row: row["discover"]["corloc"][-1],
        "CorLoc, best block": best_corloc,
    }
    rows = [[label, *(spread([value(row)]) for row in done)] for label, value in read.items()]
    return lines(" | `keep` | `decay:0.6`", rows)


# --- The initialisation ----------------------------------------------------------------------------------------------

STARTS = ("residual", "skipless", "skipless + init", "value-output alone", "query-key alone", "mlp alone")
STARTS += ("skipless + init, centred",)


def start(model: str, wiring: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The record of a model at initialisation; its condition numbers of attention and token cosines by block path."""
    row: dict[str, Any] = record("conditioning")["results"][model][wiring]
    values = {
        site["path"]: site["sublayer"]["condition"]
        for site in row["sites"]
        if site["kind"] == "attention" and "sublayer" in site
    }
    words = {path: "singular" if value is None else _short(value) for path, value in values.items()}
    return row, words, {block["block"]: f"{block['mean_cosine']:.2f}" for block in row["tokens"]}


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def _vit_starts(model: str, head: str, conditions: tuple[int, ...]) -> str:
    rows = []
    for wiring in STARTS:
        _, words, cosines = start(f"{model} at 64 px", wiring)
        shown = [words.get(f"blocks.{block}", "not recorded") for block in conditions]
        rows.append([wiring, " / ".join(shown), " / ".join(cosines[f"blocks.{block}"] for block in (0, 6, 11))])
    return lines(head, rows)


@table
def init_small() -> str:
    head = "timm ViT-S at 64 px, 12 blocks | condition of the attention sub-layer in block 1 / 7 / 12"
    head += " | mean cosine between tokens after block 1 / 7 / 12"
    return _vit_starts("vit_small_patch16_224", head, (0, 6, 11))


@table
def init_base() -> str:
    head = "timm ViT-B at 64 px, 12 blocks | the same in block 1 / 12 | mean cosine after block 1 / 7 / 12"
    return _vit_starts("vit_base_patch16_224", head, (0, 11))


@table
def init_gpt2() -> str:
    rows = []
    for wiring in ("residual", "skipless", "skipless + init", "skipless + init, centred"):
        found, _, cosines = start("gpt2-shaped", wiring)
        median = _short(found["network"]["quantiles"]["0.5"])
        rows.append([wiring, f"{cosines['h.0']} / {cosines['h.7']}", median])
    return lines(
        "GPT-2-shaped | mean cosine between tokens after block 1 / 8 | median singular value of the stack", rows
    )


# --- Language models --------------------------------------------------------------------------------------------------

_KEEP = "keep it: one addition"
_TRAIN = f"{_KEEP}; or train without, `--shortcut cut --where mlp`"
_BOUNDED = "a norm bounds the MLP, not the skip"


def _lm_mlp(site: dict[str, Any]) -> tuple[str, ...]:
    """The kind of an MLP, its verdict, the reason, and the advice."""
    if site["status"] == "unknown":
        beside = "attention" in site["reason"]
        why = "two branches, one skip" if beside else "weights differ by token"
        return "beside attention" if beside else "experts", "not decided", why, _KEEP
    what = "SwiGLU, GeGLU" if site["gated"] else "GELU, ReLU, ReLU²"
    if site["norm"] == "post":
        assert site["extra_units"] == site["mlp"][0]
        why, advice = "no flip set reproduces the skip", "exact with d more units: `absorption.apply(mode='widen')`"
        return f"{what.removesuffix(', ReLU²')}, post-norm", site["status"], why, advice
    place = {"pre": "pre-norm", "out": "norm after it", "sandwich": "norm after it"}[site["norm"]]
    return f"{what}, {place}", site["status"], _BOUNDED, _TRAIN


@table
def lm_absorb() -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, found in record("absorb-models")["architectures"].items():
        (site,) = found["sites"]
        assert found["verified"], name
        groups.setdefault(_lm_mlp(site), []).append(name)
    rows, before = [], ""
    for (what, status, why, advice), names in groups.items():
        rows.append([f"{what} ({', '.join(names)})", status, why, "the same" if advice == before else advice])
        before = advice
    return lines("your MLP | verdict | why | what to do", rows)


def _searched(wiring: str, optimizer: str) -> tuple[float, float] | None:
    """Held-out bits per byte and the learning rate of the best run of a complete search."""
    done = record("lm-stdlib-cpu")["runs"]
    if chosen_of(wiring, optimizer, done, small=True)[1] is None:
        return None
    tried = [row for name, row in done.items() if name.startswith(f"search | {wiring} | {optimizer} |")]
    best = min(tried, key=value)
    return value(best), best["config"]["lr"]


@table
def lm_search() -> str:
    rows = []
    for wiring in WIRINGS:
        found = [_searched(wiring, optimizer) for optimizer in ("adamw", "soap")]
        cells = [[f"{each[0]:.2f}", f"{each[1]:g}"] if each else ["", ""] for each in found]
        rows.append([wiring, *cells[0], *cells[1]])
    return lines("held-out bits per byte | AdamW | learning rate | SOAP | learning rate", rows)


@table
def language() -> str:
    changes = {
        "MLP skips cut": ("MLP skips cut, `skipless_`", "residual"),
        "all cut + init": ("all cut, `skipless_`", "residual"),
        CARRYING: ("all cut, half of the heads carry", "wide, residual"),
        "attention skips cut": ("attention skips cut, `skipless_`", "residual"),
        "decay to 0.1": ("decayed to a product of 0.1", "residual"),
        "decay to 1e-2": ("decayed to a product of 0.01", "residual"),
    }
    rows = []
    for wiring, (label, control) in changes.items():
        pair = [_searched(name, "soap") for name in (control, wiring)]
        rows.append([label, *(f"{each[0]:.2f}" for each in pair if each is not None)])
    return lines("change | residual | changed", rows)


@table
def lm_activations() -> str:
    models = record("absorb-models")["models"]
    shown = [name for name in models if name.startswith(("GPT-2", "Llama"))]
    rows = [
        [name, *(f"{block['kurtosis']:.1f}, {block['outlier_channels']:.1f}" for block in models[name]["blocks"])]
        for name in shown
    ]
    return lines("kurtosis, outlier channels | block 1 | 2 | 3 | 4", rows)
