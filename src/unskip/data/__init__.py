"""Images in: labelled sets, their order, and batches augmented on the device; or one batch, for looking at a model."""

from unskip.data._augment import Augment
from unskip.data._batch import batch
from unskip.data._crops import CropFeed, Crops, Drawn, DrawnFeed
from unskip.data._decode import MixedSizes
from unskip.data._dense import open_dense
from unskip.data._device import mean_and_std
from unskip.data._feed import Feed
from unskip.data._images import ImageSet, fingerprint
from unskip.data._latents import Autoencoder, LatentFeed
from unskip.data._sources import open_images

__all__ = [
    "Augment",
    "Autoencoder",
    "CropFeed",
    "Crops",
    "Drawn",
    "DrawnFeed",
    "Feed",
    "ImageSet",
    "LatentFeed",
    "MixedSizes",
    "batch",
    "fingerprint",
    "mean_and_std",
    "open_dense",
    "open_images",
]
