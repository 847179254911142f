"""Refuses models that cannot be traced or rewired: compiled, wrapped, hooked, or part of a rewired one."""

from __future__ import annotations

from torch import nn

from unskip.anatomy._rewired import PATCH, WIRING
from unskip.errors import WrappedError

_WRAPPERS = {  # class name: the tool, and the attribute with the model
    "OptimizedModule": ("torch.compile", "._orig_mod"),
    "DistributedDataParallel": ("DistributedDataParallel", ".module"),
    "DataParallel": ("DataParallel", ".module"),
    "FullyShardedDataParallel": ("FSDP", ".module"),
    "PeftModel": ("peft", ".get_base_model(), or to save it .merge_and_unload()"),
    "DeepSpeedEngine": ("DeepSpeed", ".module"),
}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel, FSDP and peft, or the model itself."""
    while isinstance(model, nn.Module):
        names = {cls.__name__ for cls in type(model).__mro__} & _WRAPPERS.keys()
        if not names:
            break
        model = model.get_base_model() if "PeftModel" in names else getattr(model, "_orig_mod", None) or model.module  # type: ignore[operator, assignment]
    return model


def refuse_wrapped(model: nn.Module) -> None:
    """Raises WrappedError if a wrapper, hook or compilation of the model would hide, ignore or undo rewiring."""
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS:
                tool, inside = _WRAPPERS[cls.__name__]
                if any(WIRING in vars(child) for child in module.modules()):
                    raise WrappedError(f"{where} is a rewired model in {tool}. Pass the model inside: {inside}.")
                raise WrappedError(f"{where} is wrapped by {tool}. Rewire the plain model first, then apply {tool}.")
            if cls.__name__ == "FSDPModule":
                raise WrappedError(f"{where} is sharded by FSDP. Rewire the plain model first, then call fully_shard.")
            if cls.__module__.startswith("torch.jit"):
                raise WrappedError(
                    f"{where} is a TorchScript module, which has no Python source. Rewire the plain model, then use "
                    "torch.export or torch.jit.trace."
                )
        if "forward" in vars(module) and getattr(vars(module)["forward"], "__self__", None) is not module:
            raise WrappedError(
                f"{where} overrides forward on the instance (a hook of accelerate or another tool), which would "
                "bypass rewiring. Remove the hook, rewire, then add it again."
            )
        if vars(module).get("_compiled_call_impl") is not None:
            raise WrappedError(f"{where} was compiled in place by module.compile(). Rewire first, then compile.")
        if hasattr(type(module), PATCH):
            raise WrappedError(f"{where} belongs to a rewired model. Work on that model, or undo its wiring first.")
