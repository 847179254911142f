"""The arguments of one forward call: given, or inferred from the model.

They are inferred from the configuration (timm, transformers, diffusers), an attribute (torchvision), the class (a layer
of torch.nn) or the run of a language model. Otherwise an example is required: a guess that happens to run could trace a
different computation.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from unskip.anatomy._guard import refuse_wrapped
from unskip.anatomy._rewired import rewired_state
from unskip.errors import BadInput

BATCH = 2
TOKENS = 8
ABOUT = "_unskip_about"  # attribute of a module: plain data about it


@dataclass(frozen=True)
class Example:
    """The arguments of one forward call."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: object) -> Example:
        """A tensor, a tuple of arguments, or a mapping of keyword arguments."""
        if isinstance(value, Example):
            return value
        if isinstance(value, tuple):
            return cls(value)
        if not isinstance(value, Tensor) and hasattr(value, "keys"):
            return cls((), {str(key): value[key] for key in value.keys()})  # type: ignore[index]  # noqa: SIM118
        if isinstance(value, Tensor):
            return cls((value,))
        raise BadInput(
            f"example is a {type(value).__name__}; pass a tensor, a tuple of arguments or a mapping of keyword "
            "arguments"
        )

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments."""
        return (*self.args, *self.kwargs.values())

    def copy(self) -> Example:
        """The same arguments with cloned tensors, because a forward may write into its input."""

        def clone(value: Any) -> Any:
            return value.clone() if isinstance(value, Tensor) else value

        return Example(*tree_map(clone, (self.args, self.kwargs)))

    def rows(self, start: int, stop: int) -> Example:
        """Some of its samples: tensors sliced along the first axis, 1-D tensors only if their length is the batch."""
        leaves = [leaf for leaf in tree_leaves(self.values) if isinstance(leaf, Tensor)]
        counts = {len(leaf) for leaf in leaves if leaf.ndim > 1}

        def sliced(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim == 0 or (value.ndim == 1 and {len(value)} != counts):
                return value
            return value[start:stop]

        return Example(*tree_map(sliced, (self.args, self.kwargs)))

    def run(self, model: nn.Module) -> Any:
        """Calls the model."""
        return model(*self.args, **self.kwargs)


def example_for(model: nn.Module, example: object = None) -> Example:
    """The given example, or one inferred from the model. Raises BadInput if none can be inferred."""
    if example is not None:
        return Example.of(example)
    maker = Maker(model)
    example = maker.torch_nn() or maker.timm() or maker.diffusers() or maker.transformers() or maker.torchvision()
    example = example or maker.run()
    if example is None:
        if rewired_state(model) is None:
            refuse_wrapped(model)  # names the wrapper, if that is the cause
        raise BadInput(
            f"{type(model).__name__}: its inputs cannot be inferred. Pass example= a tensor, a tuple of arguments or a "
            "mapping of keyword arguments."
        )
    return example


class Maker:
    """Makes small inputs of the model's dtype and device, with a fixed seed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
        self.dtype, self.device = weight.dtype, weight.device
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def ids(self, size: int, *shape: int) -> Tensor:
        # Low ids are often padding and other special tokens.
        low = min(4, size - 1)
        return torch.randint(low, size, shape, generator=self.generator).to(self.device)

    def image(self, channels: int, size: object) -> Tensor:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return self.normal(BATCH, channels, int(height), int(width))

    def torch_nn(self) -> Example | None:
        model = self.model
        if isinstance(model, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return self._layer(model, isinstance(model, nn.TransformerDecoderLayer))
        if isinstance(model, nn.TransformerEncoder | nn.TransformerDecoder):
            return self._layer(model.layers[0], isinstance(model, nn.TransformerDecoder))
        if isinstance(model, nn.Transformer):
            return self._layer(model.encoder.layers[0], both=True)
        return None

    def _layer(self, layer: nn.Module, both: bool) -> Example:
        width = layer.self_attn.embed_dim  # type: ignore[union-attr]
        # With as many rows as tokens the layout (batch first or not) does not matter.
        return Example(tuple(self.normal(TOKENS, TOKENS, int(width)) for _ in range(1 + both)))  # type: ignore[arg-type]

    def timm(self) -> Example | None:
        config: Any = getattr(self.model, "pretrained_cfg", None) or getattr(self.model, "default_cfg", None)
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size is None:
            return None
        channels, *spatial = size
        embed = getattr(self.model, "patch_embed", None)
        spatial = getattr(embed, "img_size", None) or spatial
        first = config.get("first_conv") if isinstance(config, dict) else getattr(config, "first_conv", None)
        for name in [first] if isinstance(first, str) else first or []:
            in_channels = getattr(dict(self.model.named_modules()).get(name), "in_channels", channels)
            channels = in_channels if in_channels < 16 else channels  # more are the output of a stem, not an image
        return Example((self.image(channels, list(spatial)),))

    def torchvision(self) -> Example | None:
        if not type(self.model).__module__.startswith("torchvision.models"):
            return None
        return Example((self.image(3, getattr(self.model, "image_size", 224)),))

    def diffusers(self) -> Example | None:
        if "diffusers" not in {base.__module__.partition(".")[0] for base in type(self.model).__mro__}:
            return None
        config: Any = self.model.config
        parameters = inspect.signature(self.model.forward).parameters
        width = getattr(config, "cross_attention_dim", None) or getattr(config, "joint_attention_dim", None)
        if "img_ids" in parameters:  # Flux: packed patches, with positions of three axes
            return self._flux(config)
        size = getattr(config, "sample_size", None)
        if size is None or not hasattr(config, "in_channels"):
            return None
        arguments: dict[str, Any] = {
            "sample" if "sample" in parameters else "hidden_states": self.image(config.in_channels, size),
            "timestep": torch.ones(BATCH, dtype=torch.long, device=self.device),
        }
        if "class_labels" in parameters and getattr(config, "num_embeds_ada_norm", None):
            arguments["class_labels"] = self.ids(config.num_embeds_ada_norm, BATCH)
        if "encoder_hidden_states" in parameters and isinstance(width, int):
            arguments["encoder_hidden_states"] = self.normal(BATCH, TOKENS, width)
        if "pooled_projections" in parameters and hasattr(config, "pooled_projection_dim"):
            arguments["pooled_projections"] = self.normal(BATCH, config.pooled_projection_dim)
        return Example((), {key: value for key, value in arguments.items() if key in parameters})

    def _flux(self, config: Any) -> Example:
        arguments = {
            "hidden_states": self.normal(BATCH, TOKENS, config.in_channels),
            "encoder_hidden_states": self.normal(BATCH, TOKENS, config.joint_attention_dim),
            "pooled_projections": self.normal(BATCH, config.pooled_projection_dim),
            "timestep": torch.ones(BATCH, device=self.device, dtype=self.dtype),
            "img_ids": torch.zeros(TOKENS, 3, device=self.device, dtype=self.dtype),
            "txt_ids": torch.zeros(TOKENS, 3, device=self.device, dtype=self.dtype),
        }
        if getattr(config, "guidance_embeds", False):
            arguments["guidance"] = torch.ones(BATCH, device=self.device, dtype=self.dtype)
        return Example((), arguments)

    def run(self) -> Example | None:
        """Ids of the vocabulary and context that a run of a language model records."""
        tokens = vars(self.model).get(ABOUT, {}).get("tokens")
        return None if tokens is None else Example((self.ids(tokens["vocabulary"], BATCH, tokens["context"]),))

    def transformers(self) -> Example | None:
        from unskip.anatomy._inputs import transformers_inputs

        arguments = transformers_inputs(self)
        return Example((), arguments) if arguments else None
