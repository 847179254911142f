"""The protocols: frozen, named, versioned. A number without its protocol says little, so it is written with every one.

A protocol never changes. What should be done otherwise gets a new name: knn-dino-v2. Settings that a caller changes
(fewer epochs, say) are recorded beside the name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from unskip._words import nearest
from unskip.errors import BadInput

Kind = Literal["knn", "probe", "rank", "finetune", "segment", "discover"]
Pool = Literal["mean", "cls"]
Norm = Literal["none", "layer"]


@dataclass(frozen=True)
class Protocol:
    """How features are judged: which ones, and by what. `norm="layer"` brings every token to mean 0, variance 1."""

    name: str
    kind: Kind
    settings: Mapping[str, Any]
    about: str
    pool: Pool = "mean"
    norm: Norm = "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: everything that decides the number."""
        return {
            "name": self.name,
            "kind": self.kind,
            "pool": self.pool,
            "norm": self.norm,
            "settings": {key: list(v) if isinstance(v, tuple) else v for key, v in self.settings.items()},
        }


def _frozen(*protocols: Protocol) -> Mapping[str, Protocol]:
    return MappingProxyType({each.name: each for each in protocols})


def _settings(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


PROTOCOLS = _frozen(
    Protocol(
        "knn-dino-v1",
        "knn",
        _settings(neighbours=(10, 20, 100, 200), temperature=0.07),
        "Neighbours by cosine, each voting with exp(cosine / T): DINO, arXiv 2104.14294.",
    ),
    Protocol(
        "probe-mae-v1",
        "probe",
        _settings(
            solver="lars",
            epochs=90,
            warmup=10,
            steps_per_epoch=78,  # 1.28 million images in batches of 16384
            largest_batch=16384,
            lr=6.4,  # 0.1 * 16384 / 256
            momentum=0.9,
            trust=0.001,
            weight_decay=0.0,
            batch_norm=True,
            start=0.01,
        ),
        "Batch norm without affine, then a linear layer by LARS: MAE, arXiv 2111.06377. Features are cached, so images "
        "are not augmented; a smaller set has as many steps an epoch as ImageNet, in smaller batches.",
        pool="cls",
        norm="layer",
    ),
    Protocol(
        "probe-decayed-v1",
        "probe",
        _settings(
            solver="adamw", epochs=200, warmup=0, batch=1024, lr=1e-2, weight_decay=0.0, batch_norm=False, start=0.01
        ),
        "A linear layer by AdamW at 1e-2, cosine, 200 epochs, on the mean of all tokens without a norm, as in the "
        "released code of arXiv 2404.10947; batch and weight decay are not known and are ours.",
    ),
    Protocol(
        "probe-lbfgs-v1",
        "probe",
        _settings(solver="lbfgs", standardise=True, c=1.0, iterations=1000, tolerance=1e-6),
        "Logistic regression on standardised features, C = 1 on the sum of losses, by L-BFGS: no seed, and fast.",
    ),
    Protocol(
        "finetune-mae-v1",
        "finetune",
        _settings(
            epochs=100,
            warmup=5,
            batch=1024,
            lr_256=5e-4,  # the learning rate is this times batch / 256
            layer_decay=0.65,
            weight_decay=0.05,
            betas=(0.9, 0.999),
            drop_path=0.1,
            smoothing=0.1,
            mixup=0.8,
            cutmix=1.0,
            erase=0.25,
            crop="resized",
            flip=True,
            start=2e-5,
        ),
        "The whole encoder and a linear head on the mean of the patch tokens: MAE's settings for ViT-B, arXiv "
        "2111.06377, without RandAugment.",
    ),
    Protocol(
        "rank-v1",
        "rank",
        _settings(samples=10_000, center=True),
        "Effective rank of pooled features, as entropy and as its exponential: arXiv 2404.10947; Roy & Vetterli 2007.",
    ),
    Protocol(
        "segment-linear-v1",
        "segment",
        _settings(
            solver="adamw", epochs=40, batch=32, lr=1e-3, weight_decay=1e-4, batch_norm=True, start=0.01, flip=False
        ),
        "A linear layer on frozen patch tokens after batch norm without affine, logits brought to the size of the "
        "labels (bilinear), cross entropy of every labelled pixel; mean IoU from one confusion matrix over the set.",
        pool="mean",
    ),
    Protocol(
        "segment-ridge-v1",
        "segment",
        _settings(solver="ridge", penalty=1e-3),
        "The same map in closed form: ridge regression of each patch's share of classes on standardised tokens, "
        "penalty times patches; logits brought to the size of the labels (bilinear). No seed, and fast.",
    ),
    Protocol(
        "discover-tokencut-v1",
        "discover",
        _settings(tau=0.2, floor=1e-5, iou=0.5),
        "TokenCut on keys, CorLoc against all boxes of an image: arXiv 2202.11539.",
    ),
)


# What a protocol states. A solver has settings of its own, which another one has not; at the rest nobody looks: a
# change would be recorded and change nothing.
_STATED = {
    "probe-mae-v1": ("solver",),
    "probe-decayed-v1": ("solver",),
    "probe-lbfgs-v1": ("solver", "standardise"),
    "segment-linear-v1": ("solver", "flip"),
    "segment-ridge-v1": ("solver",),
    "discover-tokencut-v1": ("floor",),
}


_WHOLE = frozenset(("neighbours", "epochs", "steps_per_epoch", "largest_batch", "batch", "samples"))
_ABOVE_ZERO = _WHOLE | {"temperature", "c", "lr", "lr_256", "penalty"}


def protocol(name: str, kind: Kind | None = None) -> Protocol:
    """The protocol of a name. Raises BadInput with the nearest names."""
    fitting = [each.name for each in PROTOCOLS.values() if kind in (None, each.kind)]
    if name not in fitting:
        other = f"; {name} is of kind {PROTOCOLS[name].kind}" if name in PROTOCOLS else nearest(name, fitting)
        raise BadInput(f"no {kind + ' ' if kind else ''}protocol {name!r}{other}; there are {', '.join(fitting)}")
    return PROTOCOLS[name]


def asked_for(names: Sequence[str], changes: Mapping[str, Mapping[str, Any]] | None = None) -> list[Protocol]:
    """The protocols of some names. Raises BadInput for changes of any other one, or that one does not take."""
    found = [protocol(name) for name in names]
    for name, values in (changes or {}).items():
        if name not in names:
            raise BadInput(f"changes of {name}, which is not asked for; asked for are {', '.join(names)}")
        settings_of(name, protocol(name).kind, values)
    return found


def settings_of(name: str, kind: Kind, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a protocol with some changed. Raises BadInput for one that it does not have, or only states."""
    settings = protocol(name, kind).settings
    unknown = sorted(set(changes or {}) - set(settings))
    if unknown:
        raise BadInput(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(settings)}")
    for stated in _STATED.get(name, ()):
        if stated in (changes or {}):
            others = ", ".join(each for each in settings if each not in _STATED[name])
            raise BadInput(f"{name}: {stated} cannot be changed; of its settings {others} can")
    for setting, value in (changes or {}).items():
        _check(name, kind, setting, value)
    return {**settings, **(changes or {})}


def _check(name: str, kind: Kind, setting: str, value: Any) -> None:
    """Raise where a count, a divisor, a rate or a penalty is no number, or not above 0."""
    if setting not in _ABOVE_ZERO:
        return
    several = setting == "neighbours"
    # Fine-tuning alone can end within an epoch.
    whole = setting in _WHOLE and not (setting == "epochs" and kind == "finetune")
    numbers = value if several else [value]
    kinds: Any = int if whole else (int, float)
    if (
        not isinstance(numbers, list | tuple)
        or not numbers
        or not all(isinstance(each, kinds) and not isinstance(each, bool) and 0 < each < math.inf for each in numbers)
    ):
        form = "whole numbers above 0, as in (10, 20)" if several else f"a {'whole ' if whole else ''}number above 0"
        raise BadInput(f"{name}: {setting} is {value!r}; it is {form}")
