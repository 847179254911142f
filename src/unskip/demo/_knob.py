"""Finds the residual additions of a small model, weakens and cuts them, and undoes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip.anatomy import audit
from unskip.wiring import Cut, Decay, rewire


def rewire_small_vit(write: Callable[[str], object]) -> bool:
    """Rewires a small random timm ViT. True if that changes the output, and `undo` restores it bit for bit."""
    model = small_vit()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    before = _output(model, images)

    write("Each block of a vision transformer adds x + f(x) twice. unskip finds these additions by a trace:\n")
    write(f"{audit(model)}\n")

    write(
        "`rewire` turns each into alpha * x + beta * f(x), in place. With Decay(0.6), alpha falls with depth from "
        "1 to 0.6:\n"
    )
    wiring = rewire(model, Decay(0.6))
    write(f"{wiring}\n")
    change = _distance(before, _output(model, images))
    write(f"The output changed by at most {change:.3g}.\n")

    write("The effective decay is the product of all alphas, so 0.6 is a stronger decay in a deeper model.")
    write("Decay.to_product finds the alpha_min for a given product, and `set` changes the rule of the same model:\n")
    for rule in (Decay.to_product(5e-3), Cut()):
        wiring.set(rule)
        difference = _distance(before, _output(model, images))
        write(
            f"  {rule!s:<21} last alpha {wiring.alphas[-1]:<6.3g} effective decay {wiring.effective_decay:<6.3g} "
            f"output changed by {difference:.3g}"
        )

    wiring.undo()
    after = _output(model, images)
    restored = torch.equal(before, after)
    write(f"\nAfter `undo` the output differs from the original by {_distance(before, after):g}.")
    write(
        "It is equal bit for bit."
        if restored
        else "It is NOT equal bit for bit. This is a bug in unskip. Please report it."
    )
    return restored and change > 0


def small_vit() -> nn.Module:
    """A timm ViT of four blocks, with the same random weights in every call."""
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
