"""A two-level bootstrap in whole arrays: how often each request was drawn, and percentiles under such counts.

No draw is ever expanded: a draw is a row of counts, and a percentile is found in their cumulative sum. So a
study's intervals take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_BINS = 1024


class Counts(NamedTuple):
    requests: np.ndarray  # (draws, requests): how often each request was drawn
    cells: np.ndarray  # (draws, cells): how often each repeat was drawn


def resample(repeat: np.ndarray, cell_repeat: np.ndarray, draws: int, rng: np.random.Generator) -> Counts:
    """Counts of a two-level bootstrap. m draws of a repeat with n requests draw its requests m * n times in
    all.
    """
    repeats, which, sizes = np.unique(repeat, return_inverse=True, return_counts=True)
    drawn = rng.multinomial(len(repeats), np.full(len(repeats), 1 / len(repeats)), size=draws)
    weights = np.zeros((draws, len(repeat)), dtype=np.float32)
    for i, n in enumerate(sizes):
        weights[:, which == i] = rng.multinomial(drawn[:, i] * n, np.full(n, 1 / n))
    of_cell = np.zeros((draws, len(cell_repeat)))
    position = np.searchsorted(repeats, cell_repeat)
    present = np.isin(cell_repeat, repeats)
    of_cell[:, present] = drawn[:, position[present]]
    return Counts(weights, of_cell)


def pool(samples: list[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples of all requests as sorted values, and how often each value is in each draw of requests.

    More than `_BINS` distinct values are binned, half of the bins evenly up to p90 and half in the tail down
    to 10^-4, so that 10^6 requests still fit: an interval's end moves by less than 0.2 percentiles (0.02 past
    p99).
    """
    every = np.concatenate(samples)
    values = np.unique(every)
    if len(values) > _BINS:
        half = _BINS // 2
        at = np.concatenate([np.linspace(0, 0.9, half), 1 - np.geomspace(0.1, 1e-4, half - 1), [1.0]])
        values = np.unique(np.quantile(every, at, method="higher"))
    owner = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
    flat = owner * len(values) + np.searchsorted(values, every)
    counts = np.bincount(flat, minlength=len(samples) * len(values)).reshape(len(samples), len(values))
    return values, weights @ counts.astype(np.float32)


def percentiles(values: np.ndarray, weights: np.ndarray, wanted: Sequence[float]) -> np.ndarray:
    """The `wanted` percentiles (linear, as numpy's default) and mean of sorted `values` under each row of
    integer `weights`.

    Shape (rows, wanted + 1); NaN where a row has no weight, inf where a failure takes part.
    """
    out = np.full((len(weights), len(wanted) + 1), np.nan)
    if not len(values):
        return out
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    some = total > 0
    for i, p in enumerate(wanted):
        at = (total - 1) * p / 100
        lower, upper = (
            values[np.minimum((cumulative <= edge[:, None]).sum(axis=1), len(values) - 1)]
            for edge in (np.floor(at), np.ceil(at))
        )
        share = at - np.floor(at)
        with np.errstate(invalid="ignore"):
            out[:, i] = np.where((share == 0) | (lower == upper), lower, lower + share * (upper - lower))
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        out[:, -1] = (weights[:, finite] @ values[finite]) / total
    out[:, -1] = np.where(weights[:, ~finite].sum(axis=1) > 0, np.inf, out[:, -1])
    out[~some] = np.nan
    return out


def ends(drawn: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Interval ends over draws; draws without any value are left out, ends among failures are inf (nulled
    later).
    """
    tail = (1 - level) / 2
    ends = np.full((2, drawn.shape[1]), np.nan)
    for i in range(drawn.shape[1]):
        known = drawn[~np.isnan(drawn[:, i]), i]
        if len(known):
            # "lower"/"higher" pick values that were drawn: interpolating towards inf is undefined
            ends[:, i] = (
                np.quantile(known, tail, method="lower"),
                np.quantile(known, 1 - tail, method="higher"),
            )
    return ends[0], ends[1]
