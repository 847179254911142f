"""SOAP: Adam in the eigenbasis of Shampoo's statistics, batched over matrices of one shape.

For a gradient G (m, n) with statistics L, R and their bases U, V,

    G' = U' G V                                         the gradient, rotated
    M  = beta1 M + (1 - beta1) G'                       moments, in the rotated basis
    S  = beta2 S + (1 - beta2) G'^2
    W  = (1 - lr * decay) (W - lr * c * U [M / (sqrt(S) + eps)] V')
    L  = beta2 L + (1 - beta2) G G',   R = beta2 R + (1 - beta2) G' G

with c = sqrt(1 - beta2^t) / (1 - beta1^t). Every few steps one power iteration updates a basis; the first
moment is rotated into the new basis and the second permuted with it. The first step of a parameter only builds its
basis. Vectors, and sides longer than `max_dim`, have the identity as basis, which is Adam.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unskip._checks import choice, whole
from unskip.errors import BadInput
from unskip.optim._basis import eigenbasis
from unskip.optim._batched import BatchedOptimizer
from unskip.optim._kernels import Factors
from unskip.optim._precision import MatmulPrecision, matmul_precision
from unskip.optim._refresh_schedule import Chunk, Side, refresh_schedule
from unskip.optim._stacks import SIDES, Matrices, gather, matrix_shape, refresh_chunks, working

StateDtype = Literal["float32", "bfloat16"]
LIMIT = 1e17  # squares of larger gradients, summed over a row, overflow in float32
COUNTERS = ("step", "skipped", "held")  # steps, masked gradients, rejected refreshes


class SOAP(BatchedOptimizer):
    """Adam in the eigenbasis of Shampoo's statistics, batched; the module's docstring has the formula.

    Each basis is refreshed once in `refresh_every` steps, all at once or spread over the interval (`stagger`).
    `splits` maps parameters to the number of row blocks that are separate matrices, 3 for a fused qkv. `precision` is
    that of matrix products on a GPU; `state_dtype` "bfloat16" halves the memory of statistics, bases and first moments.
    Gradients that are not finite are masked on the device and counted (`skipped`).
    """

    own_field = "refresh_every"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        *,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        refresh_every: int = 10,
        max_dim: int = 10_000,
        stagger: bool = True,
        splits: Mapping[Tensor, int] | None = None,
        precision: MatmulPrecision = "tf32",
        state_dtype: StateDtype = "float32",
    ) -> None:
        self._by_device: dict[int, list[_DeviceGroup]] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "refresh_every": refresh_every,
            "max_dim": max_dim,
            "stagger": stagger,
            "precision": precision,
            "state_dtype": state_dtype,
            "updates": 0,  # counts the steps of the refresh schedule
        }
        super().__init__(params, defaults, splits)

    def _check_group(self, group: dict[str, Any]) -> None:
        whole("SOAP", "refresh_every", group["refresh_every"], low=1)
        whole("SOAP", "max_dim", group["max_dim"], low=0)
        choice("SOAP", "precision", group["precision"], get_args(MatmulPrecision))
        choice("SOAP", "state_dtype", group["state_dtype"], get_args(StateDtype))
        self._check_whole(group["params"])
        for param, blocks in zip(group["params"], group["blocks"], strict=True):
            if blocks > 1 and (param.ndim < 2 or param.shape[0] % blocks):
                raise BadInput(f"SOAP: a parameter of shape {tuple(param.shape)} has no {blocks} equal blocks of rows")

    def _move(self) -> None:
        for index, group in enumerate(self.param_groups):
            if index not in self._by_device or any(part.stale(group) for part in self._by_device[index]):
                self._by_device[index] = self._build(group)
            present = [param for param in group["params"] if param.grad is not None and param.numel()]
            new = [param for param in present if not self.state.get(param)]
            active = [part for part in self._by_device[index] if any(param.grad is not None for param in part.params)]
            group["updates"] += bool(active)
            for part in active:
                with matmul_precision(group["precision"], part.device):
                    part.step(group)
            if new:
                for param in new:
                    with matmul_precision(group["precision"], param.device):
                        self._begin(param, group)
                del self._by_device[index]  # stacked again in the next step

    def skipped(self) -> dict[str, int]:
        """The number of skipped gradients, which were not finite, of each parameter that has any."""
        return self._count("skipped")

    def held(self) -> dict[str, int]:
        """The number of rejected refreshes, whose new basis was not orthogonal, of each parameter that has any."""
        return self._count("held")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        # The base class casts every entry to the dtype of its parameter; this restores the saved dtypes.
        ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, param in zip(ids, self._params(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[param][name] = value.to(param.device, copy=True)
        self._by_device = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._by_device, self._splits = {}, {}

    def _begin(self, param: Tensor, group: dict[str, Any]) -> None:
        """Creates the state from the first gradient: zero moments, statistics, and their basis."""
        state = self.state[param]
        assert param.grad is not None
        work = working(param.dtype)
        store = torch.bfloat16 if group["state_dtype"] == "bfloat16" else work
        finite = param.grad.abs().amax() < LIMIT  # False for a NaN
        for name in COUNTERS:
            state[name] = torch.zeros((), dtype=torch.float32 if name == "step" else torch.int32, device=param.device)
        state["skipped"] += ~finite
        blocks = group["blocks"][_index_of(group["params"], param)]
        shape, sides = _sides(param, blocks, group["max_dim"])
        whole_shape = (blocks, *shape) if shape is not None and sides else tuple(param.shape)
        state["exp_avg"] = torch.zeros(whole_shape, dtype=store, device=param.device)
        state["exp_avg_sq"] = torch.zeros(whole_shape, dtype=work, device=param.device)
        gradient = torch.where(finite, param.grad, 0).to(work).reshape(whole_shape)
        for side in sides:
            half = gradient if side == "left" else gradient.mT
            statistics = torch.bmm(half, half.mT).mul_(1 - group["betas"][1])
            state[side] = statistics.to(store)
            # float16 has as many bits of mantissa as tf32
            halved = param.is_cuda and work == torch.float32 and group["precision"] == "tf32"
            state[f"{side}_basis"] = eigenbasis(statistics).to(torch.float16 if halved else store)

    def _build(self, group: dict[str, Any]) -> list[_DeviceGroup]:
        pairs = [*zip(group["params"], group["blocks"], strict=True)]
        groups = []
        for device in dict.fromkeys(param.device for param, _ in pairs if self.state.get(param)):
            with matmul_precision(group["precision"], device):
                groups.append(_DeviceGroup([pair for pair in pairs if pair[0].device == device], self.state, group))
        return groups

    def _named(self) -> list[tuple[str, Tensor]]:
        named = []
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(group["params"]))]
            named += list(zip(names, group["params"], strict=True))
        return named

    def _count(self, counter: str) -> dict[str, int]:
        counts = {name: int(self.state[p][counter]) for name, p in self._named() if self.state.get(p)}
        return {name: count for name, count in counts.items() if count}


class _DeviceGroup:
    """The parameters of one group on one device that have a state: their stacks, counters and refresh schedule."""

    def __init__(self, pairs: list[tuple[Tensor, int]], state: Any, group: dict[str, Any]) -> None:
        started = [pair for pair in pairs if state.get(pair[0])]
        self.params = [param for param, _ in started]
        self.device = self.params[0].device
        self.stacks = gather(self.params, [blocks for _, blocks in started], state)
        self.counters = {name: torch.stack([state[param][name] for param in self.params]) for name in COUNTERS}
        for name, values in self.counters.items():
            for param, value in zip(self.params, values.unbind(), strict=True):
                state[param][name] = value
        self.interval = (group["refresh_every"], group["stagger"])
        self.schedule = self._scheduled(pairs, group["max_dim"])
        if self.device.type == "cuda":
            # Compiles kernels and loads libraries now rather than in a later step.
            with matmul_precision(group["precision"], self.device):
                for chunks in self.schedule:
                    self._refresh(chunks, write=False)

    def _scheduled(self, pairs: list[tuple[Tensor, int]], max_dim: int) -> list[list[Chunk]]:
        """The schedule of the whole group, without rows that have no state on this device.

        So the steps at which a basis is refreshed do not depend on how parameters are split over processes.
        """
        local = {id(param) for param in self.params}
        rows: dict[tuple[Any, ...], list[bool]] = {}  # by stack of the whole group: which rows are local
        for param, blocks in pairs:
            shape, sides = _sides(param, blocks, max_dim)
            if sides:
                rows.setdefault((shape, blocks, param.dtype, *sides), []).extend([id(param) in local] * blocks)
        index = {stack.key(): i for i, stack in enumerate(self.stacks) if isinstance(stack, Matrices)}
        sizes = {key: dict(zip(SIDES, key[0], strict=True)) for key in rows}
        keys = [*rows]
        whole = [Side(i, side, sizes[key][side], len(rows[key])) for i, key in enumerate(keys) for side in key[3:]]
        steps: list[list[Chunk]] = []
        for chunks in refresh_schedule(whole, *self.interval):
            steps.append([])
            for side, start, stop in chunks:
                key = keys[side.stack]
                first, last = sum(rows[key][:start]), sum(rows[key][:stop])
                if first < last:
                    steps[-1].append(Chunk(side._replace(stack=index[key], rows=sum(rows[key])), first, last))
        return steps

    def step(self, group: dict[str, Any]) -> None:
        grads = [param.grad for param in self.params]
        ok, largest = self._finite(grads)
        factors = self._factors(ok, largest, group)
        for stack in self.stacks:
            members = [grads[i] for i in stack.places]
            if any(grad is not None for grad in members):
                stack.update(members, ok, factors, group["betas"][1], group["eps"])
        self._refresh(self.schedule[group["updates"] % group["refresh_every"]])

    def _refresh(self, chunks: Sequence[Chunk], write: bool = True) -> None:
        for _, same in groupby(chunks, key=lambda chunk: (chunk.side.size, self._stack(chunk).work)):
            refresh_chunks([(self._stack(chunk), chunk) for chunk in same], self.counters["held"], write)

    def stale(self, group: dict[str, Any]) -> bool:
        """Whether the refresh interval or the memory of a parameter has changed."""
        moved = any(stack.moved() for stack in self.stacks if isinstance(stack, Matrices))
        return moved or self.interval != (group["refresh_every"], group["stagger"])

    def _stack(self, chunk: Chunk) -> Matrices:
        stack = self.stacks[chunk.side.stack]
        assert isinstance(stack, Matrices)
        return stack

    def _finite(self, grads: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Which parameters have a finite gradient, and its largest entry. Counts gradients that are not finite."""
        absent = torch.full((), -1.0, device=self.device)
        norms = iter(torch._foreach_norm([grad for grad in grads if grad is not None], torch.inf))
        largest = torch.stack([absent if grad is None else next(norms).to(torch.float32) for grad in grads])
        finite = largest < LIMIT  # False for a NaN
        self.counters["skipped"] += ~finite
        return finite & (largest >= 0), largest

    def _factors(self, ok: Tensor, largest: Tensor, group: dict[str, Any]) -> Tensor:
        """(5, params), see `Factors`."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        counts = ok.double()  # float32 is too coarse for 1 - beta^t
        steps = self.counters["step"].add_(ok).double()
        size = counts * (1 - beta2**steps).sqrt() / (1 - beta1**steps).clamp_min(torch.finfo(torch.float64).tiny)
        decay = lr * group["weight_decay"]
        return torch.stack(
            Factors(
                first=(1 - beta1) * counts,
                second=(1 - beta2) * counts,
                size=size * (-lr * (1 - decay)),
                keep=1 - decay * counts,
                # A power of two that scales the largest entry to 64 .. 128, the middle of float16's range.
                scale=torch.where(
                    ok & (largest > 0), torch.exp2(7 - largest.double().log2().ceil().clamp_min(-99)), 1.0
                ),
            )
        )


def _sides(param: Tensor, blocks: int, max_dim: int) -> tuple[tuple[int, int] | None, list[str]]:
    """The matrix shape of a parameter, and the sides that have a basis."""
    shape = matrix_shape(param.shape, blocks)
    return shape, [] if shape is None else [side for side, n in zip(SIDES, shape, strict=True) if n <= max_dim]


def _index_of(params: list[Tensor], param: Tensor) -> int:
    return next(i for i, other in enumerate(params) if other is param)
