"""Accuracy and cross entropy of a classifier on the classes that it was trained for."""

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
    logits, labels = test.logits, test.labels
    if logits is None or logits.ndim != 2 or int(labels.max()) >= logits.shape[1]:
        raise BadInput(
            f"accuracy-v1: labels go up to {int(labels.max())}, but the logits are {kind_of(logits)}; use a "
            "classifier of these classes, or a protocol for features, such as knn-dino-v1"
        )
    accuracy = (logits.argmax(-1) == labels).double().mean()
    return {"accuracy": float(accuracy), "loss": float(F.cross_entropy(logits.float(), labels))}
