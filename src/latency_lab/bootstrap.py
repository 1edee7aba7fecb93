"""A two-level bootstrap in whole arrays: how often each unit was drawn, and percentiles under such counts.

No draw is ever expanded: a draw is a row of counts, and a percentile is found in their cumulative sum. So a
study's intervals take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

UNITS = 1000
"""Most units that are drawn in one repeat. Its requests are the units; where there are more, they are dealt at random
into so many groups, and groups are drawn. Groups of independent requests vary as the requests do, so the interval is
the same but for its own noise: its width is known to about 1 / sqrt(2 * UNITS), 2 %."""

_BINS = 1024
_RANKED = 1 << 20
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
    edges, counts, sums = _pool(values, unit, weights.shape[1])
    drawn = percentiles(edges, weights @ counts, wanted)
    lost = weights @ np.isinf(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (weights @ np.where(np.isinf(sums), 0, sums)) / (weights @ counts.sum(axis=1, dtype=float))
    drawn[:, -1] = np.where(lost > 0, np.inf, means)
    return np.array([*np.percentile(values, wanted), values.mean()]), drawn


def percentiles(values: np.ndarray, weights: np.ndarray, wanted: Sequence[float]) -> np.ndarray:
    """The `wanted` percentiles (linear, as numpy's default) and mean of sorted `values` under each row of
    integer `weights`.

    Shape (rows, wanted + 1); NaN where a row has no weight, inf where a failure takes part.
    """
    out = np.full((len(weights), len(wanted) + 1), np.nan)
    if not len(values):
        return out
    cumulative = np.cumsum(weights, axis=1, dtype=np.float64)
    total = cumulative[:, -1].copy()
    some = total > 0
    # Rows one after another in one ascending array, so that a single search finds an edge of every row.
    start = np.arange(len(weights)) * (total.max(initial=0) + 1)
    cumulative += start[:, None]
    ascending = cumulative.ravel()
    first = np.arange(len(weights)) * len(values)
    for i, p in enumerate(wanted):
        at = (total - 1) * p / 100
        lower, upper = (
            values[np.clip(np.searchsorted(ascending, edge + start, side="right") - first, 0, len(values) - 1)]
            for edge in (np.floor(at), np.ceil(at))
        )
        share = at - np.floor(at)
        with np.errstate(invalid="ignore"):
            out[:, i] = np.where((share == 0) | (lower == upper), lower, lower + share * (upper - lower))
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        out[:, -1] = weights @ np.where(finite, values, 0) / total
    if not finite.all():
        out[weights[:, ~finite].sum(axis=1) > 0, -1] = np.inf
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


def _pool(values: np.ndarray, unit: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct values in order, how often each unit has each of them, and the sum of each unit's values.

    More than `_BINS` distinct values are binned, half of the bins evenly up to p90 and half in the tail down
    to 10^-4, so that 10^9 values still fit: an interval's end moves by less than 0.2 percentiles (0.02 past
    p99).
    """
    distinct, key_of = _keys(values)
    parts = [slice(at, at + _AT_ONCE) for at in range(0, len(values), _AT_ONCE)]  # no second copy of the values
    held = np.zeros(len(distinct), dtype=np.int64)
    for part in parts:
        held += np.bincount(key_of(part), minlength=len(distinct))
    edges = np.flatnonzero(held)
    if len(edges) > _BINS:
        half = _BINS // 2
        at = np.concatenate([np.linspace(0, 0.9, half), 1 - np.geomspace(0.1, 1e-4, half - 1), [1.0]])
        edges = np.unique(np.searchsorted(np.cumsum(held), np.ceil(at * (len(values) - 1)), side="right"))
    bins = np.searchsorted(edges, np.arange(len(distinct))).astype(np.int32)
    cells = units * len(edges)
    counts, sums = np.zeros(cells, dtype=np.float32), np.zeros(units)
    for part in parts:
        owner = unit[part].astype(np.int64)
        counts += np.bincount(owner * len(edges) + bins[key_of(part)], minlength=cells)
        sums += np.bincount(owner, weights=values[part], minlength=units)
    return distinct[edges], counts.reshape(units, len(edges)), sums


def _keys(values: np.ndarray) -> tuple[np.ndarray, Callable[[slice], np.ndarray]]:
    """Small integers in the order of the values: the value of each integer, and the integers of some of the values.

    Ranks, unless there are so many values that sorting them would take the most time: then the first bits of a float,
    which tell values apart that differ by 0.01 %.
    """
    if len(values) <= _RANKED or values.min() < 0:
        distinct, rank = np.unique(values, return_inverse=True)
        return distinct, lambda part: rank[part]
    dropped = 10  # of a float's 32 bits; those of one sign are in its order

    def first_bits(part: slice) -> np.ndarray:
        return values[part].astype(np.float32).view(np.int32) >> dropped

    last = int(np.float32(values.max()).view(np.int32)) >> dropped
    middle = (np.arange(last + 1, dtype=np.int32) << dropped) + (1 << dropped - 1)
    distinct = middle.view(np.float32).astype(float)
    return np.where(np.isnan(distinct), np.inf, distinct), first_bits
