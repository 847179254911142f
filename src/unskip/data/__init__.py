"""Images and text: data sets, their order, and batches on the device; or a single batch, to inspect a model with."""

from unskip.data._assemble import MixedSizes
from unskip.data._augment import Augment
from unskip.data._batch import batch
from unskip.data._crops import CropFeed, Crops, Drawn, DrawnFeed
from unskip.data._dense import TRIMAP, DenseSet, infer_classes, open_dense
from unskip.data._feed import Feed
from unskip.data._images import ImageSet, fingerprint, subset
from unskip.data._latents import Autoencoder, LatentFeed
from unskip.data._preprocess import (
    Normalise,
    Preprocess,
    known_preprocess,
    preprocess_of,
    set_preprocess,
    usual_preprocess,
)
from unskip.data._sources import absolute_source, open_images
from unskip.data._text import TextSet, open_text
from unskip.data._text_feed import TextFeed
from unskip.data._tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "TRIMAP",
    "Augment",
    "Autoencoder",
    "CropFeed",
    "Crops",
    "DenseSet",
    "Drawn",
    "DrawnFeed",
    "Feed",
    "ImageSet",
    "LatentFeed",
    "MixedSizes",
    "Normalise",
    "Preprocess",
    "TextFeed",
    "TextSet",
    "Tokenizer",
    "absolute_source",
    "batch",
    "fingerprint",
    "infer_classes",
    "known_preprocess",
    "open_dense",
    "open_images",
    "open_text",
    "open_tokenizer",
    "preprocess_of",
    "set_preprocess",
    "subset",
    "usual_preprocess",
]
