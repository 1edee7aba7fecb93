"""Whether each cell is a valid measurement, and whether labels mean what they seem to. Tables in, tables out."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd

from latency_lab.metrics import NEEDED, natural, natural_key, percentile_max

CLIENT_SHARE_MAX = 0.05
LOOP_LAG_MAX_S = 0.010
LOOP_LAG_MAX_SHARE = 0.25
"""A timer in the client may be late by 10 ms, or by this share of the cell's mean TPOT where that is more."""

DURATION_MIN_S = 1.0


def verdicts(cells: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Whether each cell is a valid measurement, and why not: columns valid, reasons, percentile_max.

    measured : see metrics.per_cell; cells without requests have no row there
    After MLPerf's load generator (results.cc): a run says itself whether it kept the rules. percentile_max is
    the highest percentile that the requests of all repeats of the cell's point support together (0 where not
    even a median).
    """
    span, tpot = (measured.set_index("cell")[name] for name in ("span_s", "tpot_mean_s"))
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
