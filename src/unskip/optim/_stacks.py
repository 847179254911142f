"""Parameters of equal shape, stacked so that a GPU works on all of them in one batched product.

A `Matrices` stack holds what SOAP knows about matrices of one shape: moments in the rotated basis (rows, m, n),
statistics and bases (rows, m, m) and (rows, n, n). A parameter owns one row, or several where it is split into blocks
of rows. A `Vectors` stack holds the moments of everything else, end to end. The entries of an optimizer's state are
views of the stacks, so a stack is never saved itself: `gather` makes it again from the entries, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from unskip.optim._basis import refresh
from unskip.optim._kernels import adam, clear, half, move, pointers
from unskip.optim._refresh_schedule import Chunk

SIDES = ("left", "right")
LARGE = 2**20  # a vector this long is a stack of its own

State = dict[Tensor, dict[str, Any]]


def matrix_shape(shape: Sequence[int], blocks: int = 1) -> tuple[int, int] | None:
    """(m, n) of each block of rows of a parameter, the later axes taken together; None for what is only a vector.

    A block of one row of three axes is a matrix: (8, m, n) in 8 blocks are 8 matrices (m, n), experts for instance.
    """
    axes = _without_ones(list(shape))
    if len(axes) < 2:
        return None
    axes = _without_ones([axes[0] // blocks, *axes[1:]])
    m, n = axes[0] if axes else 1, prod(axes[1:])
    return (m, n) if min(m, n) > 1 else None


def _without_ones(axes: list[int]) -> list[int]:
    """Without the leading axes of length 1."""
    while axes and axes[0] == 1:
        axes = axes[1:]
    return axes


@dataclass
class Matrices:
    """Matrices of one shape."""

    params: list[Tensor]
    blocks: int  # rows of the stack that each parameter owns
    shape: tuple[int, int]
    index: Tensor  # (rows,): the place of each row's parameter in the counters of the group
    places: list[int]  # the same for each parameter
    fields: dict[str, Tensor]
    work: torch.dtype
    pointers: Tensor | None = None
    addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pointers = pointers(self.params, self.work)
        self.addresses = [param.data_ptr() for param in self.params]

    def key(self) -> tuple[Any, ...]:
        """What its parameters have in common: matrices, blocks, dtype, and the sides with a basis."""
        return (self.shape, self.blocks, self.params[0].dtype, *(side for side in SIDES if side in self.fields))

    def moved(self) -> bool:
        """Whether a parameter has been given other memory since."""
        return self.pointers is not None and self.addresses != [param.data_ptr() for param in self.params]

    def basis(self, side: str) -> Tensor | None:
        value = self.fields.get(f"{side}_basis")
        return value if value is None or _halved(value) else value.to(self.work)

    def update(self, grads: Sequence[Tensor | None], ok: Tensor, factors: Tensor, beta: float, eps: float) -> None:
        """One step of Adam in the basis, then the statistics; `ok` says which gradients count. Factors (5, params)."""
        m, n = self.shape
        gradient = torch.cat([self._row(grad) for grad in grads]).to(self.work)  # (rows, m, n)
        clear(gradient, ok[self.index])
        each = factors[:, self.index].to(self.work)
        left, right = self.basis("left"), self.basis("right")
        halved = torch.float16 in {basis.dtype for basis in (left, right) if basis is not None}
        if halved:
            rotated = rotate(half(gradient, each[4]), left, right, out=torch.float32)
        else:
            each[4] = 1
            rotated = rotate(gradient, left, right)
        kind = torch.float16 if halved else self.work
        direction = adam(rotated, self.fields["exp_avg"], self.fields["exp_avg_sq"], each, eps, kind)
        change = unrotate(direction, left, right, out=self.work if halved else None)
        move(self.params, self.pointers, change, each, self.blocks)
        resting = [slice(i * self.blocks, (i + 1) * self.blocks) for i, grad in enumerate(grads) if grad is None]
        self._learn("left", gradient, beta, resting)
        # The layout that tensor cores read fastest; for the small side the copy would cost more than it saves.
        self._learn("right", gradient.mT.contiguous() if n > m else gradient.mT, beta, resting)

    def _row(self, grad: Tensor | None) -> Tensor:
        if grad is None:
            return self.fields["exp_avg"].new_zeros((self.blocks, *self.shape), dtype=self.params[0].dtype)
        return grad.reshape(self.blocks, *self.shape)

    def _learn(self, side: str, gradient: Tensor, beta: float, resting: Sequence[slice]) -> None:
        """L <- beta L + (1 - beta) G G'. A masked gradient is zero here: L gets smaller, its eigenvectors stay.

        The rows of parameters that have no gradient in this step, which the host knows, keep what they have.
        """
        if side not in self.fields:
            return
        statistics = self.fields[side]
        kept = [statistics[rows].clone() for rows in resting]
        if statistics.dtype == self.work:
            statistics.baddbmm_(gradient, gradient.mT, beta=beta, alpha=1 - beta)
        else:
            wide = statistics.to(self.work)
            statistics.copy_(wide.baddbmm_(gradient, gradient.mT, beta=beta, alpha=1 - beta))
        for rows, value in zip(resting, kept, strict=True):
            statistics[rows] = value


@dataclass
class Vectors:
    """Parameters without a basis, end to end: plain Adam."""

    params: list[Tensor]
    index: Tensor  # (elements,) or (1,): the place of each element's parameter in the counters of the group
    places: list[int]
    fields: dict[str, Tensor]
    work: torch.dtype

    def update(self, grads: Sequence[Tensor | None], ok: Tensor, factors: Tensor, beta: float, eps: float) -> None:
        flat = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(grads, self.params, strict=True)]
        gradient = torch.cat(flat).to(self.work).view(len(self.index), -1)  # each element, or the one vector, a row
        clear(gradient, ok[self.index])
        each = factors[:, self.index].to(self.work)
        each[4] = 1
        first, second = (self.fields[name].view_as(gradient) for name in ("exp_avg", "exp_avg_sq"))
        change = adam(gradient, first, second, each, eps, self.work).mul_(each[2][:, None])
        values = torch.cat([param.reshape(-1) for param in self.params]).to(self.work).view_as(gradient)
        values = torch.addcmul(change, values, each[3][:, None]).view(-1)
        parts = values.split([param.numel() for param in self.params])
        torch._foreach_copy_(self.params, [part.view_as(p) for part, p in zip(parts, self.params, strict=True)])


def refresh_chunks(chunks: Sequence[tuple[Matrices, Chunk]], held: Tensor, write: bool = True) -> None:
    """Refreshes bases of one size, adding to `held` what was put off. The moments follow the basis.

    With `write` False all of it is computed and nothing kept: a rehearsal.
    """
    parts = [(stack, chunk.side.name, slice(chunk.start, chunk.stop)) for stack, chunk in chunks]
    work = parts[0][0].work
    old = _joined([stack.fields[f"{side}_basis"][rows] for stack, side, rows in parts])
    statistics = _joined([stack.fields[side][rows] for stack, side, rows in parts]).to(work)
    result = refresh(statistics, old if _halved(old) else old.to(work))
    sizes = [chunk.stop - chunk.start for _, chunk in chunks]
    each = zip(parts, *(value.split(sizes) for value in (old, *result)), strict=True)
    for (stack, side, rows), before, after, order, late in each:
        moment = stack.fields["exp_avg"][rows]
        wide, before = moment.to(work), before.to(work)
        if side == "left":
            turned = torch.bmm(after, torch.bmm(before.mT, wide))
            chosen = order[:, :, None]
        else:
            turned = torch.bmm(torch.bmm(wide, before), after.mT)
            chosen = order[:, None, :]
        squares = stack.fields["exp_avg_sq"][rows]
        chosen = squares.take_along_dim(chosen, -2 if side == "left" else -1)
        if not write:
            continue
        moment.copy_(turned)
        squares.copy_(chosen)
        stack.fields[f"{side}_basis"][rows].copy_(after)  # last: `before` may be a view of it
        held.index_add_(0, stack.index[rows], late.to(held.dtype))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _halved(basis: Tensor) -> bool:
    return basis.is_cuda and basis.dtype == torch.float16


def rotate(x: Tensor, left: Tensor | None, right: Tensor | None, out: torch.dtype | None = None) -> Tensor:
    """U' x V for bases stored as rows; a missing one is the identity. Every product reads rows, not columns."""
    if left is None:
        return x if right is None else _product(x, right.mT, out)
    if right is None:
        return _product(left, x, out)
    return _product(left, torch.bmm(right, x.mT).mT, out)


def unrotate(x: Tensor, left: Tensor | None, right: Tensor | None, out: torch.dtype | None = None) -> Tensor:
    """U x V': the way back. The product that has to read columns of both factors is the one over the smaller side."""
    if left is None:
        return x if right is None else _product(x, right, out)
    if right is None:
        return _product(left.mT, x, out)
    if x.shape[-2] > x.shape[-1] and out is None:
        return torch.bmm(torch.bmm(x.mT.contiguous(), left).mT, right)
    return _product(left.mT, torch.bmm(x, right), out)


def _product(a: Tensor, b: Tensor, out: torch.dtype | None) -> Tensor:
    return torch.bmm(a, b) if out is None else torch.bmm(a, b, out_dtype=out)


def gather(params: list[Tensor], blocks: Sequence[int], state: State) -> list[Matrices | Vectors]:
    """Stacks the state of parameters, which become views of the stacks."""
    matrices: dict[tuple[Any, ...], list[int]] = {}
    vectors: dict[tuple[Any, ...], list[int]] = {}
    for place, (param, count) in enumerate(zip(params, blocks, strict=True)):
        entry = state[param]
        if "left" in entry or "right" in entry:
            shape = tuple(entry["exp_avg"].shape[1:])
            matrices.setdefault((shape, count, param.dtype, *(side in entry for side in SIDES)), []).append(place)
        else:
            vectors.setdefault((param.dtype, place if param.numel() >= LARGE else None), []).append(place)
    device = params[0].device
    result: list[Matrices | Vectors] = []
    for (shape, count, dtype, *_), places in matrices.items():
        mine = [params[place] for place in places]
        fields = {name: _stack(name, mine, state, count) for name in state[mine[0]] if state[mine[0]][name].ndim}
        index = torch.tensor(places, device=device).repeat_interleave(count)
        result.append(Matrices(mine, count, shape, index, places, fields, working(dtype)))
    for (dtype, _), places in vectors.items():
        mine = [params[place] for place in places]
        fields = {name: _lay(name, mine, state) for name in ("exp_avg", "exp_avg_sq")}
        index = torch.tensor(places, device=device)
        if len(mine) > 1:
            index = index.repeat_interleave(torch.tensor([param.numel() for param in mine], device=device))
        result.append(Vectors(mine, index, places, fields, working(dtype)))
    return result


def working(dtype: torch.dtype) -> torch.dtype:
    """What the optimizer computes in: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def _stack(name: str, params: list[Tensor], state: State, blocks: int) -> Tensor:
    whole = torch.cat([state[param][name] for param in params])
    for param, view in zip(params, whole.split(blocks), strict=True):
        state[param][name] = view
    return whole


def _lay(name: str, params: list[Tensor], state: State) -> Tensor:
    whole = torch.cat([state[param][name].reshape(-1) for param in params])
    for param, view in zip(params, whole.split([param.numel() for param in params]), strict=True):
        state[param][name] = view.view(param.shape)
    return whole
