"""Images in: labelled sets, their order, and batches augmented on the device; or one batch, for looking at a model."""

from unskip.data._augment import Augment
from unskip.data._batch import batch
from unskip.data._feed import Feed
from unskip.data._images import ImageSet
from unskip.data._sources import open_images
from unskip.data._views import ViewFeed, Views

__all__ = ["Augment", "Feed", "ImageSet", "ViewFeed", "Views", "batch", "open_images"]
