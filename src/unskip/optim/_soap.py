"""SOAP: Adam in the eigenbasis of Shampoo's statistics, for all matrices of one shape at once.

For a gradient G (m, n) with statistics L, R and their bases U, V,

    G' = U' G V                                         the gradient, rotated
    M  = beta1 M + (1 - beta1) G'                       moments, in the rotated basis
    S  = beta2 S + (1 - beta2) G'^2
    W  = (1 - lr * decay) (W - lr * c * U [M / (sqrt(S) + eps)] V')
    L  = beta L + (1 - beta) G G',   R = beta R + (1 - beta) G' G

with c = sqrt(1 - beta2^t) / (1 - beta1^t). Every few steps one power iteration moves a basis after its statistics; the
first moment is re-expressed in the new basis and the second permuted with it. The first step a parameter sees only
builds its basis. Vectors, and sides longer than `max_dim`, have the identity for a basis: that is Adam.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor

from unskip._checks import number, whole
from unskip.errors import BadInput
from unskip.optim._basis import eigenbasis
from unskip.optim._checks import betas_of, dense, loadable, number_or_tensor, plain
from unskip.optim._kernels import Factors
from unskip.optim._precision import MatmulPrecision, matmul_precision
from unskip.optim._refresh_schedule import Chunk, Side, refresh_schedule
from unskip.optim._stacks import SIDES, Matrices, Piece, gather, matrix_shape, refresh_pieces, working

LIMIT = 1e17  # the square of a larger gradient, summed over a row, would not be finite in float32
COUNTERS = ("step", "skipped", "held")  # steps taken, gradients masked, refreshes put off


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's statistics, batched; the module's docstring has the formula.

    Each basis is refreshed once in `refresh_every` steps, all at once or spread over the interval (`stagger`).
    `one_sided` keeps only the smaller side of each matrix. `splits` maps parameters to the number of row blocks that
    are matrices of their own, 3 for a fused qkv. `precision` is that of the products on a GPU; `state_dtype` "bfloat16"
    halves the statistics, bases and first moments. A gradient that is not finite is masked on the device and counted
    (`skipped`), or raises at once with `check=True`, which waits for the device in every step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        *,
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        correct_bias: bool = True,
        refresh_every: int = 10,
        max_dim: int = 10_000,
        one_sided: bool = False,
        stagger: bool = True,
        splits: Mapping[Tensor, int] | None = None,
        precision: MatmulPrecision = "tf32",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        check: bool = False,
    ) -> None:
        self._splits = {} if splits is None else dict(splits)
        self._check = check
        self._by_device: dict[int, list[_DeviceGroup]] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
            "refresh_every": refresh_every,
            "max_dim": max_dim,
            "one_sided": one_sided,
            "stagger": stagger,
            "precision": precision,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults)
        unused = set(self._splits) - {param for group in self.param_groups for param in group["params"]}
        if unused:
            raise BadInput(f"SOAP: splits names {len(unused)} tensors that are not among the parameters")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            number_or_tensor("SOAP", "lr", group["lr"])
            betas_of("SOAP", group["betas"])
            number("SOAP", "eps", group["eps"])
            number("SOAP", "weight_decay", group["weight_decay"])
            if group["shampoo_beta"] is not None:
                number("SOAP", "shampoo_beta", group["shampoo_beta"], below=1)
            whole("SOAP", "refresh_every", group["refresh_every"], low=1)
            whole("SOAP", "max_dim", group["max_dim"], low=0)
            if group["precision"] not in ("tf32", "float32"):
                raise BadInput(f"SOAP: precision is {group['precision']!r}; it can be 'tf32' or 'float32'")
            if group["state_dtype"] not in ("float32", "bfloat16"):
                raise BadInput(f"SOAP: state_dtype is {group['state_dtype']!r}; it can be 'float32' or 'bfloat16'")
            plain("SOAP", group["params"])
            group["blocks"] = [self._blocks(param) for param in group["params"]]
        except BadInput:
            self.param_groups.pop()
            raise
        group["updates"] = 0  # counts the steps of the refresh schedule

    def _blocks(self, param: Tensor) -> int:
        count = whole("SOAP", "every entry of splits", self._splits.get(param, 1), low=1)
        if count > 1 and (param.ndim < 2 or param.shape[0] % count):
            raise BadInput(f"SOAP: a parameter of shape {tuple(param.shape)} has no {count} equal blocks of rows")
        return count

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = [[p for p in group["params"] if p.grad is not None and p.numel()] for group in self.param_groups]
        for params in present:  # all of them before the first group moves
            dense("SOAP", params)
        if self._check:
            self._raise_if_masked([param for params in present for param in params])
        for index, group in enumerate(self.param_groups):
            if index not in self._by_device or any(part.stale(group) for part in self._by_device[index]):
                self._by_device[index] = self._gathered(group)
            new = [param for param in present[index] if not self.state.get(param)]
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
        return loss

    def skipped(self) -> dict[str, int]:
        """How many gradients of each parameter were not finite and left out; parameters without any are not listed."""
        return self._count("skipped")

    def held(self) -> dict[str, int]:
        """How many refreshes of each parameter were put off because the new basis was not orthogonal."""
        return self._count("held")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        given: dict[str, Any] = {}

        def look(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:  # at what the user's own hooks made of it
            loadable("SOAP", state, params, group="updates", entry="exp_avg")
            given.update(state)

        hook = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # The base class casts every entry to its parameter's dtype; these have dtypes of their own.
        ids = [key for group in given["param_groups"] for key in group["params"]]
        for key, param in zip(ids, params, strict=True):
            for name, value in given["state"].get(key, {}).items():
                self.state[param][name] = value.to(param.device, copy=True)
        self._by_device = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_check": self._check}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._by_device, self._splits = {}, {}
        self.__dict__.setdefault("_check", False)

    def _begin(self, param: Tensor, group: dict[str, Any]) -> None:
        """The first gradient: moments of zero, statistics, and the basis they give."""
        state = self.state[param]
        assert param.grad is not None
        work = working(param.dtype)
        store = torch.bfloat16 if group["state_dtype"] == "bfloat16" else work
        finite = param.grad.abs().amax() < LIMIT  # not so for a NaN
        for name in COUNTERS:
            state[name] = torch.zeros((), dtype=torch.float32 if name == "step" else torch.int32, device=param.device)
        state["skipped"] += ~finite
        blocks = group["blocks"][_place(group["params"], param)]
        shape = matrix_shape(param.shape, blocks)
        sides = [] if shape is None else _sides(shape, group["max_dim"], group["one_sided"])
        whole_shape = (blocks, *shape) if shape is not None and sides else tuple(param.shape)
        state["exp_avg"] = torch.zeros(whole_shape, dtype=store, device=param.device)
        state["exp_avg_sq"] = torch.zeros(whole_shape, dtype=work, device=param.device)
        gradient = torch.where(finite, param.grad, 0).to(work).reshape(whole_shape)
        for side in sides:
            half = gradient if side == "left" else gradient.mT
            statistics = torch.bmm(half, half.mT).mul_(1 - _beta(group))
            state[side] = statistics.to(store)
            # float16 has the bits that a tf32 product would leave of a basis
            halved = param.is_cuda and work == torch.float32 and group["precision"] == "tf32"
            state[f"{side}_basis"] = eigenbasis(statistics).to(torch.float16 if halved else store)

    def _gathered(self, group: dict[str, Any]) -> list[_DeviceGroup]:
        started = [(p, b) for p, b in zip(group["params"], group["blocks"], strict=True) if self.state.get(p)]
        groups = []
        for device in dict.fromkeys(param.device for param, _ in started):
            with matmul_precision(group["precision"], device):
                groups.append(_DeviceGroup([pair for pair in started if pair[0].device == device], self.state, group))
        return groups

    def _raise_if_masked(self, params: list[Tensor]) -> None:
        bad = [p for p in params if p.grad is not None and not bool(p.grad.abs().amax() < LIMIT)]
        if bad:
            names = ", ".join(name for name, param in self._named() if any(param is other for other in bad))
            raise BadInput(f"SOAP: the gradient of {names} is not finite, or over {LIMIT:g}; nothing was changed")

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
        self.params = [param for param, _ in pairs]
        self.device = self.params[0].device
        self.stacks = gather(self.params, [blocks for _, blocks in pairs], state)
        self.counters = {name: torch.stack([state[param][name] for param in self.params]) for name in COUNTERS}
        for name, values in self.counters.items():
            for param, value in zip(self.params, values.unbind(), strict=True):
                state[param][name] = value
        sides = [
            Side(i, side, stack.fields[side].shape[-1], len(stack.index))
            for i, stack in enumerate(self.stacks)
            if isinstance(stack, Matrices)
            for side in SIDES
            if side in stack.fields
        ]
        self.interval = (group["refresh_every"], group["stagger"])
        self.schedule = refresh_schedule(sides, *self.interval)
        if self.device.type == "cuda":
            # Kernels are compiled and libraries loaded now, not in the steps to come.
            with matmul_precision(group["precision"], self.device):
                for chunks in self.schedule:
                    self._refresh(chunks, write=False)

    def step(self, group: dict[str, Any]) -> None:
        grads = [param.grad for param in self.params]
        ok, largest = self._finite(grads)
        factors = self._factors(ok, largest, group)
        for stack in self.stacks:
            mine = [grads[place] for place in stack.places]
            if any(grad is not None for grad in mine):
                stack.update(mine, ok, factors, _beta(group), group["eps"])
        self._refresh(self.schedule[group["updates"] % group["refresh_every"]])

    def _refresh(self, chunks: Sequence[Chunk], write: bool = True) -> None:
        for _, same in groupby(chunks, key=lambda chunk: (chunk.side.size, self._stack(chunk).work)):
            pieces = [(self._stack(chunk), Piece(chunk.side.name, chunk.start, chunk.stop)) for chunk in same]
            refresh_pieces(pieces, self.counters["held"], write)

    def stale(self, group: dict[str, Any]) -> bool:
        """Whether the group has another refresh interval by now, or a parameter other memory."""
        moved = any(stack.moved() for stack in self.stacks if isinstance(stack, Matrices))
        return moved or self.interval != (group["refresh_every"], group["stagger"])

    def _stack(self, chunk: Chunk) -> Matrices:
        stack = self.stacks[chunk.side.stack]
        assert isinstance(stack, Matrices)
        return stack

    def _finite(self, grads: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Which parameters have a gradient that counts, and its largest entry. Others are counted, if they have one."""
        absent = torch.full((), -1.0, device=self.device)
        found = iter(torch._foreach_norm([grad for grad in grads if grad is not None], torch.inf))
        largest = torch.stack([absent if grad is None else next(found).to(torch.float32) for grad in grads])
        finite = largest < LIMIT  # not so for a NaN
        self.counters["skipped"] += ~finite
        return finite & (largest >= 0), largest

    def _factors(self, ok: Tensor, largest: Tensor, group: dict[str, Any]) -> Tensor:
        """(5, params), see `Factors`."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        counts = ok.double()  # float32 would lose 1 - beta^t
        steps = self.counters["step"].add_(ok).double()
        size = counts
        if group["correct_bias"]:
            size = counts * (1 - beta2**steps).sqrt() / (1 - beta1**steps).clamp_min(torch.finfo(torch.float64).tiny)
        decay = lr * group["weight_decay"]
        return torch.stack(
            Factors(
                first=(1 - beta1) * counts,
                second=(1 - beta2) * counts,
                size=size * (-lr * (1 - decay)),
                keep=1 - decay * counts,
                # A power of two that brings the largest entry to 64 .. 128: the middle of float16's range.
                scale=torch.where(
                    ok & (largest > 0), torch.exp2(7 - largest.double().log2().ceil().clamp_min(-99)), 1.0
                ),
            )
        )


def _sides(shape: tuple[int, int], max_dim: int, one_sided: bool) -> list[str]:
    sides = [side for side, size in zip(SIDES, shape, strict=True) if size <= max_dim]
    if one_sided and len(sides) == 2:
        return [SIDES[0] if shape[0] <= shape[1] else SIDES[1]]
    return sides


def _beta(group: dict[str, Any]) -> float:
    beta: float = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    return beta


def _place(params: list[Tensor], param: Tensor) -> int:
    return next(i for i, other in enumerate(params) if other is param)
