"""Tables for the docs: cost of rewiring, optimizers, training and absorption; digits; compatibility; faults; data."""

from __future__ import annotations

import statistics

from _tables import lines, record, spread, table

VARIANTS = {
    "original again": "control: the original again",
    "alpha 1": "alpha = 1, with the rewritten `forward`",
    "decay": "`Decay(0.6)`",
    "anneal": "`Anneal`, half way",
    "cut": "`Cut()`",
}


@table
def rewire_gpu() -> str:
    eager, compiled = (part["variants"] for part in record("rewire-cost-gpu")["results"])
    rows = []
    for name, label in VARIANTS.items():
        if name not in eager:
            continue
        ratios = [f"{part[name]['ratio']:.3f}" for part in (eager, compiled)]
        peaks = [f"{part[name]['peak_mib'] / part['original']['peak_mib']:.2f}" for part in (eager, compiled)]
        rows.append([label, *ratios, ", ".join(peaks)])
    return lines("time of a step / original | eager | compiled | peak memory, eager and compiled", rows)


@table
def rewire_cpu() -> str:
    parts = [part["variants"] for part in record("rewire-cost-cpu")["results"]]
    rows = []
    for name, label in VARIANTS.items():
        cells = [f"{part[name]['ratio']:.3f}" for part in parts]
        if name == "original again":
            middle = [f" ({part[name]['ratio_low']:.3f} to {part[name]['ratio_high']:.3f})" for part in parts]
            cells = [cell + more for cell, more in zip(cells, middle, strict=True)]
        rows.append([label, *cells])
    return lines("time of a step / original | eager | compiled", rows)


@table
def rewire_compile() -> str:
    records = {"CPU": "rewire-compile-cpu", "H200": "rewire-compile-gpu"}
    parts = {device: record(name)["results"][0]["variants"] for device, name in records.items()}
    rows = []
    for name, label in {"original": "the original", "decay": "`Decay(0.6)`", "cut": "`Cut()`"}.items():
        cells = [label]
        for found in (part[name] for part in parts.values()):
            seconds = f" ({found['cpu_seconds']:.0f} s)" if name == "original" else ""
            cells += [str(found["kernels"]), f"{found['ratio']:.2f}{seconds}"]
        rows.append(cells)
    head = [f"{device}: kernels | CPU time of the first step / original" for device in parts]
    return lines(" | " + " | ".join(head), rows)


@table
def optim_steps() -> str:
    rows = []
    for model, label in {"vit_base_patch16_224": "ViT-B", "vit_small_patch16_224": "ViT-S"}.items():
        for name, found in record("optim-gpu")["results"][model].items():
            keys = ("alone_mean_ms", "alone_max_ms", "queued_mean_ms", "queued_max_ms", "first_ms")
            times = [f"{found[key]:.0f}" if found[key] >= 99.5 else f"{found[key]:.1f}" for key in keys]
            rows.append([label, name, *times, f"{found['state_gib']:.2f}"])
    return lines(" |  | alone | slowest | queued | slowest | first step | state GiB", rows)


@table
def optim_digits() -> str:
    rows = []
    for name, found in record("optim-digits")["results"].items():
        wiring, optimizer = name.replace("skipless", "skipless + init").split(", ")
        ends = f"{found['lowest']:.3f}, {found['highest']:.3f}"
        rows.append([wiring, optimizer, f"{found['lr']:g}", f"{found['accuracy']:.3f}", ends, f"{found['loss']:.3f}"])
    head = " | optimizer | lr | test accuracy, mean of 3 | lowest, highest | training loss at the end"
    return lines(head, rows)


@table
def optim_digits_short() -> str:
    found, rows = record("optim-digits")["results"], []
    for wiring, label in {"residual": "residual", "skipless": "skipless, initialised"}.items():
        rows.append([label, *(f"{found[f'{wiring}, {each}']['accuracy']:.3f}" for each in ("adamw", "muon", "soap"))])
    return lines(" | AdamW | Muon | SOAP", rows)


FADED = {
    "kept, labels": ("skips kept, labels", "skips kept"),
    "cut at once, labels": ("cut at once, labels",) * 2,
    "cut at once, teacher": ("cut at once, teacher", "cut at once, distilled from the original"),
    "annealed, labels": ("annealed over 220 steps, labels", "annealed over 220 steps, labels"),
    "annealed, teacher": ("annealed over 220 steps, teacher", "annealed over 220 steps, distilled"),
    "from skipless_, labels": (
        "cut, from `skipless_` instead of the trained weights",
        "trained without skips from `skipless_`, 440 steps",
    ),
}


@table
def fade_digits() -> str:
    rows = []
    for name, (label, _) in FADED.items():
        found = record("fade-digits")["results"][name]
        rows.append([label, f"{statistics.mean(found):.3f}", f"{min(found):.3f}, {max(found):.3f}"])
    return lines("student | mean | lowest, highest", rows)


@table
def fade_digits_short() -> str:
    found = record("fade-digits")["results"]
    rows = [[label, f"{statistics.mean(found[name]):.3f}"] for name, (_, label) in FADED.items()]
    return lines(" | test accuracy", rows)


@table
def train_loop() -> str:
    rows = []
    labels = {"vit_base_patch16_224, 224 px, batch 256": "ViT-B/16, 224 px, batch 256"}
    for name, found in record("train-gpu")["results"].items():
        bare, graph, clip = found["bare"], found["loop, one graph"], found["+ clip"]
        cost = f"{100 * found['overhead over bare + clip']:.1f}%"
        over = f"{found['loop over bare']:.3f}"
        rows.append([labels.get(name, name), f"{bare:.0f}", f"{found['loop']:.0f}", over, cost, f"{found['feed']:.0f}"])
        more = 100 * (clip / graph - 1)
        ratio = graph / bare
        cells = [f"{ratio:.3f}" if ratio < 1 else f"{ratio:.2f}", f"{more:.1f}%" if more > 0 else ""]
        rows.append(["the same, one graph", "", f"{graph:.0f}", *cells, ""])
    head = " | bare step, images/s | whole loop | loop / bare | overhead over a bare step that clips, too | feed alone"
    return lines(head, rows)


def _against_published(name: str, labels: dict[str, str], memory: bool) -> str:
    rows = []
    for key, label in labels.items():
        found = record(name)["results"][key]
        over = found["over the fastest published"]
        cells = [f"{found['images a second']:,.0f}", "1" if over == 1 else f"{over:.2f}"]
        rows.append([label, *cells, *([f"{found['GiB']:.1f}"] if memory else [])])
    return lines(" | images a second | over the published layout" + (" | GiB" if memory else ""), rows)


@table
def train_mae() -> str:
    labels = {
        "published": "published layout, attention written out",
        "published, sdpa": "published layout, fused attention",
        "ours": "plain MAE here",
        "ours, narrow": "the same with `--narrow`: streams in bf16",
        "ours, paper's": "long skips and decay: more work",
    }
    return _against_published("train-mae-gpu", labels, memory=False)


@table
def train_sit() -> str:
    labels = {
        "published": "published layout, fused attention",
        "ours": "SiT here",
        "ours, narrow": "the same with `narrow`: the stream in bf16",
        "ours, paper's": "long skips and decay: more work",
    }
    return _against_published("train-sit-gpu", labels, memory=True)


@table
def demo_digits() -> str:
    labels = {
        "skips-kept": "with skips",
        "skips-cut": "cut",
        "skips-cut-initialised": "cut, `skipless` initialisation",
    }
    rows = []
    for name, label in labels.items():
        done = [row["last"] for key, row in record("demo-digits")["runs"].items() if key.partition("/")[0] == name]
        rows.append([label, spread([row["test_accuracy"] for row in done], 3, 1), "359", str(len(done))])
    return lines(" | test accuracy | n | seeds", rows)


@table
def absorption_map() -> str:
    import absorb_map

    return absorb_map.summary()


@table
def absorb_cost() -> str:
    labels = {
        "block without norms": "block",
        "block behind a norm": "pre-norm block",
        "vit_small_patch16_224": "ViT-S/16",
    }
    rows = []
    for name, device in (("absorb-cost-cpu", "one CPU thread, float32"), ("absorb-cost-gpu", "one H200, bfloat16")):
        for case in record(name)["cases"]:
            for what, run in case.items():
                if not isinstance(run, dict) or what == "skip":
                    continue
                (low, high), before = run["ratio_quartiles"], case["skip"]
                took = before["milliseconds"]
                rows.append(
                    [
                        f"{labels[case['what']]}: {what}",
                        device,
                        str(case["batch"]),
                        str(case["turns"]),
                        f"{took:.{0 if took >= 10 else 2}f}",
                        f"{run['ratio']:.2f} ({low:.2f} to {high:.2f})",
                        f"{before['peak_mib']:.1f}, {run['peak_mib']:.1f}",
                        f"{before['gflops']:.2f}, {run['gflops']:.2f}",
                    ]
                )
    head = "what | device | batch | turns | with skips, ms | ratio | peak activations, MiB: before, after"
    return lines(f"{head} | GFLOP: before, after", rows)


@table
def absorb_campaign() -> str:
    found = record("absorb-campaign")
    counts, statuses = found["counts"], ("possible", "impossible", "undecided")
    kinds = sorted({name.split(": ")[0] for name in counts if ": " in name})
    cells = [[kind, *(f"{counts.get(f'{kind}: {status}', 0):,}" for status in statuses)] for kind in kinds]
    cells.append(["all", *(f"{counts[status]:,}" for status in statuses)])
    caption = (
        f"{counts['blocks']:,} blocks: **{len(found['wrong'])} wrong**, no crash; "
        f"{counts['asked in two dtypes']:,} were asked in two dtypes."
    )
    return caption + "\n\n" + lines(" | ".join(["blocks", *statuses]), cells)


@table
def absorb_speed() -> str:
    rows = []
    labels = {
        "generic": ("768, 3072", "N(0, 0.02)"),
        "trained-scale": ("768, 3072", "N(0, 2)"),
        "heavy": ("768, 3072", "heavy-tailed rows, outlier channels"),
        "planted": ("768, 3072", "a flip set of 1536 units, found"),
        "spare": ("768, 3072", "N(0, 0.02), 384 dead units"),
        "large": ("4096, 16384", "N(0, 0.02)"),
        "large-hard": ("4096, 16384", "N(0, 2)"),
        "vit-b": ("ViT-B", "12 MLPs as they stand and alone, random"),
    }
    cases = record("absorb-cpu")["cases"]
    for name, label in labels.items():
        beside = cases[name]["beside"]
        times = [f"{beside[key]:.2f}" for key in ("seconds", "other_seconds", "ratio")]
        rows.append([*label, *times, f"{cases[name]['peak_gib']:.1f}"])
    threads = record("absorb-cpu")["device"].split(", ")[1].removesuffix(" threads")
    where = "one CPU thread, CPU seconds" if threads == "1" else f"{threads} CPU threads, seconds"
    now, before = cases["generic"]["beside"]["commits"]
    caption = f"Commit {now} in turns with version 0.1 ({before}), best of 3 each; {where} for a verdict and its check:"
    return caption + "\n\n" + lines("d, h | weights | now, s | version 0.1, s | ratio | peak GiB", rows)


@table
def compatibility() -> str:
    timm, types = (record("compatibility")["shares"][part] for part in ("timm", "transformers"))
    unbuilt = types["no forward"] + types["does not build small"]
    rows = [
        ("timm: the smallest model of every file", timm["rewired"], timm["no residual"], 0, timm["failed"]),
        ("transformers: every type of `AutoModel`", types["done"], types["no residual"], types["refused"], unbuilt),
    ]
    counts = [sum(timm.values()), sum(types.values())]
    cells = [[row[0], str(count), *map(str, row[1:])] for row, count in zip(rows, counts, strict=True)]
    return lines("matrix | models | rewired | no residual | refused | not built or not run", cells)


@table
def training_cost() -> str:
    """GPU hours of the ImageNet presets: images of the whole run over the recorded images per second."""
    from unskip.recipes import RECIPES

    base = record("train-gpu")["results"]["vit_base_patch16_224, 224 px, batch 256"]["loop"]
    mae = record("train-mae-gpu")["results"]["ours"]["images a second"]
    sit = record("train-sit-gpu")["results"]["ours"]["images a second"]
    wider = 12 * 768**2 / (28 * 1152**2)  # cost of SiT-B over SiT-XL: depth times width squared
    rows = []
    for recipe, preset, rate, how in (
        ("supervised", "vit-b16", base, "train-gpu"),
        ("mae", "vit-b16", mae, "train-mae-gpu"),
        ("sit", "sit-b2", sit, "train-sit-gpu"),
        ("sit", "sit-xl2", sit * wider, "extrapolated from sit-b2 by depth x width²"),
    ):
        config = RECIPES[recipe].config(**RECIPES[recipe].presets[preset].fields)
        images = config.steps * config.batch if config.steps else config.epochs * 1_281_167
        hours = images / rate / 3600
        cells = [f"{images / 1e6:,.0f} million", f"{rate:,.0f}", how, f"{hours:,.0f}", f"{hours / 8:,.0f}"]
        rows.append([f"`{recipe} --preset {preset}`", *cells])
    return lines("preset | images seen | images a second, one H200 | from | GPU hours | hours on 8, at best", rows)


@table
def faults() -> str:
    found = record("faults")
    kills, damage = found["SIGKILL"], found["damaged checkpoints"]
    older = "a warning; the checkpoint before it is used"
    rows = [["SIGKILL at a random moment", str(kills["kills"]), "`unskip resume`", str(kills["bitwise equal"])]]
    for how, label in (
        ("truncated", "file of the last checkpoint truncated"),
        ("bit flipped", "one bit of it flipped"),
    ):
        rows.append([label, str(damage[how]["files"]), older, str(damage[how]["bitwise equal"])])
    for name in ("full disk", "read-only folder"):
        said = "one line with the last good checkpoint; then `unskip resume`"
        rows.append([name, "1", said, str(int(found[name]["resumed"]))])
    return lines("fault | trials | what happens | ended as without it, byte for byte", rows)


@table
def data_scale() -> str:
    found = record("data-scale")["summary"]
    labels = {
        "folder": "`Feed`, folder",
        "tar": "`Feed`, tars",
        "parquet": "`Feed`, parquet files",
        "imagefolder": "torchvision's ImageFolder + DataLoader",
        "webdataset": "webdataset, a buffer of 1,000",
    }

    def seconds(state: str, reader: str) -> str:
        first, later = (found[f"{state}: seconds, {what} opening"].get(reader) for what in ("first", "later"))
        return "" if first is None else f"{first:.1f}, {later:.1f}"

    states = [state for state in ("warm", "cold") if f"{state}: images a second" in found]
    rows = []
    for reader, label in labels.items():
        cells = [label]
        for state in states:
            cells += [f"{found[f'{state}: images a second'][reader]:,.0f}", seconds(state, reader)]
        cells += [f"{found['warm: CPU microseconds an image'][reader]:.0f}"]
        rows.append([*cells, f"{found['MB above the imports'][reader]:.0f}"])
    columns = (
        f"{state}images per second | {state}seconds to open, first and later" for state in ("", "cold: ")[: len(states)]
    )
    return lines(" | " + " | ".join(columns) + " | CPU microseconds per image | MB", rows)
