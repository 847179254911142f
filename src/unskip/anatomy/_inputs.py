"""Example arguments for a model of transformers: the names in its forward's signature, in the sizes of its config.

input_ids       (batch, tokens)                     with one placeholder token for each image or audio feature
pixel_values    (batch, channels, height, width)    or flattened patches with their grid, or frames of a video
input_features  (batch, bins, frames)               of a spectrogram; (batch, frames, bins) for some
input_values    (batch, samples)                    of a waveform
"""

from __future__ import annotations

import contextlib
import inspect
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip._modes import quiet
from unskip.anatomy._example import BATCH, TOKENS, Maker

_IMAGE = 64  # for convolutional models, whose configs name no size because they accept any
_SECOND = 16_000  # samples
_FRAMES = 128  # of a spectrogram
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "n_mels", "mel_bins", "input_dim")
_MASKS = ("input_features_mask", "feature_attention_mask")  # masks over the frames of a spectrogram


def transformers_inputs(maker: Maker) -> dict[str, Any] | None:
    """The arguments by name, or None if the model is not of transformers or they cannot be inferred."""
    model: Any = maker.model
    if not hasattr(getattr(model, "config", None), "model_type") or not hasattr(model, "main_input_name"):
        return None
    return _Inputs(maker, model).arguments() or None


class _Inputs:
    def __init__(self, maker: Maker, model: Any) -> None:
        self.maker, self.model = maker, model
        self.config = model.config
        self.takes = set(inspect.signature(model.forward).parameters)

    def arguments(self) -> dict[str, Any]:
        inputs = {**self._images(), **self._audio()}
        if "past_values" in self.takes or "inference_session" in self.takes:
            return {}  # a time series, or a video with a state: the config does not determine these
        ids = self._ids("input_ids", decoder=False)
        if ids is not None and not ("input_features" in self.takes and self._is_speech_to_text()):
            inputs["input_ids"] = ids = self._with_tokens(ids, inputs)
            token = self._token("image")
            if "mm_token_type_ids" in self.takes and token is not None and "pixel_values" in inputs:
                inputs["mm_token_type_ids"] = ids.eq(token).long()
        if getattr(self.config, "is_encoder_decoder", False):
            ids = self._ids("decoder_input_ids", decoder=True)
            inputs |= {} if ids is None else {"decoder_input_ids": ids}
        if "bbox" in self.takes and "input_ids" in inputs:
            inputs["bbox"] = self._boxes(inputs["input_ids"])
        return inputs

    # --- Text ---------------------------------------------------------------------------------------------------------

    def _ids(self, name: str, decoder: bool) -> Tensor | None:
        size = self._vocabulary(decoder)
        if name not in self.takes or size is None:
            return None
        ids = self.maker.ids(size, BATCH, TOKENS)
        for special in self._specials():  # an image token without an image is an error
            ids = torch.where(ids == special, (special + 1) % size, ids)
        return ids

    def _vocabulary(self, decoder: bool) -> int | None:
        names = (
            ("decoder", "decoder_config", "text_config") if decoder else ("text_config", "encoder_config", "encoder")
        )
        parts = [self.config, *(getattr(self.config, name, None) for name in names)]
        sizes = [getattr(part, "vocab_size", None) for part in reversed(parts)]
        return next((size for size in sizes if isinstance(size, int) and size > 0), None)

    def _specials(self) -> list[int]:
        parts = [self.config, getattr(self.config, "text_config", None)]
        fields = {name: value for part in parts if part is not None for name, value in vars(part).items()}
        named = [v for name, v in fields.items() if name.endswith(("_token_id", "_token_index")) and type(v) is int]
        return sorted(set(named))

    def _boxes(self, ids: Tensor) -> Tensor:
        """The box of each token on the page: integers up to 1000, or fractions of the page size."""
        box = torch.tensor([10, 20, 30, 40], device=ids.device)
        integral = hasattr(self.config, "max_2d_position_embeddings")
        return (box if integral else (box / 1000).to(self.maker.dtype)).repeat(*ids.shape, 1)

    def _with_tokens(self, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Prepends to each row one placeholder token for each image or audio feature that the model computes."""
        for kind, main in (("image", "pixel_values"), ("audio", "input_features"), ("audio", "input_values")):
            token = self._token(kind)
            method = getattr(self.model, f"get_{kind}_features", None)
            if main not in inputs or token is None or method is None:
                continue
            rows = self._features(method, inputs)
            if rows is None and "image_sizes" in inputs:  # some towers accept one image size and no `image_sizes`
                del inputs["image_sizes"]
                rows = self._features(method, inputs)
            if kind == "audio" and (rows is None or ids.device.type == "meta"):
                for name in (main, *_MASKS):  # these models also run on text alone
                    inputs.pop(name, None)
            elif rows is not None:
                ids = torch.cat([ids.new_full((BATCH, rows), token), ids], dim=1)
        return ids

    def _token(self, kind: str) -> int | None:
        return getattr(self.config, f"{kind}_token_id", getattr(self.config, f"{kind}_token_index", None))

    def _features(self, method: Any, inputs: dict[str, Any]) -> int | None:
        """The number of features that the model computes per image or audio input, or None if that fails."""
        takes = inspect.signature(method).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        arguments = {k: v.clone() for k, v in inputs.items() if k in takes or (open_ended and k not in self.takes)}
        with quiet(self.model, training=False), contextlib.suppress(Exception):
            output = method(**arguments)
            parts = [getattr(output, name, None) for name in ("pooler_output", "last_hidden_state")]
            output = next((part for part in parts if part is not None), output)
            features = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.ndim > 1]
            return sum(prod(leaf.shape[:-1]) for leaf in features) // BATCH
        return None

    # --- Images -------------------------------------------------------------------------------------------------------

    def _images(self) -> dict[str, Any]:
        name = next((n for n in ("pixel_values", "pixel_values_videos") if n in self.takes), None)
        vision = self._part("vision_config", "image_config", "backbone_config")
        channels = self._channels(vision)
        if "grid_thw" in self.takes:
            return self._patches(vision, channels, name or "hidden_states", "grid_thw")
        if "image_grid_thw" in self.takes and name is not None:
            return self._patches(vision, channels, name, "image_grid_thw")
        if name is None:
            return {}
        if "spatial_shapes" in self.takes:
            return self._padded_patches(vision, channels)
        sizes = (getattr(part, n, None) for part in (vision, self.config) for n in ("image_size", "input_size"))
        size = next((size for size in sizes if size), _IMAGE)
        image = self.maker.image(channels, size)
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None)
        if frames:
            image = image.unsqueeze(1).repeat(1, int(frames), 1, 1, 1)
        elif "pixel_attention_mask" in self.takes and "spatial_shapes" not in self.takes:
            image = image.unsqueeze(1)  # several images in a row of text
        inputs: dict[str, Any] = {name: image}
        if "image_sizes" in self.takes and image.ndim == 4:
            inputs["image_sizes"] = torch.tensor([image.shape[-2:]] * BATCH, device=image.device)
        return inputs

    def _patches(self, vision: Any, channels: int, name: str, grid: str) -> dict[str, Any]:
        """The flattened patches of all images, and their numbers in time, height and width."""
        patch = int(getattr(vision, "patch_size", 14))
        merge = int(getattr(vision, "spatial_merge_size", 0) or getattr(vision, "merge_size", 0) or 2)
        side, frames = 2 * merge, int(getattr(vision, "temporal_patch_size", 1))
        return {
            name: self.maker.normal(BATCH * side**2, channels * frames * patch**2),
            grid: torch.tensor([[1, side, side]] * BATCH, device=self.maker.device),
        }

    def _padded_patches(self, vision: Any, channels: int) -> dict[str, Any]:
        """Flattened patches, padded to the same number for every image, with a padding mask and the grid."""
        side, patch = int(vision.num_patches**0.5), int(vision.patch_size)
        device = self.maker.device
        return {
            "pixel_values": self.maker.normal(BATCH, side**2, channels * patch**2),
            "pixel_attention_mask": torch.ones(BATCH, side**2, dtype=torch.long, device=device),
            "spatial_shapes": torch.tensor([[side, side]] * BATCH, device=device),
        }

    @staticmethod
    def _channels(vision: Any) -> int:
        named = [getattr(vision, name, None) for name in ("num_channels", "in_channels", "in_chans")]
        return next((n for n in named if isinstance(n, int) and 0 < n <= 16), 3)

    # --- Sound --------------------------------------------------------------------------------------------------------

    def _audio(self) -> dict[str, Any]:
        audio = self._part("audio_config", "audio_encoder_config", "encoder_config", "speech_config")
        bins = next((b for n in _BINS if isinstance(b := getattr(audio, n, None), int)), None)
        if "input_features" in self.takes and bins is not None:
            features, frames = self._spectrogram(audio, bins)
            mask = torch.ones(BATCH, frames, dtype=torch.bool, device=self.maker.device)
            return {"input_features": features, **{name: mask for name in _MASKS if name in self.takes}}
        if "input_values" not in self.takes:
            return {}
        if bins is not None and hasattr(audio, "max_length"):
            return {"input_values": self.maker.normal(BATCH, audio.max_length, bins)}
        channels = getattr(audio, "audio_channels", None)
        shape = (BATCH, _SECOND) if channels is None else (BATCH, int(channels), _SECOND)
        return {"input_values": self.maker.normal(*shape)}

    def _spectrogram(self, audio: Any, bins: int) -> tuple[Tensor, int]:
        """(batch, bins, frames) for a model that convolves over time, else (batch, frames, bins); the frames."""
        wide = [m for m in self.model.modules() if isinstance(m, nn.Conv1d) and m.in_channels == bins and m.groups == 1]
        if not hasattr(audio, "num_mel_bins") or not wide:
            return self.maker.normal(BATCH, _FRAMES, bins), _FRAMES
        # The first convolutions halve the frames, and every position after them has its embedding.
        frames = 2 * int(getattr(audio, "max_source_positions", None) or _FRAMES // 2)
        return self.maker.normal(BATCH, bins, frames), frames

    def _is_speech_to_text(self) -> bool:
        """Whether the ids replace the audio, rather than being a prompt with it."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    def _part(self, *names: str) -> Any:
        """The first sub-configuration of these names, or the configuration itself."""
        return next((part for n in names if (part := getattr(self.config, n, None)) is not None), self.config)
