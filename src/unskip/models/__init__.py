"""Models of objectives, around blocks of timm: the masked autoencoder."""

from unskip.models._mae import MAE, Reconstruction
from unskip.models._published import load_published

__all__ = ["MAE", "Reconstruction", "load_published"]
