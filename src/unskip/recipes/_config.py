"""The config fields of every recipe. A recipe's config adds fields and changes defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from unskip.optim import Decays
from unskip.training import Precision, RunFolder


@dataclass(frozen=True)
class Config:
    """The config of a run. `steps`, if given, replaces `epochs`. Comments are the help of `unskip train`."""

    no_use: ClassVar[dict[str, str]] = {}  # fields that a recipe does not use, and why; its command leaves them out

    preset: str = "digits"  # source of the other defaults
    data: str = "digits"  # a named set, a folder of class folders, parquet files or tar shards
    data_root: str | None = None  # folder of a named set's files; None: ~/.cache/unskip
    download: bool = False  # let torchvision download a named set that is missing
    size: int = 32  # of images, in pixels
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"  # for cropped and resized training images
    workers: int | None = None  # processes that decode images from disk; None: by the number of cores
    model: str = "timm:vit_tiny_patch16_224"  # timm:NAME, torchvision:NAME or file.py:FUNCTION
    model_args: str = ""  # further arguments of the builder: "depth=6,embed_dim=96"
    shortcut: str = "keep"  # keep, cut, decay:0.6, scale:0.7,0.7, learn:1.0, anneal:keep>cut@10000
    where: str | None = None  # attention | mlp: the sites that the shortcut applies to; None: all
    init: str = "default"  # default | zero | skipless | skipless:shaped | skipless:paired, position_code=orthogonal
    freeze_heads: int | None = None  # first heads per attention (those of carry=) kept as initialised, and paired units
    carry_rate: float = 0.0  # if above 0, their W_V, W_O and paired units take this fraction of each step
    weights: str | None = None  # weights to start from
    optimizer: str = "adamw"  # adamw | soap | muon | any optimizer of timm or of unskip.optim.register
    lr: float = 1e-3  # peak learning rate
    weight_decay: float = 0.05  # of the parameters selected by `decays`
    decays: Decays = "matrices"  # matrices: all weight matrices | blocks: weights and biases of the blocks only
    batch: int = 512  # images per step, over all processes
    epochs: float = 100  # passes over the training set
    steps: int | None = None  # replaces epochs
    warmup: float = 0.1  # fraction of the steps
    clip: float | None = None  # largest norm of the gradient
    ema: float | None = None  # decay of the EMA of the weights, which is then evaluated; None: no EMA
    precision: Precision = "float32"  # of the forward pass; weights and optimizer stay float32
    accumulate: int = 1  # gradient accumulation: parts that a batch is split into
    grad_checkpointing: bool = False  # recompute activations of blocks in the backward pass: less memory, slower
    compile: bool = False  # torch.compile
    graph: bool = False  # forward and backward as one CUDA graph, on one GPU: removes launch overhead of small models
    fsdp: bool = False  # shard the weights over the processes (FSDP2)
    validate: bool = False  # hold out a tenth of the training set and evaluate on it, for choosing settings
    evaluate_every: int | None = None  # steps; None: at the end
    online_images: int = 10_000  # images of each split for kNN and rank during training
    health: bool = True  # check features and attention at each evaluation, and warn; takes some seconds
    checkpoint_every: int = 500  # steps
    log_every: int = 20  # steps
    tracker: str | None = None  # wandb, mlflow, tensorboard, ...: also log there; several separated by commas
    seed: int = 0  # of weights, order and augmentation
    device: str = "auto"  # auto (a GPU if available) | cpu | cuda | cuda:1 | mps

    @property
    def inputs(self) -> str:
        """A description of the training data."""
        return f"images of {self.size} x {self.size} from {self.data}"

    def sizes_fit(self, model: str) -> bool:
        """Whether a preset's model_args also fit this model; if not, they are dropped."""
        return False

    def resumed(self, run: RunFolder) -> Config:
        """The config for resuming or opening a run; may replace paths by ones inside the run folder."""
        return self

    def unused(self) -> dict[str, str]:
        """Fields without effect in this config, with the reason; a run that sets one is refused."""
        reasons = dict(self.no_use)
        if self.steps is not None:
            reasons["epochs"] = f"steps is {self.steps}, which replaces it; set steps to None"
        if self.shortcut == "keep" and self.init == "default":
            reasons["where"] = "it chooses sites for a shortcut or an init; give one"
        return reasons
