"""DINO and SimCLR: losses against handwritten formulas, centring, Sinkhorn, the teacher, published checkpoints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.models import DINO, SimCLR, contrast, load_dino, sinkhorn


def backbone(**options: Any) -> nn.Module:
    made: nn.Module = timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 0}
        | {"dynamic_img_size": True, **options},
    )
    return made


def model(**options: Any) -> DINO:
    torch.manual_seed(0)
    return DINO(backbone(), **{"out": 12, "hidden": 20, "bottleneck": 8, **options})


def crops(images: int = 3, wide: int = 2, local: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(images, wide, 3, 16, 16, generator=draw), torch.randn(images, local, 3, 8, 8, generator=draw)


def by_hand(dino: DINO, wide: Tensor, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the paper, in a loop over pairs of crops. Returns the loss, entropy, and mean teacher output."""
    teacher = [dino.teacher(crop) for crop in wide.unbind(1)]
    student = [dino.student(crop) for crop in (*wide.unbind(1), *local.unbind(1))]
    p = [F.softmax((t - dino.centre) / dino.temperature, 1).detach() for t in teacher]
    terms = [
        -(p[i] * F.log_softmax(student[j] / 0.1, 1)).sum(1).mean()
        for i in range(len(p))
        for j in range(len(student))
        if i != j
    ]
    entropy = -torch.cat(p).mul(torch.cat(p).log()).sum(1).mean()
    return torch.stack(terms).mean(), entropy, torch.cat(teacher).mean(0).detach()


@pytest.mark.parametrize(("local", "shortcut"), [(0, "keep"), (3, "cut"), (3, "decay:0.5")])
def test_the_loss_matches_the_paper(local: int, shortcut: str) -> None:
    dino = model()
    dino.teacher.head.last.weight.add_(0.01)  # so that student and teacher differ
    dino.centre.copy_(torch.linspace(-0.1, 0.1, 12))
    if shortcut != "keep":
        for tower in (dino.student, dino.teacher):
            unskip.rewire(tower.backbone, shortcut)
    wide, small = crops(local=local)
    expected, entropy, mean = by_hand(dino, wide, small)
    before = dino.centre.clone()
    result = dino(wide, small)
    assert torch.allclose(result.loss, expected, atol=1e-5)
    assert torch.allclose(result.entropy, entropy, atol=1e-4)
    assert torch.allclose(result.divergence, expected - entropy, atol=1e-4)
    assert torch.allclose(dino.centre, 0.9 * before + 0.1 * mean, atol=1e-6)
    ours = torch.autograd.grad(result.loss, list(dino.student.parameters()))
    dino.centre.copy_(before)
    theirs = torch.autograd.grad(by_hand(dino, wide, small)[0], list(dino.student.parameters()))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_evaluation_does_not_update_the_centre_and_the_teacher_has_no_gradient() -> None:
    dino = model().eval()
    dino(*crops())
    assert (dino.centre == 0).all()
    assert not any(parameter.requires_grad for parameter in dino.teacher.parameters())


def test_entropy_and_spread_of_collapsed_outputs() -> None:
    """Equal outputs for all images have entropy log(out) after centring, and spread 0 if they have one peak."""
    dino = model().eval()
    wide, local = crops()
    same = wide[:1, :1].expand_as(wide)
    dino.centre.copy_(dino.teacher(same[:, 0])[0])
    result = dino(same, local)
    assert float(result.entropy) == pytest.approx(math.log(12), abs=1e-4)
    assert float(result.spread) == pytest.approx(math.log(12), abs=1e-4)
    dino.centre.copy_(torch.tensor([-1e3] + [0.0] * 11))
    result = dino(wide, local)
    assert float(result.spread) == pytest.approx(0, abs=1e-5)


def test_the_teacher_has_no_dropout() -> None:
    dino = DINO(backbone(drop_path_rate=0.5, proj_drop_rate=0.5, patch_drop_rate=0.5), out=12, hidden=20, bottleneck=8)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(dino.teacher(x), dino.teacher(x))
    assert not torch.equal(dino.student(x), dino.student(x))


def test_the_teacher_is_an_ema_of_the_student() -> None:
    dino = model()
    for parameter in dino.student.parameters():
        parameter.data.add_(1.0)
    before = [parameter.clone() for parameter in dino.teacher.parameters()]
    dino.update_teacher_(0.75)
    for old, now, student in zip(before, dino.teacher.parameters(), dino.student.parameters(), strict=True):
        assert torch.allclose(now, 0.75 * old + 0.25 * student, atol=1e-6)
    dino.update_teacher_(0.0)
    assert all(torch.allclose(a, b) for a, b in zip(dino.teacher.parameters(), dino.student.parameters(), strict=True))


def test_outputs_of_the_last_layer_are_cosines() -> None:
    dino = model()
    x = torch.randn(4, 16)
    before = dino.student.head(x).detach()
    assert float(before.abs().max()) <= 1 + 1e-6  # cosines
    dino.student.head.last.weight.data.mul_(7)
    assert torch.allclose(dino.student.head(x), before, atol=1e-5)


def test_batch_norm_of_the_bottleneck_removes_the_common_part() -> None:
    """Inputs differ by 1%. Without batch norm all outputs have nearly one direction, with it all directions."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, generator=draw) + 0.01 * torch.randn(64, 16, generator=draw)
    alike = []
    for norm in (False, True):
        head = model(bottleneck_norm=norm).student.head
        z = F.normalize(head.norm(head.mlp(x)), dim=1)
        assert torch.allclose(head(x), z @ F.normalize(head.last.weight, dim=1).T, atol=1e-6)
        alike.append(float((z @ z.T).mean().detach()))
    assert alike[0] > 0.99
    assert abs(alike[1]) < 0.05


def test_spread_rows_have_equal_singular_values() -> None:
    dino = model(out=40)
    dino.spread_(torch.Generator().manual_seed(3))
    weight = dino.last_layer().detach().double()
    assert torch.equal(dino.teacher.head.last.weight, dino.student.head.last.weight)
    assert torch.allclose(weight.norm(dim=1), torch.ones(40, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(weight.T @ weight, 40 / 8 * torch.eye(8, dtype=torch.float64), atol=1e-4)
    again = model(out=40)
    again.spread_(torch.Generator().manual_seed(3))
    assert torch.equal(again.last_layer(), dino.last_layer())
    few = model(out=5)  # fewer rows than dimensions are only normalised
    few.spread_()
    assert torch.allclose(few.last_layer().norm(dim=1), torch.ones(5))


def test_sinkhorn_equalises_rows_and_columns() -> None:
    logits = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)).double() * 3
    q = sinkhorn(logits, rounds=50)
    assert torch.allclose(q.sum(1), torch.ones(64, dtype=torch.float64))
    assert torch.allclose(q.sum(0), torch.full((6,), 64 / 6, dtype=torch.float64), rtol=1e-3)
    # It only scales rows and columns, so 2 x 2 cross ratios do not change.
    ratio = q[0, 0] * q[1, 1] / (q[0, 1] * q[1, 0])
    assert torch.allclose(ratio.log(), logits[0, 0] + logits[1, 1] - logits[0, 1] - logits[1, 0])
    result = model(balance="sinkhorn")(*crops())
    assert bool(result.loss.isfinite())


def test_bad_input_is_refused() -> None:
    with pytest.raises(BadInput, match=r"balance .*none"):
        model(balance="none")
    with pytest.raises(BadInput, match="no pair"):
        model()(*crops(wide=1, local=0))
    with pytest.raises(BadInput, match="num_features"):
        DINO(nn.Linear(3, 3))
    with pytest.raises(BadInput, match="0 layers"):
        model(layers=0)


# --- Published checkpoints --------------------------------------------------------------------------------------------


def made_up(dino: DINO, prefix: str = "module.") -> dict[str, Any]:
    """A checkpoint in the published layout with random weights."""
    draw = torch.Generator().manual_seed(5)

    def tower() -> dict[str, Tensor]:
        result = {}
        for name, value in dino.student.state_dict().items():
            theirs = name.replace("head.last.weight", "head.last_layer.weight_v")
            result[prefix + theirs] = torch.randn(value.shape, generator=draw)
        result[f"{prefix}head.last_layer.weight_g"] = torch.ones(dino.out, 1)
        return result

    return {
        "student": tower(),
        "teacher": {name.removeprefix("module."): value for name, value in tower().items()},
        "dino_loss": {"center": torch.randn(1, dino.out, generator=draw)},
        "epoch": 3,
        "args": argparse.Namespace(arch="vit_small"),
    }


def test_a_published_checkpoint_is_loaded(tmp_path: Path) -> None:
    dino = model()
    theirs = made_up(dino)
    torch.save(theirs, tmp_path / "checkpoint.pth")
    load_dino(dino, tmp_path / "checkpoint.pth")
    assert torch.equal(
        dino.student.backbone.state_dict()["blocks.1.attn.qkv.weight"],
        theirs["student"]["module.backbone.blocks.1.attn.qkv.weight"],
    )
    assert torch.equal(dino.teacher.head.last.weight, theirs["teacher"]["head.last_layer.weight_v"])
    assert torch.equal(dino.student.head.mlp[0].weight, theirs["student"]["module.head.mlp.0.weight"])
    assert torch.equal(dino.centre, theirs["dino_loss"]["center"][0])


def test_a_checkpoint_with_learned_weight_norms_gives_a_warning() -> None:
    dino = model()
    theirs = made_up(dino)
    theirs["student"]["module.head.last_layer.weight_g"] *= 1.5
    with pytest.warns(UnskipWarning, match="norm_last_layer=False"):
        load_dino(dino, theirs)
    assert torch.equal(dino.student.head.mlp[0].weight, theirs["student"]["module.head.mlp.0.weight"])


def test_a_backbone_checkpoint_is_loaded_into_student_and_teacher() -> None:
    dino = model()
    other = backbone()
    head = dino.student.head.last.weight.clone()
    load_dino(dino, other.state_dict())
    for tower in (dino.student, dino.teacher):
        assert all(torch.equal(a, b) for a, b in zip(tower.backbone.parameters(), other.parameters(), strict=True))
    assert torch.equal(dino.student.head.last.weight, head)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    dino = model()
    before = {name: value.clone() for name, value in dino.state_dict().items()}
    theirs = made_up(dino)
    theirs["student"]["module.backbone.pos_embed"] = torch.zeros(1, 3, 16)
    with pytest.raises(LoadError, match=r"student.backbone.pos_embed is \(1, 3, 16\)"):
        load_dino(dino, theirs)
    theirs = made_up(dino)
    del theirs["teacher"]["backbone.cls_token"]
    with pytest.raises(LoadError, match=r"teacher\.backbone\.cls_token is missing"):
        load_dino(dino, theirs)
    with pytest.raises(LoadError, match="neither student"):
        load_dino(dino, {"epoch": 3})
    with pytest.raises(LoadError, match="no tensors by name"):
        load_dino(dino, {})
    (tmp_path / "x.pth").write_bytes(b"nothing")
    with pytest.raises(LoadError, match="plain tensors"):
        load_dino(dino, tmp_path / "x.pth")
    assert all(torch.equal(value, before[name]) for name, value in dino.state_dict().items())


# --- SimCLR -----------------------------------------------------------------------------------------------------------


def test_the_contrastive_loss_matches_the_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    one, two = (F.normalize(torch.randn(5, 7, generator=draw), dim=1) for _ in range(2))
    z = torch.cat([one, two])
    total = torch.zeros(())
    for i in range(10):
        others = torch.stack([z[i] @ z[k] / 0.3 for k in range(10) if k != i])
        total = total - (z[i] @ z[(i + 5) % 10] / 0.3 - others.logsumexp(0))
    result = contrast(one, two, 0.3)
    assert torch.allclose(result.loss, total / 10, atol=1e-5)
    assert torch.allclose(result.aligned, (one * two).sum(1).mean(), atol=1e-6)
    cosines = z @ z.T
    apart = [cosines[i, k] for i in range(10) for k in range(10) if i % 5 != k % 5]
    assert torch.allclose(result.apart, torch.stack(apart).mean(), atol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_simclr_loss_of_two_views(norm: bool) -> None:
    net = SimCLR(backbone(), hidden=20, out=6, norm=norm)
    result = net(crops()[0])
    result.loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
