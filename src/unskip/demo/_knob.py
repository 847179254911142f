"""The knob: find the residuals of a small model, weaken them, take it back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip.anatomy import audit
from unskip.wiring import Cut, Decay, rewire


def turn(write: Callable[[str], object]) -> bool:
    """Shows it on a small timm ViT with random weights. True where the output moved and, undone, is the same bit for
    bit.
    """
    model = small_vit()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = _output(model, images)

    write("A vision transformer adds x + f(x) twice a block. unskip finds these additions in the model as it runs:\n")
    write(f"{audit(model)}\n")

    write(
        "Rewired in place, each of them becomes alpha * x + beta * f(x). With Decay(0.6), alpha falls with depth from "
        "1 to 0.6:\n"
    )
    wiring = rewire(model, Decay(0.6))
    write(f"{wiring}\n")
    moved = _distance(before, _output(model, images))
    write(f"The output changed by at most {moved:.3g}.\n")

    write("The effective decay is the product of all alphas, so the same 0.6 weighs more in a deeper model.")
    write("Decay.to_product solves alpha_min for the product you want; the rule is exchanged on the same model:\n")
    for rule in (Decay.to_product(5e-3), Cut()):
        wiring.set(rule)
        further = _distance(before, _output(model, images))
        write(
            f"  {rule!s:<21} last alpha {wiring.alphas[-1]:<6.3g} effective decay {wiring.effective_decay:<6.3g} "
            f"output changed by {further:.3g}"
        )

    wiring.undo()
    after = _output(model, images)
    restored = torch.equal(before, after)
    write(f"\nUndone: the output differs from the first one by {_distance(before, after):g}.")
    write(
        "It is the same bit for bit."
        if restored
        else "It is NOT the same bit for bit: a fault of unskip. Please report it."
    )
    return restored and moved > 0


def small_vit() -> nn.Module:
    """Four blocks of a timm ViT with random weights, the same every time."""
    timm = need("timm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=10
        )
    return model.eval()


def _output(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(images)
    return output


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
