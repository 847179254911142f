"""Accuracy and cross entropy of a classifier on its own classes."""

from __future__ import annotations

from torch.nn import functional as F

from unskip._checks import kind_of
from unskip.errors import BadInput
from unskip.evals._registry import register
from unskip.evals._split import Split


@register(
    "accuracy-v1",
    needs="logits",
    about="Top-1 accuracy and mean cross entropy of the model's own logits.",
    fractions=("accuracy",),
    train=False,
)
def evaluate_accuracy(train: Split, test: Split) -> dict[str, float]:
    """Of logits (n, classes) and labels."""
    logits, labels = test.logits, test.labels
    if logits is None or logits.ndim != 2 or int(labels.max()) >= logits.shape[1]:
        raise BadInput(
            f"accuracy-v1: labels go up to {int(labels.max())}, and the logits are {kind_of(logits)}; take a "
            "classifier of these classes, or a protocol of features, such as knn-dino-v1"
        )
    right = (logits.argmax(-1) == labels).double().mean()
    return {"accuracy": float(right), "loss": float(F.cross_entropy(logits.float(), labels))}
