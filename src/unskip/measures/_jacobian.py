"""The Jacobian of a function at a point, as a matrix or by products with vectors.

One forward pass records a graph, and backward passes through it give w -> J^T w. This map is linear in w, so a backward
pass through it gives v -> J v. The products need no second forward pass and no forward-mode formulas, which fused
kernels often lack.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unskip._checks import finite, kind_of
from unskip.errors import BadInput

Function = Callable[[Tensor], Tensor]


class Jacobian:
    """J = df/dx at x, (outputs, inputs), with x and f(x) flattened. The object keeps the graph in memory."""

    def __init__(self, f: Function, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64) or x.numel() == 0:
            raise BadInput(
                f"jacobian_spectrum: x must be a non-empty float64 or float32 tensor, got {kind_of(x)}; "
                "cast x and the model, as in model.double()"
            )
        finite("jacobian_spectrum", "x", x.detach())
        self.batched = True
        with _recording(x):
            self.x = x.detach().clone().requires_grad_()
            with torch.no_grad():
                repeated = f(self.x)
            self.y = f(self.x)
        _check(repeated, self.y)
        self.shape = (self.y.numel(), self.x.numel())
        self._rows: tuple[Tensor, Tensor] | None = None

    @property
    def precision(self) -> torch.dtype:
        """The coarser of the dtypes of x and f(x)."""
        return torch.float32 if torch.float32 in (self.x.dtype, self.y.dtype) else torch.float64

    def transposed_times(self, w: Tensor) -> Tensor:
        """J^T w for each row of w (rows, outputs), in float64."""

        def one(z: Tensor, batched: bool) -> Tensor:
            (row,) = torch.autograd.grad(self.y, self.x, z, retain_graph=True, is_grads_batched=batched)
            return row

        return self._each(one, w.to(self.y.dtype).reshape(-1, *self.y.shape))

    def times(self, v: Tensor) -> Tensor:
        """J v for each row of v (rows, inputs), in float64."""
        try:
            self._check_adjoint()
            return self._each(self._through_rows, v.to(self.x.dtype).reshape(-1, *self.x.shape))
        except (RuntimeError, NotImplementedError) as error:
            raise BadInput(
                f"jacobian_spectrum: f has no second derivatives, which the matrix-free method needs ({error}); pass "
                "exact=True, or use plain torch operations in f"
            ) from error

    def matrix(self, chunk: int) -> Tensor:
        """All of J in float64, `chunk` rows at a time."""
        rows, columns = self.shape
        full = torch.empty(rows, columns, dtype=torch.float64, device=self.x.device)
        for start in range(0, rows, chunk):
            stop = min(rows, start + chunk)
            unit = torch.zeros(stop - start, rows, dtype=self.y.dtype, device=self.y.device)
            unit[torch.arange(stop - start), torch.arange(start, stop)] = 1
            full[start:stop] = self.transposed_times(unit)
        return full

    def _check_adjoint(self) -> None:
        """Raises RuntimeError if <w, J v> != <J^T w, v>: part of the backward pass is not recorded by autograd."""
        if self._rows is not None:
            return
        g = torch.Generator().manual_seed(17_041_987)
        v = torch.randn(1, self.shape[1], generator=g, dtype=torch.float64).to(self.x.device)
        w = torch.randn(1, self.shape[0], generator=g, dtype=torch.float64).to(self.x.device)
        column = self._each(self._through_rows, v.to(self.x.dtype).reshape(1, *self.x.shape))
        row = self.transposed_times(w)
        difference = float(((w * column).sum() - (row * v).sum()).abs())
        if difference > 10 * math.sqrt(torch.finfo(self.precision).eps) * float(row.norm() * v.norm()):
            self._rows = None
            raise RuntimeError("the backward pass is not differentiable: its derivative is wrong")

    def _through_rows(self, v: Tensor, batched: bool) -> Tensor:
        if self._rows is None:
            with torch.inference_mode(False), torch.enable_grad():
                w = torch.zeros_like(self.y, requires_grad=True)
                (row,) = torch.autograd.grad(self.y, self.x, w, create_graph=True)
            self._rows = w, row
        w, row = self._rows
        if not row.requires_grad:
            raise RuntimeError("the backward pass is not differentiable")
        (column,) = torch.autograd.grad(row, w, v, retain_graph=True, is_grads_batched=batched)
        return column

    def _each(self, one: Callable[[Tensor, bool], Tensor], z: Tensor) -> Tensor:
        """One product for each entry of the first axis, batched if torch supports it."""
        out: Tensor | None = None
        if len(z) > 1 and self.batched:
            # torch's warning about a slow fallback does not concern correctness.
            with suppress(RuntimeError, NotImplementedError), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                out = one(z, True).detach().reshape(len(z), -1)
        if out is None:
            out = torch.stack([one(entry, False).detach().flatten() for entry in z])
            self.batched = self.batched and len(z) == 1  # set after the loop, which may fail for another reason
        finite("jacobian_spectrum", "a product with the Jacobian", out)
        return out.to(torch.float64)


@contextmanager
def _recording(x: Tensor) -> Iterator[None]:
    # Fused attention kernels have no second derivative, and other rounding than the plain formula.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(x.device.type, enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


def _check(repeated: object, y: object) -> None:
    if not isinstance(y, Tensor) or y.dtype not in (torch.float32, torch.float64) or y.numel() == 0:
        raise BadInput(f"jacobian_spectrum: f must return one float32 or float64 tensor, got {kind_of(y)}")
    finite("jacobian_spectrum", "f(x)", y.detach())
    if not y.requires_grad:
        raise BadInput(
            "jacobian_spectrum: autograd records no dependence of f(x) on x; "
            "f must use its argument, without detach() or no_grad()"
        )
    assert isinstance(repeated, Tensor)
    difference = float((repeated - y).detach().abs().max())
    if difference > math.sqrt(torch.finfo(y.dtype).eps) * max(float(y.detach().abs().max()), 1e-300):
        raise BadInput(
            f"jacobian_spectrum: two calls of f(x) differ by {difference:.2g}; make f deterministic, as by model.eval()"
        )
