"""Rank, Jacobians, attention, input reconstruction (echo), frequency, similarity, kurtosis and quantisation."""

from unskip.measures._measure import measure
from unskip.measures._measurement import BlockRow, Measurement, SiteRow
from unskip.measures.attention import (
    attention_condition,
    attention_entropy,
    condition,
    self_attention_mass,
    value_output_condition,
)
from unskip.measures.echo import cosine, feature_norm, high_frequency_share, ridge_r2
from unskip.measures.quantise import excess_kurtosis, outlier_channels, sqnr
from unskip.measures.rank import effective_rank, feature_matrix, rank_entropy
from unskip.measures.similarity import cka, token_cosine
from unskip.measures.spectrum import Spectrum, jacobian_spectrum

__all__ = [
    "BlockRow",
    "Measurement",
    "SiteRow",
    "Spectrum",
    "attention_condition",
    "attention_entropy",
    "cka",
    "condition",
    "cosine",
    "effective_rank",
    "excess_kurtosis",
    "feature_matrix",
    "feature_norm",
    "high_frequency_share",
    "jacobian_spectrum",
    "measure",
    "outlier_channels",
    "rank_entropy",
    "ridge_r2",
    "self_attention_mass",
    "sqnr",
    "token_cosine",
    "value_output_condition",
]
