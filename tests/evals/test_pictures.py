"""Features as colours, attention maps, pictures; sets with masks and boxes, also on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import timm
import torch
from PIL import Image
from pyarrow import parquet
from tests.data.files import REAL, encoded, needs_real
from tests.evals.small import vit
from torch import Tensor

import unskip
from unskip import cli, evals, recipes
from unskip.data import TRIMAP, DenseSet, infer_classes, open_dense, preprocess_of
from unskip.errors import BadInput
from unskip.training import RunFolder


def test_colours_match_the_pca_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(80, 12, generator=draw) * torch.arange(1, 13)
    colours, explained = evals.pca_colours(rows)
    assert (float(colours.min()), float(colours.max())) == (0, 1)
    peer = PCA(3).fit(rows.numpy())
    assert explained == pytest.approx(peer.explained_variance_ratio_, rel=1e-4)
    for component, colour in zip(peer.transform(rows.numpy()).T, colours.T, strict=True):
        assert abs(numpy.corrcoef(component, colour)[0, 1]) > 0.98  # below 1 because the ends are clipped
    # Rotation and scale of the features do not change the colours.
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=draw))
    assert torch.allclose(evals.pca_colours(3 * rows @ rotation)[0], colours, atol=1e-3)


def test_colours_of_fewer_than_three_components() -> None:
    colours, explained = evals.pca_colours(torch.arange(9.0)[:, None])
    assert explained == (1.0, 0.0, 0.0)
    # The sign is arbitrary, because a line has no third moment. Its ends are clipped.
    assert (colours[1:-1, 0].diff().sign().unique().numel(), *colours[0, 1:].tolist()) == (1, 0.5, 0.5)
    gray, none = evals.pca_colours(torch.ones(8, 4))
    assert none == (0.0, 0.0, 0.0)
    assert (gray == 0.5).all()
    with pytest.raises(BadInput, match="finite"):
        evals.pca_colours(torch.full((4, 3), torch.nan))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 2},
        {"class_token": False, "global_pool": "avg"},
        {"qk_norm": True},
        {"model_name": "vit_small_patch16_rope_224"},
        {"model_name": "beit_base_patch16_224"},
    ],
    ids=str,
)
def test_attention_maps_match_the_block(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3}
    model: Any = timm.create_model(**{"model_name": "vit_tiny_patch16_224", "num_classes": 0, **size, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms and biases have an effect
            parameter.add_(0.2 * torch.randn_like(parameter))
    unskip.rewire(model, "cut")
    attention = model.blocks[2].attn
    attention.fused_attn = False
    seen: list[Tensor] = []
    attention.attn_drop.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        model(x)
    prefix = model.num_prefix_tokens
    expected = seen[0][:, :, 0, prefix:] if prefix else seen[0].mean(2)
    maps = evals.attention_maps(model, x)
    assert maps.shape == (2, 3, 4, 4)
    assert torch.allclose(maps.flatten(2), expected, atol=1e-5)


def test_pictures_are_written(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (3, 3, 32, 32), dtype=torch.uint8)
    out = evals.pictures(vit(), images, tmp_path / "deep" / "sheet.png", blocks=[0, 2])
    with Image.open(out) as sheet:
        pixels = numpy.array(sheet)
    assert pixels.shape == (3 * 130 + 14, 5 * 130, 3)  # image, two blocks, attention, discovered
    shown = pixels[14 : 14 + 128, :128]
    assert numpy.array_equal(shown[::4, ::4], images[0].movedim(0, -1).numpy())
    values = preprocess_of(vit()).normalised(images)
    same = evals.pictures(vit(), values, tmp_path / "same.png", blocks=[0, 2])
    with Image.open(same) as sheet:
        assert numpy.array_equal(numpy.array(sheet)[:, :128], pixels[:, :128])  # bytes and normalised floats
    conv = timm.create_model("resnet10t", num_classes=0).eval()
    assert evals.pictures(conv, torch.randn(2, 3, 64, 64), tmp_path / "conv.png").is_file()  # without attention
    with pytest.raises(BadInput, match="1 to 12"):
        evals.pictures(vit(), images.repeat(5, 1, 1, 1), tmp_path / "x.png")
    with pytest.raises(BadInput, match=r"7. not among .* 3 blocks"):
        evals.pictures(vit(), images, tmp_path / "x.png", blocks=[7])
    for name in ("x", "x.psd"):  # PIL can read .psd, but not write it
        with pytest.raises(BadInput, match=r"ending in \.png"):
            evals.pictures(vit(), images, tmp_path / name)
    with pytest.raises(BadInput, match="images of 4 channels"):
        evals.pictures(vit(in_chans=4), torch.zeros(2, 4, 32, 32), tmp_path / "x.png")


# --- Masks and boxes --------------------------------------------------------------------------------------------------


def write(file: Path, count: int = 6, mask: Any = None, boxes: bool = True, size: int = 32, **extra: Any) -> Path:
    """Gray images with a bright square, a trimap and a box."""
    random = numpy.random.default_rng(0)
    rows: dict[str, Any] = {"image": [], "mask": [], "label": [], "bbox": []}
    for index in range(count):
        left = 4 * (index % 3)
        pixels = random.integers(0, 60, (size, size), numpy.uint8)
        trimap = numpy.full((size, size), 2, numpy.uint8)
        trimap[8:24, left : left + 18] = 3
        trimap[9:23, left + 1 : left + 17] = 1
        pixels[trimap == 1] += 150
        rows["image"].append({"bytes": encoded(Image.fromarray(pixels)), "path": None})
        rows["mask"].append({"bytes": encoded(Image.fromarray(trimap)) if mask is None else mask, "path": None})
        rows["label"].append(index % 2)
        rows["bbox"].append([left, 8, left + 18, 24])
    if not boxes:
        del rows["bbox"]
    if extra.get("masks") is False:
        del rows["mask"]
    parquet.write_table(pyarrow.table(rows), file)
    return file


def test_masks_and_boxes_are_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"x-{split}.parquet")
    dense = open_dense(tmp_path / "x-{split}.parquet", "test", values=TRIMAP)
    assert len(dense) == 6
    assert dense.masks.shape == (6, 32, 32)
    assert dense.masks.unique().tolist() == [0, 1, 255]
    assert dense.masks[1, 10, 6] == 1
    assert dense.boxes[1].tolist() == [4, 8, 22, 24]
    half = open_dense(tmp_path / "x-{split}.parquet", "test", size=16)
    assert half.pixels.shape[2:] == (16, 16)
    assert half.boxes[1].tolist() == [2, 4, 11, 12]
    assert half.masks.unique().tolist() == [1, 2, 3]


def test_masks_match_images_that_are_resized_to_squares(tmp_path: Path) -> None:
    flat = numpy.zeros((20, 40), numpy.uint8)
    flat[5:10, 8:30] = 255
    picture = {"bytes": encoded(Image.fromarray(flat)), "path": None}
    rows = {"image": [picture] * 2, "mask": [picture] * 2, "label": [0, 1], "bbox": [[8, 5, 30, 10]] * 2}
    parquet.write_table(pyarrow.table(rows), tmp_path / "x-test.parquet")
    dense = open_dense(tmp_path / "x-{split}.parquet", "test", size=16)
    assert dense.masks.shape == (2, 40, 40)
    inside = dense.masks[0].nonzero()
    assert (*inside.amin(0).tolist(), *(inside.amax(0) + 1).tolist()) == (10, 8, 20, 30)
    assert (dense.boxes[0] * 40 / 16).tolist() == pytest.approx([8, 10, 30, 20])
    assert open_dense(tmp_path / "x-{split}.parquet", "test").masks.shape == (2, 20, 40)


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        ({"mask": b"nothing"}, None, "row 0: the mask"),
        ({"mask": encoded(Image.new("L", (8, 8)))}, None, "mask of 8 x 8"),
        ({}, {1: 1, 2: 0}, r"\[3\], which `values`"),
        ({"masks": False, "boxes": False}, None, "no column mask or bbox"),
    ],
)
def test_bad_dense_sets(tmp_path: Path, options: Any, values: Any, message: str) -> None:
    write(tmp_path / "x-train.parquet", **options)
    with pytest.raises(BadInput, match=message):
        open_dense(tmp_path / "x-train.parquet", values=values)
    with pytest.raises(BadInput, match="no test split"):
        open_dense(tmp_path / "x-train.parquet", "test")


def test_a_bad_row_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "x-train-0.parquet")
    second = write(tmp_path / "x-train-1.parquet")
    whole = parquet.read_table(second)
    for name, value, message in (
        ("mask", {"bytes": b"nothing", "path": None}, "row 2: the mask cannot be read"),
        ("bbox", None, r"row 2: bbox is None"),
        ("bbox", [1, 2, 3], r"row 2: bbox is \[1, 2, 3\]"),
    ):
        rows = whole.to_pylist()
        rows[2][name] = value
        parquet.write_table(pyarrow.Table.from_pylist(rows, whole.schema), second)
        with pytest.raises(BadInput, match=rf"x-train-1\.parquet, {message}"):
            open_dense(tmp_path / "x-{split}-*.parquet")
    parquet.write_table(whole, second)
    dense = open_dense(tmp_path / "x-{split}-*.parquet")
    assert dense.boxes.tolist() == 2 * whole.column("bbox").to_pylist()


@pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")
def test_a_run_is_evaluated_by_dense_protocols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"x-{split}.parquet")
    tiny: dict[str, Any] = {"model_args": "depth=2,embed_dim=16,num_heads=2", "steps": 2, "batch": 32, "device": "cpu"}
    tiny |= {"local_crops": 1, "projection": 16, "hidden": 16, "bottleneck": 8, "online_images": 250, "health": False}
    unskip.train(recipes.dino("digits", **tiny), tmp_path / "run", quiet=True)
    names = "segment-ridge-v1,discover-tokencut-v1,rank-v1"
    dense = str(tmp_path / "x-{split}.parquet")
    command = ["eval", str(tmp_path / "run"), "--protocol", names, "--dense", dense, "--json"]
    assert cli.main(command) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    by = {(row["evaluation"], row["block"]): row for row in rows}
    assert set(by) == {(name, block) for name in names.split(",") for block in (0, 1)}
    assert 0 <= by["segment-ridge-v1", 1]["mean_iou"] <= 1
    assert 0 <= by["discover-tokencut-v1", 0]["corloc"] <= 1
    assert 0 <= by["discover-tokencut-v1", 0]["mask_iou"] <= 1  # masks are larger than the images of the run
    kept = RunFolder(tmp_path / "run").read("evals.jsonl")
    assert [row["precision"] for row in kept if row["evaluation"] == "segment-ridge-v1"] == ["float32"] * 2
    assert cli.main(["eval", str(tmp_path / "run"), "--protocol", "segment-ridge-v1"]) == 2
    assert "--dense FILES" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "meaning"),
    [
        ([1, 2, 3], ([1, 0, 255], 255)),
        ([1, 2], ([1, 0], 255)),
        ([0, 1, 2], ([0, 1, 2], None)),
        ([0, 5, 255], ([0, 5, 255], 255)),
        ([0, 255], ([0, 1], None)),
    ],
    ids=str,
)
def test_classes_inferred_from_masks(numbers: list[int], meaning: Any) -> None:
    """Both splits are used, because one of them may lack a class."""
    masks = torch.tensor(numbers, dtype=torch.uint8)[:, None, None]
    whole = DenseSet.of(torch.zeros(len(numbers), 3, 1, 1, dtype=torch.uint8), masks)
    train, test = infer_classes(whole, DenseSet.of(whole.pixels[:1], masks[:1]))
    assert (train.masks.flatten().tolist(), train.ignore) == meaning
    assert (test.masks.flatten().tolist(), test.ignore) == (meaning[0][:1], meaning[1])
    bare = DenseSet.of(whole.pixels)
    assert infer_classes(bare) == (bare,)


@needs_real
def test_pets() -> None:
    """Real masks and boxes agree, and an untrained model predicts masks above chance."""
    dense = open_dense(REAL / "pets-test.parquet", "test", size=64, values=TRIMAP)
    rows, columns = (dense.masks[0] == 1).nonzero(as_tuple=True)
    x0, y0, x1, y1 = (2 * dense.boxes[0]).tolist()
    assert x0 - 3 <= int(columns.min())
    assert int(columns.max()) <= x1 + 3
    assert y0 - 3 <= int(rows.min())
    assert int(rows.max()) <= y1 + 3
    model = vit(img_size=64)
    pairs = [(dense.pixels[part], dense.masks[part]) for part in (slice(0, 48), slice(48, 80))]
    guess = evals.segment(model, pairs[0], pairs[1], 2, blocks=0, ignore=255, protocol="segment-ridge-v1")
    assert guess.accuracy > 0.6
    result = evals.discover(model, dense.pixels[:16], dense.boxes[:16])
    assert 0 <= result["corloc"] <= 1
