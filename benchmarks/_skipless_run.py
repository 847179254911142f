"""One run of the classifier studies: the supervised recipe with more options for initialisation, heads, weight decay.

Used by skipless_gap.py, skipless_tiny.py and decay_classifier.py.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _study import attempt

Config = dict[str, Any]
BASE: Config = {
    "shortcut": "cut",
    "where": None,
    "heads": 3,
    "head_dim": None,  # None: width / heads
    "pool": "avg",  # "token": timm's class token
    "code": 1.0,  # norm of the position embeddings over that of the patches; None: timm's embeddings
    "whiten": None,  # the patch embedding is R Sigma^whiten, Sigma the covariance of the patches' pixels
    "start": True,  # the shaped initialisation with the constants below; False: timm's
    "alpha": 1.0,
    "beta": 1.0,
    "c": 9.0,
    "gain": 9.0,
    "bias": 1.5,
    "target": None,  # mean self-attention to calibrate W_Q and W_K to
    "even": 0,  # heads initialised with near-uniform attention
    "carry": None,  # makes the other heads near the identity; relative output scale of the near-uniform ones
    "pairs": None,  # scale of W_up of mirrored pairs, the half of an MLP's units that passes tokens on
    "carry_rate": 1.0,  # factor on the step of the weights that pass tokens on: W_V and W_O of heads, pairs of units
    "pairs_trained": False,  # pairs take full steps, whatever carry_rate is
    "optimizer": "soap",
    "split_qkv": False,
    "refresh": 10,
    "value_output": 1.0,  # factor on the optimizer step of W_V and W_O
    "fixed": False,  # W_Q and W_K of the carrying heads are frozen
    "decays": "matrices",  # which weights of the blocks decay: "matrices", or an option of StepHooks.decay
    "epochs": 20,
    "seed": 0,
    "validate": True,
    "quantise": False,  # also evaluate the trained model with quantised weights and activations
}
EMA = 0.998
MIX = 0.3  # relative output scale of the units besides the pairs, if no heads carry
SHAPES = {
    "digits": "depth=4,embed_dim=64",
    "cifar": "depth=12,embed_dim=192",
    "tiny-imagenet": "depth=12,embed_dim=384",
}
PETS = {1: 1, 2: 0, 3: 255}  # trimap: pet, background, border (ignored)


def work(config: Config) -> dict[str, Any] | None:
    """Trains and evaluates one run in this process."""
    return attempt(config, trained, ("data", "device", "preset", "pets"))


def value(row: dict[str, Any]) -> float:
    """Validation accuracy, by which settings are chosen; 0 if the run did not finish."""
    return float(row.get("val_accuracy") or 0.0)


def tell(name: str, row: dict[str, Any]) -> str:
    """The result of a run in one line."""
    shown = {key: round(entry, 4) for key, entry in row.items() if key.endswith("accuracy")}
    return f"{row.get('diverged') or row.get('failed') or shown}, {row.get('images_per_second', 0):.0f} images/s"


def trained(config: Config) -> dict[str, Any] | None:
    """Trains a model, and returns its accuracies, losses, token statistics by block and relative step sizes."""
    import torch
    from _skipless_start import watch

    import unskip
    from unskip.training import RunFolder, run_task

    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    torch.manual_seed(config["seed"])
    task, schedule = unskip.recipes.build_task(planned(config))
    images = next(iter(task.feed.iterate(0, 1)))[0][:128]
    result: dict[str, Any] = started(task.model, images, config)
    parts = unskip.parts(task.model, images[:1])
    looks = {0: watch(task.model, parts, images[:64])}
    task.optimizer = optimizer(task.model, config)
    keeper = Keeper(task.model, parts, schedule.steps)
    if config["value_output"] != 1:
        keeper.slow_down([view for part in parts.attentions() for view in (part.v, part.out)], config["value_output"])
    if config["carry_rate"] != 1:
        keeper.slow_down([*carrying(parts, config)], config["carry_rate"])
    if config["fixed"]:
        keeper.fix(parts, heads_of(config) - config["even"])
    keeper.decay(task.optimizer, parts, config["decays"], config["weight_decay"])

    def after(step: int) -> None:
        keeper.after(step)
        if step + 1 == schedule.steps // 3:
            looks[step + 1] = watch(task.model, parts, images[:64])

    task.before_step, task.after_step = keeper.before, after
    accuracy = task.evaluations["accuracy-v1"]
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        run = RunFolder.create(f"{folder}/run", {}, config["device"])
        try:
            outcome = run_task(task, schedule, run, quiet=True)
            if not outcome.finished:
                return None
            result |= {key: entry for key, entry in outcome.evaluations.items() if not key.endswith("]")}
            looks[schedule.steps] = watch(task.model, parts, images[:64])
            with torch.no_grad(), keeper.swapped_in():
                task.model.eval()
                result |= {f"ema_{key}": entry for key, entry in accuracy(task.model).items() if entry is not None}
            if config["quantise"]:
                rounded = unskip.evals.evaluate(task.model, task.feed, accuracy.test, ["quantised-accuracy-v1"])
                result["quantised"] = {key: float(f"{entry:.4g}") for key, entry in rounded[0].values.items()}
            if config.get("pets"):
                result["mean_iou"] = segmented(task.model, config["pets"], task.feed.size)
            if config["preset"] == "tiny-imagenet":
                result["top5"] = top_five(task.model, accuracy.test)
        except unskip.errors.TrainingError as error:
            result["diverged"] = str(error).partition(": ")[2]
        rows = [{key: float(entry) for key, entry in row.items()} for row in run.read("metrics.jsonl")]
    if rows:
        result["loss"] = [[row["step"], round(row["loss"], 4)] for row in rows[:: max(1, len(rows) // 20)]]
        tail = [row for row in rows if row["step"] > 0.9 * schedule.steps] or rows[-1:]
        result["train_loss"] = round(statistics.mean(row["loss"] for row in tail), 4)
        result["train_accuracy"] = round(statistics.mean(row["train_accuracy"] for row in tail), 4)
        result["images_per_second"] = round(statistics.median(row["samples_per_second"] for row in rows))
    names = [*looks[0]]
    result["watch"] = {"step": [*looks]} | {name: [look[name] for look in looks.values()] for name in names}
    result["steps"] = {"step": [*keeper.relative], "step / weight": [*keeper.relative.values()]}
    result["steps"]["weight"] = [*keeper.sizes.values()]
    result["total_steps"] = schedule.steps
    return result


def segmented(model: Any, source: str, size: int) -> list[float]:
    """Mean IoU of pet and background by block: ridge regression on frozen patch features."""
    import dataclasses

    from unskip import data, evals

    sets = [data.open_dense(source, split, size=size, values=PETS) for split in ("train", "test")]
    sets = [dataclasses.replace(each, ignore=255) for each in sets]
    return [round(each.values["mean_iou"], 4) for each in evals.evaluate(model, *sets, ["segment-ridge-v1"], batch=512)]


def top_five(model: Any, test: Any) -> float:
    """Top-5 accuracy."""
    import torch

    right = count = 0
    with torch.no_grad():
        for images, labels in test.evaluate():
            right += int((model(images).topk(5).indices == labels[:, None]).sum())
            count += len(labels)
    return right / count


def planned(config: Config) -> Any:
    """The supervised recipe's config; initialisation and optimizer options are applied afterwards."""
    import unskip

    preset = config["preset"]
    pool = "class_token=false,global_pool=avg," if config["pool"] == "avg" else ""
    names = ("shortcut", "where", "optimizer", "lr", "weight_decay", "epochs", "seed", "validate", "device", "data")
    names += ("mixup", "cutmix", "steps")
    fields = {name: config[name] for name in names if name in config}
    if "steps" in fields:
        del fields["epochs"]
    fields["model_args"] = f"{pool}{SHAPES[preset]},num_heads={heads_of(config)}"
    if "mlp_ratio" in config:
        fields["model_args"] += f",mlp_ratio={config['mlp_ratio']}"
    fields |= {"checkpoint_every": 1_000_000, "health": False}
    if config["head_dim"] is not None:
        fields["model_args"] += f",attn_head_dim={config['head_dim'] if preset != 'digits' else 16}"
    if preset != "digits":
        fields |= {"log_every": 40, "graph": True}
    return unskip.recipes.supervised(preset, **fields)


def heads_of(config: Config) -> int:
    """Heads per block. On digits the width is 64, which 3 does not divide, so other numbers are used."""
    return (
        {1: 1, 2: 2, 3: 4, 6: 8, 12: 16, 18: 24}[config["heads"]]
        if config["preset"] == "digits"
        else int(config["heads"])
    )


def started(model: Any, images: Any, config: Config) -> dict[str, Any]:
    """Initialises a model as its config says, in place; returns what was solved for."""
    import torch
    from _skipless_start import paired_, shifted_, whiten_patches_

    import unskip
    from unskip.errors import UnskipWarning
    from unskip.init import calibrate_, position_code_, skipless_

    draw = torch.Generator().manual_seed(config["seed"])
    result: dict[str, Any] = {}
    if config["whiten"] is not None:
        whiten_patches_(model, images, power=config["whiten"], generator=draw)
    if config["code"] is not None:
        result["code"] = round(position_code_(model, images, scale=config["code"], generator=draw), 3)
    if config["start"]:
        numbers = {name: config[name] for name in ("alpha", "beta", "c")} | {"mlp_gain": config["gain"]}
        numbers |= {"mlp_bias": config["bias"] or 0.0, "centre": config["bias"] is not None}
        if config["carry"] is not None:
            numbers |= {"carry": heads_of(config) - config["even"], "mix": config["carry"]}
        with warnings.catch_warnings(action="ignore", category=UnskipWarning):
            skipless_(model, images[:2], **numbers, generator=draw)
    if config["pairs"] is not None:
        mix = MIX if config["carry"] is None else config["carry"]
        for part in unskip.parts(model, images[:1]).mlps():
            if "shift" in config:
                shifted_(part, config["shift"], mix, generator=draw)
            else:
                paired_(part, config["pairs"], config["gain"], mix, generator=draw)
    if config["target"] is not None:
        noise = {"qk_noise": config["alpha"], "even": config["even"]}
        solved = calibrate_(model, images[:32], config["target"], **noise, generator=draw)
        result["solved"] = [round(each.identity, 3) for each in solved]
    return result


def carrying(parts: Any, config: Config) -> Iterator[Any]:
    """The weights that pass tokens on: W_V and W_O of the first heads, and mirrored pairs among the units of MLPs."""
    heads = 0 if config["carry"] is None else heads_of(config) - config["even"]
    for part in parts.attentions():
        yield from (part.v[:heads], part.out[:, : heads * part.v.shape[1]])
        if part.v_bias is not None:
            yield part.v_bias.view(part.heads, -1)[:heads]
    for part in parts.mlps():
        if config["pairs"] is not None and not config["pairs_trained"]:
            units = (1 if "shift" in config else 2) * part.up.shape[1]
            yield from (part.up[:units], part.up_bias[:units], part.down[:, :units])


def optimizer(model: Any, config: Config) -> Any:
    import unskip

    more = {"refresh_every": config["refresh"]} if config["optimizer"] == "soap" else {}
    decay = config["weight_decay"] if config["decays"] == "matrices" else 0.0
    return unskip.optim.build(model, config["optimizer"], config["lr"], decay, split_qkv=config["split_qkv"], **more)


class Keeper:
    """Hooks around each optimizer step: scaled or frozen weights, separate weight decay, EMA, relative step sizes."""

    def __init__(self, model: Any, parts: Any, steps: int) -> None:
        self.slow: list[Any] = []
        self.fixed: list[Any] = []
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.means = [weight.clone() for weight in self.weights]
        self.roles: dict[str, list[Any]] = {}
        for part in parts.attentions():
            for name, view in (("q", part.q), ("k", part.k), ("v", part.v), ("out", part.out)):
                self.roles.setdefault(name, []).append(view)
        for part in parts.mlps():
            for name, view in (("up", part.up), ("down", part.down)):
                self.roles.setdefault(name, []).append(view)
        self.moments = {round(share * steps) for share in (0.02, 0.1, 0.3, 0.6, 0.9)}
        self.relative: dict[int, dict[str, float]] = {}
        self.sizes: dict[int, dict[str, float]] = {}
        self.held: dict[str, list[Any]] = {}
        self.shrinking: list[tuple[Any, int]] = []

    def slow_down(self, views: list[Any], factor: float) -> None:
        """Scales each step of these weights, weight decay included, by a factor; 0 freezes them."""
        self.slow, self.factor = views, factor
        self.before_slow = [view.clone() for view in views]

    def decay(self, optimizer: Any, parts: Any, what: str, rate: float) -> None:
        """Applies weight decay here instead of in the optimizer, to a choice of weights.

        all         every weight and bias of a branch
        but QK      the same without W_Q, W_K and their biases
        scale-free  weights that a norm follows: W_V, W_O, W_down and their biases at the matching rate, so that only
                    the length of the branch output changes, which the norm removes; not W_Q, W_K, W_up
        """
        if what == "matrices":
            return
        self.optimizer, self.rate = optimizer, rate
        for part in parts.attentions():
            self.shrinking += [(part.v, 1), (part.v_bias, 1), (part.out, 1), (part.out_bias, 2)]
            if what == "all":
                self.shrinking += [(view, 1) for view in (part.q, part.k, part.q_bias, part.k_bias)]
        for part in parts.mlps():
            self.shrinking += [(part.down, 1), (part.down_bias, 1)]
            if what in ("all", "but QK"):
                self.shrinking += [(part.up, 1), (part.up_bias, 1)]
        self.shrinking = [(view, power) for view, power in self.shrinking if view is not None]

    def fix(self, parts: Any, heads: int) -> None:
        """Freezes W_Q and W_K of the first heads of each attention."""
        for part in parts.attentions():
            self.fixed += [part.q[:heads], part.k[:heads]]
            self.fixed += [bias.view(part.heads, -1)[:heads] for bias in (part.q_bias, part.k_bias)]
        self.start = [view.clone() for view in self.fixed]

    def before(self, step: int) -> None:
        if step in self.moments:
            self.held = {name: [view.clone() for view in views] for name, views in self.roles.items()}

    def after(self, step: int) -> None:
        import torch

        with torch.no_grad():
            if self.slow:
                torch._foreach_lerp_(self.slow, self.before_slow, 1 - self.factor)
                torch._foreach_copy_(self.before_slow, self.slow)
            if self.shrinking:
                keep = 1 - self.optimizer.param_groups[0]["lr"] * self.rate
                for power in (1, 2):
                    torch._foreach_mul_([view for view, each in self.shrinking if each == power], keep**power)
            if self.fixed:
                torch._foreach_copy_(self.fixed, self.start)
            torch._foreach_lerp_(self.means, self.weights, 1 - EMA if step else 1.0)
            if self.held:
                self.relative[step], self.sizes[step] = {}, {}
                for name, views in self.roles.items():
                    pairs = [*zip(views, self.held[name], strict=True)]
                    size = [float(view.norm()) for view in views]
                    moved = [float((view - old).norm()) / own for (view, old), own in zip(pairs, size, strict=True)]
                    self.relative[step][name] = float(f"{statistics.mean(moved):.4g}")
                    self.sizes[step][name] = float(f"{statistics.mean(size):.4g}")
                self.held = {}

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model has its EMA weights."""

        saved = [weight.clone() for weight in self.weights]
        for weight, mean in zip(self.weights, self.means, strict=True):
            weight.copy_(mean)
        yield
        for weight, old in zip(self.weights, saved, strict=True):
            weight.copy_(old)
