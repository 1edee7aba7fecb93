"""How far this study agrees with vLLM's own benchmark: ratios with intervals, from what `make bench` has measured.

`latest` finds the folder: what was measured here (data/runs/fidelity), else the committed (data/reference/fidelity).
It holds

    serve/          records of one server, driven in alternation by this study's client and by `vllm bench serve`
    throughput.csv  whole runs of this study's engine and of `vllm bench throughput`, in alternation
    http.csv        what one core of either HTTP client sustains
"""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pandas as pd

from latency_lab import effects, machine, records

OURS, SERVE, THROUGHPUT = "this study", "vllm bench serve", "vllm bench throughput"

AGREED = 0.05
"""A ratio further from 1 than this wants a cause."""

METRICS = {
    "TTFT p50": "ttft_p50_s",
    "TTFT p99": "ttft_p99_s",
    "TPOT p50": "tpot_p50_s",
    "TPOT p99": "tpot_p99_s",
    "ITL p50": "itl_p50_s",
    "ITL p99": "itl_p99_s",
    "E2E p50": "e2e_p50_s",
    "E2E p99": "e2e_p99_s",
    "output tokens/s": "output_tokens_per_s",
}

NOTES = (
    "Both start the clock before a request is sent, its connection included, and stop it at the last chunk that holds "
    "a token; the values compared here come from the timestamps of both by the same code.",
    "In an open loop latency counts here from when a request was due, in vLLM's benchmark from when it was sent: what "
    "the client itself is late is in the numbers here alone.",
    "vLLM's benchmark notes one gap a chunk. Here each token has its own, 0 where several came in one chunk: the same "
    "where a chunk holds one token, as it does unless server or client fall behind.",
    "vLLM's benchmark leaves out failed requests; here they count as slower than all others.",
    "This study asks the server to count the tokens in each event (continuous_usage_stats), which makes an event some "
    "80 bytes longer; vLLM's benchmark asks for one count at the end.",
    "`vllm bench throughput` hands over prompts as text and samples at temperature 1; this study hands over token ids "
    "and decodes greedily.",
)
"""How the two differ, from vllm/benchmarks/serve.py, throughput.py and lib/endpoint_request_func.py, 0.24 to 0.32."""

THROUGHPUT_FILE, HTTP_FILE = "throughput.csv", "http.csv"

ADDED_MAX_S = 0.001
KEPT_UP = 0.85
"""A source that gives this share of the tokens that it is to give is in time: the ends of a rate of eight periods, the
fewest there are, already cost it a ninth."""
"""A client has reached its limit where it adds more than this to the p99 of the gaps between tokens."""

DRAWS = 10_000


def in_turn(pair: int, other: str) -> tuple[str, str]:
    """Both sides, the first of them in every second pair coming second."""
    return (OURS, other) if pair % 2 == 0 else (other, OURS)


def with_facts(table: pd.DataFrame) -> pd.DataFrame:
    """Every row says what it was measured on, so that the file speaks for itself."""
    facts = machine.provenance()
    names = ("device", "cpu", "vllm_version", "git_commit")
    return table.assign(**{name: facts[name] for name in names}, date=f"{datetime.date.today()}")


def latest(data: Path) -> Path | None:
    """The folder of what was measured here, else of what is committed; None where there is neither."""
    folders = (data / "runs" / "fidelity", data / "reference" / "fidelity")
    return next((folder for folder in folders if folder.is_dir()), None)


def agreement(study: records.Records) -> pd.DataFrame:
    """One row a workload and metric: this study's value, vLLM's, their ratio and its 95 % interval (low, high).

    Both sides are computed from timestamps by the same code; `problem` says why there is no ratio.
    """
    rows = []
    for workload, requests in study.requests.groupby("workload", sort=True):
        for name, metric in METRICS.items():
            found = effects.effect(requests, metric, (OURS, SERVE))
            rows.append({"workload": workload, "metric": name, OURS: found.of, SERVE: found.against})
            rows[-1] |= {"ratio": found.value, "low": found.low, "high": found.high, "problem": found.problem}
    return pd.DataFrame(rows)


def throughput_ratio(table: pd.DataFrame) -> tuple[float, float, float]:
    """Median over pairs of this study's tokens a second over vLLM's, with its 95 % interval."""
    pairs = table.pivot(index="pair", columns="client", values="output_tokens_per_s")
    return median_ratio(pairs[OURS].to_numpy(), pairs[THROUGHPUT].to_numpy(), paired=True)


def limits(table: pd.DataFrame) -> pd.DataFrame:
    """What one core of each client sustains, a row for each number of streams: tokens_per_s and requests_per_s of both.

    `table` has a row for each rate that was offered in each round (see bench_http.py). A client sustains the rates
    below the first at which the median over rounds of what it adds is above ADDED_MAX_S; NaN where that is the first.
    Two kinds of rates tell nothing of a client and are left out: the lowest, in which all streams start, and those that
    the source could not keep up itself, as its loop is no faster than one stream's tokens allow.
    """
    rows = []
    for streams, own in table.groupby("streams"):
        row: dict[str, float] = {"streams": int(str(streams))}
        for client, runs in own.groupby("client"):
            offered = (
                runs[runs["kind"] == "tokens"].groupby("offered_per_s")[["per_s", "added_s"]].median().sort_index()
            )
            offered = offered.iloc[1:]
            offered = offered[offered["per_s"] >= KEPT_UP * offered.index]
            within = (offered["added_s"] <= ADDED_MAX_S).cummin()
            row[f"tokens_per_s {client}"] = offered["per_s"][within].max()
            row[f"requests_per_s {client}"] = runs.loc[runs["kind"] == "requests", "per_s"].median()
        rows.append(row)
    return pd.DataFrame(rows)


def median_ratio(of: np.ndarray, against: np.ndarray, paired: bool) -> tuple[float, float, float]:
    """Ratio of two sets of rounds with a 95 % bootstrap interval: the median over pairs, else the ratio of medians."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(of), (DRAWS, len(of)))
    if paired:
        middle, ratios = np.median(of / against), np.median((of / against)[draws], axis=1)
    else:
        others = rng.integers(0, len(against), (DRAWS, len(against)))
        middle = np.median(of) / np.median(against)
        ratios = np.median(of[draws], axis=1) / np.median(against[others], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(middle), float(low), float(high)


def serve_text(compared: pd.DataFrame, cells: pd.DataFrame) -> str:
    """What was compared on what, and how it came out, in a few sentences."""
    known = compared[compared["ratio"].notna()]
    within = (known["ratio"] - 1).abs() <= AGREED
    first = cells.iloc[0]
    pairs, requests, failed = cells["repeat"].nunique(), cells["requests"].sum(), cells["requests_failed"].sum()
    others = ", ".join(
        f"{row['metric']} of {row['workload']} {ratio_text(row['ratio'], row['low'], row['high'])}"
        for row in known[~within].to_dict("records")
    )
    return (
        f"One server ({first['model']}, vLLM {first['vllm_version']}, {first['device']}, "
        f"{first['started_at']:%Y-%m-%d}) was driven in alternation by this study's client and by `{SERVE}`: the same "
        f"lengths and arrivals, {pairs} pairs of runs of each workload, {requests:,} requests in all, {failed} failed. "
        f"{within.sum()} of {len(known)} ratios are within {AGREED:.0%} of 1"
        f"{f'; the others: {others}' if others else ''}."
    )


def throughput_text(table: pd.DataFrame) -> str:
    """The same of whole runs."""
    first = table.iloc[0]
    ours, theirs = (table.loc[table["client"] == who, "output_tokens_per_s"].median() for who in (OURS, THROUGHPUT))
    return (
        f"Saturated, this study's engine and client gave {ours:,.1f} output tokens/s and `{THROUGHPUT}` {theirs:,.1f} "
        f"(medians of {table['pair'].nunique()} runs each in alternation, {first['model']}, vLLM "
        f"{first['vllm_version']}, {first['device']}, {first['date']}); ratio {ratio_text(*throughput_ratio(table))}."
    )


def http_text(table: pd.DataFrame) -> str:
    """What the table of `limits` means."""
    first = table.iloc[0]
    return (
        f"What one core of {first['device']} sustains of either HTTP client ({first['date']}): tokens a second before "
        f"it adds {ADDED_MAX_S * 1e3:.0f} ms to the p99 of the gaps between tokens, and requests a second where every "
        f"answer of {int(first['request_tokens'])} tokens comes at once. The source of the tokens is on another core."
    )


def ratio_text(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
