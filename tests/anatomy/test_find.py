"""Which additions are residuals, on models that are easy to misread."""

from __future__ import annotations

import pytest
import torch
from tests.anatomy import doubtful as d
from tests.anatomy import handmade as h
from torch import nn

import unskip

X = torch.randn(2, 5, h.DIM, generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 5, 5, dtype=torch.bool).tril()

# model, example, the sites as (kind, norm), in execution order
RESIDUAL = [
    (h.PreNorm, X, [("mlp", "pre")]),
    (h.PostNorm, X, [("mlp", "post")]),
    (h.OutNorm, X, [("mlp", "out")]),
    (h.Sandwich, X, [("mlp", "sandwich")]),
    (h.Attention, (X, MASK), [("attention", "none")]),
    (h.LinearAttention, X, [("attention", "none")]),
    (h.Parallel, X, [("parallel", "pre")]),
    (h.GatedAttention, X, [("attention", "none")]),
    (h.Experts, X, [("mlp", "none")]),
    (h.Pooling, X, [("other", "pre")]),
    (h.Convolution, X, [("conv", "none")]),
    (h.Nested, X, [("mlp", "none"), ("mlp", "none")]),
    (h.SliceInPlace, X, [("mlp", "none")]),
    (h.PositionEachLayer, X, [("mlp", "pre")] * 3),
    (h.Latents, X, [("attention", "none")]),
    (h.InnerFunctions, X, [("mlp", "none")] * 3),
    (h.TrainingArm, X, [("mlp", "none"), ("mlp", "none")]),
    (h.Loop, X, [("attention", "none"), ("mlp", "pre")] * 3),
    (h.SameBranchLoop, X, [("mlp", "none")]),
    (h.HelperMethod, X, [("attention", "none"), ("mlp", "none")]),
    (h.ScaledStream, X, [("mlp", "pre")]),
    (h.OptionalBranch, X, [("mlp", "none")]),
    (h.CopiedStream, X, [("mlp", "none")]),
    (h.WrittenThroughOut, X, [("mlp", "none")]),
]


@pytest.mark.parametrize(("build", "example", "expected"), RESIDUAL, ids=lambda v: getattr(v, "__name__", ""))
def test_finds_exactly_the_residuals(build: type[nn.Module], example: object, expected: list[tuple[str, str]]) -> None:
    audit = unskip.audit(build(), example)
    assert [(site.kind, site.norm) for site in audit] == expected
    assert not audit.long_skips
    assert not audit.unknown
    assert not any(site.projected or site.problem for site in audit)


@pytest.mark.parametrize(
    "build",
    [d.Recurrent, d.StraightThrough, d.LowRank, d.OverwrittenBranch, nn.Identity],
    ids=lambda b: b.__name__,
)
def test_finds_nothing_in_models_without_residuals(build: type[nn.Module]) -> None:
    audit = unskip.audit(build(), X)
    assert len(audit) == 0
    assert not audit.long_skips


def test_arithmetic_of_formulas_is_not_a_residual() -> None:
    audit = unskip.audit(d.Arithmetic(), (X, torch.randn(2, 5, h.DIM)))
    assert len(audit) == 0
    assert not audit.unknown


@pytest.mark.parametrize("build", [h.Projected, h.Sliced], ids=lambda b: b.__name__)
def test_projected_streams_are_sites(build: type[nn.Module]) -> None:
    audit = unskip.audit(build(), X)
    assert [site.projected for site in audit] == [True]


def test_long_skips_differ_from_the_residuals_of_blocks() -> None:
    audit = unskip.audit(h.UNet(), X)
    assert [site.path for site in audit if not site.long] == [f"blocks.{i}" for i in range(5)]
    assert [site.expression for site in audit.long_skips] == ["x + second", "x + first"]


@pytest.mark.parametrize("build", [h.UNet, h.ProjectedLongSkip, h.Projected, h.Doubled], ids=lambda b: b.__name__)
def test_audit_wiring_and_parts_have_the_same_indices(build: type[nn.Module]) -> None:
    model = build()
    audit, parts = unskip.audit(model, X), unskip.parts(model, X)
    wiring = unskip.rewire(model, "keep", X)
    assert [site.index for site in audit] == list(range(len(audit)))
    assert tuple(audit) == wiring.sites == tuple(unskip.audit(model))
    assert len(audit) == len(wiring.alphas) == len(wiring.betas) == len(parts)
    assert [site.path for site in parts.sites] == [site.path for site in audit]


def test_a_skip_over_another_resolution_is_long() -> None:
    audit = unskip.audit(h.ResolutionNet(), X)
    assert len(audit) == 2
    assert [site.expression for site in audit.long_skips] == ["x + self.up(h)"]


def test_a_projected_long_skip_is_long() -> None:
    audit = unskip.audit(h.ProjectedLongSkip(), X)
    assert len(audit) == 4
    assert [(site.projected, site.long) for site in audit.long_skips] == [(True, True)]


def test_a_second_residual_around_a_residual_block_is_reported() -> None:
    audit = unskip.audit(h.Doubled(), X)
    assert [site.path for site in audit] == ["block", ""]
    assert [site.doubled for site in audit.long_skips] == [True]
    assert "already contains the stream" in str(audit)


def test_a_side_input_at_every_layer_is_not_a_stream() -> None:
    audit = unskip.audit(h.SideInput(), (X, torch.randn(2, 5, h.DIM)))
    assert [site.kind for site in audit] == ["attention"] * 3
    assert [site.expression[:8] for site in audit] == ["x + attn"] * 3
    assert {"side input" in unknown.reason for unknown in audit.unknown} == {True}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (d.Subtraction, "minus sign"),
        (d.Highway, "depends on the input"),
        (d.BroadcastBranch, "broadcasts over the stream"),
        (d.TrainingFused, "torch.lerp"),
        (d.Recurrent, "2 of its 3 runs"),
        (d.ForeachAdd, "torch._foreach_add"),
        (d.IndexPut, "torch.index_add"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_unclassified_additions_are_reported(build: type[nn.Module], reason: str) -> None:
    audit = unskip.audit(build(), X)
    assert [reason in unknown.reason for unknown in audit.unknown] == [True]
    assert reason in str(audit)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (d.BuiltinSum, "sum([x, self.f(x)])"),
        (d.AddInto, "torch.add(x, self.f(x), out=x)"),
        (d.SometimesResidual, "1 of its 3 runs"),
    ],
)
def test_a_site_that_cannot_be_rewired_has_the_reason(build: type[nn.Module], reason: str) -> None:
    problems = [site.problem for site in unskip.audit(build(), X) if site.problem]
    assert len(problems) == 1
    assert reason in problems[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_size_does_not_matter(batch: int) -> None:
    # With one row a position embedding has the shape of the stream.
    x = torch.randn(batch, 5, h.DIM)
    assert len(unskip.audit(h.PositionEachLayer(), x)) == 3


def test_training_lines_are_places_of_the_same_site() -> None:
    first, second = unskip.audit(h.TrainingArm(), X)
    assert (len(first.places), len(second.places)) == (2, 1)


def test_branches_are_named() -> None:
    (site,) = unskip.audit(h.Parallel(), X)
    assert site.branch == ("norm", "attn", "f")
    assert site.expression == "x + self.attn(h, h, h, need_weights=False)[0]"
    assert site.source.startswith("handmade.py:")


def test_ratio_is_branch_over_stream() -> None:
    model = h.PreNorm()
    (site,) = unskip.audit(model, X)
    with torch.no_grad():
        expected = model.f(model.norm(X)).square().mean().sqrt() / X.square().mean().sqrt()
    assert site.ratio == pytest.approx(float(expected), rel=1e-5)


def test_a_loop_over_one_branch_is_one_site_with_several_runs() -> None:
    (site,) = unskip.audit(h.SameBranchLoop(), X)
    assert site.runs == 3


def test_a_module_that_adds_for_several_branches_is_refused() -> None:
    problems = [site.problem or "" for site in unskip.audit(d.SharedAdd(), X)]
    assert all("adds for several others" in problem for problem in problems)
    assert problems


def test_a_learned_scale_inside_a_branch_is_part_of_it() -> None:
    audit = unskip.audit(h.StateSpace().eval(), torch.randn(2, 5, 8))
    assert len(audit) == 1
    assert not audit.long_skips
    assert "scan" not in audit[0].expression
    assert "self.down" in audit[0].expression
    assert ["learned scale inside the branch" in unknown.reason for unknown in audit.unknown] == [True]
