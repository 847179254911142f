"""Decay in SiT and U-ViT: more seeds, three values of alpha_min, longer training, guidance, and fewer sampling steps.

    python benchmarks/sit_long.py --data "DATA/cifar10-{split}.parquet" --device cuda --compile --workers 2 --limit 1500
    python benchmarks/sit_long.py                           # smoke test: tiny models on digits, on the CPU
    python benchmarks/sit_long.py --data ... --show         # tables and the figure of the recorded runs; runs nothing

    pair       only long skips (two seeds), and long skips with decay to 0.8
    alphas     decay to 0.7 and 0.9; the best of the three by FD-judge of seed 0 gets a second seed
    longer     1.5 times the steps, only long skips and with the best decay
    uvit       shortcuts kept and decayed to 0.8, two seeds each
    plain      SiT without long skips, two seeds

Every run is trained and evaluated as in sit.py. In addition, there are distances with guidance of 1.25, 1.5 and 2,
distances without guidance at 4, 8, 16 and 32 network evaluations (NFE; 50 elsewhere), and test kNN of the middle block
at ten noise levels. FD-judge uses a classifier of this study, trained as in sit.py: distances of the two records are
not comparable, so all compared models are trained here.

Cost on one H200, extrapolated from docs/results/sit-cifar.json, with three runs in parallel: SiT 5 to 7 minutes, 1.5
times the steps 7 to 9, U-ViT 3.5, the classifier at most 3; all 14 runs about 80. Each run is added to the JSON when it
is done, and another machine can continue, given the JSON and the classifier. Its folder (--judge) compresses to about
10 MB without `statistics`, which are computed again.
"""

from __future__ import annotations

from typing import Any

from _sit_results import ALPHAS, LONGER, best_decay, further_tables, judge_line, long_figure, table
from _study import ROOT, Job, serve
from sit import PLAIN, arguments_of, run_study, settings_of, waiting, work

SKIPS: dict[str, Any] = {"recipe": "sit", "shortcut": "keep"}


def decayed(recipe: str, alpha: str) -> dict[str, Any]:
    return {"recipe": recipe, "shortcut": f"decay:{alpha}"}


def jobs(done: dict[str, Any], fields: dict[str, Any]) -> list[Job]:
    """The runs that can start now, by priority. Runs with the best decay follow when all three decays are done."""
    steps = fields["steps"] * 3 // 2
    longer = {"steps": steps, "evaluate_every": max(1, steps // 3), "checkpoint_every": steps}
    runs: list[Job] = [
        ("sit | long skips | seed 0", {**SKIPS, "seed": 0}),
        *((f"sit | decay {alpha} | seed 0", {**decayed("sit", alpha), "seed": 0}) for alpha in ALPHAS[:1]),
        ("sit | long skips | seed 1", {**SKIPS, "seed": 1}),
        *((f"sit | decay {alpha} | seed 0", {**decayed("sit", alpha), "seed": 0}) for alpha in ALPHAS[1:]),
    ]
    best = best_decay(done)
    if best is not None:
        runs.append((f"sit | decay {best} | seed 1", {**decayed("sit", best), "seed": 1}))
    runs.append((f"sit | long skips{LONGER} | seed 0", {**SKIPS, **longer, "seed": 0}))
    if best is not None:
        runs.append((f"sit | decay {best}{LONGER} | seed 0", {**decayed("sit", best), **longer, "seed": 0}))
    for seed in (0, 1):
        runs.append((f"uvit | plain | seed {seed}", {"recipe": "uvit", "shortcut": "keep", "seed": seed}))
        runs.append((f"uvit | decay 0.8 | seed {seed}", {**decayed("uvit", "0.8"), "seed": seed}))
    runs += [(f"sit | plain | seed {seed}", {"recipe": "sit", **PLAIN, "seed": seed}) for seed in (0, 1)]
    return waiting(runs, done, fields)


def main() -> None:
    options = arguments_of(__doc__, "sit-cifar-long.json; digits go to build/sit-digits-long.json").parse_args()
    if options.work:
        serve(work)
        return
    fields = settings_of(options)
    if options.data is None:
        fields |= {"guided": [1.5, 2.0], "curve": [1, 2], "levels": [0.2, 0.6, 1.0]}
    else:
        fields |= {"guided": [1.25, 1.5, 2.0], "curve": [2, 4, 8, 16]}
        fields["levels"] = [round(0.1 * level, 1) for level in range(1, 11)]
    word = f"sit-{fields['preset']}-long"
    figures = options.pictures or ROOT / ("docs/img" if options.data else "build/img")
    options.pictures = options.pictures or ROOT / "build" / "img"  # too many sample grids for the docs
    done = run_study(__file__, options, fields, word, lambda done: jobs(done, fields))
    print(judge_line(done) + table(done))
    for about, text in further_tables(done).items():
        print(f"\n{about}\n\n{text}")
    if any("generation" in row for row in done.values()):
        long_figure(done, figures / f"{word}.svg")


if __name__ == "__main__":
    main()
