"""Do language models need their skips? Nine wirings under three optimizers, each at its own rate and weight decay.

python benchmarks/lm.py --data "DATA/english-{split}.parquet" --device cuda --graph --workers 6 --limit 1400
python benchmarks/lm.py --data stdlib --device cuda --graph --workers 6 --limit 1400
python benchmarks/lm.py --small --workers 2                       # stdlib on two CPU cores, hours
python benchmarks/lm.py                                          # stdlib on the CPU, a tiny model, three steps a run

A GPT-2 of 10.8 million parameters on bytes, sequences of 256, orthogonal position embeddings. "Wide" models (gpt.py)
have twice as many heads of the same size; without skips one half of them starts near the identity, passes tokens on and
is frozen, but for W_V and W_O, which like paired units train at a tenth of the rate. For each wiring and optimizer,
weight decay and, where skips are cut, one of two initialisations are chosen at the middle learning rate, and then the
learning rate, on text that is held out from training; a best rate at the edge adds the next one. The chosen setting is
trained five times as long on the whole training split.

search   600 steps of 16,384 bytes, held-out bits per byte
final    3000 steps, two seeds: test bits per byte, loss against steps and seconds; without each block, read out after
         each block (logit lens), ranks by block, and rounded to 8 and 4 bits

Estimated, not measured, on one H200 in bf16, from docs/results/roofline-gpu.json: at twice the batch a step has 9 ms of
kernels and 9 ms of gaps between them, which --graph removes. A text has 126 to 180 searches and 54 final runs, so about
15 minutes of kernels, and as much again for building models and evaluating them, which workers do side by side: half an
hour with six workers. SOAP and Muon add to it. `--limit` stops in time, begins nothing that would not end by then, and
the same command goes on; a run that was stopped begins anew.

`--small` trains a GPT-2 of 0.7 million parameters on sequences of 128, 2,048 bytes a step, 400 steps in a search and
1,200 in a final run. It does not search weight decay (0.1).

Each text has its own JSON, docs/results/lm-stdlib.json or lm-NAME.json, with the fingerprint of the text in every run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _lm_run import Config, tell, value, work
from _study import ROOT, Job, about, arguments, drawing, opened, results, search, serve, study

CARRYING = "wide, all cut, half of the heads carry"
WIRINGS: dict[str, Config] = {
    "residual": {"shortcut": "keep"},
    "decay to 0.1": {"shortcut": "decay:product=0.1"},
    "decay to 1e-2": {"shortcut": "decay:product=0.01"},
    "decay to 1e-3": {"shortcut": "decay:product=0.001"},
    "MLP skips cut": {"shortcut": "cut", "where": "mlp"},
    "attention skips cut": {"shortcut": "cut", "where": "attention"},
    "all cut + init": {"shortcut": "cut"},
    "wide, residual": {"shortcut": "keep", "wide": True},
    CARRYING: {"shortcut": "cut", "wide": True, "carry_rate": 0.1},
}
CODE = "position_code=orthogonal"  # for every wiring
UNIT = "skipless:shaped,vo_gain=1,mlp_gain=1"  # branches as large as the stream, for models that keep some skips
CARRY = "carry={heads},mix=0.3,self_attention=0.9"  # _lm_run.py fills in the number of heads
RATES = {"adamw": 1e-3, "muon": 1e-3, "soap": 4e-3}  # the middle ones; the others are a factor of two apart
DECAYS = (0.1, 1.0)
EDGES = 3  # how far from the middle rate the search goes, in factors of two
SIZES = "hidden_size=384,num_hidden_layers=6,num_attention_heads=6"
BASE: Config = {
    "model_args": SIZES,
    "batch": 64,
    "steps": 600,
    "evaluate_every": None,
    "online_sequences": 2048,
    "log_every": 50,
}
FINAL: Config = {"steps": 3000, "validate": False, "looks": True}
TINY: Config = {"model_args": "hidden_size=32,num_hidden_layers=2,num_attention_heads=2", "context": 32, "batch": 4}
SMALL: Config = {"model_args": "hidden_size=96,num_hidden_layers=6,num_attention_heads=3", "context": 128, "batch": 16}
SMALL |= {"compile": False, "precision": "float32", "online_sequences": 512}
SMALL_STEPS = {"search": 400, "final": 1200}
SMALL_RATE, SMALL_DECAYS = 4e-3, (0.1,)
TINY |= {"steps": 3, "compile": False, "precision": "float32", "online_sequences": 8, "log_every": 1}


def inits_of(wiring: str) -> tuple[str, ...]:
    """The initialisations among which a wiring chooses."""
    if WIRINGS[wiring]["shortcut"] != "cut":
        return ("default",)
    if WIRINGS[wiring].get("where") == "attention":
        return UNIT, "skipless"  # `paired` sets MLPs alone
    if "wide" in WIRINGS[wiring]:
        return f"{UNIT},{CARRY}", f"skipless:paired,{CARRY}"
    return UNIT if "where" in WIRINGS[wiring] else "skipless:shaped", "skipless:paired"


def config_of(wiring: str, optimizer: str, lr: float, decay: float, init: str) -> Config:
    own = {**WIRINGS[wiring], "init": f"{init}{',' if ':' in init else ':'}{CODE}"}
    return {**BASE, **own, "optimizer": optimizer, "lr": lr, "weight_decay": decay, "validate": True, "seed": 0}


def chosen_of(wiring: str, optimizer: str, done: dict[str, Any], small: bool) -> tuple[list[Job], Config | None]:
    """The search runs that are still missing, and the chosen config once none is."""

    def job(step: int, option: tuple[float, str]) -> Job:
        lr = (SMALL_RATE if small else RATES[optimizer]) * 2.0**step
        decay, init = option
        name = f"search | {wiring} | {optimizer} | {lr:g} | {decay:g}"
        name += f" | {init.removesuffix(f',{CARRY}')}" if len(inits) > 1 else ""
        return name, config_of(wiring, optimizer, lr, decay, init)

    inits = inits_of(wiring)
    options = [*itertools.product(SMALL_DECAYS if small else DECAYS, inits)]
    return search(job, options, EDGES, lambda row: -value(row), done)


def waiting(done: dict[str, Any], small: bool) -> Iterator[Job]:
    """All runs that can start now, searches first."""
    pairs = [*itertools.product(RATES, WIRINGS)]
    found = {(optimizer, wiring): chosen_of(wiring, optimizer, done, small) for optimizer, wiring in pairs}
    for jobs, _ in found.values():
        yield from jobs
    for seed, ((optimizer, wiring), (_, chosen)) in itertools.product(range(2), found.items()):
        if chosen is not None:
            yield f"final | {wiring} | {optimizer} | seed {seed}", {**chosen, **FINAL, "seed": seed}


def finals(done: dict[str, Any], wiring: str, optimizer: str) -> list[dict[str, Any]]:
    """The finished final runs of a wiring, one per seed."""
    rows = [row for name, row in done.items() if name.startswith(f"final | {wiring} | {optimizer} |")]
    return [row for row in rows if "test_bits_per_byte" in row]


def table(done: dict[str, Any]) -> str:
    """Test bits per byte by wiring, mean and standard deviation over seeds, with what was chosen."""
    head = ["optimizer", "wiring", "init", "lr", "weight decay", "bits per byte", "seeds", "8 bits", "4 bits"]
    head += ["worst block left out"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for optimizer, wiring in itertools.product(RATES, WIRINGS):
        rows = finals(done, wiring, optimizer)
        if not rows:
            continue
        bits = [row["test_bits_per_byte"] for row in rows]
        spread = f" ± {statistics.stdev(bits):.4f}" if len(bits) > 1 else ""
        config = rows[0]["config"]
        rounded = [
            statistics.mean(row["quantised"][f"bits_per_byte_{width}_tensor_clipped"] for row in rows)
            for width in (8, 4)
        ]
        worst = statistics.mean(max(row["without_block"]) for row in rows)
        cells = [
            optimizer,
            wiring,
            config["init"].removesuffix(CODE)[:-1],
            f"{config['lr']:g}",
            f"{config['weight_decay']:g}",
        ]
        cells += [f"{statistics.mean(bits):.4f}{spread}", str(len(bits)), *(f"{each:.3f}" for each in rounded)]
        lines.append(f"| {' | '.join([*cells, f'{worst:.3f}'])} |")
    return "\n".join(lines)


def figure(done: dict[str, Any], file: Path) -> None:
    """Draws test bits per byte, and those of SOAP with one block left out and when read out after each block."""
    pyplot = drawing("lm")
    image, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for colour, optimizer in enumerate(RATES):
        rows = {name: finals(done, name, optimizer) for name in WIRINGS}
        points = [(place, row["test_bits_per_byte"]) for place, name in enumerate(WIRINGS) for row in rows[name]]
        if points:
            left.plot(*zip(*points, strict=True), f"C{colour}o", ms=5, alpha=0.8, label=optimizer)
    for colour, name in enumerate(name for name in WIRINGS if name not in ("decay to 1e-2", "decay to 1e-3")):
        for index, row in enumerate(finals(done, name, "soap")):
            label = name if index == 0 else None
            blocks = range(1, len(row["without_block"]) + 1)
            style: dict[str, Any] = {"color": f"C{colour}", "marker": "o", "ms": 3, "alpha": 0.8, "label": label}
            middle.plot(blocks, [bits - row["whole"] for bits in row["without_block"]], **style)
            right.plot(blocks, row["logit_lens"], **style)
    left.set_xticks(range(len(WIRINGS)), [name.replace(" ", "\n") for name in WIRINGS], fontsize=7)
    left.set(ylabel="test bits per byte", title="one point per seed")
    middle.set(xlabel="block that is left out", ylabel="more bits per byte", yscale="log", title="SOAP")
    right.set(xlabel="read out after block", ylabel="bits per byte", yscale="log", title="SOAP, logit lens")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    image.savefig(file, metadata={"Date": None})
    pyplot.close(image)


def main() -> None:
    parser = arguments(__doc__, "lm-stdlib.json, lm-NAME.json; of a smoke test in build")
    parser.add_argument("--small", action="store_true", help="a model for the CPU")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs instead of torch.compile")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    tiny = options.data is None and not options.small
    source = options.data or "stdlib"
    name = "tiny" if tiny else Path(source).name.partition("{")[0].strip("-_.") or "text"
    name += "-cpu" if options.small else ""
    options.out = options.out or results(None if tiny else source) / f"lm-{name}.json"
    own = TINY if tiny else SMALL if options.small else {}
    settings: Config = {"text": name, **(own or {"preset": "stdlib-small"})}
    fields: Config = {"data": source, "device": options.device}
    if options.graph:
        fields |= {"graph": True, "compile": False}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        decays = SMALL_DECAYS if options.small else DECAYS
        data |= about(__file__, options.device, settings, base=BASE, final=FINAL, wirings=WIRINGS, decays=decays)

        def jobs() -> list[Job]:
            steps = {kind: {"steps": count} for kind, count in SMALL_STEPS.items() if options.small}
            todo = [each for each in waiting(done, options.small) if each[0] not in done]
            return [(job, {**config, **own, **steps.get(job.split()[0], {})}) for job, config in todo]

        def task(job: str, config: Config) -> Config:
            # Settings are chosen within the training files, so that no other split takes part in the choice.
            chosen = {"data": source.replace("{split}", "train")} if job.startswith("search") else {}
            return {**config, **fields, **chosen}

        study(__file__, data, jobs, task, options, tell)
    print(table(done))
    if not tiny and any(finals(done, wiring, "soap") for wiring in WIRINGS):
        figure(done, ROOT / "docs" / "img" / f"lm-{name}.svg")


if __name__ == "__main__":
    main()
