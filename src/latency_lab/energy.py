"""What a token costs in energy: joules that the GPUs took while a cell ran, over its output tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd

from latency_lab import bootstrap, files


def per_token(
    cells: pd.DataFrame, rates: pd.DataFrame, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> pd.DataFrame:
    """Joules for each output token at each workload point: columns setting, workload, energy_j, _low, _high, repeats.

    cells : rows of `cells`, with the GPUs' energy of the whole cell: prompts, idle moments and failed requests included
    rates : a row a cell with the output tokens of its completed requests, as metrics.throughput has them

    All repeats together (joules over tokens), with a bootstrap interval over them; with one repeat its ends are null.
    Cells without energy (no NVIDIA GPU) or without a completed request are left out.
    """
    known = cells.loc[cells["energy_j"].notna(), ["cell", "energy_j"]]
    table = known.merge(rates[rates["output_tokens"] > 0], on="cell")
    rows = []
    for (setting, workload), own in table.groupby(["setting", "workload"], sort=False):
        energy_j, tokens = own["energy_j"].to_numpy(float), own["output_tokens"].to_numpy(float)
        row = {"setting": setting, "workload": workload, "energy_j": energy_j.sum() / tokens.sum()}
        row |= {"energy_j_low": np.nan, "energy_j_high": np.nan, "repeats": len(own)}
        if len(own) > 1:
            rng = np.random.default_rng([seed, int(files.digest([setting, workload]), 16)])
            repeat = own["repeat"].to_numpy(int)
            drawn = bootstrap.resample(repeat, repeat, draws, rng).cells
            low, high = bootstrap.ends(((drawn @ energy_j) / (drawn @ tokens))[:, None], level)
            row |= {"energy_j_low": float(low[0]), "energy_j_high": float(high[0])}
        rows.append(row)
    return pd.DataFrame(rows, columns=["setting", "workload", "energy_j", "energy_j_low", "energy_j_high", "repeats"])


def beside(points: pd.DataFrame, cells: pd.DataFrame, rates: pd.DataFrame) -> pd.DataFrame:
    """A summary's points with `per_token` beside their other columns; null where a point has none."""
    return points.merge(per_token(cells, rates).drop(columns="repeats"), on=["setting", "workload"], how="left")
