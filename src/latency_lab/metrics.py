"""From raw timestamps to latencies and throughput. Tables in, tables out.

Definitions follow vLLM's benchmark (`vllm bench serve`, calculate_metrics) and GuideLLM
(schemas/request_stats.py):

- TTFT  first token minus arrival. Both count from when the request was sent; we count from when it was *due*
        (`scheduled_s`), so that a client that falls behind in an open loop cannot hide the delay.
- E2E   last token minus arrival, from `scheduled_s` likewise.
- TPOT  (last token - first token) / (output tokens - 1), as vLLM. GuideLLM calls this quantity inter-token
        latency; its own "time per output token" is E2E / output tokens and includes the first token.
- ITL   the wait for each token after the first, as the client saw it: see token_gaps.py.

What is undefined (TPOT of a one-token output, any latency of a failed request) is null and counted, never 0.

A failed request counts as slower than every one that completed: a percentile that falls among failures is
null, and so is every mean with a failure in it. vLLM's benchmark drops failures, which makes an overloaded
engine look fast.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from latency_lab import schemas

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
POINT = ["setting", "workload", "class_name"]

NEEDED = {50: 5, 90: 10, 95: 20, 99: 100}
"""Requests that a percentile needs so that at least one is expected beyond it (5 for a median)."""

VALUES = [field.name for field in schemas.SETTING_VALUES + schemas.WORKLOAD_VALUES]

COLUMNS = [*POINT, "cell", "repeat", "request", *VALUES, "streaming", "error", "prompt_tokens", "output_tokens"]
COLUMNS += ["scheduled_s", "sent_s", "first_token_s", "last_token_s", "queue_s", "prefill_s"]
"""Of `requests`, what the metrics here are made from."""


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Latencies of each request, in seconds, one row a request in the order given.

    Adds to the keys: ok, timed_out, ttft_s, tpot_s, e2e_s, queue_s and prefill_s (the engine's own),
    frontend_s (the rest of TTFT). A failed request has null latencies; a non-streaming one has E2E only, as
    its first token was never seen.
    """
    ok = requests["error"].isna()
    seen = ok & requests["streaming"].astype(bool)
    tokens = as_float(requests["output_tokens"])
    first, last, due = (as_float(requests[name]) for name in ("first_token_s", "last_token_s", "scheduled_s"))
    keys = [*POINT, "cell", "repeat", "request", *VALUES, "prompt_tokens", "output_tokens"]
    out = requests[keys].copy()
    out["ok"] = ok
    out["timed_out"] = False
    errors = requests.loc[~ok, "error"].astype("string")
    out.loc[~ok, "timed_out"] = errors.str.contains(r"timed?[\s_-]?out", case=False).to_numpy(bool)
    out["ttft_s"] = (first - due).where(seen)
    out["tpot_s"] = ((last - first) / (tokens - 1)).where(seen & (tokens >= 2))
    out["e2e_s"] = (last - due).where(ok)
    out["queue_s"] = as_float(requests["queue_s"]).where(ok)
    out["prefill_s"] = as_float(requests["prefill_s"]).where(ok)
    out["frontend_s"] = out["ttft_s"] - out["queue_s"] - out["prefill_s"]
    return out


def throughput(requests: pd.DataFrame) -> pd.DataFrame:
    """Rates of each cell over its span, first request sent to last token received (span_s; null where no
    token came).

    Rates count the tokens of completed requests; what failed requests received is in failed_output_tokens
    alone.
    """
    ok = requests["error"].isna().to_numpy()
    output, prompt = (requests[name].fillna(0).to_numpy(float) for name in ("output_tokens", "prompt_tokens"))
    rows = requests[["setting", "workload", "cell", "repeat"]].assign(
        sent=as_float(requests["sent_s"]),
        last=as_float(requests["last_token_s"]),
        output_tokens=np.where(ok, output, 0),
        total_tokens=np.where(ok, output + prompt, 0),
        completed=ok.astype(int),
        failed_output_tokens=np.where(ok, 0, output).astype(int),
    )
    grouped = rows.groupby(["setting", "workload", "cell", "repeat"], sort=False)
    out = grouped[["output_tokens", "total_tokens", "completed", "failed_output_tokens"]].sum()
    span = grouped["last"].max() - grouped["sent"].min()
    out["span_s"] = span.where(span > 0)
    for rate, count in zip(RATES, ("output_tokens", "total_tokens", "completed"), strict=True):
        out[rate] = out[count] / out["span_s"]
    return out.reset_index()


def per_cell(requests: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Throughput of each cell, and tpot_mean_s, the mean of its requests' TPOT; `table`: their latencies."""
    out = throughput(requests)
    return out.assign(tpot_mean_s=out["cell"].map(table.groupby("cell")["tpot_s"].mean()))


def ttft_parts(table: pd.DataFrame) -> pd.DataFrame:
    """Mean TTFT of each point split in queue_s, prefill_s (the engine's own) and frontend_s (the rest); sums
    to ttft_s.

    table : latencies of requests. Means, because medians of parts do not add up. Over completed requests whose engine
    times are known (`n` of them).
    """
    known = table[table["ttft_s"].notna() & table["queue_s"].notna() & table["prefill_s"].notna()]
    grouped = known.groupby([*POINT, "concurrency", "load"], sort=False, dropna=False)
    out = grouped[["queue_s", "prefill_s", "frontend_s", "ttft_s"]].mean()
    out["n"] = grouped.size()
    return out.reset_index().sort_values(POINT, key=natural, ignore_index=True)


def pareto(benefit: Sequence[float] | pd.Series, cost: Sequence[float] | pd.Series) -> np.ndarray:
    """Which points no other beats: more `benefit` at no more `cost`, or less cost at no less benefit. Nulls
    are never on it.
    """
    gain, price = np.asarray(benefit, float), np.asarray(cost, float)
    known = np.isfinite(gain) & np.isfinite(price)
    no_worse = (gain[None, :] >= gain[:, None]) & (price[None, :] <= price[:, None])
    better = (gain[None, :] > gain[:, None]) | (price[None, :] < price[:, None])
    return known & ~(no_worse & better & known[None, :]).any(axis=1)


def percentile_max(n: int) -> int:
    """The highest of PERCENTILES that `n` requests support (NEEDED), 0 where none."""
    return max((p for p in PERCENTILES if n >= NEEDED[p]), default=0)


def natural_key(label: object) -> tuple[tuple[int, float, str], ...]:
    """Sorts numbers inside labels by value: budget=128 before budget=2048."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(label))
    return tuple((1, float(p), "") if i % 2 else (0, 0.0, p) for i, p in enumerate(parts))


def natural(column: pd.Series) -> pd.Series:
    """`natural_key` as a sort key for pandas."""
    order = {label: i for i, label in enumerate(sorted(column.unique(), key=natural_key))}
    return column.map(order)


def as_float(column: pd.Series) -> pd.Series:
    """A column of numbers with NaN for null, whatever pandas made of it."""
    return pd.to_numeric(column).astype("Float64").astype(float)
