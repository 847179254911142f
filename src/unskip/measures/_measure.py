"""`measure`: what a model does to a batch, site by site and block by block.

Each sample is traced once, with the weights of the model's wiring; the numbers come from the plain functions of this
package. Memory: all activations of one sample, the output of every block for all samples, what 4096 tokens take in
float64, and what a Jacobian takes (`jacobian_spectrum`).
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip._checks import choice, whole
from unskip._modes import quiet
from unskip.anatomy import Blocks, Example, Sample, block_indices, blocks_in, example_for, trace_again, trace_parts
from unskip.errors import BadInput, NoResidualError
from unskip.measures._block_rows import block_rows
from unskip.measures._collect import Samples
from unskip.measures._measurement import Measurement
from unskip.measures._site_rows import Jacobians, Progress, Spectra, site_rows


def measure(
    model: nn.Module,
    batch: object = None,
    *,
    blocks: Blocks = "all",
    jacobians: Jacobians = "auto",
    steps: int = 96,
    grid: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Rank, conditioning, attention, echo and quantisation of a model on a batch. Nothing in the model is changed.

    `batch` is a tensor, a tuple of arguments or a mapping, as for audit; samples lie along the first axis. Blocks are
    measured at their outputs, as `features` gives them: in post-norm blocks after the last norm; `blocks` selects or
    declares them as there. Jacobians are those of the first sample: "auto" builds them where they are small and
    estimates them otherwise, in `steps` products each way; "exact" builds them all, "off" leaves them out. `grid` is
    (rows, columns) of the patches, where they do not lie on a square. `progress` is called with (done, total, what).
    The model runs in evaluation mode; a rewired one with its weights. What cannot be measured is left out, and the
    notes say why.
    """
    _check_arguments(jacobians, steps, grid, generator)
    generator = generator or torch.Generator().manual_seed(0)
    tick = progress or (lambda done, total, what: None)
    example = example_for(model, batch)
    count = _count(example)
    _refuse_mixed(model, example, count)
    total = count + (0 if jacobians == "off" else 1)
    tick(0, total, "tracing")
    traced = trace_parts(model, example.rows(0, 1) if count > 1 else example, weighted=True)
    if not traced.trace.sites:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so nothing to measure")
    all_blocks = blocks_in(model, traced.trace, blocks)
    wanted = [all_blocks[index] for index in block_indices(blocks, len(all_blocks))]
    samples = Samples(model, traced, wanted, grid, _image(example))
    if len({len(value) for value in _tensors(example) if value.ndim > 1}) > 1:
        samples.notes.append("arguments without a row for each sample: the batch runs whole, its first sample is seen")
    for index in range(count):
        again = Sample(trace_again(model, example.rows(index, index + 1), traced.trace)) if index else samples.first
        samples.add(again)
        tick(index + 1, total, "samples")
    with quiet(model, training=False):
        spectra = Spectra(2 * len(traced.trace.sites) + 1, jacobians, steps, samples.notes, tick)
        rows = block_rows(samples, generator.initial_seed())
        sites = site_rows(samples, spectra, generator)
        network = spectra.of("the network", samples.first.network)
    notes = tuple(dict.fromkeys(samples.notes))
    return Measurement(type(model).__name__, count, samples.tokens, tuple(sites), tuple(rows), network, notes)


def _check_arguments(jacobians: object, steps: object, grid: object, generator: object) -> None:
    choice("measure", "jacobians", jacobians, get_args(Jacobians))
    whole("measure", "steps", steps, low=2)
    if grid is not None and not (
        isinstance(grid, tuple) and len(grid) == 2 and all(isinstance(n, int) and n > 1 for n in grid)
    ):
        raise BadInput(f"measure: grid is {grid!r}; it is (rows, columns) of the patches, two or more of each")
    if not isinstance(generator, torch.Generator | None):
        raise BadInput(f"measure: generator is {generator!r}; write torch.Generator().manual_seed({generator!r})")


def _tensors(tree: object) -> list[Tensor]:
    tree = tree.values if isinstance(tree, Example) else tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _image(example: Example) -> tuple[int, int] | None:
    """Height and width of the images, where there are some and all are of one size."""
    shapes = [value.shape for value in _tensors(example) if value.ndim == 4]
    sizes = {(s[1], s[2]) if s[-1] <= 4 < s[1] else (s[2], s[3]) for s in shapes}  # channels may come last
    return sizes.pop() if len(sizes) == 1 and 0 not in next(iter(sizes)) else None


def _count(example: Example) -> int:
    """How many samples the batch holds; 1 where its arguments have not all a row for each, and are taken as one."""
    counts = {len(value) for value in _tensors(example) if value.ndim > 1}
    if not counts or 0 in counts:
        raise BadInput("the batch holds no tensor with samples along its first axis, or none at all")
    return counts.pop() if len(counts) == 1 else 1


def _refuse_mixed(model: nn.Module, example: Example, count: int) -> None:
    """Samples are measured one by one, which makes sense only where they do not see each other."""
    if count < 2:
        return
    try:
        with quiet(model, training=False):
            pair, alone = (example.rows(start, count).copy().run(model) for start in (count - 2, count - 1))
    except Exception:  # the trace that follows raises with the reason
        return
    for two, one in zip(_tensors(pair), _tensors(alone), strict=False):
        if two.dtype not in (torch.float32, torch.float64) or two.ndim < 2 or len(two) != 2:
            continue
        if two[1:].shape == one.shape and float((two[1:] - one).norm()) > 0.1 * float(one.norm()):
            raise BadInput(
                f"{type(model).__name__}: its output for a sample changes with the sample before it. Samples must lie "
                "along the first axis (batch_first=True) and not see each other; else pass one at a time."
            )
