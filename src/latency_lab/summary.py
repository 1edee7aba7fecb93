"""A study reduced to small tables, which most of the report is drawn from.

A study may hold more requests than memory: `of_study` reads it cell by cell and keeps of a cell only the numbers that
its point needs, so that memory holds the latencies and gaps of one point on each core.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files, machine, metrics, token_gaps
from latency_lab.metrics import LATENCIES, PERCENTILES, POINT, RATES, VALUES, natural, percentile_max
from latency_lab.records import Records

_COLUMNS = [*metrics.COLUMNS, "token_times_s", "token_counts"]

DRAWS, SEED, LEVEL = 1000, 0, 0.95
"""Of the bootstrap. Draws depend on the seed and a row's own names: a row does not change when others are added."""


@dataclass(frozen=True)
class Summary:
    """points : one row a setting, workload point and class of requests, see `of_requests`
    cells : one row a cell that has requests, see metrics.per_cell
    parts : mean TTFT of each point in its parts, see metrics.ttft_parts
    """

    points: pd.DataFrame
    cells: pd.DataFrame
    parts: pd.DataFrame


class _Numbers(NamedTuple):
    """What is kept of requests; rows as in `latencies`."""

    latencies: pd.DataFrame
    itl_row: np.ndarray
    itl_s: np.ndarray
    cells: pd.DataFrame


def of_study(study: Records, draws: int = DRAWS, seed: int = SEED, level: float = LEVEL) -> Summary:
    """The tables of a whole study: at once where its requests are few, else a point at a time on each core.

    Raises records.BadRecord.
    """
    measured = study.cells[study.cells["requests"] > 0]
    if study.keeps("requests"):
        numbers = _numbers(study.part(measured).requests_with(_COLUMNS))
        rows = _rows(numbers, draws, seed, level)
        return Summary(_table(rows), numbers.cells, metrics.ttft_parts(numbers.latencies))

    def reduced(cells: pd.DataFrame) -> tuple[list[dict[Any, Any]], pd.DataFrame, pd.DataFrame]:
        point = study.part(cells)
        pieces = [point] if point.keeps("requests") else point.one_by_one()
        numbers = _joined([_numbers(one.requests_with(_COLUMNS)) for one in pieces])
        return _rows(numbers, draws, seed, level), numbers.cells, metrics.ttft_parts(numbers.latencies)

    # in threads: numpy and pyarrow compute beside one another
    with ThreadPoolExecutor(machine.cores()) as pool:
        done = list(pool.map(reduced, (cells for _, cells in measured.groupby(["setting", "workload"], sort=False))))
    return Summary(
        _table([row for rows, _, _ in done for row in rows]),
        pd.concat([cells for _, cells, _ in done], ignore_index=True),
        pd.concat([parts for _, _, parts in done]).sort_values(POINT, key=natural, ignore_index=True),
    )


def of_requests(requests: pd.DataFrame, draws: int = DRAWS, seed: int = SEED, level: float = LEVEL) -> pd.DataFrame:
    """One row for each setting, workload point and class of request: percentiles, means, rates, and their
    intervals.

    Columns `<latency>_p<percentile>_s`, `<latency>_mean_s` and the rates each come with `_low` and `_high`, a
    bootstrap interval of `level`. The bootstrap is hierarchical: repeats are drawn first, then requests
    within each drawn repeat (all gaps of a request together, as they are not independent). With one repeat
    only the noise among its requests is known, and `interval_over` says so; rates then have no interval. Few
    repeats make such intervals somewhat too narrow. Rates are those of the whole cell, all classes together,
    pooled over repeats (tokens over seconds). An interval's end is null where it lies among failures.
    `percentile_max` is the highest percentile that `n` requests support.
    """
    return _table(_rows(_numbers(requests), draws, seed, level))


def _numbers(requests: pd.DataFrame) -> _Numbers:
    latencies = metrics.latencies(requests).reset_index(drop=True)
    return _Numbers(latencies, *token_gaps.itl(requests), metrics.per_cell(requests, latencies))


def _joined(repeats: list[_Numbers]) -> _Numbers:
    """The numbers of a point from those of its cells."""
    first = np.cumsum([0, *(len(one.latencies) for one in repeats)], dtype=np.int32)
    return _Numbers(
        pd.concat([one.latencies for one in repeats], ignore_index=True),
        np.concatenate([one.itl_row + start for one, start in zip(repeats, first, strict=False)]),
        np.concatenate([one.itl_s for one in repeats]),
        pd.concat([one.cells for one in repeats], ignore_index=True),
    )


def _rows(numbers: _Numbers, draws: int, seed: int, level: float) -> list[dict[Any, Any]]:
    """A row for each class of requests of each point."""
    out = []
    latencies, itl_s = numbers.latencies, numbers.itl_s
    groups = latencies.groupby(POINT, sort=False)
    cells = dict(list(numbers.cells.groupby(POINT[:2], sort=False)))
    # the gaps of each group one after another, and their requests by position in it
    group_of, position = groups.ngroup().to_numpy()[numbers.itl_row], groups.cumcount().to_numpy()[numbers.itl_row]
    if len(groups) > 1:
        order = np.argsort(group_of, kind="stable")
        group_of, position, itl_s = group_of[order], position[order], itl_s[order]
    ends = np.searchsorted(group_of, np.arange(len(groups) + 1))
    for (key, own), first, last in zip(groups, ends[:-1], ends[1:], strict=True):
        rng = np.random.default_rng([seed, int(files.digest(list(key)), 16)])
        repeats = cells[key[:2]]["repeat"].to_numpy(int)
        drawn = bootstrap.resample(own["repeat"].to_numpy(int), repeats, draws, rng)
        row: dict[Any, Any] = dict(zip(POINT, key, strict=True)) | own[VALUES].iloc[0].to_dict()
        row |= _counts(own, int(last - first))
        for name in LATENCIES:
            if name == "itl":
                own_s, unit = itl_s[first:last], drawn.unit[position[first:last]]
                found = bootstrap.estimates(own_s, unit, drawn.units, PERCENTILES)
            else:
                found = estimates(own, name, drawn, PERCENTILES)
            row |= _interval(name, *found, level)
        row |= _rates(cells[key[:2]], drawn.cells, level)
        out.append(row)
    return out


def _table(rows: list[dict[Any, Any]]) -> pd.DataFrame:
    if not rows:
        stats = [f"{name}_{stat}_s" for name in LATENCIES for stat in [*(f"p{p}" for p in PERCENTILES), "mean"]]
        ends = [f"{name}{end}" for name in [*stats, *RATES] for end in ("", "_low", "_high")]
        return pd.DataFrame(columns=[*POINT, *VALUES, "n", "failed", *ends])
    return pd.DataFrame(rows).sort_values(POINT, key=natural, ignore_index=True)


def _counts(own: pd.DataFrame, itl_n: int) -> dict[str, object]:
    n, failed, repeats = len(own), int((~own["ok"]).sum()), own["repeat"].nunique()
    return {
        "repeats": repeats,
        "n": n,
        "failed": failed,
        "timeouts": int(own["timed_out"].sum()),
        "failed_share": failed / n,
        "tpot_undefined": int((own["ok"] & own["tpot_s"].isna()).sum()),
        "itl_n": itl_n,
        "percentile_max": percentile_max(n),
        "interval_over": "repeats and requests" if repeats > 1 else "requests of one repeat only",
    }


def estimates(
    table: pd.DataFrame, name: str, drawn: bootstrap.Counts, wanted: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The `wanted` percentiles and the mean of a latency that each request has one of, and the same of each draw.

    table : latencies of the requests that `drawn` draws. A failed request never ended: it is infinitely late. One that
    completed without the latency does not take part.
    """
    column = np.where(table["ok"], table[f"{name}_s"].to_numpy(float), np.inf)
    order = np.argsort(column, kind="stable")[: np.count_nonzero(~np.isnan(column))]
    values = column[order]
    if drawn.grouped:
        return bootstrap.estimates(values, drawn.unit[order], drawn.units, wanted)
    estimate = bootstrap.percentiles(values, np.ones((1, len(values))), wanted)[0]
    return estimate, bootstrap.percentiles(values, drawn.units[:, drawn.unit[order]], wanted)


def _interval(name: str, estimate: np.ndarray, drawn: np.ndarray, level: float) -> dict[str, float]:
    """Point estimates and interval ends of one latency, keyed by column name; null where they lie among failures."""
    low, high = bootstrap.ends(drawn, level)
    out = {}
    for i, stat in enumerate([*(f"p{p}" for p in PERCENTILES), "mean"]):
        for suffix, value in (("", estimate[i]), ("_low", low[i]), ("_high", high[i])):
            out[f"{name}_{stat}_s{suffix}"] = float(value) if np.isfinite(value) else np.nan
    return out


def _rates(cells: pd.DataFrame, weights: np.ndarray, level: float) -> dict[str, float]:
    measured = cells["span_s"].notna().to_numpy()
    cells, weights = cells[measured], weights[:, measured]
    span = cells["span_s"].to_numpy(float)
    out: dict[str, float] = {"failed_output_tokens": float(cells["failed_output_tokens"].sum())}
    for rate, count in zip(RATES, ("output_tokens", "total_tokens", "completed"), strict=True):
        amount = cells[count].to_numpy(float)
        out[rate] = amount.sum() / span.sum() if len(span) else np.nan
        out[f"{rate}_low"] = out[f"{rate}_high"] = np.nan
        if len(span) > 1:
            with np.errstate(invalid="ignore", divide="ignore"):
                low, high = bootstrap.ends(((weights @ amount) / (weights @ span))[:, None], level)
            out[f"{rate}_low"], out[f"{rate}_high"] = float(low[0]), float(high[0])
    return out
