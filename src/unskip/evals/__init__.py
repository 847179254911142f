"""Judge it: features of every block in one pass, and named, frozen protocols that turn them into numbers."""

from unskip.evals._diffusion import by_time, diffusion, noised_features
from unskip.evals._discover import discover, discover_blocks, discoveries
from unskip.evals._evaluate import Result, by_depth, evaluate
from unskip.evals._extract import DTYPES, Blocks, Features, Precision, View, autocast, extract
from unskip.evals._extractor import Extractor, extractor
from unskip.evals._finetune import finetune
from unskip.evals._frechet import Moments, frechet
from unskip.evals._generation import Statistics, generation, statistics
from unskip.evals._input import known
from unskip.evals._iou import class_iou, confusion, mean_iou
from unskip.evals._knn import knn
from unskip.evals._manifold import kid, precision_recall, score
from unskip.evals._patches import Patches, patches
from unskip.evals._pictures import attention_maps, main_directions, pca_colours, pictures, sheet_file
from unskip.evals._probe import linear_probe
from unskip.evals._protocols import PROTOCOLS, Protocol, protocol
from unskip.evals._rank import rank
from unskip.evals._segment import Segmentation, segment, segment_blocks
from unskip.evals._tokencut import Discovery, tokencut

__all__ = [
    "DTYPES",
    "PROTOCOLS",
    "Blocks",
    "Discovery",
    "Extractor",
    "Features",
    "Moments",
    "Patches",
    "Precision",
    "Protocol",
    "Result",
    "Segmentation",
    "Statistics",
    "View",
    "attention_maps",
    "autocast",
    "by_depth",
    "by_time",
    "class_iou",
    "confusion",
    "diffusion",
    "discover",
    "discover_blocks",
    "discoveries",
    "evaluate",
    "extract",
    "extractor",
    "finetune",
    "frechet",
    "generation",
    "kid",
    "knn",
    "known",
    "linear_probe",
    "main_directions",
    "mean_iou",
    "noised_features",
    "patches",
    "pca_colours",
    "pictures",
    "precision_recall",
    "protocol",
    "rank",
    "score",
    "segment",
    "segment_blocks",
    "sheet_file",
    "statistics",
    "tokencut",
]
