"""How far this study agrees with vLLM's own benchmark: ratios with intervals, from what `make bench` has measured.

`latest` finds the folder: what was measured here (data/runs/fidelity), else the committed (data/reference/fidelity).
It holds

    serve/          records of one server, driven in alternation by this study's client and by `vllm bench serve`
    throughput.csv  whole runs of this study's engine and of `vllm bench throughput`, in alternation
    http.csv        what one core of either HTTP client sustains
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from latency_lab import effects, records

OURS, SERVE, THROUGHPUT = "this study", "vllm bench serve", "vllm bench throughput"

AGREED = 0.05
"""A ratio further from 1 than this wants a cause: NOTES has those that are known."""

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

NOTES: tuple[str, ...] = ()

DRAWS = 10_000


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


def ratio_text(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
