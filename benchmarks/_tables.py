"""Markdown tables for the docs, each a function of the records in docs/results; `make results` writes the pages."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parent.parent / "docs" / "results"
TABLES: dict[str, Callable[[], str]] = {}
Row = dict[str, Any]


def table(make: Callable[[], str]) -> Callable[[], str]:
    """Registers a table under the name of its function: skipless_epochs is `<!-- table: skipless-epochs -->`."""
    TABLES[make.__name__.replace("_", "-")] = make
    return make


@functools.cache
def record(name: str) -> Row:
    """The contents of docs/results/NAME.json."""
    result: Row = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def runs(name: str, start: str) -> list[Row]:
    """The runs of a study whose names start with these words: one configuration, all seeds."""
    found = [row for key, row in record(name)["runs"].items() if f"{key} |".startswith(f"{start} |")]
    if not found:
        raise KeyError(f"docs/results/{name}.json has no run {start!r}")
    return found


def spread(values: Iterable[float], digits: int = 1, scale: float = 100) -> str:
    """The mean, with the standard deviation if there are several values."""
    values = [scale * value for value in values]
    more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{more}"


def lines(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table from a header such as "a | b | c" and rows of cells."""
    rows = [head.split(" | "), *rows]
    assert len({len(row) for row in rows}) == 1, head
    written = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows]
    return "\n".join([written[0], "|---" * len(rows[0]) + "|", *written[1:]])


# --- Training without skips -------------------------------------------------------------------------------------------


def _skipless(kind: str, wiring: str, optimizer: str) -> str:
    """Test accuracy of a wiring under an optimizer; empty if it was not run."""
    done = record("skipless-cifar")["runs"]
    rows = [row for name, row in done.items() if name.startswith(f"{kind} | {wiring} | {optimizer} |")]
    return spread(row["test_accuracy"] for row in rows) if rows else ""


@table
def skipless_epochs() -> str:
    wirings = {
        "residual": "residual",
        "skipless": "skipless",
        "skipless + init": "skipless + init",
        "mlp cut + init": "only the MLPs' skips cut, + init",
        "attention cut + init": "only the attentions' skips cut, + init",
        "decayed": "not cut: decayed to a product of 0.001",
    }
    by = ("adamw", "muon", "soap")
    rows = [[label, *(_skipless("final", wiring, each) for each in by)] for wiring, label in wirings.items()]
    return lines("at equal epochs | AdamW | Muon | SOAP", rows)


@table
def skipless_time() -> str:
    rows = []
    for wiring in ("residual", "skipless + init"):
        soap = _skipless("final", wiring, "soap")
        rows.append([wiring, _skipless("time", wiring, "adamw"), _skipless("time", wiring, "muon"), soap])
    return lines("at the wall time of SOAP's 20 epochs | AdamW | Muon | SOAP", rows)


@table
def skipless_gap() -> str:
    names = {
        "residual": "grid | residual | 0.003 | 1",
        "MLPs' skips cut, shaped start (vo_gain 1)": "grid | MLPs cut, shaped | 0.003 | 0.3",
        "decayed to a product of 0.001": "grid | decay | 0.003 | 1",
        "MLPs' skips cut, paper's ViT-S constants": "grid | MLPs cut, paper | 0.003 | 0.3",
        "all cut, shaped, SOAP's bases refreshed every step": "factor | refresh every step",
        "all cut, shaped, biases decay with the weights": "factor | biases decay, too; weight decay 0.6",
        "all cut, shaped, W_V and W_O at a tenth of the rate": "factor | value-output x 0.1",
        "all cut, shaped": "grid | cut, shaped | 0.003 | 0.3",
        "all cut, paper's ViT-S constants": "grid | cut, paper | 0.003 | 1",
        "attentions' skips cut, paper's ViT-S constants at all sites": "grid | attention cut, paper | 0.003 | 0.3",
        "attentions' skips cut, shaped start (vo_gain 1)": "grid | attention cut, shaped | 0.003 | 0.3",
    }
    rows = []
    for label, name in names.items():
        (row,) = runs("skipless-gap", name)
        config = row["config"]
        rate, decay = f"{config['lr']:.0e}".replace("e-0", "e-"), f"{config['weight_decay']:g}"
        rows.append([label, rate, decay, f"{100 * row['val_accuracy']:.1f}", f"{row['train_loss']:.2f}"])
    return lines(" | lr | weight decay | accuracy | training loss", rows)


FROZEN = "no skips, shaped MLPs, carrying V and O fixed"  # W_Q and W_K of these heads are also frozen
LONG = {  # 100 epochs: label, first words of the run names
    "residual, weight decay 0.3": "final | residual, weight decay 0.3",
    "residual, weight decay 1": "final | residual",
    "MLPs' skips cut, weight decay 0.3": "final | MLPs cut",
    "no skips, carrying heads frozen, weight decay 0.3": f"final | {FROZEN}, weight decay 0.3",
    "no skips, weight decay 0.3": "final | no skips",
}


@table
def skipless_long() -> str:
    rows = []
    for label, start in LONG.items():
        done = runs("skipless-long", start)
        cells = [spread(row[key] for row in done) for key in ("test_accuracy", "ema_test_accuracy", "train_accuracy")]
        rows.append([label, *cells, spread([row["train_loss"] for row in done], 2, 1), str(len(done))])
    return lines(" | test | test, EMA | training accuracy | training loss | seeds", rows)


@table
def skipless_longer() -> str:
    fixed = "no skips, carrying heads fixed"
    partly = "no skips, W_Q and W_K of carrying heads frozen"
    pairs = "no skips, paired units in MLPs"
    names = {  # label: the run's name without its weight decay
        "residual": "residual",
        "MLPs' skips cut": "MLPs cut",
        "no skips, carrying heads frozen": FROZEN,
        f"{pairs}, carrying weights at a tenth of the rate": "no skips, pairs, carrying weights x 0.1",
        f"{pairs}, W_Q and W_K of carrying heads frozen": "no skips, pairs, c 3",
        partly: fixed,
        f"{partly}, mix 1": f"{fixed}, mix 1",
        f"{partly}, W_V and W_O at a tenth of the rate": f"{fixed}, V and O x 0.1",
        "no skips": "no skips",
        "no skips, W_Q and W_K do not decay": "no skips, Q and K do not decay",
    }
    rows = []
    for label, name in names.items():
        done = runs("skipless-long", f"long | {name}")
        for row in sorted(done, key=lambda row: -row["val_accuracy"]):
            scores = [f"{100 * row[key]:.1f}" for key in ("val_accuracy", "ema_val_accuracy")]
            cells = [f"{row['config']['weight_decay']:g}", *scores, f"{row['train_loss']:.2f}"]
            rows.append([label, *cells, f"{row['watch']['cosine'][-1][-1]:.2f}"])
    return lines(" | weight decay | accuracy | accuracy, EMA | training loss | token cosine, last block", rows)


@table
def skipless_quantised() -> str:
    ways = ("8_tensor_clipped", "6_tensor_clipped", "4_tensor_clipped", "4_tensor_minmax", "4_channel_minmax")
    rows = []
    for label, start in LONG.items():
        done = runs("skipless-long", start)
        cells = [
            spread(row["quantised"][key] for row in done) for key in ("accuracy", *(f"accuracy_{w}" for w in ways))
        ]
        noise = spread([row["quantised"]["sqnr_8_tensor_clipped"] for row in done], 1, 1)
        kurtosis = [
            f"{statistics.mean(row['watch']['kurtosis'][-1][block] for row in done):.1f}" for block in (0, 5, 11)
        ]
        rows.append([label, *cells, noise, " / ".join(kurtosis), str(len(done))])
    head = " | float | 8 bits | 6 bits | 4 bits | 4 bits, min-max | 4 bits, per channel | SQNR at 8 bits, dB"
    return lines(f"{head} | kurtosis, block 1 / 6 / 12 | seeds", rows)


# --- Representations --------------------------------------------------------------------------------------------------

PROBES = ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed")


def _last(rows: list[Row], key: str) -> str:
    digits, scale = (1, 1) if key == "rank" else (1, 100)
    text = spread([row["depth"][key][-1] for row in rows], digits, scale)
    return text.partition(" ±")[0] if key == "rank" else text


@table
def mae_final() -> str:
    names = {"plain": "plain MAE", "long skips": "long skips, all shortcuts kept"}
    names["decay 0.8"] = "long skips, decayed to 0.8"
    rows = []
    for name, label in names.items():
        done = runs("mae-cifar", f"final | {name}")
        tuned = spread(row["finetune"] for row in done)
        rows.append([label, *(_last(done, key) for key in PROBES), tuned, _last(done, "rank")])
    return lines(" | kNN | probe, L-BFGS | probe, MAE's | probe, the paper's | fine-tuned | effective rank", rows)


@table
def mae_long() -> str:
    names = {
        "plain | x 2": ("plain MAE", "2e-3"),
        "long skips | x 2": ("long skips, all shortcuts kept", "2e-3"),
        "long skips | x 1": ("long skips, all shortcuts kept", "1e-3"),
        "decay 0.8 | x 1": ("long skips, decayed to 0.8", "1e-3"),
    }
    rows = []
    for name, labels in names.items():
        done = runs("mae-cifar", f"longer | {name}")
        rows.append([*labels, *(_last(done, key) for key in (*PROBES, "rank"))])
    return lines(" | rate | kNN | probe, L-BFGS | probe, MAE's | probe, the paper's | effective rank", rows)


def best_corloc(row: Row) -> float:
    """Test CorLoc of the block with the best CorLoc on the training images."""
    train = row["discover"]["corloc, train"]
    return float(row["discover"]["corloc"][train.index(max(train))])


def dino_cells(name: str, spreads: bool = True, last_corloc: bool = True) -> list[str]:
    """Segmentation, object discovery, kNN and probe of a DINO configuration."""
    done = runs("dino-64", name)
    values = [
        [row["segment"]["single"] for row in done],
        [row["segment"]["multi-scale"] for row in done],
        *([[row["discover"]["corloc"][-1] for row in done]] if last_corloc else []),
        [best_corloc(row) for row in done],
        [row["depth"]["knn20"][-1] for row in done],
        [row["depth"]["probe_lbfgs"][-1] for row in done],
    ]
    cells = [spread(each) for each in values]
    return cells if spreads else [cell.partition(" ±")[0] for cell in cells]


@table
def dino_main() -> str:
    names = {
        "residual, SOAP": "main | residual | soap",
        "without skips + init, SOAP": "main | skipless | soap",
        "residual, AdamW": "main | residual | adamw",
        "without skips + init, AdamW": "main | skipless | adamw",
        "`decay:0.6`, SOAP": "remedy | decay 0.6 | soap",
        "6 blocks, residual, SOAP": "depth | residual, 6 blocks | soap",
        "6 blocks, without skips + init, SOAP": "depth | skipless, 6 blocks | soap",
        "with labels: residual, SOAP": "labels | residual | soap",
        "with labels: without skips + init, SOAP": "labels | skipless | soap",
    }
    head = " | mean IoU, last block | four blocks | CorLoc, last block | best block | kNN | probe"
    return lines(head, [[label, *dino_cells(name)] for label, name in names.items()])


@table
def dino_remedies() -> str:
    names = {
        "no skips + init, two seeds": "main | skipless | soap",
        "sharper attention, `beta=2`": "remedy | sharper attention | soap",
        "values centred over tokens, `centre`": "remedy | centred | soap",
        "both": "remedy | centred, sharper | soap",
        "skips annealed to 0 over half of the steps, + init": "remedy | annealed + init | soap",
        "slower teacher, 0.998": "remedy | momentum 0.998 | soap",
        "mean of patches instead of the class token": "remedy | mean of patches | soap",
        "only the MLPs' skips cut, `--where mlp`": "remedy | MLPs' skips cut | soap",
    }
    rows = [[label, *dino_cells(name, spreads=False, last_corloc=False)] for label, name in names.items()]
    return lines(" | mean IoU, last block | four blocks | CorLoc, best block | kNN | probe", rows)


# --- Generation -------------------------------------------------------------------------------------------------------


def _chosen(done: list[Row], key: str) -> str:
    """Test accuracy at the block and time chosen on held-out images, with block and time in brackets."""
    rows = [row["features"][key] for row in done]
    blocks = " and ".join(dict.fromkeys(str(row["block"]) for row in rows))
    times = " and ".join(dict.fromkeys(f"{row['time']:g}" for row in rows))
    return f"{spread(row['test'][row['block']] for row in rows)} ({blocks}, {times})"


@table
def sit_samples() -> str:
    return sit_lines(
        "sit-cifar",
        {
            "SiT, plain": "sit | plain",
            "SiT, long skips": "sit | long skips",
            "SiT, long skips, `decay:0.8`": "sit | decay 0.8",
            "the same product, reached in the middle": "sit | decay 0.8 to the middle",
            "U-ViT, which has long skips": "uvit | plain",
            "U-ViT, `decay:0.8`": "uvit | decay 0.8",
        },
    )


def sit_lines(study: str, names: dict[str, str]) -> str:
    """Fréchet distance, precision, recall, kNN and probe of configurations of a study; `names` maps labels to them."""
    rows = []
    for label, name in names.items():
        done = [row for row in runs(study, name) if "generation" in row]  # not the runs that diverged
        samples = [row["generation"]["1"] for row in done]
        distance = spread([row["FD-judge"] for row in samples], 2, 1)
        means = [f"{statistics.mean(row[key] for row in samples):.3f}" for key in ("precision", "recall")]
        product = f"{done[0]['effective_decay']:.2g}"
        rows.append([label, product, distance, *means, _chosen(done, "knn20"), _chosen(done, "probe_lbfgs")])
    real = record(study)["runs"]["judge"]["real"]
    end = [f"{real['FD-judge']:.2f}", f"{real['precision']:.3f}", f"{real['recall']:.3f}", "", ""]
    head = " | effective decay | FD | precision | recall | kNN (block, time) | probe (block, time)"
    return lines(head, [*rows, [f"{real['n']:,} test images", "", *end]])
