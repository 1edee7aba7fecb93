"""How much a metric differs between two settings, and how sure that is: one number with its bootstrap interval."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files, metrics, summary, token_gaps

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


def tokens_in_time(
    requests: pd.DataFrame,
    setting: str,
    within_s: float,
    share: float,
    *,
    of_class: str | None = None,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Effect:
    """Tokens that a `share` of one setting's requests had received within `within_s` of their arrival, rounded down.

    `requests` are rows of one workload point. As E2E would be measured with an output of just so many tokens, but for
    the prompts of the requests that would then follow sooner. `of` and `value` are the same number, `against` the
    output length that was asked for. A failed request has received none.
    """
    own = requests[requests["setting"] == setting]
    if of_class is not None:
        own = own[own["class_name"] == of_class]
    if own.empty:
        return Effect(problem=f"{setting} was not measured")
    if (repeats := own["repeat"].nunique()) < REPEATS_NEEDED:
        return Effect(problem=f"{setting}: {repeats} repeat only, an interval needs {REPEATS_NEEDED}")
    needed = math.ceil(1 / min(share, 1 - share))
    if len(own) < needed:
        return Effect(problem=f"{setting}: {len(own)} requests, a share of {share:g} needs {needed}")
    tokens = np.array([_tokens_by(row, within_s) for row in own.to_dict("records")], float)
    repeat = own["repeat"].to_numpy(int)
    rng = np.random.default_rng([seed, int(files.digest([setting, within_s, share, of_class]), 16)])
    counts = bootstrap.resample(repeat, np.unique(repeat), draws, rng)
    estimate, drawn = bootstrap.estimates(tokens, counts.unit, counts.units, (100 * (1 - share),))
    low, high = bootstrap.ends(np.floor(drawn[:, :1]), level)
    asked = float(own["target_output_tokens"].max())
    return Effect(math.floor(estimate[0]), asked, math.floor(estimate[0]), float(low[0]), float(high[0]))


def _tokens_by(request: Mapping[Hashable, Any], within_s: float) -> int:
    """Tokens that a request had received `within_s` after it was due; 0 where it failed. Unstreamed, all come last."""
    if pd.notna(request["error"]):
        return 0
    if not request["streaming"]:
        return int(request["output_tokens"]) if request["last_token_s"] - request["scheduled_s"] <= within_s else 0
    at_s = request["sent_s"] - request["scheduled_s"] + np.asarray(request["token_times_s"], float)
    return int(np.asarray(request["token_counts"])[at_s <= within_s].sum())


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
    counts = bootstrap.resample(repeat, np.unique(repeat), draws, rng)
    wanted, at = ((), -1) if statistic == "mean" else ((int(statistic[1:]),), 0)
    if name == "itl":
        failed = int((~table["ok"]).sum())
        if failed:
            return math.nan, none, f"{failed} of {len(table)} requests failed, and their gaps are not known"
        row, values = token_gaps.itl(own)
        estimate, drawn = bootstrap.estimates(values, counts.unit[row], counts.units, wanted)
        if not len(values):
            return math.nan, none, "no gaps between tokens"
    else:
        values = table.loc[~table["ok"] | table[f"{name}_s"].notna(), f"{name}_s"].to_numpy(float)
        if not len(values):
            return math.nan, none, f"no request has a {name}"
        estimate, drawn = summary.estimates(table, name, counts, wanted)
    needed = metrics.NEEDED[50 if statistic == "mean" else int(statistic[1:])]
    if len(values) < needed:
        return math.nan, none, f"{len(values)} values, {statistic} needs {needed}"
    return float(estimate[at]), drawn[:, at], ""
