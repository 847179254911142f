"""Images in: a batch from a folder, an array or noise."""

from unskip.data._batch import batch

__all__ = ["batch"]
