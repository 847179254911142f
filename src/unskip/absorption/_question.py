"""What a verdict is about, worked out once more for its check, with nothing of the search.

The weights after the norms' quotients, the sizes that rounding is relative to, the units that share a key, and the
equation that flips would have to solve. All of it in float64 on the device of the weights: what leaves it are numbers
and vectors, never a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._verdict import Verdict

UNIT = 2.0**-53
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Setting:
    """The question in numbers: the weights after the norms' quotients, and their sizes before them."""

    block: Block
    width: int
    hidden_bias: bool
    output_bias: bool
    skip: Tensor  # without output biases the constant is one more column
    up: Tensor
    bias: Tensor
    down: Tensor
    const: Tensor
    size_skip: Tensor  # entry by entry, up to its sign, what rounding is relative to
    size_up: Tensor
    size_down: Tensor
    long_skip: float  # norms before the quotients
    long_up: Tensor
    long_bias: Tensor
    long_down: Tensor
    radius: float | None
    sound: bool  # whether an `impossible` here is one of the block

    @property
    def odd(self) -> float:
        odd = self.block.phi.odd
        return float(odd) if odd is not None else math.nan

    @cached_property
    def groups(self) -> Groups:
        """Units that share a key, as far as rounding could have told them apart, and those that count for nothing."""
        return _group_units(self)


@dataclass(frozen=True, eq=False)
class Groups:
    """Units that share a key."""

    head: Tensor  # (m,) the first unit of every group that counts
    of: Tensor  # (h,) the group of every unit, -1 where it counts for nothing
    rough: bool  # whether some unit counts for nothing only up to rounding


def _numbers(value: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros(shape, dtype=torch.float64, device=like.device)
    return value.detach().to(like.device, torch.float64)


def setting(verdict: Verdict, given: Tensor | None = None) -> Setting:
    """The question of a verdict. Behind a norm a certificate says in which basis of the inputs it speaks."""
    block = verdict.block
    h, d, o = block.width, block.inputs, block.outputs
    up, down = (_numbers(value, (), block.up) for value in (block.up, block.down))
    bias, const = _numbers(block.up_bias, (h,), up), _numbers(block.down_bias, (o,), up)
    if isinstance(block.skip, Tensor):
        skip = _numbers(block.skip, (o, d), up)
    else:
        skip = _numbers(None, (o, d), up)
        skip.diagonal().fill_(block.skip)
    sizes = [skip, up, down]  # their signs do not matter, and copies cost memory
    hidden, output = {
        "as-is": (block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True),
        "none": (False, False),
    }[verdict.biases]
    radius, sound, norms = None, block.phi.trusted and not (block.phi.odd is not None and block.extreme), block.norms
    long_skip, long_bias, long_up, long_down = float(skip.norm()), bias.abs(), up.norm(dim=1), down.norm(dim=0)
    if "input" in norms:
        norm, radius = norms["input"], math.sqrt(d)
        basis = _numbers(given, (d, d), up)
        gain = torch.ones_like(up[0]) if norm.gain is None else _numbers(norm.gain, (d,), up)
        inner = torch.where(gain[:, None] != 0, basis / gain[:, None], 0.0)
        sound &= bool(norm.eps) and norm.kind != "other" and given is not None
        sound &= not bool(basis[gain == 0].any())
        # The ball of s: directions that sum to zero, and no longer than the search believed.
        if norm.kind == "layernorm" and bool((gain != 0).all()):  # else the hidden channel makes up the sum
            sound &= bool((inner.sum(0).abs() <= 1e-9 * (1 + inner.abs().sum(0))).all())
        if not block.phi.analytic:
            sound &= _within_ball(inner, int((gain == 0).sum()) if norm.kind == "layernorm" else 0)
        shift = _numbers(norm.bias, (d,), up)
        long_skip, long_up = float((skip * gain).norm()), (up * gain).norm(dim=1)
        long_bias = torch.hypot(long_bias, (up * shift).norm(dim=1))
        bias, const = bias + up @ shift, const + skip @ shift
        sizes[0], sizes[1] = sizes[0].abs() @ basis.abs(), sizes[1].abs() @ basis.abs()
        whole, skip, up = up.norm(dim=1) * basis.norm(), skip @ basis, up @ basis
        up[up.norm(dim=1) <= 64 * d * UNIT * whole] = 0
    if "post" in norms:
        norm = norms["post"]
        sound &= bool(norm.eps) and norm.kind != "other"
        sound &= norm.gain is None or bool((norm.gain != 0).all())
        if norm.kind == "layernorm":
            sizes[0], sizes[2] = (size.abs() + size.abs().mean(0) for size in (sizes[0], sizes[2]))
            skip, down, const = skip - skip.mean(0), down - down.mean(0), const - const.mean(0)
            down[:, down.norm(dim=0) <= 64 * o * UNIT * long_down] = 0  # a column of ones is hidden
    if norms and float(skip.norm()) <= 64 * max(d, o) * UNIT * long_skip:
        skip = torch.zeros_like(skip)  # the norms hide all of it
    moved = bool(bias.any()) or bool(const.any())
    silent = not moved and (block.phi.at_zero == 0 or bool(up.any(dim=1).all()))
    if not (output or silent):
        skip = torch.cat([skip, const[:, None]], 1)
        sizes[0] = torch.cat([sizes[0], const[:, None]], 1)
    return Setting(
        block=block,
        width=verdict.width,
        hidden_bias=hidden,
        output_bias=output or silent,  # no constant to make up
        skip=skip,
        up=up,
        bias=bias,
        down=down,
        const=const,
        size_skip=sizes[0],
        size_up=sizes[1],
        size_down=sizes[2],
        long_skip=long_skip,
        long_up=long_up,
        long_bias=long_bias,
        long_down=long_down,
        radius=radius,
        sound=bool(sound),
    )


def relaxed(at: Setting) -> Setting:
    """The same with output biases allowed: what is impossible then is impossible without them too."""
    if at.output_bias:
        return at
    columns = at.up.shape[1]
    return replace(at, output_bias=True, skip=at.skip[:, :columns], size_skip=at.size_skip[:, :columns])


def _within_ball(inner: Tensor, hidden: int) -> bool:
    """Whether |s| < 1 is all that `inner` needs to stay in the unit ball. Hidden channels make up the sum."""
    square = inner.mT @ inner
    if hidden:
        square = square + torch.outer(inner.sum(0), inner.sum(0)) / hidden
    if not square.numel() or float(square.abs().sum(1).max()) <= 1 + 1e-9:
        return True
    return float(torch.linalg.eigvalsh(square)[-1]) <= 1 + 1e-9


def norms_of(at: Setting) -> tuple[Tensor, Tensor]:
    """|u_i| and |v_i|."""
    norms = at.block.norms
    lengths = at.up.norm(dim=1) if "input" in norms else at.long_up
    return lengths, at.down.norm(dim=0) if "post" in norms else at.long_down


def tolerance(at: Setting) -> float:
    """What rounding of the stored weights may move, if every unit were flipped."""
    size = at.long_down * (at.long_up if at.output_bias else torch.hypot(at.long_up, at.long_bias))
    norm = at.long_skip if at.output_bias else math.hypot(at.long_skip, float(at.const.norm()))
    return max(4 * at.block.roundoff * math.hypot(at.odd * float(size.norm()), norm), 1e-12 * norm)


def _group_units(at: Setting) -> Groups:
    h, phi = len(at.up), at.block.phi
    within, grown = 32 * at.block.roundoff, torch.ones_like(at.bias)
    lengths, columns = norms_of(at)
    nothing = (lengths == 0) | (columns == 0)
    idle = nothing | (lengths * columns <= tolerance(at) / (abs(at.odd) * h))
    if at.radius is not None and not phi.analytic:  # its kink misses the ball
        nothing = nothing | (at.bias.abs() >= at.radius * lengths)
        idle = idle | (at.bias.abs() >= at.radius * lengths * (1 - 1e-6))
    norms = torch.hypot(lengths, at.bias).clamp(min=TINY)
    exact = 64 * UNIT
    if at.block.norms:  # what a quotient took away has left its rounding behind
        exact = max(exact, 16 * max(at.block.inputs, at.block.outputs) * UNIT)
        within = max(within, exact)
    if at.radius is not None:
        grown = (torch.hypot(at.long_up, at.long_bias) / norms.clamp(min=1e-150)).clamp(min=1.0)
    first = _leaders(at, norms, grown, within, torch.nonzero(~idle).flatten())
    alone = torch.bincount(first, minlength=h) == 1
    many = torch.nonzero(~idle & ~alone[first]).flatten()
    gone, rough = many[:0], bool((idle & ~nothing).any())
    if len(many):  # groups whose columns cancel count for nothing either
        leaders, place = torch.unique(first[many], return_inverse=True)
        ratio = norms[many] / norms[first[many]] if phi.homogeneous else torch.ones_like(norms[many])
        total = at.down.new_zeros(len(at.down), len(leaders)).index_add_(1, place, at.down[:, many] * ratio)
        bulk = at.down.new_zeros(len(leaders)).index_add_(0, place, at.long_down[many] * ratio)
        cancel = total.norm(dim=0) <= 2 * within * bulk
        rough |= bool((cancel & (total.norm(dim=0) > exact * bulk)).any())
        gone = many[cancel[place]]
    counts = ~idle
    counts[gone] = False
    head, place = torch.unique(first[counts], return_inverse=True)
    of = torch.full_like(first, -1)
    of[counts] = place
    return Groups(head, of, rough)


def _leaders(at: Setting, norms: Tensor, grown: Tensor, within: float, wanted: Tensor) -> Tensor:
    """For every unit the first one that it is joined to by pairs which are equal up to sign."""
    h, n = at.up.shape
    homogeneous = at.block.phi.homogeneous
    label = torch.arange(h, device=at.up.device)
    edges: list[Tensor] = []

    def equal(pairs: Tensor) -> Tensor:
        one, two = (torch.cat([at.up[k], at.bias[k, None]], 1) for k in pairs)
        long = norms[pairs] if homogeneous else norms[pairs].amax(0).expand(2, -1)
        one, two = one / long[0, :, None], two / long[1, :, None]
        apart = torch.minimum((one - two).norm(dim=1), (one + two).norm(dim=1))
        return apart <= within * grown[pairs].amax(0)

    some = min(max(64, 2**22 // n), 2**15)  # pairs whose rows are held at a time
    for pairs in _candidates(at, norms, within * float(grown[wanted].max()) if len(wanted) else within, wanted):
        while pairs.shape[1]:
            pairs = pairs[:, label[pairs[0]] != label[pairs[1]]]
            edges.append(pairs[:, :some][:, equal(pairs[:, :some])])
            label, pairs = _components(h, edges, label), pairs[:, some:]
    least = torch.full_like(label, h).scatter_reduce_(0, label, torch.arange(h, device=label.device), "amin")
    return least[label]


def _candidates(at: Setting, norms: Tensor, reach: float, wanted: Tensor) -> Iterator[Tensor]:
    """Pairs (2, some) of units that may be equal up to sign: all that are within `reach`, and others."""
    rows = [*at.up.tensor_split(min(16, at.up.shape[1]), dim=1), at.bias[:, None]]
    # The norms of slices of a row do not know its sign, and differ by no more than the rows do.
    parts = torch.stack([part.norm(dim=1) for part in rows], 1)[wanted] / norms[wanted, None]
    count, bound = len(wanted), 2 * reach + 64 * at.up.shape[1] * UNIT
    if not count:
        return
    places = torch.arange(count, device=wanted.device)
    telling = int(parts.var(0, correction=0).argmax())
    values, order = parts[:, telling].sort()
    after = torch.searchsorted(values, values + bound, right=True) - places - 1
    if int(after.sum()) <= 64 * count:
        one = places.repeat_interleave(after)
        two = one + 1 + torch.arange(len(one), device=one.device) - (after.cumsum(0) - after)[one]
        near = (parts[order[one]] - parts[order[two]]).norm(dim=1) <= bound
        yield wanted[order[torch.stack([one, two])[:, near]]]
        return
    # Where that tells too few apart, distances in some of the entries.
    some = torch.linspace(0, at.up.shape[1] - 1, min(256, at.up.shape[1]), device=wanted.device).long()
    few = torch.cat([at.up[:, some], at.bias[:, None]], 1)[wanted] / norms[wanted, None]
    half = few.square().sum(1) / 2
    for start in range(0, count, 1024):
        # |a -+ b|^2 <= bound^2  <=>  |a.b| >= (|a|^2 + |b|^2 - bound^2) / 2
        like = (few[start : start + 1024] @ few[start:].mT).abs_().sub_(half[start:])
        pairs = torch.nonzero(like >= half[start : start + 1024, None] - bound**2 / 2 - 1e-12).mT + start
        yield wanted[pairs[:, pairs[0] < pairs[1]]]


def _components(count: int, edges: list[Tensor], before: Tensor) -> Tensor:
    if not edges[-1].shape[1]:
        return before
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    one, two = torch.cat(edges, 1).cpu().numpy()
    _, label = connected_components(coo_array((one >= 0, (one, two)), (count, count)), directed=False)
    return torch.as_tensor(label, dtype=torch.long, device=before.device)


Equation = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def flip_equation(at: Setting, line: Tensor | None = None, column: Tensor | None = None) -> Equation | None:
    """J, U, B and their sizes (up to sign) on some rows and columns; None where there are spare units."""
    head, of = at.groups.head, at.groups.of
    if len(head) != at.width or (at.groups.rough and not at.output_bias):
        return None
    down, size_down, rows, size_rows = at.down, at.size_down, at.up, at.size_up
    goal, size = at.skip, at.size_skip
    if not at.output_bias:
        rows = torch.cat([rows, at.bias[:, None]], 1)
        size_rows = rows if at.size_up is at.up else torch.cat([size_rows, at.bias[:, None]], 1)
    if line is not None:
        down, size_down, goal, size = down[line], size_down[line], goal[line], size[line]
    if column is not None:
        rows, size_rows, goal, size = rows[:, column], size_rows[:, column], goal[:, column], size[:, column]
    goal, size = -goal / at.odd, size.abs() / abs(at.odd)
    if len(head) == len(of):
        return down, rows, goal, size_down, size_rows, size
    size_down, size_rows = size_down.abs(), size_rows.abs()
    joint, size_joint = down[:, head], size_down[:, head]
    follow = torch.nonzero(of >= 0).flatten()
    follow = follow[head[of[follow]] != follow]
    lead = head[of[follow]]
    norms = torch.hypot(norms_of(at)[0], at.bias)
    ratio = norms[follow] / norms[lead] if at.block.phi.homogeneous else torch.ones_like(norms[follow])
    joint.index_add_(1, of[follow], down[:, follow] * ratio)
    size_joint.index_add_(1, of[follow], size_down[:, follow] * ratio)
    same = (at.up[follow] * at.up[lead]).sum(1) + at.bias[follow] * at.bias[lead] >= 0
    against = follow[~same]
    goal = goal - down[:, against] @ rows[against]
    size = size + size_down[:, against] @ size_rows[against]
    spare = torch.nonzero(of < 0).flatten()
    seen, size_seen = _by_itself(at, spare, rows[spare], size_rows[spare], column)
    goal, size = goal - down[:, spare] @ seen, size + size_down[:, spare] @ size_seen
    return joint, rows[head], goal, size_joint, size_rows[head], size


def _by_itself(at: Setting, spare: Tensor, rows: Tensor, sizes: Tensor, column: Tensor | None) -> tuple[Tensor, Tensor]:
    """The linear parts over c of units that count for nothing, and their sizes. One that sees nothing is a constant."""
    phi, lengths = at.block.phi, norms_of(at)[0][spare]
    bias = at.bias[spare]
    half = torch.full_like(bias, 0.5)
    if at.radius is not None and not phi.analytic:
        slope = torch.where(bias > 0, 1.0, at.odd - 1) / at.odd
        half = torch.where(bias.abs() >= at.radius * lengths, slope, half)
    seen, size = half[:, None] * rows, half.abs()[:, None] * sizes
    if not at.output_bias:
        last = at.up.shape[1]  # the column of the constant
        place = torch.arange(last + 1, device=rows.device) if column is None else column
        constant = (lengths == 0)[:, None] & (place == last)
        value = phi.function(bias)
        seen = torch.where(constant, value[:, None] / at.odd, seen)
        size = torch.where(constant, (value.abs() + bias.abs() + 1)[:, None] / abs(at.odd), size)
    return seen, size
