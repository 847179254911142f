"""The docs section on longer training of SiT and U-ViT; empty until docs/results has its record (sit_long.py)."""

from __future__ import annotations

from _sit_results import further_tables, groups, title
from _tables import RECORDS, record, sit_lines, table

STUDY = "sit-cifar-long"
ABOUT = f"""## Seeds, alpha_min, longer training and guidance

![Fréchet distance by alpha_min, guidance and evaluations, and kNN of the middle block](img/{STUDY}.svg)

`benchmarks/sit_long.py` ([record](results/{STUDY}.json)) trains and evaluates as above, with a classifier of its own
for the distances: they do not compare with those above. ± is the standard deviation over two seeds; rows without it are
one seed. The alpha_min with a second seed and longer training was chosen by the distance of seed 0, which favours that
seed."""


@table
def sit_long() -> str:
    """The section, or nothing without a record with evaluated runs."""
    if not (RECORDS / f"{STUDY}.json").exists():
        return ""
    # Diverged runs have no samples; the study itself prints them.
    done = {name: row for name, row in record(STUDY)["runs"].items() if name == "judge" or "generation" in row}
    names = {title(name): name for name in groups(done)}
    if not names:
        return ""
    parts = [ABOUT, sit_lines(STUDY, names)]
    for about, text in further_tables(done).items():
        parts += [f"{about}:", text]
    return "\n\n".join(parts)
