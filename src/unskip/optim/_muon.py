"""Muon: momentum orthogonalised by Newton-Schulz, batched over matrices of one shape; AdamW for the rest.

    B  =  mu B + (1 - mu) G,    O  =  NS(mu B + (1 - mu) G),    W  =  (1 - lr * decay) W - lr * adjust(m, n) * O

NS is five steps of X <- a X + (b X X' + c (X X')^2) X in bfloat16, which moves all singular values near 1. Constants
and order of operations are those of torch.optim.Muon; here products of equal shapes are batched, and groups with
use="adamw" take the parameters that are not hidden matrices, so that one optimizer trains a whole model.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the adjustment to AdamW's scale: Liu et
al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from unskip._checks import choice, number, whole
from unskip.errors import BadInput
from unskip.optim._batched import BatchedOptimizer
from unskip.optim._kernels import momentum, move, pointers
from unskip.optim._stacks import matrix_shape, working

Adjust = Literal["original", "match_rms_adamw", "spectral_unclamped"]
ADJUST: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}


class Muon(BatchedOptimizer):
    """torch.optim.Muon with equal shapes batched; the module's docstring has the formula.

    Matrices of more than two axes are flattened to (first, rest). `splits` maps parameters to the number of row blocks
    that are separate matrices, 3 for a fused qkv. A group with use="adamw" is AdamW with `betas` and `adam_eps`.
    """

    own_field = "ns_steps"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Adjust | None = None,
        splits: Mapping[Tensor, int] | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
    ) -> None:
        self._stacks: dict[int, list[_Stack]] = {}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use": "muon",
            "betas": betas,
            "adam_eps": adam_eps,
        }
        super().__init__(params, defaults, splits)

    def _check_group(self, group: dict[str, Any]) -> None:
        number("Muon", "momentum", group["momentum"], below=1)
        number("Muon", "adam_eps", group["adam_eps"])
        whole("Muon", "ns_steps", group["ns_steps"], low=0)
        if len(group["ns_coefficients"]) != 3:
            raise BadInput(f"Muon: ns_coefficients must be three numbers, got {group['ns_coefficients']!r}")
        choice("Muon", "adjust_lr_fn", group["adjust_lr_fn"] or "original", ADJUST)
        if choice("Muon", "a group's use", group["use"], ("muon", "adamw")) == "adamw":
            return
        self._check_whole(group["params"])
        for param, blocks in zip(group["params"], group["blocks"], strict=True):
            if matrix_shape(param.shape, blocks) is None or param.shape[0] % blocks:
                raise BadInput(
                    f"Muon: a parameter of shape {tuple(param.shape)} is not {blocks} matrices; put it into a group "
                    "with use='adamw', or use unskip.optim.build"
                )

    def _move(self) -> None:
        for index, group in enumerate(self.param_groups):
            present = [param for param in group["params"] if param.grad is not None]
            if not present:
                continue
            if group["use"] == "adamw":
                self._adamw(present, group)
                continue
            stacks = self._stacks.get(index, [])
            if {id(p) for s in stacks for p in s.params} != {id(p) for p in present} or any(s.moved() for s in stacks):
                stacks = self._stacks[index] = self._build_stacks(present, group)
            for stack in stacks:
                with torch.autocast(stack.momentum.device.type, enabled=False):
                    stack.step(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        self._stacks = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks, self._splits = {}, {}

    def _build_stacks(self, params: list[Tensor], group: dict[str, Any]) -> list[_Stack]:
        blocks = dict(zip(map(id, group["params"]), group["blocks"], strict=True))
        by_kind: dict[Any, list[Tensor]] = {}
        for param in params:
            count = blocks[id(param)]
            by_kind.setdefault((matrix_shape(param.shape, count), count, param.dtype, param.device), []).append(param)
        return [_Stack(same, count, shape, self.state) for (shape, count, *_), same in by_kind.items()]

    def _adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        fused = all(param.is_cuda for param in params)
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "step": torch.zeros((), device=param.device if fused else "cpu"),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        states = [self.state[param] for param in params]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=fused,
            foreach=not fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adam_eps"],
            maximize=False,
        )


class _Stack:
    """Matrices of one shape, with stacked momentum; the entries of the state are views of it."""

    def __init__(self, params: list[Tensor], blocks: int, shape: tuple[int, int], state: Any) -> None:
        self.params, self.blocks, self.shape = params, blocks, shape
        for param in params:
            if not state[param]:
                state[param] = {"momentum_buffer": torch.zeros_like(param, memory_format=torch.contiguous_format)}
        # (rows, m, n)
        self.momentum = torch.cat([state[param]["momentum_buffer"].reshape(blocks, *shape) for param in params])
        for param, view in zip(params, self.momentum.split(blocks), strict=True):
            state[param]["momentum_buffer"] = view.view(param.shape)
        self.pointers = pointers(params, working(params[0].dtype))
        self.addresses = [param.data_ptr() for param in params]

    def moved(self) -> bool:
        return self.pointers is not None and self.addresses != [param.data_ptr() for param in self.params]

    def step(self, group: dict[str, Any]) -> None:
        m, n = self.shape
        rows = [param.grad.reshape(self.blocks, m, n) for param in self.params if param.grad is not None]
        gradient = torch.cat(rows).to(self.momentum.dtype)
        update = momentum(gradient, self.momentum, group["momentum"], group["nesterov"], torch.bfloat16)
        change = newton_schulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        lr = float(group["lr"])
        factors = torch.empty(4, len(change), dtype=working(self.params[0].dtype), device=change.device)
        factors[2].fill_(-lr * ADJUST[group["adjust_lr_fn"] or "original"](m, n))
        factors[3].fill_(1 - lr * group["weight_decay"])
        move(self.params, self.pointers, change, factors, self.blocks)


def newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices (rows, m, n) with singular values moved near 1, in bfloat16."""
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    lengths: Tensor = matrices.to(torch.bfloat16).norm(dim=(-2, -1), keepdim=True)
    x = matrices.to(torch.bfloat16).div(lengths.clamp_min(eps))
    for _ in range(steps):
        # The smaller of both Gram matrices. Adding a to its diagonal would save a pass but lose accuracy.
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, update, beta=a) if tall else torch.baddbmm(x, update, x, beta=a)
    return x
