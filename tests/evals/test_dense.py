"""Mean IoU, the segmentation probe and object discovery."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score
from tests.evals.small import colours, vit
from torch import Tensor, nn

from unskip import evals
from unskip.data import DenseSet
from unskip.errors import BadInput
from unskip.evals._discover import in_pixels, true_boxes
from unskip.evals._iou import pair_iou
from unskip.evals._patches import Reader

# --- Mean IoU ---------------------------------------------------------------------------------------------------------


def test_mean_iou_by_hand() -> None:
    truth = torch.tensor([[0, 0, 1], [1, 2, 9]])
    guess = torch.tensor([[0, 1, 1], [1, 2, 0]])
    # class 0: 1 of 2, class 1: 2 of 3, class 2: 1 of 1; class 3 is absent; the 9 is ignored
    assert evals.mean_iou(guess, truth, 4, ignore=9) == pytest.approx((1 / 2 + 2 / 3 + 1) / 3)
    assert evals.mean_iou(guess, guess, 3) == 1.0
    assert math.isnan(evals.mean_iou(guess[:0], truth[:0], 3))
    assert math.isnan(evals.mean_iou(guess, torch.full_like(guess, 9), 3, ignore=9))


@given(st.integers(0, 10_000), st.integers(1, 5), st.booleans())
def test_mean_iou_matches_scikit_learn(seed: int, classes: int, skip: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    guess, truth = (torch.randint(classes, (3, 4, 5), generator=draw) for _ in range(2))
    counted = torch.ones_like(truth, dtype=torch.bool)
    if skip:
        counted = torch.rand(truth.shape, generator=draw) < 0.7
        truth = torch.where(counted, truth, 255)
    x, y = truth[counted].numpy(), guess[counted].numpy()
    if not len(x):
        return
    labels = sorted(set(x) | set(y))
    expected = jaccard_score(x, y, labels=labels, average="macro", zero_division=0)
    assert evals.mean_iou(guess, truth, classes, ignore=255 if skip else None) == pytest.approx(expected)
    # The matrix of the set is the sum over its images.
    parts = sum(evals.confusion(g, t, classes, 255) for g, t in zip(guess, truth, strict=True))
    assert torch.equal(parts, evals.confusion(guess, truth, classes, 255))


@pytest.mark.parametrize(
    ("guess", "truth", "classes", "message"),
    [
        (torch.zeros(2, 3).long(), torch.zeros(3, 2).long(), 2, "resize the predictions"),
        (torch.zeros(2).long(), torch.full((2,), 7), 3, "targets hold class 7"),
        (torch.zeros(2), torch.zeros(2).long(), 3, "use argmax"),
        (torch.zeros(2).long(), [0, 0], 3, "got list"),
    ],
)
def test_mean_iou_refuses(guess: Any, truth: Any, classes: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evals.mean_iou(guess, truth, classes)


def test_pair_iou() -> None:
    boxes = torch.tensor([[0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 0, 0], [5, 5, 6, 6]])
    ious = pair_iou(boxes[:, None], boxes[None])
    assert ious[0, 1] == pytest.approx(1 / 7)
    assert ious[0, 0] == 1
    assert (ious[2] == 0).all()  # an empty box, also with itself
    assert ious[3, 0] == 0


# --- Segmentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["segment-linear-v1", "segment-ridge-v1"])
@pytest.mark.parametrize("blocks", [-1, (0, 2)])
def test_linearly_separable_patches_are_segmented(protocol: str, blocks: Any) -> None:
    model = vit()
    changes = {"lr": 3e-2, "batch": 6} if "linear" in protocol else {}
    segmentation = evals.segment(
        model, colours(24), colours(8, seed=1), 2, blocks=blocks, protocol=protocol, changes=changes
    )
    assert segmentation.mean_iou > 0.75  # below 1, because logits are interpolated between patches
    assert segmentation.iou[0] > 0.75
    assert segmentation.blocks == ((2,) if blocks == -1 else (0, 2))
    assert segmentation.changes == changes


def test_ridge_matches_scikit_learn() -> None:
    from sklearn.linear_model import Ridge

    model, (images, masks) = vit(), colours(10)
    test = colours(4, seed=1)
    segmentation = evals.segment(model, (images, masks), test, 2, protocol="segment-ridge-v1")
    x = evals.patches(model, images).blocks[2].flatten(0, 1).double().numpy()
    share = nn.functional.avg_pool2d(masks[:, None].float(), 8).flatten().double().numpy()
    mean, std = x.mean(0), x.std(0)
    peer = Ridge(alpha=1e-3 * len(x)).fit((x - mean) / std, numpy.stack([1 - share, share], 1))
    z = evals.patches(model, test[0]).blocks[2].flatten(0, 1).double().numpy()
    logits = torch.from_numpy(peer.predict((z - mean) / std)).view(4, 4, 4, 2).movedim(-1, 1)
    large = nn.functional.interpolate(logits, (32, 32), mode="bilinear", align_corners=False).argmax(1)
    assert segmentation.mean_iou == pytest.approx(evals.mean_iou(large, test[1].long(), 2), abs=2e-3)


def test_ignored_pixels_are_not_used_in_training_or_testing() -> None:
    model = vit()
    (images, masks), test = colours(16), colours(6, seed=1)
    plain = evals.segment(model, (images, masks), test, 2, protocol="segment-ridge-v1")
    wrong, border = masks.clone(), masks.clone()
    wrong[:, :, :16] = 1 - wrong[:, :, :16]
    border[:, :, :16] = 255
    misled = evals.segment(model, (images, wrong), test, 2, protocol="segment-ridge-v1")
    segmentation = evals.segment(model, (images, border), test, 2, protocol="segment-ridge-v1", ignore=255)
    assert misled.mean_iou < 0.6 < 0.8 < segmentation.mean_iou
    hidden = test[1].clone()
    hidden[:, 3:5] = 200
    without = evals.segment(model, (images, masks), (test[0], hidden), 2, protocol="segment-ridge-v1", ignore=200)
    assert without.accuracy != plain.accuracy
    with pytest.raises(BadInput, match="no pixel"):
        evals.segment(model, (images, torch.full_like(masks, 9)), test, 2, protocol="segment-ridge-v1", ignore=9)


def test_segmentation_over_depth_matches_each_block_alone() -> None:
    model, train, test = vit(), colours(12), colours(4, seed=1)
    sets = [DenseSet.of(*each) for each in (train, test)]
    curve = evals.evaluate(model, *sets, ["segment-ridge-v1"])
    assert [each.block for each in curve] == [0, 1, 2]
    alone = evals.segment(model, train, test, 2, blocks=1, protocol="segment-ridge-v1")
    values = {
        "mean_iou": alone.mean_iou,
        "pixel_accuracy": alone.accuracy,
        "iou_0": alone.iou[0],
        "iou_1": alone.iou[1],
    }
    assert curve[1].values == pytest.approx(values)
    assert (curve[1].n, curve[1].intervals, curve[1].pool) == (4, {}, "tokens")


def test_batch_norm_removes_scale_and_shift_of_features_on_a_small_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running statistics that start at 0 and 1 would not be forgotten in forty steps."""
    model, train, test = vit(), colours(12), colours(8, seed=1)
    plain = evals.segment(model, train, test, 2)
    read = Reader.__call__

    def shifted(self: Reader, *arguments: Any) -> evals.Patches:
        patches = read(self, *arguments)
        return replace(patches, blocks={index: x / 16 + 8 for index, x in patches.blocks.items()})

    monkeypatch.setattr(Reader, "__call__", shifted)
    assert evals.segment(model, train, test, 2).iou == pytest.approx(plain.iou, abs=2e-3)


def test_masks_of_a_finer_grid_and_odd_images() -> None:
    model = vit(dynamic_img_size=True)
    images, masks = colours(6)
    fine = masks.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert evals.segment(model, (images, fine), (images, fine), 2, protocol="segment-ridge-v1").mean_iou > 0.7
    odd, cut = images[:, :, :30, :27], masks[:, :30, :27]
    segmentation = evals.segment(model, (odd, cut), (odd, cut), 2, protocol="segment-ridge-v1")
    assert 0.5 < segmentation.mean_iou <= 1


@pytest.mark.parametrize(
    ("masks", "options", "message"),
    [
        (torch.zeros(4, 32, 16).long(), {}, "same aspect ratio"),
        (torch.zeros(3, 32, 32).long(), {}, "one per image"),
        (torch.zeros(4, 32, 32), {}, "whole numbers"),
        (torch.full((4, 32, 32), 5), {}, r"\[5\], .* 2 classes"),
        (torch.zeros(4, 32, 32).long(), {"batch": 0}, "batch is 0"),
    ],
)
def test_segment_refuses(masks: Tensor, options: Any, message: str) -> None:
    images, _ = colours(4)
    with pytest.raises(BadInput, match=message):
        evals.segment(vit(), (images, masks), colours(2), 2, **options)


def test_segment_refuses_empty_sets_and_broken_features() -> None:
    train, test = colours(4), colours(2)
    with pytest.raises(BadInput, match="no test images"):
        evals.segment(vit(), train, (test[0][:0], test[1][:0]), 2)
    with pytest.raises(BadInput, match="no pixel of the test"):
        evals.segment(vit(), train, (test[0], torch.full_like(test[1], 9)), 2, ignore=9)
    broken = torch.full_like(test[0], torch.nan, dtype=torch.float32)
    with pytest.raises(BadInput, match="test features are not finite"):
        evals.segment(vit(), train, (broken, test[1]), 2, protocol="segment-ridge-v1")


def test_masks_can_be_bool() -> None:
    (images, masks), model = colours(), vit()
    result = [
        evals.segment(model, (images, each), (images, each), 2, protocol="segment-ridge-v1").iou
        for each in (masks, masks.bool())
    ]
    assert result[0] == result[1]


# --- Discovery --------------------------------------------------------------------------------------------------------


def results(
    model: nn.Module, images: Tensor, block: int = -1, what: Any = "keys"
) -> tuple[evals.Discovery, tuple[float, float]]:
    read = evals.patches(model, images, block, what)
    (tokens,) = read.blocks.values()
    return evals.tokencut(tokens, read.grid), read.stride


def test_corloc_counts_hits_against_any_box() -> None:
    """The discovered boxes are hits, other boxes are not, and one hit among several boxes is enough."""
    model, (images, masks) = vit(), colours(8)
    objects, stride = results(model, images)
    discovered = in_pixels(objects.boxes, stride, (32, 32))
    assert stride == (8.0, 8.0)
    assert objects.sure.any()
    empty = ~objects.masks.flatten(1).any(1)
    assert not empty.any()
    assert evals.discover(model, images, discovered)["corloc"] == 1.0
    small = torch.tensor([[0.0, 0.0, 0.5, 0.5]]).expand(8, 4)
    assert evals.discover(model, images, small)["corloc"] == 0.0
    both = torch.stack([small, discovered.float()], 1)
    several = [*both[:4], *small[4:, None]]
    result = evals.discover(model, images, several, masks=masks)
    assert result["corloc"] == 0.5
    assert 0 <= result["mask_iou"] <= 1
    assert result["empty"] == 0


def test_masks_are_compared_at_full_resolution() -> None:
    model, (images, _) = vit(), colours(5)
    result, _ = results(model, images)
    full = result.masks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    boxes = torch.tensor([[0, 0, 32, 32]]).expand(5, 4)
    assert evals.discover(model, images, boxes, masks=full.long())["mask_iou"] == 1.0
    half = full.long()
    half[:, :, 16:] = 7
    expected = [float(m[:, :16].sum() / (m[:, :16].sum()) if m[:, :16].any() else 1) for m in full]
    found_iou = evals.discover(model, images, boxes, masks=half, ignore=7)["mask_iou"]
    assert found_iou == pytest.approx(sum(expected) / 5)
    other = torch.rand(5, 32, 32, generator=torch.Generator().manual_seed(0)).gt(0.5).long()
    fine, rough = other.repeat_interleave(2, 1).repeat_interleave(2, 2), other[:, ::8, ::8]
    expected = [float((m & t).sum() / (m | t).sum()) for m, t in zip(full, other.bool(), strict=True)]
    for masks in (other, fine):
        assert evals.discover(model, images, boxes, masks=masks)["mask_iou"] == pytest.approx(sum(expected) / 5)
    expected = [float((m & t).sum() / (m | t).sum()) for m, t in zip(result.masks, rough.bool(), strict=True)]
    assert evals.discover(model, images, boxes, masks=rough)["mask_iou"] == pytest.approx(sum(expected) / 5)


def test_images_with_only_ignored_pixels_do_not_count() -> None:
    model, (images, _) = vit(), colours(4)
    masks = torch.rand(4, 32, 32, generator=torch.Generator().manual_seed(0)).gt(0.5).long()
    boxes = torch.tensor([[0, 0, 32, 32]]).expand(4, 4)
    blank = torch.cat([masks[:3], torch.full_like(masks[3:], 9)])
    some = evals.discover(model, images[:3], boxes[:3], masks=masks[:3])["mask_iou"]
    assert evals.discover(model, images, boxes, masks=blank, ignore=9)["mask_iou"] == pytest.approx(some)


def test_non_finite_features_are_misses() -> None:
    model, (images, _) = vit(), colours(4)
    broken = images.float() / 128 - 1
    broken[1] = float("nan")
    result = evals.discover(model, broken, torch.tensor([[0, 0, 32, 32]]).expand(4, 4))
    assert result["empty"] == 0.25
    assert result["unsure"] >= 0.25


def test_discovery_over_depth_matches_each_block_alone() -> None:
    model, (images, masks) = vit(), colours(7)
    boxes = torch.tensor([[8, 8, 24, 24]]).expand(7, 4)
    images_and_truth = DenseSet.of(images, masks, boxes)
    curve = evals.evaluate(model, None, images_and_truth, ["discover-tokencut-v1"], batch=4)
    result = {each.block: each.values for each in curve}
    assert result == {block: evals.discover(model, images, boxes, masks=masks, block=block) for block in range(3)}
    assert curve[0].intervals["corloc"] == evals.wilson(curve[0].values["corloc"], 7)
    some = evals.evaluate(model, None, images_and_truth, ["discover-tokencut-v1"], blocks=[-1, 0])
    assert [each.block for each in some] == [0, 2]
    with pytest.raises(BadInput, match="boxes"):
        evals.evaluate(model, None, DenseSet.of(images, masks), ["discover-tokencut-v1"])


def test_images_that_are_not_square() -> None:
    model = vit(dynamic_img_size=True)
    images = torch.randint(0, 255, (2, 3, 37, 52), dtype=torch.uint8)
    result, stride = results(model, images, 1, "tokens")
    assert result.masks.shape == (2, 5, 7)
    boxes = in_pixels(result.boxes, stride, (37, 52))
    assert bool((boxes <= torch.tensor([52, 37, 52, 37])).all())
    assert evals.discover(model, images, boxes, what="tokens", block=1)["corloc"] == 1.0


@pytest.mark.parametrize(
    ("boxes", "options", "message"),
    [
        (torch.zeros(2, 4), {}, "is empty .* width 32"),
        (torch.tensor([[9.0, 9, 3, 20]] * 2), {}, "is empty"),
        (torch.zeros(3, 4), {}, "2 images, but boxes for 3"),
        (torch.zeros(2, 5), {}, "x0, y0, x1, y1"),
        (torch.full((2, 4), float("nan")), {}, "not finite"),
        (torch.tensor([[0.0, 0, 9, 9]] * 2), {"masks": torch.zeros(2, 9, 8)}, "same aspect ratio"),
        (torch.tensor([[0.0, 0, 9, 9]] * 2), {"masks": numpy.zeros((2, 32, 32))}, "got ndarray"),
        (torch.tensor([[0.0, 0, 9, 9]] * 2), {"masks": torch.ones(2, 32, 32), "ignore": 1}, "value to ignore"),
    ],
)
def test_discover_refuses(boxes: Tensor, options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evals.discover(vit(), colours(2)[0], boxes, **options)


def test_true_boxes_are_clipped_to_the_image() -> None:
    boxes, owner = true_boxes(
        [torch.tensor([-5.0, 3, 40, 90]), torch.tensor([[1, 1, 2, 2], [0, 0, 3, 99]])], 2, (20, 30)
    )
    assert boxes.tolist() == [[0, 3, 30, 20], [1, 1, 2, 2], [0, 0, 3, 20]]
    assert owner.tolist() == [0, 1, 1]
