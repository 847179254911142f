"""How images become the inputs of a model: its size, crop, interpolation, mean and standard deviation.

    x = (resize(central crop of an image) / 255 - mean) / std

A model is evaluated with its own: a ViT that was trained on [0, 1] loses ten points of kNN accuracy with the mean and
standard deviation of ImageNet. `preprocess_of` asks, in this order,

    what is kept with the model (`set_preprocess`), as by a run or by `unskip.load`
    timm's `pretrained_cfg`, where its mean has as many channels as the images
    the image processor that lies beside the weights of a Hugging Face model

and takes ImageNet's, or 0.5 for images that are not in colour, where none of them says anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unskip.data._augment import Augment, Interpolation, normalisation
from unskip.errors import BadInput
from unskip.wiring import about

_RESAMPLE: dict[Any, Interpolation] = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}


@dataclass(frozen=True)
class Preprocess:
    """What is done to an image before a model sees it. `crop` is the share of the shorter side that is kept."""

    mean: tuple[float, ...]  # by channel, of values from 0 to 1
    std: tuple[float, ...]
    size: int | None = None  # of the square that the model takes; None: the images' own
    interpolation: Interpolation = "bilinear"
    crop: float = 1.0
    source: str = "the caller"  # who says so

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        self.augment()  # it checks them

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in each) for each in (self.mean, self.std))
        size = "own size" if self.size is None else f"size {self.size}"
        return f"{size}, crop {self.crop:g}, {self.interpolation}, mean {mean}, std {std} (from {self.source})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as a row of evals.jsonl holds it."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    def given(self, **fields: Any) -> Preprocess:
        """With these fields in place of its own, and a source that names them."""
        return replace(self, **fields, source=f"{self.source}; {', '.join(fields)} from the caller")

    def augment(self, **training: Any) -> Augment:
        """For a Feed: evaluation without augmentation, or training with this mean, standard deviation and size."""
        fields: dict[str, Any] = {"mean": self.mean, "std": self.std, "center": self.crop}
        fields["interpolation"] = self.interpolation
        still: dict[str, Any] = {"crop": "center", "flip": False}
        found = Augment(**(still | training | fields))
        normalisation(found, len(self.mean))
        return found

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes (..., channels, height, width) to floats."""
        mean, std = self._tensors(images)
        return (images.float() / 255 - mean) / std

    def pixels(self, values: Tensor) -> Tensor:
        """The bytes that `normalised` made these values of."""
        mean, std = self._tensors(values)
        return ((values * std + mean) * 255).round().clamp(0, 255).byte()

    def _tensors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if images.shape[-3] != len(self.mean):
            raise BadInput(
                f"images of {images.shape[-3]} channels, and a mean of {len(self.mean)} (from {self.source}); give "
                "normalise=(mean, std) with a number for each channel"
            )
        mean, std = (torch.tensor(each, device=images.device)[:, None, None] for each in (self.mean, self.std))
        return mean, std


Normalise = Preprocess | tuple[Sequence[float], Sequence[float]]  # preprocessing, or mean and standard deviation


def set_preprocess(model: nn.Module, preprocess: Preprocess) -> None:
    """Records with a model how its images are made; `preprocess_of` reads it."""
    about(model)["preprocess"] = preprocess.to_dict()


def usual_preprocess(channels: int, size: int | None = None, source: str = "the default") -> Preprocess:
    """ImageNet's mean and standard deviation, or 0.5 for images that are not in colour: what `Feed` does by default."""
    mean, std = normalisation(None, channels)
    return Preprocess(mean, std, size, source=source)


def preprocess_of(model: nn.Module, channels: int = 3, normalise: Normalise | None = None) -> Preprocess:
    """How images of so many channels are made for a model; `normalise` takes the place of what the model says."""
    if isinstance(normalise, Preprocess):
        return normalise
    own = known_preprocess(model, channels) or usual_preprocess(channels, _size(model))
    if normalise is None:
        return own
    mean, std = normalise
    return own.given(mean=tuple(mean), std=tuple(std))


def known_preprocess(model: nn.Module, channels: int) -> Preprocess | None:
    """What is kept with a model, or its library says; None where neither says anything."""
    kept = about(model).get("preprocess")
    if kept is None:
        return _of_timm(model, channels) or _of_hugging_face(model, channels)
    try:
        return Preprocess(**kept)
    except (TypeError, ValueError, BadInput) as error:
        raise BadInput(f"the preprocessing that is kept with {type(model).__name__} does not read: {error}") from error


def _size(model: nn.Module) -> int | None:
    """The side of the images that a ViT of timm was built for."""
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return int(size[0]) if isinstance(size, tuple | list) and size[0] == size[1] else None


def _of_timm(model: nn.Module, channels: int) -> Preprocess | None:
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or len(config.get("mean") or ()) != channels:
        return None
    size = _size(model)
    sides: Any = config.get("input_size") or ()
    if size is None and len(sides) == 3 and sides[1] == sides[2]:
        size = int(sides[1])
    way = _RESAMPLE.get(config.get("interpolation"), "bilinear")
    return Preprocess(config["mean"], config["std"], size, way, float(config.get("crop_pct") or 1), "timm's config")


def _of_hugging_face(model: nn.Module, channels: int) -> Preprocess | None:
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    if not place or not type(model).__module__.startswith("transformers"):
        return None
    from transformers import ImageProcessingMixin

    try:
        said, _ = ImageProcessingMixin.get_image_processor_dict(place, local_files_only=True)
    except (OSError, ValueError):
        return None  # it has none, or none in the cache
    mean, std = said.get("image_mean"), said.get("image_std")
    if said.get("do_normalize") is False or mean is None or std is None:
        mean, std = (0.0,) * channels, (1.0,) * channels
    if len(mean) != channels:
        return None
    whole, kept = _side(said.get("size")), _side(said.get("crop_size")) if said.get("do_center_crop") else None
    crop = min(1.0, kept / whole) if kept and whole else 1.0
    way = _RESAMPLE.get(said.get("resample"), "bilinear")
    return Preprocess(mean, std, kept or whole, way, crop, "its image processor")


def _side(said: object) -> int | None:
    """The side of a square in an image processor's words."""
    if isinstance(said, Mapping):
        sides = [said.get(name) for name in ("shortest_edge", "height", "width") if said.get(name)]
        said = sides[0] if sides and len({*sides}) == 1 else None
    return said if isinstance(said, int) else None
