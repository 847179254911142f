"""Feature extractors for generation metrics.

    inception        the standard Inception weights, through torch-fidelity
    timm:NAME        a pretrained timm model
    RUN or FOLDER    a classifier trained with unskip: a run folder, or a folder of unskip.save
    a module         maps bytes to features; pass its name too

The Fréchet distance is called FID with the standard Inception weights, and FD-<name> with any other extractor. Cached
statistics are keyed by a hash of the weights and, for a rewired model, of its shortcuts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip._extras import need
from unskip._modes import evaluating
from unskip.data import preprocess_of
from unskip.errors import BadInput, LoadError, UnskipError
from unskip.evals._extract import image_channels
from unskip.wiring import find_wiring

INCEPTION = "pt_inception-2015-12-05-6726825d.pth"  # the standard FID weights


@dataclass(frozen=True)
class Extractor:
    """Maps bytes (n, channels, height, width) to features (n, dim), and logits if it is a classifier."""

    name: str
    module: nn.Module
    extract: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    key: str  # hash of the weights and shortcuts, and for a module also of its class

    @property
    def distance(self) -> str:
        """The name of the Fréchet distance with this extractor."""
        return "FID" if self.name == "inception" else f"FD-{self.name}"

    @property
    def device(self) -> torch.device:
        """The device of its weights; the CPU if it has none."""
        weight = next(chain(self.module.parameters(), self.module.buffers()), None)
        return torch.device("cpu") if weight is None else weight.device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise BadInput(f"{self.name}: images must be bytes (n, channels, height, width), got {kind_of(images)}")
        with evaluating(self.module):
            features, logits = self._tried(images.to(self.device))
        if features.ndim != 2 or not bool(features.isfinite().all()):
            raise BadInput(f"{self.name}: features must be finite (n, dim), got {tuple(features.shape)}")
        return features.float(), None if logits is None else logits.float()

    def _tried(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        try:
            return self.extract(images)
        except (UnskipError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a module can raise anything for images of the wrong shape
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise BadInput(f"{self.name}: failed on bytes of shape {tuple(images.shape)} ({reason})") from error


def extractor(
    source: str | Path | nn.Module | Extractor, *, name: str | None = None, device: str | torch.device | None = None
) -> Extractor:
    """The extractor for a name, a folder or a module. Raises BadInput or LoadError if it cannot be loaded."""
    if isinstance(source, Extractor):
        return source
    if isinstance(source, nn.Module):
        # Modules with equal weights, or none, can still compute different features.
        key = weights_key(source, f"{type(source).__module__}.{type(source).__qualname__}")
        return Extractor(name or type(source).__name__, source, _plain(source), key)
    if str(source) == "inception":
        return _inception(device)
    if str(source).startswith("timm:"):
        return _timm(str(source).partition(":")[2], name, device)
    return _folder(Path(source), name, device)


def weights_key(module: nn.Module, word: str = "") -> str:
    """A hash of all weights by name, of the shortcuts of rewired modules, and of a word."""
    digest = hashlib.sha256(word.encode())
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for path, part in module.named_modules():
        wiring = find_wiring(part)
        if wiring is not None:
            digest.update(f"{path} {wiring.alphas} {wiring.betas}".encode())
    return digest.hexdigest()[:16]


def _plain(module: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    def extract(images: Tensor) -> tuple[Tensor, None]:
        features: Tensor = module(images)
        if not isinstance(features, Tensor) or features.ndim < 2:
            name = type(module).__name__
            raise BadInput(f"{name}: an extractor must return features (n, dim), got {kind_of(features)}")
        return features.flatten(1), None

    return extract


def _classifier(name: str, module: Any, device: Any) -> Extractor:
    """The features of a timm model before its head, and its logits."""
    module = module.to(device or "cpu").eval()
    preprocess = preprocess_of(module, image_channels(module) or 3)
    size = preprocess.size

    def extract(images: Tensor) -> tuple[Tensor, Tensor | None]:
        x = preprocess.normalised(images)
        if size is not None and tuple(x.shape[2:]) != (size, size):
            x = F.interpolate(x, [size] * 2, mode="bicubic", antialias=True, align_corners=False)
        if not hasattr(module, "forward_features") or not hasattr(module, "forward_head"):
            logits: Tensor = module(x)
            return logits.flatten(1), None
        maps = module.forward_features(x)
        features: Tensor = module.forward_head(maps, pre_logits=True)
        return features.flatten(1), module.forward_head(maps) if getattr(module, "num_classes", 0) else None

    return Extractor(name, module, extract, weights_key(module))


def _timm(model: str, name: str | None, device: Any) -> Extractor:
    timm = need("timm")
    try:
        module: Any = timm.create_model(model, pretrained=True)
    except Exception as error:  # the hub raises many types without a network
        raise LoadError(
            f"timm:{model}: cannot load its pretrained weights ({str(error).partition(chr(10))[0][:200]}). Download "
            "them with a network connection, or use a run folder as extractor: unskip train supervised"
        ) from error
    return _classifier(name or model, module, device)


def _folder(folder: Path, name: str | None, device: Any) -> Extractor:
    from unskip.training import RunFolder, ema_weights
    from unskip.wiring import load

    if not folder.is_dir():
        raise BadInput(f"{folder}: not an extractor; use inception, timm:NAME, a run folder or one of unskip.save")
    weights = folder
    if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
        run = RunFolder.open(folder)
        checkpoint = run.last_checkpoint()
        if checkpoint is None:
            raise LoadError(f"{folder}: the run has no checkpoint yet; run unskip resume {folder}")
        weights = checkpoint[1]
    try:
        module: Any = load(weights)
    except UnskipError as error:
        raise LoadError(f"{folder}: cannot load a model as extractor: {error}") from error
    ema = ema_weights(weights)  # runs are evaluated with their EMA weights
    if ema is not None:
        module.load_state_dict(ema)
    return _classifier(name or folder.resolve().name, module, device)


def _inception(device: Any) -> Extractor:
    file = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import (  # type: ignore[import-not-found,unused-ignore]
            FeatureExtractorInceptionV3,
        )
    except ImportError as error:
        raise BadInput(
            "inception needs torch-fidelity: pip install torch-fidelity, or choose another extractor"
        ) from error
    if not file.is_file():
        raise LoadError(
            f"{file}: the standard Inception weights are missing. Put {INCEPTION} there; with any other extractor the "
            "distance is not FID"
        )
    module: Any = FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], str(file))
    module = module.to(device or "cpu").eval()

    def extract(images: Tensor) -> tuple[Tensor, Tensor]:
        features, logits = module(images.expand(-1, 3, -1, -1))
        return features, logits

    return Extractor("inception", module, extract, weights_key(module))
