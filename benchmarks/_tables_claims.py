"""The summary table of README, and the tables of docs/results.md: the claims of three papers and our measurements."""

from __future__ import annotations

from _tables import FROZEN, best_corloc, lines, record, runs, spread, table


def accuracy(wiring: str, optimizer: str = "soap") -> str:
    """Test accuracy after 20 epochs of CIFAR-10."""
    return spread(row["test_accuracy"] for row in runs("skipless-cifar", f"final | {wiring} | {optimizer}"))


def _long(name: str) -> str:
    """Test accuracy after 100 epochs of CIFAR-10."""
    return spread(row["test_accuracy"] for row in runs("skipless-long", f"final | {name}"))


def _tiny(name: str) -> str:
    """Test accuracy after 100 epochs of Tiny-ImageNet-200 at the best learning rate, one seed."""
    return spread([max(row["test_accuracy"] for row in runs("skipless-tiny", f"final | {name}"))])


def _mae(name: str, key: str = "knn20") -> str:
    """A result of the last block (or "finetune") of an MAE configuration."""
    done = runs("mae-cifar", name)
    if key == "finetune":
        return spread(row[key] for row in done)
    return spread([row["depth"][key][-1] for row in done], 1, 1 if key == "rank" else 100)


def _dino(name: str, part: str) -> str:
    """Mean IoU ("iou") or CorLoc of the best block ("corloc") of a DINO configuration."""
    read = {"iou": lambda row: row["segment"]["single"], "corloc": best_corloc}
    return spread(read[part](row) for row in runs("dino-64", name))


def distance(name: str) -> str:
    """Fréchet distance of samples without guidance."""
    return spread([row["generation"]["1"]["FD-judge"] for row in runs("sit-cifar", name)], 2, 1)


def _condition(wiring: str) -> str:
    """Condition number of the first attention sub-layer of ViT-S."""
    site = record("conditioning")["results"]["vit_small_patch16_224 at 64 px"][wiring]["sites"][0]
    value = float(site["sublayer"]["condition"])
    return f"{value:.0f}" if value < 1e3 else f"{value:.1e}".replace("e+0", "e")


@table
def readme() -> str:
    tuned = [spread(row["test_accuracy"] for row in runs("decay-classifier", f"short | {name} | soap"))
             for name in ("residual", "decay to 1e-3")]  # fmt: skip
    kept, control, decayed = accuracy("residual"), _long("residual, weight decay 0.3"), "decayed to a product of 0.001"
    plain, dino = _mae("final | plain"), [_dino(f"main | {name} | soap", "iou") for name in ("residual", "skipless")]
    short, long, masked = "ViT, 20 epochs", "ViT, 100 epochs", "MAE, 60 epochs"
    parts, results = "skipless-parts", "skipless-results"
    frozen = _long(f"{FROZEN}, weight decay 0.3")
    tiny = (_tiny("residual"), _tiny("no skips, paired units, lr 0.0015"))
    sit = (distance("sit | plain"), distance("sit | decay 0.8"))
    top, every = "accuracy", "10,000"
    rows = [
        (short, decayed, top, kept, accuracy("decayed"), every, "3", parts),
        (f"{short}, each at its chosen weight decay", decayed, top, *tuned, every, "1", "decay"),
        (short, "MLP skips cut, `skipless_`", top, kept, accuracy("mlp cut + init"), every, "3", parts),
        (short, "all cut, `skipless_`", top, kept, accuracy("skipless + init"), every, "3", parts),
        (short, "all cut, default initialisation", top, kept, accuracy("skipless"), every, "3", parts),
        (long, "MLP skips cut", top, control, _long("MLPs cut"), every, "3, 2", results),
        (long, "all cut, three heads frozen", top, control, frozen, every, "3", results),
        ("ViT-S, Tiny-ImageNet-200, 100 epochs", "all cut, paired units", top, *tiny, every, "1", results),
        (masked, "long skips", "kNN", plain, _mae("final | long skips"), every, "3", "mae-results"),
        (masked, "long skips, decayed", "kNN", plain, _mae("final | decay 0.8"), every, "3", "mae-results"),
        ("SiT", "long skips, decayed", "FD", *sit, every, "2", "generate-results"),
        ("DINO, pets", "all cut", "mean IoU", *dino, "736", "2", "dino-results"),
    ]
    cells = [[*row, f"[{page}](docs/{page}.md)"] for *row, page in rows]
    return lines("model | change | metric | baseline | changed | n | seeds | details", cells)


def _claims(rows: list[tuple[str, str, str, str, str, str, str]]) -> str:
    cells = [[*row[:-1], f"[record](results/{row[-1]}.json)"] for row in rows]
    return lines("claim | paper | here | n | seeds | verdict | details", cells)


@table
def claims_decay() -> str:
    final, probe, held = "final | {}", "probe_decayed", "5,000"

    def pair(key: str) -> str:
        ways = [_mae(final.format(name), key) for name in ("plain", "long skips", "decay 0.8")]
        return f"{ways[0]} → {ways[2]} (long skips alone {ways[1]})"

    sweep = {alpha: _mae(f"sweep | alpha_min {alpha}") for alpha in ("0.8", "0.6")}
    learned = runs("mae-cifar", "ablation | learnable")[0]["effective_decay"]
    contrast = [
        [spread(row["depth"][key][-1] for row in runs("dino-64", f"contrast | {rule} | adamw"))
         for key in ("knn20_cls", "knn20")]
        for rule in ("keep", "decay:0.6")
    ]  # fmt: skip
    distances = [distance(f"sit | {name}") for name in ("plain", "long skips", "decay 0.8")]
    mae = "mae-cifar"
    return _claims(
        [
            ("MAE: kNN of the last block rises", "27.4 → 63.9", pair("knn20"), "10,000", "3", "holds in part", mae),
            ("MAE: the paper's probe rises", "67.8 → 72.7", pair(probe), "10,000", "3", "holds in part", mae),
            ("MAE: fine-tuning falls a little", "83.6 → 82.9", pair("finetune"), "10,000", "3", "not seen", mae),
            ("MAE: the rank of features falls", "yes", pair("rank"), "10,000", "3", "holds in part", mae),
            (
                "MAE: decay needs the long skips (the paper's probe, with → without; L-BFGS probe)",
                "83.6 → 61.5",
                "; ".join(
                    f"{_mae('sweep | alpha_min 0.8', key)} → {_mae('ablation | decay without long skips', key)}"
                    for key in (probe, "probe_lbfgs")
                ),
                held,
                "1",
                "holds",
                mae,
            ),
            (
                "alpha_min of 0.6 to 0.7 is best",
                "0.6",
                f"0.8: {sweep['0.8']}, 0.6: {sweep['0.6']}",
                held,
                "1",
                "not seen",
                mae,
            ),
            (
                "small alpha_min needs the zero start (kNN at 0.6)",
                "yes",
                f"with {sweep['0.6']}, without {_mae('start | alpha_min 0.6 without zero start')}",
                held,
                "1",
                "not seen",
                mae,
            ),
            (
                "learned alphas return to 1 and do worse",
                "probe 79.5 against 83.6",
                f"product {learned:.2f}; kNN {_mae('ablation | learnable')} against {sweep['0.8']}",
                held,
                "1",
                "holds in part",
                mae,
            ),
            (
                "SiT: samples improve (FID; here FD)",
                "17.2 → 11.8 (long skips alone 16.5)",
                f"{distances[0]} → {distances[2]} (long skips alone {distances[1]})",
                "10,000",
                "2 (long skips alone 1)",
                "holds",
                "sit-cifar",
            ),
            (
                "contrastive learning (SimCLR) does not gain: kNN of the class token; mean token",
                "yes",
                "; ".join(f"{keep} → {decay}" for keep, decay in zip(*contrast, strict=True)),
                "12,000",
                "1",
                "holds in part",
                "dino-64",
            ),
        ]
    )


@table
def claims_skipless() -> str:
    def gain(optimizer: str) -> str:
        return f"{accuracy('skipless', optimizer)} → {accuracy('skipless + init', optimizer)}"

    skipless, residual = "main | skipless | soap", "main | residual | soap"
    conditions = " / ".join(_condition(name) for name in ("residual", "skipless", "skipless + init"))
    nine = _dino("depth | skipless, 9 blocks | soap", "corloc")
    wide = "10,000"
    return _claims(
        [
            (
                "the initialisation raises accuracy, AdamW",
                "61.4 → 78.1",
                gain("adamw"),
                wide,
                "3",
                "holds",
                "skipless-cifar",
            ),
            (
                "the initialisation raises accuracy, SOAP",
                "77.0 → 80.8",
                gain("soap"),
                wide,
                "3",
                "holds",
                "skipless-cifar",
            ),
            (
                "no skips with SOAP reach residual with AdamW",
                "80.3 → 80.8",
                f"{accuracy('residual', 'adamw')} → {accuracy('skipless + init')}",
                wide,
                "3",
                "holds",
                "skipless-cifar",
            ),
            (
                "no skips with SOAP reach residual with SOAP, 20 epochs",
                "80.1 → 80.8",
                f"{accuracy('residual')} → {accuracy('skipless + init')}",
                wide,
                "3",
                "not seen",
                "skipless-cifar",
            ),
            (
                "the same after 100 epochs, carrying heads frozen",
                "80.1 → 80.8",
                f"{_long('residual, weight decay 0.3')} → {_long(f'{FROZEN}, weight decay 0.3')}",
                wide,
                "3",
                "not seen",
                "skipless-long",
            ),
            (
                "the same after 100 epochs of Tiny-ImageNet-200, ViT-S, paired units",
                "80.1 → 80.8",
                f"{_tiny('residual')} → {_tiny('no skips, paired units, lr 0.0015')}",
                wide,
                "1",
                "not seen",
                "skipless-tiny",
            ),
            (
                "condition number of the first attention: residual / cut / cut, `skipless_`",
                "restored",
                conditions,
                "1 image",
                "1",
                "holds in part",
                "conditioning",
            ),
            (
                "DINO: segmentation improves (mean IoU)",
                "56.3 → 62.3",
                f"{_dino(residual, 'iou')} → {_dino(skipless, 'iou')}",
                "736",
                "2",
                "not seen",
                "dino-64",
            ),
            (
                "DINO: object discovery improves (CorLoc)",
                "49.4 → 63.2",
                f"{_dino(residual, 'corloc')} → {_dino(skipless, 'corloc')}",
                "736",
                "2",
                "not seen",
                "dino-64",
            ),
            (
                "DINO: 9 blocks without skips beat 12 with them (CorLoc)",
                "yes",
                f"{_dino(residual, 'corloc')} → {nine}",
                "736",
                "1 (residual 2)",
                "not seen",
                "dino-64",
            ),
        ]
    )


@table
def claims_absorption() -> str:
    campaign, cases = record("absorb-campaign"), record("absorb-cpu")["cases"]
    counts, domain = campaign["counts"], record("absorb-domain")["runs"]
    blocks = [block for run in domain for block in run["blocks"]]
    trained = [site["status"] for model in record("absorb-models")["models"].values() for site in model["sites"]]
    never, wrong = counts["blocks"], len(campaign["wrong"])
    return _claims(
        [
            (
                "verdicts agree with exact arithmetic or a theorem",
                "theorems",
                f"{wrong} wrong",
                f"{never:,} blocks",
                "",
                "holds",
                "absorb-campaign",
            ),
            (
                "GELU: possible where a flip set adds up to the skip",
                "theorem",
                f"planted set: {cases['planted']['status']}",
                "1 block, 768 > 3072",
                "1",
                "holds",
                "absorb-cpu",
            ),
            (
                "random weights cannot absorb",
                "probability 1",
                f"{cases['generic']['status']}, {cases['large']['status']}",
                "2 blocks",
                "1",
                "holds",
                "absorb-cpu",
            ),
            (
                "trained MLPs cannot absorb (not claimed for trained weights)",
                "",
                f"{sum(each == 'impossible' for each in trained)} impossible",
                f"{len(trained)} MLPs",
                "1",
                "holds",
                "absorb-models",
            ),
            (
                "the same on the region of the data alone",
                "",
                f"{sum(block['data'] == 'impossible' for block in blocks)} impossible",
                f"{len(blocks)} MLPs",
                "3",
                "holds",
                "absorb-domain",
            ),
        ]
    )
