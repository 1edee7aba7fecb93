"""What quantization does, over concurrency: latency, throughput and energy of settings that differ in nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from latency_lab import metrics, panels, schemas, style
from latency_lab.style import Context, Drawn

QUANTIZED = ("dtype", "quantization", "kv_cache_dtype")
PANELS = (
    ("TPOT p50 (ms)", "tpot_p50_s", 1e3),
    ("TTFT p50 (ms)", "ttft_p50_s", 1e3),
    ("output throughput (tokens/s)", "output_tokens_per_s", 1.0),
    ("energy per output token (J)", "energy_j", 1.0),
)
"""What each panel shows: its axis, the column, and the factor to the axis' unit."""

_NO_DATA = pd.DataFrame()


def quantization(points: pd.DataFrame, rates: pd.DataFrame, cells: pd.DataFrame, context: Context) -> Drawn:
    """TPOT, TTFT, throughput and energy per token over concurrency; one line for each way to quantize.

    points : summary of the study with the energy beside it (see energy.beside)
    rates : a row a cell that has requests, as metrics.throughput has them
    """
    settings = compared(cells)
    if len(settings) < 2:
        return Drawn(None, _NO_DATA, reason="the study has no two settings that differ in quantization alone.")
    points = _closed(points[points["setting"].isin(settings)], rates)
    if points.empty:
        return Drawn(None, _NO_DATA, reason="no workload of one shape was measured at two concurrencies or more.")
    data = points.sort_values(["setting", "concurrency"])
    shown = [panel for panel in PANELS if data[panel[1]].notna().any()]
    with style.theme():
        made, axes = style.figure(5.4 if len(shown) > 2 else 2.8, (len(shown) + 1) // 2, 2, sharex=True)
        for ax in axes.flat[len(shown) :]:
            ax.set_visible(False)
        for ax, (text, column, factor) in zip(axes.flat, shown, strict=False):
            panels.over_concurrency(ax, data, column, factor, context)
            ax.set_ylabel(text)
        for ax in axes[-1]:
            ax.set_xlabel("concurrency (requests in flight)")
        shape = f"prompts of {data['prompt'].iloc[0]:,.0f} and outputs of {data['output'].iloc[0]:,.0f} tokens"
        note = f"Closed loop, {shape}; bars: 95 % bootstrap intervals"
        if len(shown) == len(PANELS):
            note += "; energy is the GPU's over the whole cell, its own counter's steps make it coarse in short cells"
        style.finish(made, _title(data), f"{note}. {context.small_print}.")
        panels.name_lines(made, axes.flat[: len(shown)])
    columns = ["setting", "workload", "concurrency"]
    columns += [f"{column}{end}" for _, column, _ in shown for end in ("", "_low", "_high")]
    alt = f"Small panels over concurrency, one line for each of {len(settings)} ways to quantize: "
    return Drawn(made, data[columns].reset_index(drop=True), alt + ", ".join(text for text, _, _ in shown) + ".")


def compared(cells: pd.DataFrame) -> list[str]:
    """Settings that differ in quantization alone: of such groups the one with the most ways to quantize weights.

    Empty where the weights of all are quantized alike.
    """
    measured = cells[cells["status"] == "done"].drop_duplicates("setting")
    others = [field.name for field in schemas.SETTING_VALUES if field.name not in QUANTIZED]
    group = measured.groupby(others, dropna=False, sort=False).ngroup()
    ways = measured["quantization"].groupby(group).nunique(dropna=False)
    if ways.empty or ways.max() < 2:
        return []
    return sorted(measured.loc[group == ways.idxmax(), "setting"], key=metrics.natural_key)


def _closed(points: pd.DataFrame, rates: pd.DataFrame) -> pd.DataFrame:
    """Closed-loop points of the lengths (prompt, output: mean tokens) that were measured at most concurrencies."""
    per_request = rates[rates["completed"] > 0].groupby(["setting", "workload"], sort=False)
    sums = per_request[["output_tokens", "total_tokens", "completed"]].sum()
    lengths = pd.DataFrame({"output": (sums["output_tokens"] / sums["completed"]).round()})
    lengths["prompt"] = (sums["total_tokens"] / sums["completed"]).round() - lengths["output"]
    own = points[points["load"] == "closed"].merge(lengths.reset_index(), on=["setting", "workload"])
    levels = own.groupby(["prompt", "output"], sort=False)["concurrency"].nunique()
    if levels.empty or levels.max() < 2:
        return own.iloc[:0]
    prompt, output = levels.reset_index().loc[int(levels.to_numpy().argmax()), ["prompt", "output"]]
    chosen = own[(own["prompt"] == prompt) & (own["output"] == output)]
    return chosen.sort_values("n", ascending=False, kind="stable").drop_duplicates(["setting", "concurrency"])


def _title(data: pd.DataFrame) -> str:
    """The two ends of TPOT at the lowest concurrency that all settings share."""
    count = data.groupby("concurrency")["setting"].nunique()
    level = count[count == data["setting"].nunique()].index.min()
    own = data[(data["concurrency"] == level) & data["tpot_p50_s"].notna()].sort_values("tpot_p50_s")
    if pd.isna(level) or len(own) < 2:
        return "Quantization over concurrency"
    first, last = own.iloc[0], own.iloc[-1]
    return (
        f"At concurrency {level:.0f} a token takes {_ms(first)} with {first['setting']}, {_ms(last)} with "
        f"{last['setting']}"
    )


def _ms(row: Any) -> str:
    return f"{np.float64(row['tpot_p50_s']) * 1e3:.3g} ms"
