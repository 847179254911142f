"""The fields that every run has. A recipe's config adds its own, and sets other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unskip.optim import Decays
from unskip.training import Precision, RunFolder


@dataclass(frozen=True)
class Config:
    """What a run is. `steps`, where given, replaces `epochs`. Comments are the help of `unskip train`."""

    no_use: ClassVar[dict[str, str]] = {}  # fields that a recipe has no use for, and why; its command does without them

    preset: str = "digits"  # where the other defaults come from
    data: str = "digits"  # a named set, a folder of class folders, parquet files or tar shards; several are joined by +
    data_root: str | None = None  # where the files of a named set lie; None: ~/.cache/unskip
    download: bool = False  # let torchvision download a named set that is missing
    size: int = 32  # of images, in pixels
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"  # of training images that are cropped and resized
    workers: int | None = None  # processes that decode images which are read from disk; None: by the cores
    model: str = "timm:vit_tiny_patch16_224"  # timm:NAME, torchvision:NAME or file.py:FUNCTION
    model_args: str = ""  # further arguments of the builder: "depth=6,embed_dim=96"
    shortcut: str = "keep"  # keep, cut, decay:0.6, scale:0.7,0.7, learn:1.0, anneal:keep>cut@10000
    where: str | None = None  # attention | mlp: the sites that the shortcut governs; None: all
    init: str = "default"  # default | zero | skipless | skipless:shaped | skipless:paired, position_code=orthogonal
    freeze_heads: int | None = None  # the first heads of each attention stay as init makes them, and its paired units
    carry_rate: float = 0.0  # their W_V and W_O and paired units move by this share of a step instead
    weights: str | None = None  # weights to start from
    optimizer: str = "adamw"  # adamw | soap | muon | any optimizer of timm
    lr: float = 1e-3  # peak learning rate
    weight_decay: float = 0.05  # of what `decays` says
    decays: Decays = "matrices"  # matrices: all weight matrices | blocks: weights and biases of the blocks alone
    batch: int = 512  # images a step, over all processes
    epochs: float = 100  # passes over the training set
    steps: int | None = None  # instead of epochs
    warmup: float = 0.1  # fraction of the steps
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay of the EMA of the weights, which is then evaluated; None: no EMA
    precision: Precision = "float32"  # of the forward pass; weights and optimizer stay float32
    accumulate: int = 1  # gradient accumulation: parts that a batch is split into
    grad_checkpointing: bool = False  # compute activations of blocks again in the backward pass: less memory, slower
    compile: bool = False  # torch.compile
    graph: bool = False  # forward and backward as one CUDA graph, on one GPU: removes launch overhead of small models
    fsdp: bool = False  # shard the weights over the processes (FSDP2)
    validate: bool = False  # hold out a tenth of the training set and evaluate on it, for choosing settings
    evaluate_every: int | None = None  # steps; None: at the end
    online_images: int = 10_000  # images of each split for kNN and rank during training
    health: bool = True  # check features and attention with each evaluation, and warn; takes some seconds
    checkpoint_every: int = 500  # steps
    log_every: int = 20  # steps
    tracker: str | None = None  # wandb, mlflow, tensorboard, ...: a second copy of the log; several by commas
    seed: int = 0  # of weights, order and augmentation
    device: str = "auto"  # auto (a GPU where there is one) | cpu | cuda | cuda:1 | mps

    @property
    def inputs(self) -> str:
        """What the model is trained on, in words."""
        return f"images of {self.size} x {self.size} from {self.data}"

    def sizes_fit(self, model: str) -> bool:
        """Whether a preset's model_args fit another model than its own; otherwise they are left out for it."""
        return False

    def resumed(self, run: RunFolder) -> Config:
        """The config that a run is resumed with, where it reads something from its own folder then."""
        return self

    def unused(self) -> dict[str, str]:
        """Fields that have no effect beside the others, with the reason; a run that sets one of them is refused."""
        replaced = {"epochs": f"steps is {self.steps}, which replaces it; set steps to None"}
        return self.no_use | (replaced if self.steps is not None else {})
