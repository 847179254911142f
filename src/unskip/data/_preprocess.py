"""Preprocessing of a model's input images: size, crop, interpolation, mean and standard deviation.

    x = (resize(central crop of an image) / 255 - mean) / std

A model needs the preprocessing it was trained with: a ViT trained on [0, 1] loses ten points of kNN accuracy with the
mean and standard deviation of ImageNet. `preprocess_of` uses the first that exists of

    the record stored with the model by `set_preprocess`, as by a run or by `unskip.load`
    timm's `pretrained_cfg`, if its mean has as many channels as the images
    the image processor beside the weights of a Hugging Face model
    ImageNet's mean and standard deviation, or 0.5 for images that are not in colour, at the size of the model or of
    its config
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
    """Preprocessing of images for a model. `crop` is the fraction of the shorter side that is kept."""

    mean: tuple[float, ...]  # per channel, of values in [0, 1]
    std: tuple[float, ...]
    size: int | None = None  # the side of the model's square inputs; None: that of the images
    interpolation: Interpolation = "bilinear"
    crop: float = 1.0
    source: str = "the caller"  # the origin of these settings

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        self.augment()  # checks the fields

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        size = "own size" if self.size is None else f"size {self.size}"
        return f"{size}, crop {self.crop:g}, {self.interpolation}, mean {mean}, std {std} (from {self.source})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in a row of evals.jsonl."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    def given(self, **fields: Any) -> Preprocess:
        """A copy with these fields replaced, and named in its source."""
        return replace(self, **fields, source=f"{self.source}; {', '.join(fields)} from the caller")

    def augment(self, **training: Any) -> Augment:
        """The augmentation of a Feed: none but the crop, for evaluation; or with the `training` fields of Augment."""
        fields: dict[str, Any] = {"crop": "center", "flip": False, **training}
        fields |= {"mean": self.mean, "std": self.std, "center": self.crop, "interpolation": self.interpolation}
        augment = Augment(**fields)
        normalisation(augment, len(self.mean))  # checks the mean and std
        return augment

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes (..., channels, height, width) to floats."""
        mean, std = self._tensors(images)
        return (images.float() / 255 - mean) / std

    def pixels(self, values: Tensor) -> Tensor:
        """The inverse of `normalised`, rounded to bytes."""
        mean, std = self._tensors(values)
        return ((values * std + mean) * 255).round().clamp(0, 255).byte()

    def _tensors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if images.shape[-3] != len(self.mean):
            raise BadInput(
                f"images of {images.shape[-3]} channels, but a mean of {len(self.mean)} (from {self.source}); give "
                "normalise=(mean, std) with one number per channel"
            )
        mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (self.mean, self.std))
        return mean, std


Normalise = Preprocess | tuple[Sequence[float], Sequence[float]]  # preprocessing, or mean and standard deviation


def set_preprocess(model: nn.Module, preprocess: Preprocess) -> None:
    """Stores the preprocessing with a model, for `preprocess_of`."""
    about(model)["preprocess"] = preprocess.to_dict()


def usual_preprocess(channels: int, size: int | None = None, source: str = "the default") -> Preprocess:
    """ImageNet's mean and standard deviation, or 0.5 for images that are not in colour: the default of `Feed`."""
    mean, std = normalisation(None, channels)
    return Preprocess(mean, std, size, source=source)


def preprocess_of(model: nn.Module, channels: int = 3, normalise: Normalise | None = None) -> Preprocess:
    """The preprocessing of a model for images of `channels` channels; `normalise` overrides it."""
    if isinstance(normalise, Preprocess):
        return normalise
    own = known_preprocess(model, channels) or usual_preprocess(channels, _size(model))
    if normalise is None:
        return own
    mean, std = normalise
    return own.given(mean=tuple(mean), std=tuple(std))


def known_preprocess(model: nn.Module, channels: int) -> Preprocess | None:
    """The preprocessing stored with a model, or that of its library; None if there is neither."""
    stored = about(model).get("preprocess")
    if stored is None:
        return _of_timm(model, channels) or _of_hugging_face(model, channels)
    try:
        return Preprocess(**stored)
    except (TypeError, ValueError, BadInput) as error:
        raise BadInput(f"the preprocessing stored with {type(model).__name__} is invalid: {error}") from error


def _size(model: nn.Module) -> int | None:
    """The image side that a ViT of timm, or the config of a Hugging Face model, was built for."""
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None and type(model).__module__.startswith("transformers"):
        config: Any = getattr(model, "config", None)
        size = getattr(getattr(config, "vision_config", config), "image_size", None)
    first, last = (size[0], size[-1]) if isinstance(size, tuple | list) else (size, size)
    return first if isinstance(first, int) and first == last else None


def _of_timm(model: nn.Module, channels: int) -> Preprocess | None:
    config = getattr(model, "pretrained_cfg", None)
    if not isinstance(config, Mapping) or len(config.get("mean") or ()) != channels:
        return None
    size = _size(model)
    sides: Any = config.get("input_size") or ()
    if size is None and len(sides) == 3 and sides[1] == sides[2]:
        size = int(sides[1])
    interpolation, crop = _RESAMPLE.get(config.get("interpolation"), "bilinear"), float(config.get("crop_pct") or 1)
    return Preprocess(config["mean"], config["std"], size, interpolation, crop, "timm's config")


def _of_hugging_face(model: nn.Module, channels: int) -> Preprocess | None:
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not name or not type(model).__module__.startswith("transformers"):
        return None
    from transformers import ImageProcessingMixin

    try:
        config, _ = ImageProcessingMixin.get_image_processor_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return None  # it has none, or none in the cache
    mean, std = config.get("image_mean"), config.get("image_std")
    if config.get("do_normalize") is False or mean is None or std is None:
        mean, std = (0.0,) * channels, (1.0,) * channels
    if len(mean) != channels:
        return None
    resized, cropped = _side(config.get("size")), None
    if config.get("do_center_crop"):
        cropped = _side(config.get("crop_size"))
    crop = min(1.0, cropped / resized) if cropped and resized else 1.0
    interpolation = _RESAMPLE.get(config.get("resample"), "bilinear")
    return Preprocess(mean, std, cropped or resized, interpolation, crop, "its image processor")


def _side(size: object) -> int | None:
    """The side of a square, from a size in an image processor's config: a number or a mapping."""
    if isinstance(size, Mapping):
        sides = [size.get(name) for name in ("shortest_edge", "height", "width") if size.get(name)]
        size = sides[0] if sides and len({*sides}) == 1 else None
    return size if isinstance(size, int) else None
