"""Position codes: finding the position embeddings of a model, and their values."""

import warnings
from typing import Any

import pytest
import torch
from tests.init.started import seeded
from torch import nn

from unskip.errors import BadInput, InitError, UnskipWarning
from unskip.init import position_code_, sine_cosine, skipless_, start_, verify_skipless

timm = pytest.importorskip("timm")
SHAPE = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}


def timm_vit(**more: Any) -> tuple[nn.Module, str, str, int]:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE, **more)
    return model, "pos_embed", "patch_embed", 0 if "class_token" in more or "no_embed_class" in more else 1


def torchvision_vit() -> tuple[nn.Module, str, str, int]:
    models = pytest.importorskip("torchvision").models
    return models.VisionTransformer(16, 4, 2, 3, 48, 96, num_classes=5), "encoder.pos_embedding", "conv_proj", 1


def hf_vit() -> tuple[nn.Module, str, str, int]:
    hf = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
    model = hf.ViTModel(hf.ViTConfig(**shape, intermediate_size=96))
    return model, "embeddings.position_embeddings", "embeddings.patch_embeddings", 1


def hf_clip() -> tuple[nn.Module, str, str, int]:
    hf = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
    model = hf.CLIPVisionModel(hf.CLIPVisionConfig(**shape, intermediate_size=96))
    return model, "embeddings.position_embedding.weight", "embeddings.patch_embedding", 1


def hf_mae() -> tuple[nn.Module, str, str, int]:
    hf = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
    model = hf.ViTMAEModel(hf.ViTMAEConfig(**shape, intermediate_size=96))
    return model, "embeddings.position_embeddings", "embeddings.patch_embeddings", 1


MODELS = {
    "timm": timm_vit,
    "timm, no class token": lambda: timm_vit(class_token=False, global_pool="avg"),
    "timm, class token without position": lambda: timm_vit(no_embed_class=True),
    "torchvision": torchvision_vit,
    "transformers": hf_vit,
    "transformers, nn.Embedding": hf_clip,
    "transformers, class token added after the positions": hf_mae,
}


def hf_text(name: str, **more: Any) -> nn.Module:
    hf = pytest.importorskip("transformers")
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "vocab_size": 40}
    return getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**shape, max_position_embeddings=24, **more)).eval()


TEXTS = {
    "Bert": "embeddings.position_embeddings.weight",
    "Roberta": "embeddings.position_embeddings.weight",
    "OPT": "decoder.embed_positions.weight",
}


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=seeded(1))


def patch_tokens(model: nn.Module, path: str) -> torch.Tensor:
    with torch.no_grad():
        out = model.get_submodule(path)(images())
    return out.flatten(2).mT if out.ndim == 4 else out


@pytest.mark.parametrize("name", MODELS)
def test_codes_have_the_norm_of_the_patch_tokens(name: str) -> None:
    model, path, embed, prefix = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    length = position_code_(model, images(), generator=seeded())
    assert length == pytest.approx(float(patch_tokens(model, embed).norm(dim=-1).mean()), rel=1e-5)
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])] == [path]
    rows = model.get_parameter(path).detach().double().reshape(-1, 48)
    torch.testing.assert_close(
        rows @ rows.T, length**2 * torch.eye(16 + prefix).double(), rtol=0, atol=1e-5 * length**2
    )
    position_code_(model, images(), kind="sincos", scale=0.5)
    found = model.get_parameter(path).detach().reshape(-1, 48)
    assert not found[:prefix].any()
    torch.testing.assert_close(found[prefix:], length / 2 * sine_cosine(4, 4, 48) / 24**0.5)
    torch.testing.assert_close(found[prefix:].norm(dim=1), torch.full((16,), length / 2))


def test_products_of_sine_cosine_codes_depend_only_on_the_distance() -> None:
    code = sine_cosine(3, 5, 16).double()
    products = (code @ code.T).reshape(3, 5, 3, 5)
    torch.testing.assert_close(products[0, 0, 1, 2], products[1, 2, 2, 4])
    torch.testing.assert_close(products[0, 1, 2, 1], products[0, 4, 2, 4])
    with pytest.raises(BadInput, match="multiple of 4"):
        sine_cosine(2, 2, 6)


def test_more_positions_than_dimensions_have_orthogonal_columns() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", **{**SHAPE, "embed_dim": 12}, class_token=False, global_pool="avg"
    )
    length = position_code_(model, images(), generator=seeded())
    rows = model.pos_embed.detach()[0].double()
    torch.testing.assert_close(rows.T @ rows, length**2 * 16 / 12 * torch.eye(12).double(), rtol=0, atol=1e-4)


def test_a_model_without_position_embeddings_is_refused() -> None:
    model = timm.create_model("beit_base_patch16_224", **SHAPE)
    with pytest.raises(InitError, match="no position embeddings"):
        position_code_(model, images())
    with pytest.raises(BadInput, match="kind"):
        position_code_(model, images(), kind="learned")  # type: ignore[arg-type]


@pytest.mark.parametrize("words", ["random", "counting", "padded"])
@pytest.mark.parametrize("name", TEXTS)
def test_the_positions_of_text_models_are_told_from_words_and_token_types(name: str, words: str) -> None:
    widths = {"word_embed_proj_dim": 48, "ffn_dim": 64} if name == "OPT" else {"intermediate_size": 64}
    model = hf_text(name, **widths)
    ids = torch.randint(3, 40, (2, 8), generator=seeded())
    ids = torch.arange(3, 11).expand(2, 8).clone() if words == "counting" else ids
    ids[0, 6:] = 1 if words == "padded" else ids[0, 6:]  # the token of padding in RoBERTa and OPT
    before = {key: value.clone() for key, value in model.state_dict().items()}
    position_code_(model, {"input_ids": ids, "attention_mask": (ids != 1).long()}, generator=seeded())
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])] == [TEXTS[name]]


def test_several_position_embeddings_are_refused_by_name() -> None:
    model, *_ = timm_vit()
    model.more = nn.Parameter(torch.randn(17, 48))
    model.norm_pre.register_forward_pre_hook(lambda module, args: (args[0] + model.more,))
    with pytest.raises(InitError, match="pos_embed and more are all added"):
        position_code_(model, images())


@pytest.mark.parametrize("words", ["default", "zero", "skipless"])
def test_position_codes_with_every_initialisation(words: str) -> None:
    (one, *_), (other, *_) = timm_vit(), timm_vit()
    with warnings.catch_warnings(action="ignore", category=UnskipWarning):
        start_(one, f"{words}:position_code=orthogonal", seeded(), images())
    length = position_code_(other, images(), generator=seeded())
    assert torch.equal(one.pos_embed, other.pos_embed)  # type: ignore[arg-type]
    assert length > 1


def test_nothing_is_changed_if_another_part_fails() -> None:
    model, *_ = timm_vit()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(InitError, match="carry is 2"):
        skipless_(model, images(), position_code="orthogonal", carry=2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["orthogonal", "sincos"])
@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # of attention
@pytest.mark.parametrize("images", [16, 36])  # fewer positions than dimensions (48), and more
def test_verify_checks_the_code_and_its_norm(kind: Any, images: int) -> None:
    model = timm.create_model("vit_tiny_patch16_224", **SHAPE | {"img_size": images})
    sample = torch.rand(4, 3, images, images, generator=seeded())
    check = skipless_(model, sample, position_code=kind, generator=seeded())
    assert check.rows[0].values["code norm"] == pytest.approx(1, abs=1e-4)
    with pytest.raises(InitError, match="code"):
        verify_skipless(model, sample, position_code="sincos" if kind == "orthogonal" else "orthogonal")
    with torch.no_grad():
        model.pos_embed *= 1.2
    with pytest.raises(InitError, match=r"1\.2 times the norm"):
        verify_skipless(model, sample, position_code=kind)
    with torch.no_grad():
        model.pos_embed /= 1.2
        model.pos_embed[0, 3] *= -1 if kind == "sincos" else 0.9
    with pytest.raises(InitError, match=f"from the code {kind}"):
        verify_skipless(model, sample, position_code=kind)
