"""Loads checkpoints of plain MAE in the layout of the published code.

    cls_token, pos_embed, patch_embed.*, blocks.*, norm.*     ->  encoder.*
    mask_token, decoder_embed.*, decoder_blocks.*             ->  decoder.{mask_token, embed.*, blocks.*}
    decoder_norm.*, decoder_pred.*, decoder_pos_embed         ->  decoder.{norm.*, head.*, positions}

The published decoder also has positions for the class token, which are zero and dropped here.
"""

from __future__ import annotations

from unskip.errors import BadInput
from unskip.models._mae import MAE
from unskip.models._published import Weights, check_fit, read_tensors

_DECODER = {
    "decoder_embed.": "decoder.embed.",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "decoder.head.",
}


def load_published(mae: MAE, weights: Weights) -> None:
    """Fills a plain MAE (long_skips=False) from a published checkpoint: a .pth file or its state dict.

    A checkpoint without a decoder fills only the encoder. Raises LoadError if names or shapes differ, without changing
    the model.
    """
    if mae.decoder.skips:
        raise BadInput("published MAE checkpoints have no long skips; build MAE(..., long_skips=False)")
    wanted = mae.state_dict()
    tensors = {_renamed(name): value for name, value in read_tensors(weights, "model").items()}
    if "decoder.positions" in tensors and tensors["decoder.positions"].ndim == 3:
        tensors["decoder.positions"] = tensors["decoder.positions"][0, mae.grid.prefix :]
    has_decoder = any(name.startswith("decoder.") for name in tensors)
    needed = {name for name in wanted if has_decoder or name.startswith("encoder.")}
    check_fit(tensors, wanted, needed, (), "Build the MAE with its encoder, patch size, image size and decoder.")
    mae.load_state_dict(tensors, strict=False)


def _renamed(name: str) -> str:
    if name == "mask_token":
        return "decoder.mask_token"
    if name == "decoder_pos_embed":
        return "decoder.positions"
    for published, ours in _DECODER.items():
        if name.startswith(published):
            return ours + name.removeprefix(published)
    return f"encoder.{name}"
