"""The model families of the tests: how each is built, its inputs, and the sites that an audit must find.

The expected sites were written by hand from the source of each library. Models are tiny, seeded and built offline. All
weights are random, because with a zero-initialised head or a LayerScale of 1e-6 most comparisons would be trivial.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tests.zoo import handmade
from torch import Tensor, nn

Inputs = Any  # valid for `example`: a tensor, a tuple of arguments, or a mapping of keyword arguments


@dataclass(frozen=True)
class Expected:
    """An expected site, according to the source of the model."""

    path: str  # of the module with the addition
    kind: str
    norm: str
    runs: int = 1
    projected: bool = False
    long: bool = False


@dataclass(frozen=True)
class Poison:
    """The module at whose input or output NaN is written into the stream, and the branch modules that read it."""

    path: str
    at: Literal["input", "output"]
    readers: tuple[str, ...]  # endings of module paths


@dataclass(frozen=True)
class Family:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]  # batch size -> example
    sites: tuple[Expected, ...]
    poison: Poison | tuple[Poison, ...]  # one for all sites, or one for each
    checkpoint: str | tuple[str, ...]  # the name of the model's method for it, or the paths of the blocks to wrap
    core: bool = True
    drop_path: bool = False  # if True, Cut gives a warning
    oracle: bool = True  # oracle.py or more.py has its weighted forward

    @property
    def governed(self) -> list[int]:
        """Indices of the sites that a rule governs by default."""
        return [i for i, site in enumerate(self.sites) if not site.projected and not site.long]

    def build(self) -> nn.Module:
        """A new model in evaluation mode, with the same weights in every call."""
        return copy.deepcopy(_built(self.name))

    def __str__(self) -> str:
        return self.name


FAMILIES: dict[str, Family] = {}
# The attributes of each class before any rewiring, and the names in the module that defines it.
PRISTINE: dict[type, tuple[dict[str, object], set[str]]] = {}


def add(
    name: str, sites: tuple[Expected, ...], inputs: Callable[[int], Inputs], **facts: Any
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Registers the decorated builder as a family."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in FAMILIES
        FAMILIES[name] = Family(name, make, inputs, sites, **facts)
        return make

    return register


@functools.cache
def _built(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[name].make()
        randomise_(model)
    for cls in classes(model) - PRISTINE.keys():
        PRISTINE[cls] = (dict(vars(cls)), set(vars(sys.modules[cls.__module__])))
    return model.eval()


def classes(model: nn.Module) -> set[type]:
    """The classes of a model, without those that torch.compile and transformers modify themselves."""
    return {cls for module in model.modules() for cls in type(module).__mro__} - {nn.Module, object}


@torch.no_grad()
def randomise_(model: nn.Module) -> None:
    """Sets all weights to random values such that branches are about as large as their streams."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.numel():
            parameter.normal_(std=math.prod(parameter.shape[1:]) ** -0.5)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def image(batch: int, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=generator())


def tokens(batch: int, width: int, length: int = 4) -> Tensor:
    return torch.randn(batch, length, width, generator=generator())


def ids(batch: int, vocabulary: int = 32, length: int = 6) -> Tensor:
    return torch.randint(4, vocabulary, (batch, length), generator=generator())


def repeat(paths: str, *sites: tuple[str, str], count: int = 2, **facts: Any) -> tuple[Expected, ...]:
    """The expected sites of `count` blocks, from the (kind, norm) of one; `{}` in a path is the block index."""
    return tuple(Expected(paths.format(i), kind, norm, **facts) for i in range(count) for kind, norm in sites)


PRE = (("attention", "pre"), ("mlp", "pre"))
POST = (("attention", "post"), ("mlp", "post"))

# --- timm -------------------------------------------------------------------------------------------------------------

_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
_timm = functools.partial(
    add, inputs=image, poison=Poison("blocks.0", "input", ("norm1", "norm2")), checkpoint="set_grad_checkpointing"
)


@_timm("timm_vit", repeat("blocks.{}", *PRE))
def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**_VIT, proj_drop_rate=0.1)


@_timm("timm_vit_layerscale_droppath", repeat("blocks.{}", *PRE), drop_path=True)
def timm_vit_layerscale_droppath() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**_VIT, init_values=0.1, drop_path_rate=0.5)


@_timm("timm_deit3", repeat("blocks.{}", *PRE))
def timm_deit3() -> nn.Module:
    import timm

    return timm.create_model("deit3_small_patch16_224", **_VIT)


@_timm("timm_eva02", repeat("blocks.{}", *PRE))
def timm_eva02() -> nn.Module:
    import timm

    return timm.create_model("eva02_tiny_patch14_224", **_VIT | {"ref_feat_shape": (2, 2)}, proj_drop_rate=0.1)


@_timm("timm_eva02_scaled", repeat("blocks.{}", *PRE), drop_path=True)
def timm_eva02_scaled() -> nn.Module:
    """With a norm inside the MLP, LayerScale parameters in the block, and drop path."""
    from timm.models.eva import Eva

    sizes = _VIT | {"mlp_ratio": 2, "swiglu_mlp": True, "scale_mlp": True, "use_rot_pos_emb": True}
    return Eva(**sizes, init_values=0.1, drop_path_rate=0.5)


@_timm(
    "timm_parallel_scaling", repeat("blocks.{}", ("parallel", "pre")), poison=Poison("blocks.0", "input", ("in_norm",))
)
def timm_parallel_scaling() -> nn.Module:
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    return VisionTransformer(**_VIT, block_fn=ParallelScalingBlock, proj_drop_rate=0.1)


@_timm(
    "timm_parallel_things",
    repeat("blocks.{}", *PRE),
    # Each element of these lists is a branch that reads the stream.
    poison=Poison("blocks.0", "input", ("attns.0", "attns.1", "ffns.0", "ffns.1")),
)
def timm_parallel_things() -> nn.Module:
    from timm.models.vision_transformer import ParallelThingsBlock, VisionTransformer

    return VisionTransformer(**_VIT, block_fn=ParallelThingsBlock, proj_drop_rate=0.1)


# --- torch.nn ---------------------------------------------------------------------------------------------------------

_LAYER = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.1}
_READERS = {True: ("norm1", "norm2", "norm3"), False: ("self_attn", "multihead_attn", "linear1")}
_NORM = {True: "pre", False: "post"}


def _add_torch(norm_first: bool) -> None:
    name = _NORM[norm_first]
    pair = (("attention", name), ("mlp", name))
    three = (("attention", name), *pair)
    one = {"poison": Poison("", "input", _READERS[norm_first]), "checkpoint": ("",)}
    many = {"poison": Poison("layers.0", "input", _READERS[norm_first]), "checkpoint": ("layers.0", "layers.1")}

    @add(f"nn_encoder_layer_{name}", repeat("", *pair, count=1), lambda batch: tokens(batch, 16), **one)
    def encoder_layer() -> nn.Module:
        return nn.TransformerEncoderLayer(**_LAYER, batch_first=True, norm_first=norm_first)

    @add(f"nn_encoder_{name}", repeat("layers.{}", *pair), lambda batch: tokens(batch, 16), **many)
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(**_LAYER, batch_first=True, norm_first=norm_first, activation="gelu")
        # The final norm does not belong to a site.
        return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=not norm_first)

    @add(f"nn_decoder_layer_{name}", repeat("", *three, count=1), _decoder_inputs, **one)
    def decoder_layer() -> nn.Module:
        return nn.TransformerDecoderLayer(**_LAYER, norm_first=norm_first)

    @add(f"nn_decoder_{name}", repeat("layers.{}", *three), _decoder_inputs, **many)
    def decoder() -> nn.Module:
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(**_LAYER, norm_first=norm_first), 2)


def _decoder_inputs(batch: int) -> tuple[Tensor, Tensor]:
    """(tokens, batch, dim): the layout without batch_first."""
    return tokens(batch, 16).transpose(0, 1), torch.randn(5, batch, 16, generator=generator())


_add_torch(norm_first=True)
_add_torch(norm_first=False)

# --- transformers and torchvision -------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
_hf = functools.partial(add, checkpoint="gradient_checkpointing_enable")


@_hf(
    "hf_vit",
    repeat("layers.{}", *PRE),
    lambda batch: {"pixel_values": image(batch)},
    poison=Poison("layers.0", "input", ("layernorm_before", "layernorm_after")),
)
def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    sizes = {
        key: _TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    return ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8, hidden_dropout_prob=0.1))


@_hf(
    "hf_bert",
    tuple(
        Expected(f"encoder.layer.{i}.{path}", kind, "post")
        for i in range(2)
        for path, kind in (("attention.output", "attention"), ("output", "mlp"))
    ),
    lambda batch: {"input_ids": ids(batch)},
    poison=Poison("encoder.layer.0", "input", ("attention.self", "intermediate")),
)
def hf_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_TEXT))


@_hf(
    "hf_gpt2",
    repeat("h.{}", *PRE),
    lambda batch: {"input_ids": ids(batch)},
    poison=Poison("h.0", "input", ("ln_1", "ln_2")),
)
def hf_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


@_hf(
    "hf_llama",
    repeat("layers.{}", *PRE),
    lambda batch: {"input_ids": ids(batch)},
    poison=Poison("layers.0", "input", ("input_layernorm", "post_attention_layernorm")),
)
def hf_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaModel(LlamaConfig(**sizes, use_cache=False))


_ALBERT = "encoder.albert_layer_groups.0.albert_layers.0"


@_hf(
    "hf_albert",
    (Expected(f"{_ALBERT}.attention", "attention", "post", runs=3), Expected(_ALBERT, "mlp", "post", runs=3)),
    lambda batch: {"input_ids": ids(batch)},
    poison=Poison(_ALBERT, "input", ("query", "key", "value", "ffn")),
    checkpoint=(_ALBERT,),  # the model has no method for it
)
def hf_albert() -> nn.Module:
    """One layer that runs three times."""
    from transformers import AlbertConfig, AlbertModel

    drops = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return AlbertModel(AlbertConfig(**_TEXT | {"num_hidden_layers": 3, "embedding_size": 8}, **drops))


@add(
    "torchvision_vit",
    repeat("encoder.layers.encoder_layer_{}", *PRE),
    image,
    poison=Poison("encoder.layers.encoder_layer_0", "input", ("ln_1", "ln_2")),
    checkpoint=("encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"),
)
def torchvision_vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    sizes = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return VisionTransformer(**sizes, dropout=0.1, num_classes=5)


# --- Handwritten models -----------------------------------------------------------------------------------------------


def _hand(name: str, block: Callable[[], nn.Module], sites: tuple[Expected, ...], poison: Any, **facts: Any) -> None:
    """Registers a stack of two blocks. `poison` has the modules that read the stream, or a Poison for each site."""
    if isinstance(poison[0], str):
        poison = Poison("blocks.0", "input", poison)
    checkpoint = facts.pop("checkpoint", ("blocks.0", "blocks.1"))
    make = functools.partial(_stack, block)
    add(name, sites, lambda batch: tokens(batch, handmade.INPUT), poison=poison, checkpoint=checkpoint, **facts)(make)


def _stack(block: Callable[[], nn.Module]) -> nn.Module:
    return handmade.Stack(block(), block())


_hand(
    "hand_control_flow",
    handmade.ControlFlow,
    # One line in a loop has one site for each branch that it adds.
    repeat("blocks.{}", *PRE, ("mlp", "pre")),
    ("norm1", "norm2"),
)
_hand(
    "hand_nested",
    handmade.Nested,
    # The inner site comes first, because its addition runs before the outer one.
    repeat("blocks.{}", ("mlp", "none"), ("mlp", "pre")),
    tuple(
        poison
        for i in range(2)
        for poison in (Poison(f"blocks.{i}.up", "output", ("inner",)), Poison(f"blocks.{i}", "input", ("norm",)))
    ),
)
_hand(
    "hand_shared_block",
    handmade.SharedBlock,
    repeat("blocks.{}.block", *PRE, runs=2),
    ("norm1", "norm2"),
)
_hand(
    "hand_shared_branch",
    handmade.SharedBranch,
    repeat("blocks.{}", ("mlp", "pre"), ("mlp", "pre")),
    ("norm",),
)
_hand(
    "hand_spellings",
    handmade.Spellings,
    repeat("blocks.{}", *[("mlp", "none")] * 7),
    tuple(f"branches.{i}" for i in range(7)),
    checkpoint=("",),  # a block overwrites its input, so it cannot be recomputed
)
_hand("hand_helpers", handmade.Helpers, repeat("blocks.{}", *PRE), ("norm1", "norm2"))
_hand("hand_inherited", handmade.Inherited, repeat("blocks.{}", *PRE), ("norm1", "norm2"))
_hand("hand_decorated", handmade.Decorated, repeat("blocks.{}", ("mlp", "pre")), ("norm",))
_hand("hand_mangled", handmade.Mangled, repeat("blocks.{}", ("mlp", "pre")), ("norm",))
_hand("hand_decoys", handmade.Decoys, repeat("blocks.{}", ("attention", "pre")), ("norm",))
