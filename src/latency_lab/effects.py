"""How much a metric differs between two settings, and how sure that is: one number with its bootstrap interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files, metrics

REPEATS_NEEDED = 2
"""With one repeat nothing is known of how much repeats differ, so no interval is honest."""

_COUNTS = {
    "output_tokens_per_s": "output_tokens",
    "total_tokens_per_s": "total_tokens",
    "requests_per_s": "completed",
}


@dataclass(frozen=True)
class Effect:
    """A metric on one setting (`of`) and on another (`against`), in its own unit, and the ratio or difference.

    `problem` says why there is no effect to speak of; it is empty where `low` and `high` bound one.
    """

    of: float = math.nan
    against: float = math.nan
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    problem: str = ""


def effect(
    requests: pd.DataFrame,
    metric: str,
    pair: tuple[str, str],
    *,
    of_class: str | None = None,
    ratio: bool = True,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Effect:
    """The metric on the first setting of `pair` over, or minus, that on the second, at one workload point.

    Parameters
    ----------
    requests : rows of one workload point; other settings than the pair's do not matter.
    metric : a latency and its statistic as in metrics.summary (`ttft_p50_s`; also `queue_...`), or a rate.
    of_class : class whose requests count; a rate is always that of the whole cell.

    Both sides are resampled by themselves, repeats first and requests within them (see bootstrap.resample).
    """
    samples = []
    for setting in pair:
        own = requests[requests["setting"] == setting]
        if own.empty:
            return Effect(problem=f"{setting} was not measured")
        rng = np.random.default_rng([seed, int(files.digest([setting, metric, of_class]), 16)])
        estimate, drawn, problem = _sample(own, metric, of_class, draws, rng)
        if problem:
            return Effect(problem=f"{setting}: {problem}")
        samples.append((estimate, drawn))
    (of, of_drawn), (against, against_drawn) = samples
    with np.errstate(invalid="ignore", divide="ignore"):
        values = of_drawn / against_drawn if ratio else of_drawn - against_drawn
        value = np.float64(of) / against if ratio else of - against
    if np.isnan(value) or np.isnan(values).any():
        return Effect(of, against, problem="too many requests failed, or too few took part, for an interval")
    low, high = bootstrap.ends(values[:, None], level)
    return Effect(of, against, float(value), float(low[0]), float(high[0]))


def _sample(
    own: pd.DataFrame, metric: str, of_class: str | None, draws: int, rng: np.random.Generator
) -> tuple[float, np.ndarray, str]:
    """The metric over one setting's requests, its bootstrap draws, and what keeps them from being used."""
    none = np.empty(0)
    repeats = own["repeat"].nunique()
    if repeats < REPEATS_NEEDED:
        return math.nan, none, f"{repeats} repeat only, an interval needs {REPEATS_NEEDED}"
    if metric in _COUNTS:
        cells = metrics.throughput(own)
        if cells["span_s"].isna().any():
            return math.nan, none, "a repeat completed no request"
        drawn = bootstrap.resample(own["repeat"].to_numpy(int), cells["repeat"].to_numpy(int), draws, rng).cells
        amount, span = cells[_COUNTS[metric]].to_numpy(float), cells["span_s"].to_numpy(float)
        return amount.sum() / span.sum(), (drawn @ amount) / (drawn @ span), ""
    if of_class is not None:
        own = own[own["class_name"] == of_class]
    name, statistic, _ = metric.split("_")
    table = metrics.latencies(own).reset_index(drop=True)
    repeat = table["repeat"].to_numpy(int)
    weights = bootstrap.resample(repeat, np.unique(repeat), draws, rng).requests
    if name == "itl":
        failed = int((~table["ok"]).sum())
        if failed:
            return math.nan, none, f"{failed} of {len(table)} requests failed, and their gaps are not known"
        itl = metrics.token_itl(metrics.gaps(own))
        by_row = {row: own_itl.to_numpy() for row, own_itl in itl.groupby("row")["itl_s"]}
        samples = [by_row.get(row, none) for row in range(len(table))]
        values = np.sort(np.concatenate(samples)) if samples else none
        if not len(values):
            return math.nan, none, "no gaps between tokens"
        pooled, counts = bootstrap.pool(samples, weights)
        drawn = _statistic(pooled, counts, statistic)
        if statistic == "mean":
            sums, sizes = np.array([gaps.sum() for gaps in samples]), np.array([len(gaps) for gaps in samples])
            drawn = (weights @ sums) / (weights @ sizes)
    else:
        # A failed request never ended: infinitely late. One that completed without the latency does not take part.
        column = np.where(table["ok"], table[f"{name}_s"].to_numpy(float), np.inf)
        order = np.argsort(column, kind="stable")[: np.count_nonzero(~np.isnan(column))]
        values = column[order]
        if not len(values):
            return math.nan, none, f"no request has a {name}"
        drawn = _statistic(values, weights[:, order], statistic)
    needed = metrics.NEEDED[50 if statistic == "mean" else int(statistic[1:])]
    if len(values) < needed:
        return math.nan, none, f"{len(values)} values, {statistic} needs {needed}"
    estimate = float(_statistic(values, np.ones((1, len(values))), statistic)[0])
    return estimate, drawn, ""


def _statistic(values: np.ndarray, weights: np.ndarray, statistic: str) -> np.ndarray:
    """A percentile or the mean of sorted values under each row of weights."""
    if statistic == "mean":
        return bootstrap.percentiles(values, weights, ())[:, -1]
    return bootstrap.percentiles(values, weights, (int(statistic[1:]),))[:, 0]
