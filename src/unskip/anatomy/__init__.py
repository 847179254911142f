"""The residual sites of a model, the weights of their branches, the features of its blocks, and the audit table."""

from unskip.anatomy._activations import ACTIVATIONS, GRID, Curve
from unskip.anatomy._audit import AUDIT_HEADER, Audit, audit, audit_rows
from unskip.anatomy._blocks import Block, Blocks, block_indices, blocks_in, find_blocks, is_declared, keep_outputs
from unskip.anatomy._correlation import CorrelationMap, correlation_map, mean_output
from unskip.anatomy._describe import Kind
from unskip.anatomy._droppath import drop_paths
from unskip.anatomy._example import ABOUT, Example, example_for
from unskip.anatomy._features import features, pool_tokens
from unskip.anatomy._grid import patch_grid, patch_sides
from unskip.anatomy._guard import refuse_wrapped, unwrapped
from unskip.anatomy._locate import Hop, Place, Unreachable, locate
from unskip.anatomy._model_trace import ModelTrace, SiteRun, mean_weight, trace_again, trace_model
from unskip.anatomy._norms import NormKind
from unskip.anatomy._ops import is_addition
from unskip.anatomy._parts import (
    AttentionParts,
    MlpParts,
    NormParts,
    ParallelParts,
    Part,
    Parts,
)
from unskip.anatomy._parts_trace import PartsTrace, parts, trace_parts
from unskip.anatomy._positions import find_positions
from unskip.anatomy._replay import ReplayError, replay
from unskip.anatomy._rewired import PATCH, WIRING, rewired_state
from unskip.anatomy._sample import Function, Sample, tokens
from unskip.anatomy._sites import Site, Survey, Unknown, named, survey
from unskip.anatomy._trace import calls

__all__ = [
    "ABOUT",
    "ACTIVATIONS",
    "AUDIT_HEADER",
    "GRID",
    "PATCH",
    "WIRING",
    "AttentionParts",
    "Audit",
    "Block",
    "Blocks",
    "CorrelationMap",
    "Curve",
    "Example",
    "Function",
    "Hop",
    "Kind",
    "MlpParts",
    "ModelTrace",
    "NormKind",
    "NormParts",
    "ParallelParts",
    "Part",
    "Parts",
    "PartsTrace",
    "Place",
    "ReplayError",
    "Sample",
    "Site",
    "SiteRun",
    "Survey",
    "Unknown",
    "Unreachable",
    "audit",
    "audit_rows",
    "block_indices",
    "blocks_in",
    "calls",
    "correlation_map",
    "drop_paths",
    "example_for",
    "features",
    "find_blocks",
    "find_positions",
    "is_addition",
    "is_declared",
    "keep_outputs",
    "locate",
    "mean_output",
    "mean_weight",
    "named",
    "parts",
    "patch_grid",
    "patch_sides",
    "pool_tokens",
    "refuse_wrapped",
    "replay",
    "rewired_state",
    "survey",
    "tokens",
    "trace_again",
    "trace_model",
    "trace_parts",
    "unwrapped",
]
