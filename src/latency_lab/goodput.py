"""Service-level objectives, and the requests a second that meet them all (goodput).

An SLO limits a statistic of a latency: `e2e_p95<1s` asks that 95 of 100 requests are answered within a second. Goodput,
as DistServe and vLLM's benchmark (`--goodput`) have it, counts the requests that are within every limit and divides by
the time: an overloaded engine may have a high throughput and a goodput of nothing. ITL is no latency of a request, so
that no request is counted by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files, metrics
from latency_lab.records import Records

LATENCIES = ("ttft", "tpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
_LIMIT = re.compile(r"\s*([a-z0-9]+)_([a-z0-9]+)\s*<=?\s*([0-9]*\.?[0-9]+)\s*(ms|s)\s*")


class SloError(Exception):
    """An SLO that can't be read; the message says what is wrong and what is allowed."""


def parse(text: str) -> dict[str, float]:
    """Limits in seconds by `<latency>_<statistic>`, from a text such as "e2e_p95<1s,ttft_p95<300ms".

    Raises SloError for what is not an SLO, for limits of nothing, and where two limits contradict each other.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part)
        latency, statistic = match.group(1, 2) if match else ("", "")
        if match is None or latency not in LATENCIES or statistic not in STATISTICS:
            raise SloError(
                f"slo {part.strip()!r} is not a limit; allowed: LATENCY_STATISTIC<NUMBERs or ms, LATENCY one of "
                f"{', '.join(LATENCIES)}, STATISTIC one of {', '.join(STATISTICS)}"
            )
        limit_s = float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)
        if limit_s <= 0:
            raise SloError(f"slo {part.strip()!r}: nothing takes no time; allowed: a limit above 0")
        name = f"{latency}_{statistic}"
        if found.get(name, limit_s) != limit_s:
            raise SloError(f"slo: {name} is limited to {found[name]:g} s and to {limit_s:g} s; allowed: one limit each")
        found[name] = limit_s
    return found


def of_cell(slo: str | None) -> dict[str, float]:
    """The limits of a cell's `slo` column, in the form of `parse`; of ITL none, since no request has one."""
    limits = json.loads(slo) if isinstance(slo, str) else {}
    return {name.removesuffix("_s"): float(limit) for name, limit in limits.items() if not name.startswith("itl_")}


def statistic(values: pd.Series | np.ndarray, name: str) -> float:
    """A statistic of STATISTICS; a percentile in the way of numpy's default."""
    known = np.asarray(values, float)
    if name in ("mean", "max"):
        return float(getattr(np, name)(known)) if len(known) else np.nan
    return float(np.percentile(known, int(name[1:]))) if len(known) else np.nan


def good(latencies: pd.DataFrame, slo: Mapping[str, float]) -> pd.Series:
    """Which requests are within every limit, whatever its statistic. A failed request never is; one of a single token
    has no TPOT, and is within any limit of it.
    """
    ok = latencies["ok"].astype(bool) if "ok" in latencies else pd.Series(True, latencies.index)
    for name, limit_s in slo.items():
        values = latencies[f"{name.split('_')[0]}_s"]
        ok &= (values <= limit_s) | (values.isna() & name.startswith("tpot"))
    return ok


def of_study(study: Records, draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """`by_point` of a whole study. Where it has many requests they are read a point at a time."""
    cells = study.cells[(study.cells["requests"] > 0) & study.cells["slo"].map(of_cell).astype(bool)]
    if study.keeps("requests"):
        return by_point(study.part(cells).requests_with(metrics.COLUMNS), cells, draws, seed)
    found = [
        by_point(study.part(own).requests_with(metrics.COLUMNS), own, draws, seed)
        for _, own in cells.groupby(["setting", "workload"], sort=False)
    ]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def by_point(requests: pd.DataFrame, cells: pd.DataFrame, draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Goodput of each setting and workload point whose study gave an SLO: a row a point, pooled over repeats.

    goodput_per_s, goodput_per_s_low, _high : requests a second within all limits, of all classes, with a 95 %
        bootstrap interval over repeats (null with one)
    attained : share of the requests that are within; requests_per_s : all that completed; slo : the limits as a text
    """
    latencies = metrics.latencies(requests)
    rates = metrics.throughput(requests).set_index("cell")
    limits = {cell: of_cell(slo) for cell, slo in zip(cells["cell"], cells["slo"], strict=True)}
    found = []
    for (setting, workload), own in latencies.groupby(["setting", "workload"], sort=False):
        slo = limits.get(own["cell"].iloc[0]) or {}
        if not slo:
            continue
        within = good(own, slo)
        count = within.groupby(own["cell"]).sum()
        span = rates.loc[count.index, "span_s"]
        count, span = count[span.notna()].to_numpy(float), span.dropna().to_numpy(float)
        if not len(span):
            continue
        low = high = np.nan
        if len(span) > 1:
            rng = np.random.default_rng([seed, int(files.digest([setting, workload]), 16)])
            drawn = rng.multinomial(len(span), np.full(len(span), 1 / len(span)), size=draws)
            ends = bootstrap.ends(((drawn @ count) / (drawn @ span))[:, None], 0.95)
            low, high = (float(end[0]) for end in ends)
        first = own.iloc[0]
        found.append(
            {
                "setting": setting,
                "workload": workload,
                **{name: first[name] for name in ("load", "concurrency", "rate_per_s")},
                "slo": ", ".join(f"{name} < {limit_s:g} s" for name, limit_s in slo.items()),
                "n": len(own),
                "attained": float(within.mean()),
                "goodput_per_s": count.sum() / span.sum(),
                "goodput_per_s_low": low,
                "goodput_per_s_high": high,
                "requests_per_s": float(own["ok"].sum() / span.sum()),
            }
        )
    return pd.DataFrame(found)
