"""Measures how often a verdict changes if it is restricted to the inputs that a trained block receives.

    python benchmarks/absorb_domain.py               # writes docs/results/absorb-domain.json; a minute

The models are residual ReLU networks trained on scikit-learn's digits, with and without a norm before each MLP.
Verdicts are for every MLP without its norm: on all inputs, on the ball of outputs of its norm, and on a domain around
the inputs from the training data (box and ellipsoid, 10 % wider). The script also counts the hinges that do not cross
the data, and measures the error of the best same-width approximation.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unskip
from unskip.absorption import Block, Domain, Norm, absorb, approximate

ROOT = Path(__file__).resolve().parent.parent


class Residual(nn.Module):
    def __init__(self, d: int, h: int, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)
        self.norm: nn.Module = nn.LayerNorm(d) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(self.up(self.norm(x)).relu())
        return x + branch

    def block(self) -> Block:
        up, down = self.up, self.down
        return Block(up.weight, down.weight, up_bias=up.bias, down_bias=down.bias, activation="relu")


def train(norm: bool, seed: int, steps: int, d: int, h: int, depth: int) -> tuple[nn.Sequential, Tensor, float]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, d), *(Residual(d, h, norm) for _ in range(depth)), nn.Linear(d, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for _ in range(steps):
        rows = torch.randint(1400, (256,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(x[1400:]).argmax(1) == y[1400:]).double().mean())
    return model.eval(), x[:1400], accuracy


def verdicts(model: nn.Sequential, x: Tensor, norm: bool) -> list[dict[str, Any]]:
    rows = []
    with torch.no_grad():
        x = model[0](x)
        for layer in model[1:-1]:
            block = layer.block()
            read = layer.norm(x).double()
            domain = Domain.around(read)
            up, bias = block.up.double(), block.up_bias.double()
            row: dict[str, Any] = {"all": absorb(block).status, "data": absorb(block, domain=domain).status}
            row["hinges_that_miss_the_data"] = int((domain.side(up, bias) != 0).sum())
            values = read @ up.mT + bias
            row["units_that_never_switch_on_the_data"] = int(((values > 0).all(0) | (values <= 0).all(0)).sum())
            if norm:
                layer_norm = layer.norm
                norm_config = Norm(
                    "layernorm", "pre", layer_norm.eps, layer_norm.weight.detach(), layer_norm.bias.detach()
                )
                row["norm"] = absorb(block, domain=Domain.after(norm_config, block.inputs)).status
            row["units"] = block.width
            row["approximate"] = approximate(block, read).error
            rows.append(row)
            x = layer(x)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-domain.json")
    options = parser.parse_args()
    d, h, depth = 32, 128, 4
    record: dict[str, Any] = {"script": "benchmarks/absorb_domain.py", "d": d, "h": h, "depth": depth}
    record |= {"seeds": options.seeds, "steps": options.steps, "runs": []}
    record["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__}
    for norm in (False, True):
        for seed in range(options.seeds):
            model, x, accuracy = train(norm, seed, options.steps, d, h, depth)
            rows = verdicts(model, x, norm)
            record["runs"].append({"norm": norm, "seed": seed, "test_accuracy": accuracy, "blocks": rows})
    for norm in (False, True):
        rows = [row for run in record["runs"] if run["norm"] == norm for row in run["blocks"]]
        domains = ("all", "norm", "data") if norm else ("all", "data")
        record["with norm" if norm else "without norm"] = {
            "blocks": len(rows),
            **{kind: dict(Counter(row[kind] for row in rows)) for kind in domains},
            "changed_on_the_data": sum(row["all"] != row["data"] for row in rows),
            "hinges_that_miss_the_data": sum(row["hinges_that_miss_the_data"] for row in rows),
            "units_that_never_switch": sum(row["units_that_never_switch_on_the_data"] for row in rows),
            "units": sum(row["units"] for row in rows),
            "approximate": [min(row["approximate"] for row in rows), max(row["approximate"] for row in rows)],
        }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("without norm", "with norm")}, indent=1))


if __name__ == "__main__":
    main()
