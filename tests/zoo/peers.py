"""Small models of vit-pytorch and x-transformers, each with an example and its expected sites and blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, object]  # a model, and the arguments of its forward
Build = Callable[[], Built]


class Peer(NamedTuple):
    """A model, its sites in order as letters (A attention, M MLP, C convolution), and its number of blocks."""

    build: Build
    kinds: str = "AMAM"
    blocks: int = 2
    norms: str = "pre"
    unknown: str = ""  # the reason why an addition cannot be classified
    stuck: bool = False  # whether a site cannot be rewired


_HEADS = {"heads": 2, "dim_head": 8}
_VIT = {"image_size": 32, "patch_size": 16, "num_classes": 5, "dim": 16, "depth": 2, "mlp_dim": 32, **_HEADS}
_FLAT = {key: value for key, value in _VIT.items() if key not in ("image_size", "patch_size")}


def _images(side: int = 32, frames: int | None = None) -> Tensor:
    shape = (1, 3, side, side) if frames is None else (1, 3, frames, side, side)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _vit(module: str, name: str, example: Tensor | None = None, **kwargs: Any) -> Build:
    """A class of vit-pytorch with these arguments, and those of a small ViT as defaults."""

    def build() -> Built:
        torch.manual_seed(0)
        model = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**kwargs)
        return model.eval(), _images() if example is None else example

    return build


def _plain(module: str, name: str = "ViT", **kwargs: Any) -> Build:
    return _vit(module, name, **{**_VIT, **kwargs})


_ND = {"ndim": 2, "input_shape": 32, "patch_size": 16, **_FLAT}
_VIDEO = {"image_size": 32, "image_patch_size": 16, "frames": 2, "frame_patch_size": 1, **_FLAT}
_VIVIT = {key: value for key, value in _VIDEO.items() if key != "depth"} | {"spatial_depth": 1, "temporal_depth": 1}
_T2T = {key: value for key, value in _FLAT.items() if key != "num_classes"}
_CCT = {"img_size": 32, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0, "num_classes": 5}
_CCT |= {"positional_embedding": "learnable"}
_CROSS = {f"{side}_enc_{key}": value for side in ("sm", "lg") for key, value in {**_HEADS, "mlp_dim": 32}.items()}
_CROSS |= {"sm_dim": 16, "lg_dim": 24, "sm_patch_size": 8, "lg_patch_size": 16, "lg_enc_depth": 1, "depth": 1}
_CROSS_ATTENTION = {"cross_attn_heads": 2, "cross_attn_dim_head": 8}
_MAX_VIT = {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 2}
_TWINS = {f"s{stage}_emb_dim": 16 for stage in (1, 2, 3, 4)}
for _stage, _side in ((1, 4), (2, 4), (3, 2), (4, 2)):
    _TWINS |= {f"s{_stage}_local_patch_size": _side, f"s{_stage}_global_k": _side}

VIT_PYTORCH: dict[str, Peer] = {
    "ats_vit": Peer(_plain("ats_vit", max_tokens_per_depth=(4, 3))),
    "attn_residual_with_dca_simple_vit": Peer(
        _plain("attn_residual_with_dca_simple_vit", "SimpleViT"), unknown="stacked"
    ),
    "cait": Peer(_plain("cait", "CaiT", cls_depth=1), kinds="AMAMAM", blocks=3),
    "cct": Peer(_vit("cct", "CCT", **_CCT), norms="pre none"),
    "cct_3d": Peer(_vit("cct_3d", "CCT", _images(32, 4), num_frames=4, **_CCT), norms="pre none"),
    "cross_vit": Peer(
        _vit("cross_vit", "CrossViT", image_size=32, num_classes=5, cross_attn_depth=1, **_CROSS, **_CROSS_ATTENTION),
        kinds="AMAMAA",
        blocks=4,
        norms="pre inner",
        unknown="side input",
    ),
    "crossformer": Peer(
        _vit(
            "crossformer",
            "CrossFormer",
            _images(64),
            dim=(32, 32, 32, 32),
            depth=(1, 1, 1, 1),
            global_window_size=(8, 4, 2, 1),
            local_window_size=2,
            num_classes=5,
        ),
        kinds="AMAMAMAMAMAMAMAM",
        blocks=4,
    ),
    "cvt": Peer(
        _vit("cvt", "CvT", _images(64), num_classes=5, s1_emb_dim=16, s2_emb_dim=24, s3_emb_dim=32, s3_depth=1),
        kinds="AMAMAMAM",
        blocks=4,
    ),
    "deepvit": Peer(_plain("deepvit", "DeepViT")),
    "jet_vit": Peer(_plain("jet_vit", "JetViT", window_size=2)),
    "jumbo_vit": Peer(_plain("jumbo_vit", "JumboViT"), kinds="AMMAM", blocks=3),
    "learnable_memory_vit": Peer(_plain("learnable_memory_vit")),
    "levit": Peer(
        _vit(
            "levit",
            "LeViT",
            _images(64),
            image_size=64,
            num_classes=5,
            dim=(16, 24, 32),
            depth=1,
            heads=(2, 2, 2),
            mlp_mult=2,
            dim_key=8,
            dim_value=8,
        ),
        kinds="AMMAMMAM",
        blocks=5,
        norms="out none",
    ),
    "look_vit": Peer(
        _vit(
            "look_vit",
            "LookViT",
            image_size=32,
            num_classes=5,
            dim=16,
            depth=1,
            patch_size=16,
            highres_patch_size=8,
            **_HEADS,
            **_CROSS_ATTENTION,
        ),
        kinds="AAMM",
        blocks=1,
        unknown="side input",
    ),
    "looped_vit": Peer(
        _vit(
            "looped_vit",
            "LoopedViT",
            image_size=32,
            patch_size=16,
            num_classes=5,
            dim=16,
            pre_loop_depth=1,
            num_looped_blocks=1,
            post_loop_depth=1,
            loop_depth=2,
            mlp_dim=32,
            **_HEADS,
        ),
        kinds="AMAMAM",
        blocks=3,
    ),
    "max_vit": Peer(_vit("max_vit", "MaxViT", _images(64), **_MAX_VIT), kinds="AMAMAMAM"),
    "max_vit_with_registers": Peer(_vit("max_vit_with_registers", "MaxViT", _images(64), **_MAX_VIT), kinds="AMAMAMAM"),
    "mobile_vit": Peer(
        _vit(
            "mobile_vit",
            "MobileViT",
            _images(64),
            image_size=(64, 64),
            dims=[16, 16, 16],
            channels=[8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 32],
            num_classes=5,
            depths=(1, 1, 1),
        ),
        kinds="CCCAMAMAM",
        blocks=6,
        norms="pre out",
    ),
    "mp3": Peer(_plain("mp3")),
    "na_vit": Peer(_plain("na_vit", "NaViT"), kinds="AMAMA", blocks=3),
    "nest": Peer(
        _vit(
            "nest",
            "NesT",
            image_size=32,
            patch_size=4,
            num_classes=5,
            dim=16,
            num_hierarchies=2,
            block_repeats=(1, 1),
            **_HEADS,
        )
    ),
    "normalized_vit": Peer(_plain("normalized_vit", "nViT"), kinds="", unknown="lerp"),
    "parallel_vit": Peer(_plain("parallel_vit")),
    "pit": Peer(_plain("pit", "PiT", patch_size=8, depth=(1, 1))),
    "regionvit": Peer(
        _vit(
            "regionvit",
            "RegionViT",
            _images(64),
            dim=(32, 32, 32, 32),
            depth=(1, 1, 1, 1),
            window_size=2,
            num_classes=5,
        ),
        kinds="AAMAAMAAMAAM",
        blocks=4,
    ),
    "rvt": Peer(_plain("rvt", "RvT")),
    "scalable_vit": Peer(
        _vit(
            "scalable_vit",
            "ScalableViT",
            _images(64),
            num_classes=5,
            dim=16,
            depth=(1, 1),
            heads=(2, 2),
            reduction_factor=(2, 1),
            window_size=(4, None),
        ),
        kinds="AMCMAAMCMA",
        norms="pre none",
    ),
    "sep_vit": Peer(
        _vit("sep_vit", "SepViT", _images(56), num_classes=5, dim=16, depth=(1, 1), heads=(2, 2), dim_head=8),
        kinds="CAMCAM",
        blocks=4,
        norms="pre none",
    ),
    "simple_flash_attn_vit": Peer(_plain("simple_flash_attn_vit", "SimpleViT")),
    "simple_flash_attn_vit_3d": Peer(_vit("simple_flash_attn_vit_3d", "SimpleViT", _images(32, 2), **_VIDEO)),
    "simple_uvit": Peer(_plain("simple_uvit", "SimpleUViT", depth=4), kinds="AMAMAMAM", blocks=4),
    "simple_vit": Peer(_plain("simple_vit", "SimpleViT")),
    "simple_vit_1d": Peer(_vit("simple_vit_1d", "SimpleViT", torch.ones(1, 3, 32), seq_len=32, patch_size=8, **_FLAT)),
    "simple_vit_3d": Peer(_vit("simple_vit_3d", "SimpleViT", _images(32, 2), **_VIDEO)),
    "simple_vit_attn_residual": Peer(_plain("simple_vit_attn_residual", "SimpleViTAttnResidual"), kinds=""),
    "simple_vit_orthog_residual_update": Peer(_plain("simple_vit_orthog_residual_update", "SimpleViT"), norms="inner"),
    "simple_vit_with_fft": Peer(_plain("simple_vit_with_fft", "SimpleViT", freq_patch_size=16)),
    "simple_vit_with_hyper_connections": Peer(
        _plain("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=4),
        kinds="",
        unknown="several streams",
    ),
    "simple_vit_with_patch_dropout": Peer(_plain("simple_vit_with_patch_dropout", "SimpleViT")),
    "simple_vit_with_qk_norm": Peer(_plain("simple_vit_with_qk_norm", "SimpleViT")),
    "simple_vit_with_register_tokens": Peer(_plain("simple_vit_with_register_tokens", "SimpleViT")),
    "simple_vit_with_relative_proj_pos_bias": Peer(
        _plain("simple_vit_with_relative_proj_pos_bias", "SimpleViT"), norms="pre inner"
    ),
    "simple_vit_with_sparse_gating": Peer(_plain("simple_vit_with_sparse_gating", "SimpleViTWithSparseGating")),
    "simple_vit_with_specialized_cls": Peer(_plain("simple_vit_with_specialized_cls", "SimpleViT")),
    "simple_vit_with_value_residual": Peer(_plain("simple_vit_with_value_residual", "SimpleViT"), unknown="gate"),
    "t2t": Peer(
        _vit("t2t", "T2TViT", image_size=32, num_classes=5, t2t_layers=((7, 4), (3, 2)), **_T2T),
        kinds="AMAMAM",
        blocks=3,
    ),
    "twins_svt": Peer(
        _vit("twins_svt", "TwinsSVT", _images(64), num_classes=5, s3_depth=1, s4_depth=1, **_TWINS),
        kinds="AMAMCAMAMAMAMCAMAMAMAMCAMAMAMCAM",
        blocks=30,
        norms="pre none",
    ),
    "vat": Peer(_plain("vat")),
    "vit": Peer(_plain("vit")),
    "vit_1d": Peer(_vit("vit_1d", "ViT", torch.ones(1, 3, 32), seq_len=32, patch_size=8, **_FLAT)),
    "vit_3d": Peer(_vit("vit_3d", "ViT", _images(32, 2), **_VIDEO)),
    "vit_5": Peer(_plain("vit_5")),
    "vit_detpool": Peer(_plain("vit_detpool", "ViTDetPool")),
    "vit_for_small_dataset": Peer(_plain("vit_for_small_dataset")),
    "vit_nd": Peer(_vit("vit_nd", "ViTND", **_ND)),
    "vit_nd_pope": Peer(_vit("vit_nd_pope", "ViTND", **_ND)),
    "vit_nd_rotary": Peer(_vit("vit_nd_rotary", "ViTND", **_ND)),
    "vit_with_decorr": Peer(_plain("vit_with_decorr")),
    "vit_with_keel_post_ln": Peer(_plain("vit_with_keel_post_ln"), blocks=4),
    "vit_with_patch_dropout": Peer(_plain("vit_with_patch_dropout")),
    "vit_with_patch_merger": Peer(_plain("vit_with_patch_merger", patch_merge_num_tokens=2)),
    "vivit": Peer(_vit("vivit", "ViViT", _images(32, 2), **_VIVIT)),
    "wwt": Peer(
        _plain("wwt", "WWT", num_slots=2),
        kinds="AAAAAAAA",
        blocks=4,
        norms="pre post inner",
        unknown="1 of its 2 runs",
        stuck=True,
    ),
    "xcit": Peer(_plain("xcit", "XCiT", cls_depth=1), kinds="ACMACMAM", blocks=3),
}


def _text(kind: str = "Decoder", depth: int = 2, **kwargs: Any) -> Build:
    """A language model of x-transformers with these layer settings."""

    def build() -> Built:
        torch.manual_seed(0)
        module = importlib.import_module("x_transformers")
        settings = {"dim": 16, "depth": depth, "heads": 2, "attn_dim_head": 8, "ff_mult": 2} | kwargs
        model = module.TransformerWrapper(num_tokens=20, max_seq_len=8, attn_layers=getattr(module, kind)(**settings))
        return model.eval(), torch.arange(6)[None]

    return build


def _encoder_decoder() -> Built:
    torch.manual_seed(0)
    side = {"num_tokens": 20, "depth": 1, "heads": 2, "max_seq_len": 8, "attn_dim_head": 8}
    sides = {f"{name}_{key}": value for name in ("enc", "dec") for key, value in side.items()}
    model = importlib.import_module("x_transformers").XTransformer(dim=16, **sides)
    return model.eval(), (torch.arange(6)[None], torch.arange(5)[None])


def _image() -> Built:
    torch.manual_seed(0)
    module = importlib.import_module("x_transformers")
    layers = module.Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    return module.ViTransformerWrapper(image_size=32, patch_size=16, attn_layers=layers).eval(), _images()


X_TRANSFORMERS: dict[str, Peer] = {
    "decoder": Peer(_text(), blocks=4),
    "encoder": Peer(_text("Encoder"), blocks=4),
    "image": Peer(_image, blocks=4),
    "encoder-decoder": Peer(_encoder_decoder, blocks=5, kinds="AMAAM"),
    "post-norm": Peer(_text(pre_norm=False), blocks=4, norms="post"),
    "sandwich norm": Peer(_text(sandwich_norm=True), blocks=4, norms="sandwich"),
    "pre- and post-norm": Peer(_text(pre_and_post_norm=True, scale_residual_constant=4.0), blocks=4),
    "residual attention": Peer(_text(residual_attn=True), blocks=4),
    "rms norm": Peer(_text(use_rmsnorm=True), blocks=4),
    "scale norm": Peer(_text(use_scalenorm=True), blocks=4),
    "dynamic tanh": Peer(_text(use_dynamic_tanh=True), blocks=4, norms="none"),
    "rotary": Peer(_text(rotary_pos_emb=True), blocks=4),
    "alibi": Peer(_text(alibi_pos_bias=True), blocks=4),
    "relative bias": Peer(_text(rel_pos_bias=True), blocks=4),
    "flash": Peer(_text(attn_flash=True), blocks=4),
    "glu": Peer(_text(ff_glu=True, ff_swish=True), blocks=4),
    "one kv head": Peer(_text(attn_one_kv_head=True), blocks=4),
    "grouped queries": Peer(_text(attn_kv_heads=1), blocks=4),
    "talking heads": Peer(_text(attn_pre_talking_heads=True), blocks=4),
    "memory": Peer(_text(attn_num_mem_kv=2), blocks=4),
    "attention on attention": Peer(_text(attn_on_attn=True), blocks=4),
    "gated values": Peer(_text(attn_gate_values=True), blocks=4),
    "value residual": Peer(_text(add_value_residual=True), blocks=4, unknown="lerp"),
    "scale_residual": Peer(_text(scale_residual=True), blocks=4),
    "scale_residual_constant": Peer(_text(scale_residual_constant=0.5), blocks=4),
    "layerscale": Peer(_text(use_layerscale=True), blocks=4),
    "macaron": Peer(_text(macaron=True), blocks=6, kinds="MAMMAM"),
    "sandwich": Peer(_text(sandwich_coef=1, depth=3), blocks=6, kinds="AAMAMM"),
    "layer dropout": Peer(_text(layer_dropout=0.5), blocks=4),
    "shift tokens": Peer(_text(shift_tokens=1), blocks=4),
    "weight tie": Peer(_text(weight_tie_layers=True), blocks=2, kinds="AM"),
    "orthogonal residual": Peer(_text(orthog_residual=True), blocks=4, norms="inner"),
    "mean-split residual": Peer(_text(mv_split_residual=True), blocks=4),
    "input again": Peer(
        _text(reinject_input=True), blocks=5, kinds="MAMAM", norms="none inner", unknown="side input", stuck=True
    ),
    "u-net": Peer(_text(unet_skips=True, depth=4), blocks=8, kinds="AMAMAMAM"),
    "gru": Peer(_text(gate_residual=True), blocks=4, kinds="", unknown="minus sign"),
    "hyper-connections": Peer(_text(num_residual_streams=4), blocks=4, kinds="", unknown="several streams"),
    "gated streams": Peer(
        _text(gated_multi_residual=True, num_residual_streams=4, residual_fn_kwargs={"read_gate_rank": 4}),
        blocks=4,
        norms="pre inner none",
    ),
    "attention over depth": Peer(
        _text(attn_aggregated_residuals=True, attn_aggregated_residual_kwargs={"lora_rank": 4}),
        blocks=8,
        kinds="MAMAMAMA",
        norms="pre inner",
        unknown="stacked",
    ),
    "layers integrated": Peer(
        _text(integrate_layers=True), blocks=4, kinds="AMAM", norms="pre inner", unknown="stacked"
    ),
}
