"""A two-level bootstrap in whole arrays: how often each unit was drawn, and percentiles under such counts.

No draw is ever expanded: a draw is a row of counts, and a percentile is found in their cumulative sum. So a
study's intervals take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNITS = 1000
"""Most units that are drawn in one repeat. Its requests are the units; where there are more, they are dealt at random
into so many groups, and groups are drawn. Groups of independent requests vary as the requests do, so the interval is
the same but for its own noise: its width is known to about 1 / sqrt(2 * UNITS), 2 %."""

_BINS = 1024
_AT_ONCE = 1 << 22


class Counts(NamedTuple):
    units: np.ndarray  # (draws, units): how often each unit was drawn
    cells: np.ndarray  # (draws, cells): how often each repeat was drawn
    unit: np.ndarray  # (requests,): the unit that each request belongs to

    @property
    def requests(self) -> np.ndarray:
        """(draws, requests): how often each request was drawn."""
        return self.units[:, self.unit]

    @property
    def grouped(self) -> bool:
        """Whether there are units of more than one request."""
        return len(self.unit) > self.units.shape[1]


def resample(repeat: np.ndarray, cell_repeat: np.ndarray, draws: int, rng: np.random.Generator) -> Counts:
    """Counts of a two-level bootstrap. m draws of a repeat with n units draw its units m * n times in all."""
    repeats, which, sizes = np.unique(repeat, return_inverse=True, return_counts=True)
    drawn = rng.multinomial(len(repeats), np.full(len(repeats), 1 / len(repeats)), size=draws)
    kept = np.minimum(sizes, UNITS)
    unit = np.empty(len(repeat), dtype=np.int32)
    weights = np.zeros((draws, kept.sum()), dtype=np.float32)
    for i, (n, units, start) in enumerate(zip(sizes, kept, np.cumsum(kept) - kept, strict=True)):
        unit[which == i] = start + (np.arange(n) if n == units else rng.permutation(n) % units)
        weights[:, start : start + units] = rng.multinomial(drawn[:, i] * units, np.full(units, 1 / units))
    of_cell = np.zeros((draws, len(cell_repeat)))
    position = np.searchsorted(repeats, cell_repeat)
    present = np.isin(cell_repeat, repeats)
    of_cell[:, present] = drawn[:, position[present]]
    return Counts(weights, of_cell, unit)


def estimates(
    values: np.ndarray, unit: np.ndarray, weights: np.ndarray, wanted: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The `wanted` percentiles and the mean of all values (exact), and the same of each draw of units.

    Percentiles of draws are from bins where there are many values (see _pool). inf where failures take part.
    """
    if not len(values):
        return np.full(len(wanted) + 1, np.nan), np.full((len(weights), len(wanted) + 1), np.nan)
    ordered = np.sort(values)
    drawn = percentiles(*_pool(values, ordered, unit, weights), wanted)
    finite = np.isfinite(values)
    kept, owner = (values, unit) if finite.all() else (values[finite], unit[finite])
    sums, sizes = (np.bincount(owner, weights=of, minlength=weights.shape[1]) for of in (kept, None))
    lost = weights @ np.bincount(unit[~finite], minlength=weights.shape[1])
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn[:, -1] = np.where(lost > 0, np.inf, (weights @ sums) / (weights @ sizes))
    return np.array([*_percentiles_of_sorted(ordered, wanted), values.mean()]), drawn


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


def _pool(
    values: np.ndarray, ordered: np.ndarray, unit: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values in order, and how often each is in each draw of units. `ordered`: the values, sorted.

    More than `_BINS` distinct values are binned, half of the bins evenly up to p90 and half in the tail down
    to 10^-4, so that 10^9 values still fit: an interval's end moves by less than 0.2 percentiles (0.02 past
    p99).
    """
    if np.count_nonzero(ordered[1:] != ordered[:-1]) < _BINS:
        edges = np.unique(ordered)
    else:
        half = _BINS // 2
        at = np.concatenate([np.linspace(0, 0.9, half), 1 - np.geomspace(0.1, 1e-4, half - 1), [1.0]])
        edges = np.unique(ordered[np.ceil(at * (len(ordered) - 1)).astype(int)])
    cells = weights.shape[1] * len(edges)
    counts = np.zeros(cells, dtype=np.float32)
    for start in range(0, len(values), _AT_ONCE):  # so that memory holds no second copy of the values
        some = slice(start, start + _AT_ONCE)
        counts += np.bincount(unit[some] * len(edges) + np.searchsorted(edges, values[some]), minlength=cells)
    return edges, weights @ counts.reshape(-1, len(edges))


def _percentiles_of_sorted(ordered: np.ndarray, wanted: Sequence[float]) -> list[float]:
    """As numpy's default, without another copy of a large array."""
    out = []
    for p in wanted:
        at = (len(ordered) - 1) * p / 100
        lower, upper = ordered[int(np.floor(at))], ordered[int(np.ceil(at))]
        out.append(lower if lower == upper else lower + (at - np.floor(at)) * (upper - lower))
    return out
