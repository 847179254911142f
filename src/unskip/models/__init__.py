"""Models built from timm blocks: MAE, DINO, SimCLR, SiT and U-ViT; interpolants and samplers."""

from unskip.models._dino import DINO, Teaching, sinkhorn
from unskip.models._flow import Flow, Interpolant, Target, Times
from unskip.models._mae import MAE, Reconstruction
from unskip.models._noise import normal
from unskip.models._published_dino import load_dino
from unskip.models._published_mae import load_published
from unskip.models._published_sit import load_published_sit
from unskip.models._samplers import Drawn, Sampler, Sampling, draw
from unskip.models._simclr import Contrast, SimCLR, contrast
from unskip.models._sit import SiT
from unskip.models._uvit import UViT

__all__ = [
    "DINO",
    "MAE",
    "Contrast",
    "Drawn",
    "Flow",
    "Interpolant",
    "Reconstruction",
    "Sampler",
    "Sampling",
    "SiT",
    "SimCLR",
    "Target",
    "Teaching",
    "Times",
    "UViT",
    "contrast",
    "draw",
    "load_dino",
    "load_published",
    "load_published_sit",
    "normal",
    "sinkhorn",
]
