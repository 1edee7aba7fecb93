"""Rates of vLLM on other GPUs that others have measured and published: what tells how well a fit carries over.

None of them is fitted. Each is predicted from the costs that were fitted on another GPU, with that GPU's bandwidth and
FLOP/s put in; how far the predictions are off is the error band of a prediction for a GPU that was never measured here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import gpus, shapes
from latency_lab.fitting import Fit
from latency_lab.roofline import Engine, StepTime
from latency_lab.simulate import closed, simulate

FILE = Path(__file__).with_name("published.json")


def rates() -> pd.DataFrame:
    """The published rates, a row a concurrency: gpu, model, weights, lengths, tpot_ms, ttft_ms, e2e_ms, url, note.

    eager : eager mode; old_kernel : vLLM takes a faster kernel today unless told otherwise
    """
    content = json.loads(FILE.read_text())
    rows = [
        {"eager": False, "old_kernel": False, **source, **row}
        for source in content["sources"]
        for row in source["rows"]
    ]
    return pd.DataFrame(rows).drop(columns="rows")


def check(fit: Fit) -> pd.DataFrame:
    """Each published latency beside its prediction, a row a rate and metric: measured_s, predicted_s, error.

    int4 weights are predicted with the costs of int4 where the fit has any, else those of unquantized weights.
    """
    sizes = json.loads(FILE.read_text())["models"]
    found: list[dict[str, Any]] = []
    for rate in rates().to_dict("records"):
        shape = shapes.from_config(str(rate["model"]), sizes[rate["model"]])
        engine = Engine(
            int(rate["max_num_seqs"]),
            8192,
            weights=rate["weights"],
            cache="fp8" if rate["cache"] == "fp8" else "16-bit",
            graphs=not rate["eager"],
        )
        gpu = gpus.find(rate["gpu"])
        time = StepTime(shape, gpu, fit.costs_of(engine.weights), engine)
        load = closed(int(rate["concurrency"]), int(rate["prompt_tokens"]), int(rate["output_tokens"]), requests_each=2)
        run = simulate(load, engine, time, fit.costs)
        for metric in ("tpot", "ttft", "e2e"):
            if pd.notna(rate[f"{metric}_ms"]):
                measured_s = rate[f"{metric}_ms"] / 1e3
                predicted_s = float(run.requests[f"{metric}_s"].median())
                keys = ("gpu", "model", "weights", "concurrency", "vllm", "url", "file", "note", "old_kernel")
                found.append(
                    {name: rate[name] for name in keys}
                    | {"metric": metric, "measured_s": measured_s, "predicted_s": predicted_s}
                )
    out = pd.DataFrame(found)
    return out.assign(error=out["predicted_s"] / out["measured_s"] - 1)
