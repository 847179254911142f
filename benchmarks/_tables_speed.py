"""Tables of docs/performance.md: speed against peers, time of a step by kind of work, and growth of cost with size."""

from __future__ import annotations

from _tables import lines, record, table

_LINKS = {"rewiring": "#rewiring"}  # a section of the same page


@table
def speed() -> str:
    optim = record("optim-gpu")["results"]["vit_base_patch16_224"]
    eigen = record("discover-gpu")["results"][0]["solver"]
    loop = record("train-gpu")["results"]["vit_base_patch16_224, 224 px, batch 256"]
    compiled = record("rewire-cost-gpu")["results"][1]["variants"]
    sharded = record("fsdp-gpu")["results"]["adamw"]
    rows: list[tuple[str, str, str, str, float, str]] = []
    for name, who in (("SOAP", "pytorch_optimizer"), ("Muon", "torch")):
        peer, ours = (optim[f"{each} {name}"]["alone_mean_ms"] for each in (who, "unskip"))
        step = f"{name}, ViT-B: ms per step"
        rows.append((step, who, f"{peer:.1f}", f"{ours:.1f}", peer / ours, "optim-cost"))
    ours, peer = eigen["ours_ms"], eigen["scipy_ms"]
    rows.append(("TokenCut: ms per image", "scipy, CPU", f"{peer:.2f}", f"{ours:.3f}", peer / ours, "dense"))
    for what, name, page in (("MAE, ViT-B", "train-mae-gpu", "mae"), ("SiT-B/2", "train-sit-gpu", "generate")):
        done = record(name)["results"]
        peer = max(row["images a second"] for key, row in done.items() if key.startswith("published"))
        ours = done["ours"]["images a second"]
        rows.append((f"{what}: images per second", "published code", f"{peer:,.0f}", f"{ours:,.0f}", ours / peer, page))
    for what, peer, ours, label, page in (
        ("supervised loop, ViT-B", loop["bare"], loop["loop"], "bare step", "training"),
        (
            "FSDP on one GPU, AdamW",
            *(sharded[key]["images a second"] for key in ("plain", "fsdp")),
            "plain",
            "many-gpus",
        ),
    ):
        rows.append((f"{what}: images per second", label, f"{peer:,.0f}", f"{ours:,.0f}", ours / peer, page))
    for name in ("decay", "cut"):
        peer, ours = (compiled[key]["median_ms"] for key in ("original", name))
        step = f"`{name}`, ViT-B, compiled: ms per step"
        rows.append((step, "not rewired", f"{peer:.1f}", f"{ours:.1f}", peer / ours, "rewiring"))
    cells = [
        [
            *row[:4],
            f"{row[4]:.0f}" if row[4] > 9.95 else f"{row[4]:.2f}",
            f"[{row[5]}]({_LINKS.get(row[5], f'{row[5]}.md')})",
        ]
        for row in rows
    ]
    return lines("on one H200 | peer | peer's | unskip | times as fast | ", cells)


@table
def roofline() -> str:
    found = record("roofline-gpu")["results"]
    labels = {"supervised": "supervised ViT-B/16", "mae": "MAE ViT-B/16", "sit": "SiT-B/2", "dino": "DINO ViT-S/16"}
    labels |= {"lm": "GPT-2, 10.8 M", "tiny": "ViT-S, 64 px, SOAP, one graph"}
    labels |= {f"{name}-graph": f"{labels[name]}, one graph" for name in ("dino", "lm")}
    kinds = [kind for kind in next(iter(found.values()))["ms a step by kind"] if kind != "other"]
    rows = []
    for name, row in found.items():
        parts = [*(row["ms a step by kind"][kind] for kind in kinds), row["ms a step without a kernel"]]
        shares = [f"{100 * part / row['ms a step']:.0f}%" for part in parts]
        rows.append([labels[name], *shares, f"{row['ms a step']:.0f}", f"{100 * row['share of the matrix rate']:.0f}%"])
    return lines(f" | {' | '.join(kinds)} | launch gaps | ms per step | of the matrix rate", rows)


@table
def growth() -> str:
    from growth import TOOLS, exponent

    found = record("growth-cpu")["results"]
    rows = [[tool, *(f"{exponent(rows, name, tool):.1f}" for name, rows in found.items())] for tool in TOOLS]
    return lines(f"exponent | {' | '.join(found)}", rows)
