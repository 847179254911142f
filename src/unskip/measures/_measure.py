"""`measure`: numbers about a model and a batch, by site and by block.

Each sample is traced once, with the weights of the model's wiring; the numbers come from the public functions of this
package. Memory: all activations of one sample, the output of every block for all samples, 4096 tokens in float64, and
a Jacobian (`jacobian_spectrum`).
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
    """Rank, conditioning, attention, echo and quantisation of a model on a batch. The model does not change.

    `batch` is a tensor, a tuple of arguments or a mapping, as for `audit`, with samples along the first axis. Blocks
    are measured at their outputs, as in `features`, and `blocks` selects or declares them in the same way. Jacobians
    are those of the first sample: "auto" builds small ones and estimates large ones, with `steps` products with J and
    J^T each; "exact" builds all, "off" none. `grid` is (rows, columns) of the patches, if it is not square. `progress`
    is called with (done, total, what). The model runs in evaluation mode, with its current shortcut weights. Numbers
    that cannot be measured are None, and the notes give the reason.
    """
    _check_arguments(jacobians, steps, grid, generator)
    generator = generator or torch.Generator().manual_seed(0)
    tick = progress or (lambda done, total, what: None)
    example = example_for(model, batch)
    count = _count(example)
    _check_independent(model, example, count)
    total = count + (0 if jacobians == "off" else 1)
    tick(0, total, "tracing")
    traced = trace_parts(model, example.rows(0, 1) if count > 1 else example, weighted=True)
    if not traced.trace.sites:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so nothing to measure")
    all_blocks = blocks_in(model, traced.trace, blocks)
    wanted = [all_blocks[index] for index in block_indices(blocks, len(all_blocks))]
    samples = Samples(model, traced, wanted, grid, _image(example))
    if len({len(value) for value in _tensors(example) if value.ndim > 1}) > 1:
        samples.notes.append("arguments without a row for each sample: only the first sample of the batch is measured")
    for index in range(count):
        sample = Sample(trace_again(model, example.rows(index, index + 1), traced.trace)) if index else samples.first
        samples.add(sample)
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
        raise BadInput(f"measure: grid is {grid!r}; it must be (rows, columns) of the patches, at least 2 of each")
    if not isinstance(generator, torch.Generator | None):
        raise BadInput(f"measure: generator is {generator!r}; write torch.Generator().manual_seed({generator!r})")


def _tensors(tree: object) -> list[Tensor]:
    tree = tree.values if isinstance(tree, Example) else tree
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _image(example: Example) -> tuple[int, int] | None:
    """Height and width of the images, if there are any and all have the same size."""
    shapes = [value.shape for value in _tensors(example) if value.ndim == 4]
    sizes = {(s[1], s[2]) if s[-1] <= 4 < s[1] else (s[2], s[3]) for s in shapes}  # channels may come last
    return sizes.pop() if len(sizes) == 1 and 0 not in next(iter(sizes)) else None


def _count(example: Example) -> int:
    """The number of samples of the batch; 1 if its arguments do not all have one row for each sample."""
    counts = {len(value) for value in _tensors(example) if value.ndim > 1}
    if not counts or 0 in counts:
        raise BadInput("the batch has no tensor with samples along its first axis, or no samples")
    return counts.pop() if len(counts) == 1 else 1


def _check_independent(model: nn.Module, example: Example, count: int) -> None:
    """Raises BadInput if the samples of a batch affect each other, because they are measured one by one."""
    if count < 2:
        return
    try:
        with quiet(model, training=False):
            pair, last = (example.rows(start, count).copy().run(model) for start in (count - 2, count - 1))
    except Exception:  # the trace that follows raises with the reason
        return
    for two, one in zip(_tensors(pair), _tensors(last), strict=False):
        if two.dtype not in (torch.float32, torch.float64) or two.ndim < 2 or len(two) != 2:
            continue
        if two[1:].shape == one.shape and float((two[1:] - one).norm()) > 0.1 * float(one.norm()):
            raise BadInput(
                f"{type(model).__name__}: its output for a sample changes with the previous sample. Samples must be "
                "along the first axis (batch_first=True) and independent; otherwise pass one at a time."
            )
