"""Evaluation: features of every block in one pass, scored by named, frozen protocols."""

import unskip.evals._accuracy
import unskip.evals._bits_per_byte
import unskip.evals._loss
import unskip.evals._next_token
import unskip.evals._quantised
import unskip.evals._quantised_text  # noqa: F401  # these modules register their evaluators
from unskip.evals._diffusion import noised
from unskip.evals._discover import discover
from unskip.evals._evaluate import Result, by_depth, evaluate, flat
from unskip.evals._extract import Features, Inputs, autocast, extract, image_channels
from unskip.evals._extractor import Extractor, extractor
from unskip.evals._finetune import finetune
from unskip.evals._frechet import Moments, frechet
from unskip.evals._generation import Statistics, generation, statistics
from unskip.evals._iou import confusion, mean_iou
from unskip.evals._knn import check_knn, knn
from unskip.evals._manifold import kid, precision_recall, score
from unskip.evals._patches import Patches, patches
from unskip.evals._pictures import attention_maps, pca_colours, pictures
from unskip.evals._predictions import Predictions, token_logits
from unskip.evals._probe import linear_probe
from unskip.evals._rank import rank
from unskip.evals._registry import PROTOCOLS, Protocol, find_protocols, protocol, register, wilson
from unskip.evals._segment import Segmentation, segment
from unskip.evals._split import Options, Split
from unskip.evals._tokencut import Discovery, tokencut
from unskip.training import Precision

__all__ = [
    "PROTOCOLS",
    "Discovery",
    "Extractor",
    "Features",
    "Inputs",
    "Moments",
    "Options",
    "Patches",
    "Precision",
    "Predictions",
    "Protocol",
    "Result",
    "Segmentation",
    "Split",
    "Statistics",
    "attention_maps",
    "autocast",
    "by_depth",
    "check_knn",
    "confusion",
    "discover",
    "evaluate",
    "extract",
    "extractor",
    "find_protocols",
    "finetune",
    "flat",
    "frechet",
    "generation",
    "image_channels",
    "kid",
    "knn",
    "linear_probe",
    "mean_iou",
    "noised",
    "patches",
    "pca_colours",
    "pictures",
    "precision_recall",
    "protocol",
    "rank",
    "register",
    "score",
    "segment",
    "statistics",
    "token_logits",
    "tokencut",
    "wilson",
]
