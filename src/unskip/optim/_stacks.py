"""Stacks of parameters of equal shape, so that a GPU processes them in one batched product.

A `Matrices` stack has the state of matrices of one shape: moments in the rotated basis (rows, m, n), statistics and
bases (rows, m, m) and (rows, n, n). A parameter has one row, or several if it is split into blocks. A `Vectors` stack
has the concatenated moments of everything else. The entries of an optimizer's state are views of the stacks, so stacks
are not saved: `gather` rebuilds them from the entries, bit for bit.
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
LARGE = 2**20  # a vector of at least this size is a separate stack

State = dict[Tensor, dict[str, Any]]


def matrix_shape(shape: Sequence[int], blocks: int = 1) -> tuple[int, int] | None:
    """(m, n) of each block of rows of a parameter, with later axes flattened; None for a vector.

    A block of one row of three axes is a matrix: (8, m, n) in 8 blocks are 8 matrices (m, n), such as experts.
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
    blocks: int  # rows of the stack per parameter
    shape: tuple[int, int]
    index: Tensor  # (rows,): index of each row's parameter in the counters of the group
    places: list[int]  # the same index for each parameter
    fields: dict[str, Tensor]
    work: torch.dtype
    pointers: Tensor | None = None
    addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pointers = pointers(self.params, self.work)
        self.addresses = [param.data_ptr() for param in self.params]

    def key(self) -> tuple[Any, ...]:
        """The properties that its parameters share: shape, blocks, dtype, and the sides with a basis."""
        return (self.shape, self.blocks, self.params[0].dtype, *(side for side in SIDES if side in self.fields))

    def moved(self) -> bool:
        """Whether the memory of a parameter has changed."""
        return self.pointers is not None and self.addresses != [param.data_ptr() for param in self.params]

    def basis(self, side: str) -> Tensor | None:
        value = self.fields.get(f"{side}_basis")
        return value if value is None or _halved(value) else value.to(self.work)

    def update(self, grads: Sequence[Tensor | None], ok: Tensor, factors: Tensor, beta: float, eps: float) -> None:
        """One step of Adam in the basis, then the statistics; `ok` masks gradients, factors are (5, params)."""
        m, n = self.shape
        gradient = torch.cat([self._row(grad) for grad in grads]).to(self.work)  # (rows, m, n)
        clear(gradient, ok[self.index])
        row_factors = factors[:, self.index].to(self.work)
        left, right = self.basis("left"), self.basis("right")
        halved = torch.float16 in {basis.dtype for basis in (left, right) if basis is not None}
        if halved:
            rotated = rotate(half(gradient, row_factors[4]), left, right, out=torch.float32)
        else:
            row_factors[4] = 1
            rotated = rotate(gradient, left, right)
        kind = torch.float16 if halved else self.work
        direction = adam(rotated, self.fields["exp_avg"], self.fields["exp_avg_sq"], row_factors, eps, kind)
        change = unrotate(direction, left, right, out=self.work if halved else None)
        move(self.params, self.pointers, change, row_factors, self.blocks)
        inactive = [slice(i * self.blocks, (i + 1) * self.blocks) for i, grad in enumerate(grads) if grad is None]
        self._update_statistics("left", gradient, beta, inactive)
        # Tensor cores read this layout fastest; for the smaller side the copy costs more than it saves.
        self._update_statistics("right", gradient.mT.contiguous() if n > m else gradient.mT, beta, inactive)

    def _row(self, grad: Tensor | None) -> Tensor:
        if grad is None:
            return self.fields["exp_avg"].new_zeros((self.blocks, *self.shape), dtype=self.params[0].dtype)
        return grad.reshape(self.blocks, *self.shape)

    def _update_statistics(self, side: str, gradient: Tensor, beta: float, inactive: Sequence[slice]) -> None:
        """L <- beta L + (1 - beta) G G'. A masked gradient is zero: L shrinks and keeps its eigenvectors.

        Rows of parameters without a gradient in this step do not change.
        """
        if side not in self.fields:
            return
        statistics = self.fields[side]
        kept = [statistics[rows].clone() for rows in inactive]
        if statistics.dtype == self.work:
            statistics.baddbmm_(gradient, gradient.mT, beta=beta, alpha=1 - beta)
        else:
            wide = statistics.to(self.work)
            statistics.copy_(wide.baddbmm_(gradient, gradient.mT, beta=beta, alpha=1 - beta))
        for rows, value in zip(inactive, kept, strict=True):
            statistics[rows] = value


@dataclass
class Vectors:
    """Concatenated parameters without a basis: plain Adam."""

    params: list[Tensor]
    index: Tensor  # (elements,) or (1,): index of each element's parameter in the counters of the group
    places: list[int]
    fields: dict[str, Tensor]
    work: torch.dtype

    def update(self, grads: Sequence[Tensor | None], ok: Tensor, factors: Tensor, beta: float, eps: float) -> None:
        flat = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(grads, self.params, strict=True)]
        gradient = torch.cat(flat).to(self.work).view(len(self.index), -1)  # a row per element or vector
        clear(gradient, ok[self.index])
        row_factors = factors[:, self.index].to(self.work)
        row_factors[4] = 1
        first, second = (self.fields[name].view_as(gradient) for name in ("exp_avg", "exp_avg_sq"))
        change = adam(gradient, first, second, row_factors, eps, self.work).mul_(row_factors[2][:, None])
        values = torch.cat([param.reshape(-1) for param in self.params]).to(self.work).view_as(gradient)
        values = torch.addcmul(change, values, row_factors[3][:, None]).view(-1)
        parts = values.split([param.numel() for param in self.params])
        torch._foreach_copy_(self.params, [part.view_as(p) for part, p in zip(parts, self.params, strict=True)])


def refresh_chunks(chunks: Sequence[tuple[Matrices, Chunk]], held: Tensor, write: bool = True) -> None:
    """Refreshes bases of one size and rotates their moments. Adds the number of rejected refreshes to `held`.

    With `write` False everything is computed and nothing is written, as a warm-up.
    """
    parts = [(stack, chunk.side.name, slice(chunk.start, chunk.stop)) for stack, chunk in chunks]
    work = parts[0][0].work
    old = _joined([stack.fields[f"{side}_basis"][rows] for stack, side, rows in parts])
    statistics = _joined([stack.fields[side][rows] for stack, side, rows in parts]).to(work)
    result = refresh(statistics, old if _halved(old) else old.to(work))
    sizes = [chunk.stop - chunk.start for _, chunk in chunks]
    split = zip(parts, *(value.split(sizes) for value in (old, *result)), strict=True)
    for (stack, side, rows), before, after, order, rejected in split:
        moment = stack.fields["exp_avg"][rows]
        wide, before = moment.to(work), before.to(work)
        if side == "left":
            rotated = torch.bmm(after, torch.bmm(before.mT, wide))
            permutation, axis = order[:, :, None], -2
        else:
            rotated = torch.bmm(torch.bmm(wide, before), after.mT)
            permutation, axis = order[:, None, :], -1
        squares = stack.fields["exp_avg_sq"][rows]
        permuted = squares.take_along_dim(permutation, axis)
        if not write:
            continue
        moment.copy_(rotated)
        squares.copy_(permuted)
        stack.fields[f"{side}_basis"][rows].copy_(after)  # last: `before` may be a view of it
        held.index_add_(0, stack.index[rows], rejected.to(held.dtype))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _halved(basis: Tensor) -> bool:
    return basis.is_cuda and basis.dtype == torch.float16


def rotate(x: Tensor, left: Tensor | None, right: Tensor | None, out: torch.dtype | None = None) -> Tensor:
    """U' x V for bases stored as rows; None is the identity. Every product reads rows, not columns."""
    if left is None:
        return x if right is None else _product(x, right.mT, out)
    if right is None:
        return _product(left, x, out)
    return _product(left, torch.bmm(right, x.mT).mT, out)


def unrotate(x: Tensor, left: Tensor | None, right: Tensor | None, out: torch.dtype | None = None) -> Tensor:
    """U x V', the inverse of `rotate`. Only the product over the smaller side reads columns of both factors."""
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
    """Stacks the state of parameters; its entries become views of the stacks."""
    matrices: dict[tuple[Any, ...], list[int]] = {}
    vectors: dict[tuple[Any, ...], list[int]] = {}
    for i, (param, count) in enumerate(zip(params, blocks, strict=True)):
        entry = state[param]
        if "left" in entry or "right" in entry:
            shape = tuple(entry["exp_avg"].shape[1:])
            matrices.setdefault((shape, count, param.dtype, *(side in entry for side in SIDES)), []).append(i)
        else:
            vectors.setdefault((param.dtype, i if param.numel() >= LARGE else None), []).append(i)
    device = params[0].device
    result: list[Matrices | Vectors] = []
    for (shape, count, dtype, *_), places in matrices.items():
        members = [params[i] for i in places]
        names = [name for name, value in state[members[0]].items() if value.ndim]
        fields = {name: _stack(name, members, state, count) for name in names}
        index = torch.tensor(places, device=device).repeat_interleave(count)
        result.append(Matrices(members, count, shape, index, places, fields, working(dtype)))
    for (dtype, _), places in vectors.items():
        members = [params[i] for i in places]
        fields = {name: _concatenate(name, members, state) for name in ("exp_avg", "exp_avg_sq")}
        index = torch.tensor(places, device=device)
        if len(members) > 1:
            index = index.repeat_interleave(torch.tensor([param.numel() for param in members], device=device))
        result.append(Vectors(members, index, places, fields, working(dtype)))
    return result


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the optimizer computes in: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def _stack(name: str, params: list[Tensor], state: State, blocks: int) -> Tensor:
    whole = torch.cat([state[param][name] for param in params])
    for param, view in zip(params, whole.split(blocks), strict=True):
        state[param][name] = view
    return whole


def _concatenate(name: str, params: list[Tensor], state: State) -> Tensor:
    whole = torch.cat([state[param][name].reshape(-1) for param in params])
    for param, view in zip(params, whole.split([param.numel() for param in params]), strict=True):
        state[param][name] = view.view(param.shape)
    return whole
