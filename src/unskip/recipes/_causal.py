"""Decoder-only models of Hugging Face transformers, by kind, name or folder.

    gpt2, llama, mistral, qwen3, ...    a config of this kind, with random weights; model_args are its fields
    hf:NAME-or-FOLDER                   the config of the hub or of a folder; with pretrained=True its weights

Defaults of a kind follow from the given fields: as many key heads as heads, heads of width / heads, gated MLPs of 8/3
of the width, no dropout.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskip import spec
from unskip._extras import need
from unskip._words import brief, nearest
from unskip.errors import BadInput

_MULTIPLE = 64  # vocabulary and MLP sizes are multiples: matrix products of other sizes are slow on GPUs
_DECODERS = ("gpt_neox", "gpt_neox_japanese", "trocr")  # causal with is_decoder=False, too
_INSTEAD = "take a decoder-only kind, such as gpt2, llama, mistral or qwen3"


def check_kind(model: str, arguments: dict[str, Any]) -> None:
    """Raises BadInput if `model` is not a decoder-only language model."""
    if model.startswith("hf:"):
        return
    kinds = _causal_kinds()
    if model not in kinds:
        raise BadInput(
            f"model is {model!r}{nearest(model, kinds)}; it is a kind of language model of transformers, such as gpt2, "
            "llama, mistral or qwen3, hf:NAME-or-FOLDER, or file.py:FUNCTION"
        )
    default: Any = _config_of(model)
    _check_no_encoder(model, default)
    is_decoder = arguments.get("is_decoder", getattr(default, "is_decoder", True))
    if not is_decoder and model not in _DECODERS:
        raise BadInput(f"model {model} is an encoder: add is_decoder=true to model_args, or {_INSTEAD}")


def architecture(model: str, arguments: dict[str, Any], vocabulary: int, context: int, end: int) -> dict[str, Any]:
    """The config of a model for a vocabulary and a context length, as plain data."""
    if model.startswith("hf:"):
        config = _named(model.removeprefix("hf:"), arguments)
        _check_no_encoder(model, config)
        _check_room(model, config, vocabulary, context)
    else:
        try:
            config = _of_kind(model, arguments, vocabulary, context, end)
        except BadInput:
            raise
        except Exception as error:  # some configs differ by layer
            raise BadInput(f"model {model}: {type(error).__name__}: {brief(error)}") from error
    config.use_cache = False  # for training; sampling turns it on
    return {"model_type": config.model_type, **json.loads(config.to_json_string(use_diff=False))}


def build_causal(described: dict[str, Any]) -> nn.Module:
    """A new model from the config that `architecture` describes, in float32, with torch's fused attention."""
    transformers = need("transformers")
    try:
        config = transformers.CONFIG_MAPPING[described["model_type"]].from_dict(described)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # transformers raises many kinds for inconsistent fields
        raise BadInput(f"model {described['model_type']}: {type(error).__name__}: {brief(error)}") from error
    assert isinstance(model, nn.Module)
    return model


def pretrained_weights(model: str) -> dict[str, Any]:
    """The weights of hf:NAME-or-FOLDER."""
    if not model.startswith("hf:"):
        raise BadInput(f"pretrained: {model} is a kind of model without weights; give hf:NAME-or-FOLDER")
    name = model.removeprefix("hf:")
    try:
        with spec.hub(needed=not Path(name).expanduser().is_dir()):
            kind: Any = need("transformers").AutoModelForCausalLM
            loaded = kind.from_pretrained(name, trust_remote_code=False, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise BadInput(f"{model}: no weights: {brief(error)}") from error
    weights: dict[str, Any] = loaded.state_dict()
    return weights


def takes_cache(model: nn.Module) -> bool:
    """Whether a model can cache the keys and values of earlier tokens."""
    return {"past_key_values", "use_cache"} <= {*inspect.signature(model.forward).parameters}


def _causal_kinds() -> list[str]:
    transformers = need("transformers")
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted({*names} & {*transformers.CONFIG_MAPPING.keys()})


def _named(name: str, arguments: dict[str, Any]) -> Any:
    folder = Path(name).expanduser()
    try:
        with spec.hub(needed=not folder.is_dir()):
            kind: Any = need("transformers").AutoConfig
            return kind.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False, **arguments)
    except (OSError, ValueError) as error:
        raise BadInput(f"hf:{name}: {brief(error)}") from error


def _check_no_encoder(model: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(f"model {model} is an encoder with a decoder; {_INSTEAD}")


def _check_room(model: str, config: Any, vocabulary: int, context: int) -> None:
    if config.vocab_size < vocabulary:
        raise BadInput(
            f"{model}: its vocabulary is {config.vocab_size}, and the tokenizer has {vocabulary} ids; use the model's "
            f"tokenizer, {model.removeprefix('hf:')!r}"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < context:
        raise BadInput(f"{model}: it has {positions} positions, and the context is {context}; shorten the context")


def _config_of(kind: str, **fields: Any) -> Any:
    cls: Any = need("transformers").CONFIG_MAPPING[kind]
    try:
        return cls(**fields)
    except Exception as error:  # checks of transformers
        where = "model_args: " if fields else ""
        raise BadInput(f"{where}{cls.__name__}: {brief(error)}") from error


def _of_kind(kind: str, arguments: dict[str, Any], vocabulary: int, context: int, end: int) -> Any:
    default = _config_of(kind)
    cls = type(default)
    fields = {*default.to_dict(), *default.attribute_map}
    unknown = sorted({*arguments} - fields)
    if unknown:
        raise BadInput(
            f"model_args: {cls.__name__} has no field {unknown[0]!r}{nearest(unknown[0], fields)}; model_args "
            "are fields of this config, by default the sizes of the preset"
        )
    derived: dict[str, Any] = {
        name: 0.0 for name in fields if name.endswith(("_pdrop", "_dropout", "dropout_rate")) or name == "dropout"
    }
    width = arguments.get("hidden_size", arguments.get("n_embd", default.hidden_size))
    heads = arguments.get("num_attention_heads", arguments.get("n_head", getattr(default, "num_attention_heads", 1)))
    if width < 1 or heads < 1 or width % heads:
        raise BadInput(f"model_args: a width of {width} is not divided evenly by {heads} heads; change one of them")
    for name, value in (
        ("num_key_value_heads", heads),
        ("head_dim", width // heads),
        ("intermediate_size", -(-8 * width // 3 // _MULTIPLE) * _MULTIPLE),
    ):
        # None stays None, except for key heads: most kinds read it as the number of heads.
        unset = getattr(default, name, None) is None and name != "num_key_value_heads"
        if name in fields and name not in arguments and not unset and width != default.hidden_size:
            derived[name] = value
    ends = {name: end for name in ("bos_token_id", "eos_token_id") if name in fields}
    derived |= {"vocab_size": -(-vocabulary // _MULTIPLE) * _MULTIPLE, "max_position_embeddings": context, **ends}
    # No padding is used, and the embedding of a padding token would not be trained: there is none, or an unused one.
    derived["pad_token_id"] = None
    if "None" not in str(cls.__annotations__.get("pad_token_id")):  # modernbert-decoder
        derived["vocab_size"] = -(-(vocabulary + 1) // _MULTIPLE) * _MULTIPLE
        derived["pad_token_id"] = derived["vocab_size"] - 1
    config = _config_of(kind, **{**derived, **arguments})
    _check_room(kind, config, vocabulary, context)
    return config
