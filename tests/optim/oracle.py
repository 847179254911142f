"""A reference implementation of SOAP and Adam from their formulas, for one matrix, in numpy and float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Soap:
    """SOAP on one matrix.

    `bases` are the initial bases, for gradients whose statistics have a null space, where eigenvectors are arbitrary.
    """

    def __init__(
        self,
        weight: Matrix,
        *,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        decay: float = 0.01,
        every: int = 10,
        sides: tuple[bool, bool] = (True, True),
        bases: list[Matrix | None] | None = None,
    ) -> None:
        self.weight = weight.copy()
        self.lr, self.betas, self.eps, self.decay, self.every, self.sides = lr, betas, eps, decay, every, sides
        self.bases, self.time = bases, -1
        self.statistics = [np.zeros((size, size)) for size in weight.shape]
        self.first = np.zeros_like(weight)  # in the original space, unlike in the tested code
        self.second = np.zeros_like(weight)

    def step(self, gradient: Matrix) -> None:
        self.time += 1
        if self.time:
            self._move(gradient)
        beta = self.betas[1]
        for side, outer in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            self.statistics[side] = beta * self.statistics[side] + (1 - beta) * outer
        if self.bases is None:
            self.bases = [self._eigenvectors(side) for side in (0, 1)]
        elif self.time and self.time % self.every == 0:
            self._refresh()

    def _move(self, gradient: Matrix) -> None:
        beta1, beta2 = self.betas
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * self._rotate(gradient) ** 2
        direction = self._rotate(self.first) / (np.sqrt(self.second) + self.eps)
        left, right = self._both()
        scale = self.lr * np.sqrt(1 - beta2**self.time) / (1 - beta1**self.time)
        self.weight = (self.weight - scale * left @ direction @ right.T) * (1 - self.lr * self.decay)

    def _both(self) -> tuple[Matrix, Matrix]:
        left, right = (np.eye(n) if b is None else b for b, n in zip(self.bases, self.weight.shape, strict=True))
        return left, right

    def _rotate(self, matrix: Matrix) -> Matrix:
        left, right = self._both()
        return left.T @ matrix @ right

    def _eigenvectors(self, side: int) -> Matrix | None:
        if not self.sides[side]:
            return None
        return np.linalg.eigh(self.statistics[side])[1][:, ::-1]

    def _refresh(self) -> None:
        for side, basis in enumerate(self.bases):
            if basis is None:
                continue
            statistics = self.statistics[side]
            order = np.argsort(-np.einsum("ji,jk,ki->i", basis, statistics, basis), kind="stable")
            self.second = np.take(self.second, order, axis=side)
            self.bases[side] = np.linalg.qr(statistics @ basis[:, order])[0]


class Adam:
    """Adam on one vector, with decoupled decay after the step; like SOAP it skips the first gradient."""

    def __init__(
        self, weight: Matrix, lr: float = 3e-3, betas: tuple[float, float] = (0.95, 0.95), decay: float = 0.01
    ) -> None:
        self.weight, self.lr, self.betas, self.decay = weight.copy(), lr, betas, decay
        self.first, self.second, self.time = np.zeros_like(weight), np.zeros_like(weight), -1

    def step(self, gradient: Matrix) -> None:
        self.time += 1
        if not self.time:
            return
        beta1, beta2 = self.betas
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient**2
        scale = self.lr * np.sqrt(1 - beta2**self.time) / (1 - beta1**self.time)
        self.weight = (self.weight - scale * self.first / (np.sqrt(self.second) + 1e-8)) * (1 - self.lr * self.decay)
