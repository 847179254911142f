"""Judge it: features of every block in one pass, and named, frozen protocols that turn them into numbers."""

from unskip.evals._evaluate import Result, evaluate
from unskip.evals._extract import Features, extract
from unskip.evals._finetune import finetune
from unskip.evals._knn import knn
from unskip.evals._probe import linear_probe
from unskip.evals._protocols import PROTOCOLS, Protocol
from unskip.evals._rank import rank

__all__ = [
    "PROTOCOLS",
    "Features",
    "Protocol",
    "Result",
    "evaluate",
    "extract",
    "finetune",
    "knn",
    "linear_probe",
    "rank",
]
