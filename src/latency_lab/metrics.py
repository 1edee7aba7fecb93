"""From raw timestamps to latencies, throughput, their intervals and a verdict on each cell. Tables in, tables
out.

Definitions follow vLLM's benchmark (`vllm bench serve`, calculate_metrics) and GuideLLM
(schemas/request_stats.py):

- TTFT  first token minus arrival. Both count from when the request was sent; we count from when it was *due*
        (`scheduled_s`), so that a client that falls behind in an open loop cannot hide the delay.
- E2E   last token minus arrival, from `scheduled_s` likewise.
- TPOT  (last token - first token) / (output tokens - 1), as vLLM. GuideLLM calls this quantity inter-token
        latency; its own "time per output token" is E2E / output tokens and includes the first token.
- ITL   the wait for each token after the first. vLLM counts one gap a chunk, so several tokens in one chunk
        would count as one. Here the first token of a chunk has waited for the whole gap and the others 0 s,
        since they came together: the stall that a reader sees is kept, and the mean ITL of a request is
        exactly its TPOT.

What is undefined (TPOT of a one-token output, any latency of a failed request) is null and counted, never 0.

A failed request counts as slower than every one that completed: a percentile that falls among failures is
null, and so is every mean with a failure in it. vLLM's benchmark drops failures, which makes an overloaded
engine look fast.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files, schemas

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
POINT = ["setting", "workload", "class_name"]

NEEDED = {50: 5, 90: 10, 95: 20, 99: 100}
"""Requests that a percentile needs so that at least one is expected beyond it (5 for a median)."""

CLIENT_SHARE_MAX = 0.05
LOOP_LAG_MAX_S = 0.010
LOOP_LAG_MAX_SHARE = 0.25
"""A timer in the client may be late by 10 ms, or by this share of the cell's mean TPOT where that is more."""

DURATION_MIN_S = 1.0

_VALUES = [field.name for field in schemas.SETTING_VALUES + schemas.WORKLOAD_VALUES]


def latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Latencies of each request, in seconds, one row a request in the order given.

    Adds to the keys: ok, timed_out, ttft_s, tpot_s, e2e_s, queue_s and prefill_s (the engine's own),
    frontend_s (the rest of TTFT). A failed request has null latencies; a non-streaming one has E2E only, as
    its first token was never seen.
    """
    ok = requests["error"].isna()
    seen = ok & requests["streaming"].astype(bool)
    tokens = requests["output_tokens"].astype("Float64").astype(float)
    first, last, due = (_float(requests[name]) for name in ("first_token_s", "last_token_s", "scheduled_s"))
    keys = [*POINT, "cell", "repeat", "request", *_VALUES, "prompt_tokens", "output_tokens"]
    out = requests[keys].copy()
    out["ok"] = ok
    error = requests["error"].astype("string").fillna("")
    out["timed_out"] = error.str.contains(r"timed?[\s_-]?out", case=False).to_numpy(bool)
    out["ttft_s"] = (first - due).where(seen)
    out["tpot_s"] = ((last - first) / (tokens - 1)).where(seen & (tokens >= 2))
    out["e2e_s"] = (last - due).where(ok)
    out["queue_s"] = _float(requests["queue_s"]).where(ok)
    out["prefill_s"] = _float(requests["prefill_s"]).where(ok)
    out["frontend_s"] = out["ttft_s"] - out["queue_s"] - out["prefill_s"]
    return out


def gaps(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a chunk of tokens: gap_s since the chunk before (null for a request's first), tokens in it,
    at_s in the cell.

    `row` is the request's position in `requests`. Requests without token times, and non-streaming ones, have
    no rows. Where it is not known what each chunk held, `tokens` is right in sum only.
    """
    times, counts = ([_array(value) for value in requests[name]] for name in ("token_times_s", "token_counts"))
    streamed = requests["streaming"].to_numpy(bool)
    lengths = np.array([len(t) if s else 0 for t, s in zip(times, streamed, strict=True)], dtype=int)
    row = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.flatnonzero(lengths)
    after_sent = np.concatenate([times[i] for i in kept]) if len(kept) else np.empty(0)
    output = _float(requests["output_tokens"]).to_numpy()
    known = zip(counts, lengths, output, strict=True)
    counts = [count if len(count) == n else _unknown_counts(n, total) for count, n, total in known]
    tokens = np.concatenate([counts[i] for i in kept]).astype(int) if len(kept) else np.empty(0, int)
    gap_s = np.diff(after_sent, prepend=np.nan)
    gap_s[(np.cumsum(lengths) - lengths)[kept]] = np.nan
    sent = _float(requests["sent_s"]).to_numpy()
    keys = [*POINT, "cell", "repeat", "request", "max_num_batched_tokens", "load"]
    own = requests[keys].take(row).reset_index(drop=True)
    return own.assign(
        row=row,
        ok=requests["error"].isna().to_numpy()[row],
        at_s=sent[row] + after_sent,
        gap_s=gap_s,
        tokens=tokens,
    )


def token_itl(chunks: pd.DataFrame) -> pd.DataFrame:
    """ITL of each token after a request's first, of completed requests: rows of `gaps` to row (the request)
    and itl_s.
    """
    done = chunks[chunks["ok"]]
    waited = done[done["gap_s"].notna()]
    together = np.repeat(done["row"].to_numpy(), np.maximum(done["tokens"].to_numpy() - 1, 0))
    return pd.DataFrame(
        {
            "row": np.concatenate([waited["row"].to_numpy(), together]),
            "itl_s": np.concatenate([waited["gap_s"].to_numpy(), np.zeros(len(together))]),
        }
    )


def throughput(requests: pd.DataFrame) -> pd.DataFrame:
    """Rates of each cell over its span, first request sent to last token received (span_s; null where no
    token came).

    Rates count the tokens of completed requests; what failed requests received is in failed_output_tokens
    alone.
    """
    ok = requests["error"].isna().to_numpy()
    output, prompt = (requests[name].fillna(0).to_numpy(float) for name in ("output_tokens", "prompt_tokens"))
    rows = requests[["setting", "workload", "cell", "repeat"]].assign(
        sent=_float(requests["sent_s"]),
        last=_float(requests["last_token_s"]),
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


def summary(requests: pd.DataFrame, draws: int = 1000, seed: int = 0, level: float = 0.95) -> pd.DataFrame:
    """One row for each setting, workload point and class of request: percentiles, means, rates, and their
    intervals.

    Columns `<latency>_p<percentile>_s`, `<latency>_mean_s` and the rates each come with `_low` and `_high`, a
    bootstrap interval of `level`. The bootstrap is hierarchical: repeats are drawn first, then requests
    within each drawn repeat (all gaps of a request together, as they are not independent). With one repeat
    only the noise among its requests is known, and `interval_over` says so; rates then have no interval. Few
    repeats make such intervals somewhat too narrow. Rates are those of the whole cell, all classes together,
    pooled over repeats (tokens over seconds). An interval's end is null where it lies among failures.
    `percentile_max` is the highest percentile that `n` requests support.

    Draws depend on `seed` and the row's own names, so that a row does not change when others are added.
    """
    table = latencies(requests).reset_index(drop=True)
    itl = token_itl(gaps(requests))
    itl_by_row = itl.sort_values("row", kind="stable")
    bounds = np.searchsorted(itl_by_row["row"].to_numpy(), np.arange(len(table) + 1))
    itl_s = itl_by_row["itl_s"].to_numpy()
    rates = throughput(requests)
    out = []
    for key, group in table.groupby(POINT, sort=False):
        rng = np.random.default_rng([seed, int(files.digest(list(key)), 16)])
        cells = rates[(rates["setting"] == key[0]) & (rates["workload"] == key[1])]
        drawn = bootstrap.resample(group["repeat"].to_numpy(int), cells["repeat"].to_numpy(int), draws, rng)
        spans = [slice(bounds[i], bounds[i + 1]) for i in group.index]
        row: dict[Any, Any] = dict(zip(POINT, key, strict=True)) | group[_VALUES].iloc[0].to_dict()
        row |= _counts(group, sum(s.stop - s.start for s in spans))
        for name in LATENCIES:
            row |= _latency_row(name, group, [itl_s[s] for s in spans], drawn.requests, level)
        row |= _rate_row(cells, drawn.cells, level)
        out.append(row)
    if not out:
        stats = [f"{name}_{stat}_s" for name in LATENCIES for stat in [*(f"p{p}" for p in PERCENTILES), "mean"]]
        ends = [f"{name}{end}" for name in [*stats, *RATES] for end in ("", "_low", "_high")]
        return pd.DataFrame(columns=[*POINT, *_VALUES, "n", "failed", *ends])
    return pd.DataFrame(out).sort_values(POINT, key=natural, ignore_index=True)


def ttft_parts(requests: pd.DataFrame) -> pd.DataFrame:
    """Mean TTFT of each point split in queue_s, prefill_s (the engine's own) and frontend_s (the rest); sums
    to ttft_s.

    Means, because medians of parts do not add up. Over completed requests whose engine times are known (`n`
    of them).
    """
    table = latencies(requests)
    known = table[table["ttft_s"].notna() & table["queue_s"].notna() & table["prefill_s"].notna()]
    grouped = known.groupby([*POINT, "concurrency", "load"], sort=False, dropna=False)
    out = grouped[["queue_s", "prefill_s", "frontend_s", "ttft_s"]].mean()
    out["n"] = grouped.size()
    return out.reset_index().sort_values(POINT, key=natural, ignore_index=True)


def verdicts(cells: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Whether each cell is a valid measurement, and why not: columns valid, reasons, percentile_max.

    After MLPerf's load generator (results.cc): a run says itself whether it kept the rules. percentile_max is
    the highest percentile that the requests of all repeats of the cell's point support together (0 where not
    even a median).
    """
    span = throughput(requests).set_index("cell")["span_s"]
    tpot = latencies(requests).groupby("cell")["tpot_s"].mean()
    pooled = cells.groupby(["setting", "workload"])["requests"].transform("sum")
    rows = []
    for cell, n_pooled in zip(cells.to_dict("records"), pooled, strict=True):
        reasons = _reasons(cell, int(n_pooled), *(known.get(cell["cell"], np.nan) for known in (span, tpot)))
        rows.append(
            {
                **{
                    name: cell[name]
                    for name in (
                        "setting",
                        "workload",
                        "repeat",
                        "cell",
                        "status",
                        "requests",
                        "requests_failed",
                    )
                },
                "valid": not reasons,
                "reasons": "; ".join(reasons),
                "percentile_max": percentile_max(int(n_pooled)),
            }
        )
    names = ["setting", "workload", "repeat"]
    return (
        pd.DataFrame(rows).sort_values(names, key=natural, ignore_index=True) if rows else pd.DataFrame(columns=names)
    )


def label_conflicts(cells: pd.DataFrame) -> pd.DataFrame:
    """Labels that do not mean what they seem to: columns labels (a list) and problem (a sentence).

    Two setting labels whose resolved engine arguments are the same, and one label with more than one
    configuration.
    """
    resolved = cells[cells["resolved_id"].notna()]
    rows = []
    for _, group in resolved.groupby("resolved_id", sort=False):
        labels = sorted(group["setting"].unique(), key=natural_key)
        if len(labels) > 1:
            rows.append(
                {
                    "labels": labels,
                    "problem": "vLLM resolved these settings to one and the same configuration",
                }
            )
    for name, ids, frame in (("setting", "resolved_id", resolved), ("workload", "workload_id", cells)):
        for label, count in frame.groupby(name)[ids].nunique().items():
            if count > 1:
                rows.append(
                    {
                        "labels": [label],
                        "problem": f"this {name} was measured in {count} different definitions",
                    }
                )
    return pd.DataFrame(rows, columns=["labels", "problem"])


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


def beside_long_prompts(requests: pd.DataFrame) -> tuple[pd.DataFrame, str, str] | None:
    """Rows of the first workload in which streams run beside longer prompts, and the names of both classes.

    None where no workload has a class of long prompts, at least four times the others', and one of longer outputs.
    """
    for _, rows in requests[requests["load"] == "mix"].groupby("workload", sort=False):
        sizes = rows.groupby("class_name")[["prompt_tokens", "output_tokens"]].median().astype(float)
        long, stream = sizes["prompt_tokens"].idxmax(), sizes["output_tokens"].idxmax()
        if len(sizes) == 2 and long != stream and sizes["prompt_tokens"].max() >= 4 * sizes["prompt_tokens"].min():
            return rows, str(long), str(stream)
    return None


def natural_key(label: object) -> tuple[tuple[int, float, str], ...]:
    """Sorts numbers inside labels by value: budget=128 before budget=2048."""
    parts = re.split(r"(\d+(?:\.\d+)?)", str(label))
    return tuple((1, float(p), "") if i % 2 else (0, 0.0, p) for i, p in enumerate(parts))


def natural(column: pd.Series) -> pd.Series:
    """`natural_key` as a sort key for pandas."""
    order = {label: i for i, label in enumerate(sorted(column.unique(), key=natural_key))}
    return column.map(order)


def _counts(group: pd.DataFrame, itl_n: int) -> dict[str, object]:
    n, failed, repeats = len(group), int((~group["ok"]).sum()), group["repeat"].nunique()
    return {
        "repeats": repeats,
        "n": n,
        "failed": failed,
        "timeouts": int(group["timed_out"].sum()),
        "failed_share": failed / n,
        "tpot_undefined": int((group["ok"] & group["tpot_s"].isna()).sum()),
        "itl_n": itl_n,
        "percentile_max": percentile_max(n),
        "interval_over": "repeats and requests" if repeats > 1 else "requests of one repeat only",
    }


def _latency_row(
    name: str, group: pd.DataFrame, itl_s: list[np.ndarray], weights: np.ndarray, level: float
) -> dict[str, float]:
    """Point estimates and interval ends of one latency, keyed by column name."""
    if name == "itl":
        estimate, drawn = _itl_estimates(itl_s, weights)
    else:
        column = group[f"{name}_s"].to_numpy(float)
        # A failed request never ended: infinitely late. One that completed without it does not take part.
        column = np.where(group["ok"], column, np.inf)
        order = np.argsort(column, kind="stable")[: np.count_nonzero(~np.isnan(column))]
        once = np.ones((1, len(order)))
        estimate = bootstrap.percentiles(column[order], once, PERCENTILES)[0]
        drawn = bootstrap.percentiles(column[order], weights[:, order], PERCENTILES)
    low, high = bootstrap.ends(drawn, level)
    out = {}
    for i, stat in enumerate([*(f"p{p}" for p in PERCENTILES), "mean"]):
        for suffix, value in (("", estimate[i]), ("_low", low[i]), ("_high", high[i])):
            out[f"{name}_{stat}_s{suffix}"] = float(value) if np.isfinite(value) else np.nan
    return out


def _itl_estimates(itl_s: list[np.ndarray], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """PERCENTILES and mean over every gap (exact), and the same of each draw (percentiles from bins)."""
    every = np.concatenate(itl_s) if itl_s else np.empty(0)
    if not len(every):
        return np.full(len(PERCENTILES) + 1, np.nan), np.full((len(weights), len(PERCENTILES) + 1), np.nan)
    drawn = bootstrap.percentiles(*bootstrap.pool(itl_s, weights), PERCENTILES)
    sums, sizes = np.array([gaps.sum() for gaps in itl_s]), np.array([len(gaps) for gaps in itl_s])
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn[:, -1] = (weights @ sums) / (weights @ sizes)
    return np.array([*np.percentile(every, PERCENTILES), every.mean()]), drawn


def _rate_row(cells: pd.DataFrame, weights: np.ndarray, level: float) -> dict[str, float]:
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


def _reasons(cell: dict[Hashable, Any], pooled: int, span_s: float, tpot_s: float) -> list[str]:
    """Sentences that say why a cell is not a valid measurement; none where it is."""
    if cell["status"] != "done":
        return [f"{cell['status']}: {cell['error']}" if pd.notna(cell["error"]) else str(cell["status"])]
    reasons = []
    failed, asked, share, lag_s = (
        float(cell[name]) if pd.notna(cell[name]) else np.nan
        for name in ("requests_failed", "requests", "client_share", "loop_lag_p99_s")
    )
    if failed > 0:
        reasons.append(f"{failed:.0f} of {asked:.0f} requests failed")
    if pooled < NEEDED[50]:
        reasons.append(f"only {pooled:.0f} requests in all repeats, a median needs {NEEDED[50]}")
    if span_s < DURATION_MIN_S:
        reasons.append(f"lasted {span_s:.2f} s, under {DURATION_MIN_S:.0f} s")
    if share > CLIENT_SHARE_MAX:
        reasons.append(f"the client took {share:.0%} of the time, over {CLIENT_SHARE_MAX:.0%}")
    allowed_s = np.nanmax([LOOP_LAG_MAX_S, LOOP_LAG_MAX_SHARE * tpot_s])
    if lag_s > allowed_s:
        late, allowed = f"{lag_s * 1e3:.0f} ms", f"{allowed_s * 1e3:.0f} ms"
        reasons.append(f"the client's timer was {late} late (p99), over {allowed}")
    return reasons


def _float(column: pd.Series) -> pd.Series:
    return pd.to_numeric(column).astype("Float64").astype(float)


def _unknown_counts(chunks: int, tokens: float) -> np.ndarray:
    """A token in each chunk and the rest in the first: ITL comes out the same however the rest is distributed."""
    return np.array([max(1.0, tokens - chunks + 1), *[1.0] * (chunks - 1)] if chunks else [])


def _array(value: object) -> np.ndarray:
    """A list cell as float64, empty for null."""
    null = value is None or value is pd.NA or isinstance(value, float)
    return np.empty(0) if null else np.asarray(value, float)
