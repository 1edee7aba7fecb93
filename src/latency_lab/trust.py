"""How far to trust the numbers: what the studies and parts of the bench that check the method itself have found.

Each sentence is made from data in the reference folder, and is left out where that data is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from latency_lab import door_figures, effects, fidelity, records

DOORS, WEIGHTS = "thread", "weights"
"""The studies, by name, that compare ways into the engine, and random with real weights."""


def bullets(reference: Path, studies: Mapping[str, records.Records]) -> list[str]:
    """Markdown list items: agreement with vLLM's own benchmark, the cost of the front door, random weights."""
    folder, found = reference / "fidelity", []
    if (folder / "serve").is_dir():
        study = records.load(folder / "serve")
        text = fidelity.serve_text(fidelity.agreement(study), study.cells)
        found.append(f"- **Against `{fidelity.SERVE}`.** {text}")
    if (folder / fidelity.THROUGHPUT_FILE).exists():
        text = fidelity.throughput_text(pd.read_csv(folder / fidelity.THROUGHPUT_FILE))
        found.append(f"- **Against `{fidelity.THROUGHPUT}`.** {text}")
    return found + checks(studies)


def checks(studies: Mapping[str, records.Records]) -> list[str]:
    """Those of them that studies give: the cost of the front door, random weights."""
    found = []
    if DOORS in studies:
        found += _front_door(studies[DOORS])
    if WEIGHTS in studies:
        found += _random_weights(studies[WEIGHTS])
    return found


def _front_door(study: records.Records) -> list[str]:
    """What the chat API adds to the median E2E, streamed, for each workload that was measured through both doors."""
    costs = door_figures.costs(study)
    if costs.empty:
        return []
    rows = costs[(costs["metric"] == "e2e") & (costs["percentile"] == 50) & (costs["door"] == "chat")]
    parts = [
        f"{row['added_s'] * 1e3:,.0f} ms [{row['added_low_s'] * 1e3:,.0f}, {row['added_high_s'] * 1e3:,.0f}] to "
        f"{row['latency_s'] - row['added_s']:.3g} s ({row['workload']})"
        for row in rows.dropna(subset="added_s").to_dict("records")
    ]
    return parts and [
        f"- **HTTP, chat template and text of the answer**, on {_where(study.cells)}: the streaming chat API adds to "
        f"the engine's median E2E {', '.join(parts)}."
    ]


def _random_weights(study: records.Records) -> list[str]:
    """Ratios of the same engine with weights that vLLM drew to it with the published ones."""
    parts = []
    for workload, requests in study.requests.groupby("workload"):
        for name, metric in (("TTFT", "ttft_p50_s"), ("TPOT", "tpot_p50_s")):
            ratio = effects.effect(requests, metric, ("random", "real"))
            if not ratio.problem:
                parts.append(f"{name} {fidelity.ratio_text(ratio.value, ratio.low, ratio.high)} ({workload})")
    if not parts:
        return []
    return [
        f"- **Random weights for real ones**, on {_where(study.cells)}: ratios of the median are {', '.join(parts)}. "
        "One engine start each, so that the difference between two starts is in them."
    ]


def _where(cells: pd.DataFrame) -> str:
    first = cells.iloc[0]
    return f"{first['device']} with vLLM {first['vllm_version']} and {first['model']}"
