"""What a GPU that was never measured here would do: floors, E2E over concurrency, the longest output within a second.

All of it is predicted, with the band that predictions of this kind deserve (recommend.Oracle), and marked so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from latency_lab import goodput, gpus, records, shapes
from latency_lab.fitting import Fit
from latency_lab.recommend import Oracle, Question, longest_output
from latency_lab.roofline import StepTime
from latency_lab.simulate import Ask, Load, closed, poisson

PROMPT_TOKENS = 32
CONTEXT = 160
"""Tokens behind a request in the middle of the thread's answer: its prompt and half of 256."""
OUTPUTS = (16, 32, 64, 128, 256)
CONCURRENCY = (1, 2, 4, 8, 16, 20, 32, 64)
RATES = (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
OPEN_S = 15.0
"""How long Poisson arrivals last, so that a queue that grows is seen to."""
THREAD = {
    "requests": 20,
    "output_tokens": 256,
    "e2e_s": 15.7,
    "e2e_not_streaming_s": 13.3,
    "ttft_s": 1.2,
    "tokens_per_s": 340.0,
    "alone_tokens_per_s": 19.4,
}
"""What the thread reports of Qwen3-4B on an L4: 20 requests at once, 15.7 s on average streaming and 13.3 s not, TTFT
1.1 to 1.3 s, 300 to 380 tokens/s in all; and a log line of one request at 19.4 tokens/s."""

EAGER_ELSEWHERE = (
    "A published run of Mistral-7B on an L4, four requests at a time (README of GitHub's 'L4 Inference Benchmark Lab "
    "(vLLM) - C1-C8 Optimisation Study', vLLM 0.10.1), has 48.3 tokens/s in eager mode against 48.8 with CUDA graphs."
)


def oracle(gpu: str, model: str, studies: Sequence[records.Records], known: Mapping[str, Fit]) -> Oracle | None:
    """Predictions for a GPU by name; None where no GPU was measured whose costs could be carried over."""
    if not any("16-bit" in fit.gpu.flops for fit in known.values()):
        return None
    return Oracle.of(gpus.find(gpu), shapes.shape(model), studies, known)


def formats(oracle: Oracle) -> list[str]:
    """Formats of weights that fit into the GPU's memory, largest first."""
    return [weights for weights in ("bf16", "fp8", "int4") if oracle.engine(weights) is not None]


def floors(oracle: Oracle) -> pd.DataFrame:
    """Latencies of a lone request of PROMPT_TOKENS, a row a format of weights.

    weights_gb : read at every step; bytes_tpot_s : their time at the GPU's full bandwidth, which nothing can beat
    tpot_s, ttft_s, with _low and _high : predicted
    """
    found = []
    for weights in formats(oracle):
        engine = oracle.engine(weights)
        assert engine is not None
        read = oracle.shape.step_bytes(weights)
        row: dict[str, Any] = {"weights": weights, "weights_gb": read / 1e9}
        row["bytes_tpot_s"] = read / oracle.gpu.bandwidth
        run = oracle.run(engine, closed(1, PROMPT_TOKENS, 64, 2))
        for name in ("tpot", "ttft"):
            row |= _banded(f"{name}_s", float(run.requests[f"{name}_s"].median()), oracle.bands.get(name))
        found.append(row)
    return pd.DataFrame(found)


def e2e(oracle: Oracle, outputs: Sequence[int] = OUTPUTS, concurrency: Iterable[int] = CONCURRENCY) -> pd.DataFrame:
    """Median E2E of closed loops: weights, output_tokens, concurrency, e2e_s, e2e_s_low, e2e_s_high, tokens_per_s."""
    found = []
    for weights in formats(oracle):
        engine = oracle.engine(weights)
        assert engine is not None
        for level in concurrency:
            for tokens in outputs:
                run = oracle.run(engine, closed(level, PROMPT_TOKENS, tokens, 2))
                value = float(run.requests["e2e_s"].median())
                row = {"weights": weights, "output_tokens": tokens, "concurrency": level}
                row |= _banded("e2e_s", value, oracle.bands.get("e2e"))
                found.append(row | {"tokens_per_s": run.output_tokens_per_s})
    return pd.DataFrame(found)


def longest(oracle: Oracle, limit_s: float = 1.0, concurrency: Iterable[int] = CONCURRENCY) -> pd.DataFrame:
    """The largest output with a p95 of E2E under `limit_s`, by format and concurrency: tokens by the prediction itself,
    sure with its whole band.
    """
    found = []
    for weights in formats(oracle):
        engine = oracle.engine(weights)
        assert engine is not None
        for level in concurrency:
            asked = Question("", oracle.gpu.name, {"e2e_p95": limit_s}, 1, PROMPT_TOKENS, level)
            tokens, sure = (longest_output(asked, oracle, engine, factor) for factor in ("value", "high"))
            found.append({"weights": weights, "concurrency": level, "tokens": tokens, "sure": sure})
    return pd.DataFrame(found)


def thread(oracle: Oracle) -> pd.DataFrame:
    """The thread's own load, a row a format of weights: means e2e_s and ttft_s with bands, tokens_per_s of all and
    alone_tokens_per_s of a lone request.
    """
    found = []
    burst = [Load([Ask(PROMPT_TOKENS, int(THREAD["output_tokens"]))] * int(THREAD["requests"]))]
    for weights in formats(oracle):
        engine = oracle.engine(weights)
        assert engine is not None
        run, alone = oracle.run(engine, burst), oracle.run(engine, closed(1, PROMPT_TOKENS, 256, 1))
        row: dict[str, Any] = {"weights": weights}
        for name in ("e2e", "ttft"):
            row |= _banded(f"{name}_s", float(run.requests[f"{name}_s"].mean()), oracle.bands.get(name))
        row |= {"tokens_per_s": run.output_tokens_per_s, "alone_tokens_per_s": 1 / alone.requests["tpot_s"].iloc[0]}
        found.append(row)
    return pd.DataFrame(found)


def bounds(oracle: Oracle, weights: str = "bf16", batches: Sequence[int] = (1, 8, 20, 64, 128)) -> pd.DataFrame:
    """What a decode step's time goes to, a row a batch and part: batch, part, seconds."""
    engine = oracle.engine(weights)
    assert engine is not None
    time = StepTime(oracle.shape, oracle.gpu, oracle.fit.costs_of(weights), engine)
    rows = [
        {"batch": batch, "part": part, "seconds": seconds}
        for batch in batches
        for part, seconds in time.parts_s(batch, batch, batch * CONTEXT, batch * CONTEXT).items()
    ]
    return pd.DataFrame(rows)


def goodput_over_rate(
    oracle: Oracle, slo: Mapping[str, float], output_tokens: int = 24, rates: Iterable[float] = RATES
) -> pd.DataFrame:
    """Goodput of Poisson arrivals, by format and rate_per_s: goodput_per_s, and low and high with the bands' ends.

    Here it is the rate times the share of requests within the SLO, which leaves out how the load begins and ends.
    """
    found = []
    for weights in formats(oracle):
        engine = oracle.engine(weights)
        assert engine is not None
        for rate in rates:
            run = oracle.run(engine, poisson(rate, PROMPT_TOKENS, output_tokens, int(rate * OPEN_S)))
            row = {"weights": weights, "rate_per_s": rate, "output_tokens": output_tokens}
            for name, end in (("goodput_per_s", None), ("low", 1), ("high", 0)):
                limits = {
                    key: limit if end is None else limit / oracle.bands[key.split("_")[0]][end]
                    for key, limit in slo.items()
                }
                row[name] = float(rate * goodput.good(run.requests, limits).mean())
            found.append(row)
    return pd.DataFrame(found)


def eager_factors(studies: Iterable[records.Records]) -> pd.DataFrame:
    """How much eager mode costs where it was measured: E2E of a study's eager setting over its default one, a row a
    workload point: study, workload, factor.
    """
    found = []
    for study in studies:
        cells = study.cells[study.cells["status"].eq("done")]
        eager = cells["enforce_eager"].fillna(False).astype(bool)
        if not eager.any() or eager.all():
            continue
        table = study.requests_with(["cell", "setting", "workload", "load", "scheduled_s", "last_token_s"])
        table = table.assign(e2e_s=table["last_token_s"] - table["scheduled_s"])
        other = cells.loc[~eager & cells["quantization"].isna(), :]
        same = other[other["max_num_batched_tokens"].isin(cells.loc[eager, "max_num_batched_tokens"])]
        same = same[same["max_num_seqs"].isin(cells.loc[eager, "max_num_seqs"])]
        sides = [
            table[table["cell"].isin(own["cell"])].groupby("workload")["e2e_s"].median() for own in (cells[eager], same)
        ]
        factor = (sides[0] / sides[1]).dropna()
        found += [{"study": study.path.name, "workload": name, "factor": value} for name, value in factor.items()]
    return pd.DataFrame(found, columns=["study", "workload", "factor"])


def _banded(name: str, value: float, band: tuple[float, float] | None) -> dict[str, float]:
    low, high = band or (1.0, 1.0)
    return {name: value, f"{name}_low": value * low, f"{name}_high": value * high}
