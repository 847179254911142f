"""The fields that every run has. A recipe's config adds its own, and sets other defaults."""

from __future__ import annotations

from dataclasses import dataclass

from unskip.training import Precision


@dataclass(frozen=True)
class Config:
    """What a run is. `steps`, where given, counts instead of `epochs`. Comments are the help of `unskip train`."""

    preset: str = "digits"  # where the other defaults come from
    data: str = "digits"  # a named set, a folder of class folders or parquet files; several are joined by +
    data_root: str | None = None  # where the files of a named set lie; None: ~/.cache/unskip
    skip_broken: bool = False  # leave out, count and report images that cannot be read, instead of an error
    download: bool = False  # let torchvision get a named set that is not there
    model: str = "timm:vit_tiny_patch16_224"  # timm:NAME, torchvision:NAME or file.py:FUNCTION
    model_args: str = ""  # further arguments of the builder: "depth=6,embed_dim=96"
    size: int = 32  # of images, in pixels
    shortcut: str = "keep"  # keep, cut, decay:0.6, scale:0.7,0.7, learn:1.0, anneal:keep>cut@10000
    where: str | None = None  # attention | mlp: the sites that the shortcut governs; None: all
    init: str = "default"  # default | zero | skipless | skipless:vit-small,centre
    optimizer: str = "adamw"  # adamw | soap | muon
    lr: float = 1e-3  # peak learning rate
    weight_decay: float = 0.05  # of weight matrices; not of biases, norms and embeddings
    batch: int = 512  # images a step, over all processes
    epochs: float = 100  # passes over the training set
    steps: int | None = None  # instead of epochs
    warmup: float = 0.1  # share of the steps
    clip: float | None = None  # the largest norm of the gradient
    precision: Precision = "float32"  # of the forward; weights and optimizer stay float32
    accumulate: int = 1  # parts that a batch is taken in
    compile: bool = False  # torch.compile
    graph: bool = False  # forward and backward as one CUDA graph, on one GPU: removes launch overhead of small models
    shard: bool = False  # spread the weights over the processes (FSDP2); AdamW without averaged weights only
    validate: bool = False  # hold a tenth of the training set out and evaluate on it, for choosing settings
    evaluate_every: int | None = None  # steps; None: at the end
    checkpoint_every: int = 500  # steps
    log_every: int = 20  # steps
    tensorboard: bool = False  # write its event files too
    workers: int = 0  # processes that decode images which are read from disk
    seed: int = 0  # of weights, order and augmentation
    device: str = "auto"  # auto | cpu | cuda | cuda:1

    def idle(self) -> dict[str, str]:
        """The fields that have no effect beside the others, and why; a run that is given one of them is refused."""
        return {} if self.steps is None else {"epochs": f"steps is {self.steps}, and counts instead; set it to None"}
