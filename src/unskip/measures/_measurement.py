"""The result of `measure`: one row for each site, one for each block, and the spectrum of the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from unskip._table import table
from unskip.measures.spectrum import Spectrum


@dataclass(frozen=True)
class SiteRow:
    """The numbers of one site. Tuples have one number for each head; None means not measured."""

    index: int
    path: str
    kind: str
    alpha: float
    beta: float
    ratio: float  # rms(beta f) / rms(alpha x), the mean over samples
    branch: Spectrum | None  # Jacobian of f with respect to its normalised input
    sublayer: Spectrum | None  # Jacobian of alpha x + beta f(x) with respect to x
    entropy: tuple[float, ...] | None  # of attention, by head, in nats
    self_attention: tuple[float, ...] | None  # attention of tokens to themselves, by head
    attention_condition: tuple[float, ...] | None  # of the attention matrix, by head, the median over samples
    value_output: float | None  # condition number of W_V W_O
    correlation_slope: float | None  # C'(1) of an MLP's correlation map: 1 keeps the angles between similar tokens
    gradient: float | None  # |d<w, x_L> / dx_l| for a random sign vector w


@dataclass(frozen=True)
class BlockRow:
    """The numbers of one block's output, (samples, tokens, dim), as in `features`."""

    index: int
    path: str
    norm: float  # mean over tokens
    token_rank: float | None  # effective rank of all tokens, centred
    token_cosine: float | None  # mean cosine between different tokens of a sample; near 1: rank collapse
    pooled_rank: float | None  # effective rank of the samples' mean tokens, centred
    carried: float  # the product of the alphas so far
    cosine: float | None  # with the first stream, mean over tokens
    echo: float | None  # R^2 of the first stream predicted from this output by ridge regression, on held-out samples
    high_frequency: float | None  # fraction of the energy of patch tokens above half of the Nyquist frequency
    cka_first: float | None  # unbiased linear CKA with the first stream
    cka_previous: float | None  # unbiased linear CKA with the previous block
    kurtosis: float | None  # excess kurtosis of all entries
    outlier_channels: float | None  # largest RMS of a channel over the median RMS
    sqnr8: float | None  # in dB, at 8 bits with one scale for the tensor
    sqnr4: float | None


@dataclass(frozen=True)
class Measurement:
    """Numbers about a model and a batch. str() is a table, to_dict() plain data."""

    model: str
    samples: int
    tokens: int
    sites: tuple[SiteRow, ...]
    blocks: tuple[BlockRow, ...]
    network: Spectrum | None  # from the first stream to the last sum
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; spectra without their values, non-finite numbers as None."""
        return {
            "model": self.model,
            "samples": self.samples,
            "tokens": self.tokens,
            "sites": [_plain(row) for row in self.sites],
            "blocks": [_plain(row) for row in self.blocks],
            "network": None if self.network is None else self.network.to_dict(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        title = f"{self.model} on {self.samples} sample{'s' * (self.samples != 1)} of {self.tokens} tokens"
        lines = [title, "", _table(_SITE, self.sites), "", _table(_BLOCK, self.blocks)]
        if self.network is not None:
            lines += ["", f"network: {self.network}"]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __repr__(self) -> str:
        return f"<Measurement of {self.model}: {len(self.sites)} sites, {len(self.blocks)} blocks>"


def _plain(row: SiteRow | BlockRow) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    return {name: value.to_dict() if isinstance(value, Spectrum) else _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(columns: dict[str, Callable[[Any], object]], rows: Sequence[SiteRow | BlockRow]) -> str:
    """A table of the columns that have a value in any row."""
    cells = {name: [value(row) for row in rows] for name, value in columns.items()}
    shown = {name: values for name, values in cells.items() if any(value is not None for value in values)}
    return table([*shown], [*zip(*shown.values(), strict=True)])


def _condition(spectrum: Spectrum | None) -> object:
    """A condition number; a lower bound if it was estimated."""
    if spectrum is None:
        return None
    return spectrum.condition if spectrum.exact else f">{spectrum.condition:.3g}"


def _mean(values: tuple[float, ...] | None) -> float | None:
    return None if values is None else sum(values) / len(values)


def _median(values: tuple[float, ...] | None) -> float | None:
    return None if values is None else sorted(values)[len(values) // 2]


_SITE: dict[str, Callable[[Any], object]] = {
    "site": lambda r: r.index,
    "path": lambda r: r.path or "(model)",
    "kind": lambda r: r.kind,
    "alpha": lambda r: r.alpha,
    "beta": lambda r: r.beta,
    "|bf|/|ax|": lambda r: r.ratio,
    "cond f": lambda r: _condition(r.branch),
    "cond x+f": lambda r: _condition(r.sublayer),
    "max x+f": lambda r: None if r.sublayer is None else r.sublayer.sigma_max,
    "self-att": lambda r: _mean(r.self_attention),
    "entropy": lambda r: _mean(r.entropy),
    "cond att": lambda r: _median(r.attention_condition),
    "cond VO": lambda r: r.value_output,
    "C'(1)": lambda r: r.correlation_slope,
    "|grad|": lambda r: r.gradient,
}
_BLOCK: dict[str, Callable[[Any], object]] = {
    "block": lambda r: r.index,
    "path": lambda r: r.path or "(model)",
    "|x|": lambda r: r.norm,
    "rank": lambda r: r.token_rank,
    "tok cos": lambda r: r.token_cosine,
    "pooled": lambda r: r.pooled_rank,
    "carried": lambda r: r.carried,
    "cosine": lambda r: r.cosine,
    "echo": lambda r: r.echo,
    "high": lambda r: r.high_frequency,
    "CKA x0": lambda r: r.cka_first,
    "CKA prev": lambda r: r.cka_previous,
    "kurtosis": lambda r: r.kurtosis,
    "outlier": lambda r: r.outlier_channels,
    "dB int8": lambda r: r.sqnr8,
    "dB int4": lambda r: r.sqnr4,
}
