"""Made-up rows in the real schema, for tests: never results. Whole studies come from latency_lab.synthetic."""

from __future__ import annotations

from typing import Any

import pandas as pd

from latency_lab import records, schemas
from latency_lab.synthetic import CELL, write_study

__all__ = ["cell", "cells", "frame", "request", "write_study"]


def request(**values: Any) -> dict[str, Any]:
    """One row of `requests` with everything required filled in; give only what the test is about.

    `token_times_s` alone is enough for a request that completed: first, last and output tokens follow from
    it.
    """
    row: dict[str, Any] = {
        "study": "made-up",
        "cell": "cell0",
        "setting": "a",
        "setting_id": "sa",
        "workload": "chat c=1",
        "workload_id": "w",
        "repeat": 0,
        "request": 0,
        "request_id": "r",
        "class_name": "chat",
        "via": "engine",
        "streaming": True,
        "load": "closed",
        "concurrency": 1,
        "scheduled_s": 0.0,
        "sent_s": 0.0,
        "prompt_tokens": 8,
    }
    times = values.get("token_times_s")
    if times is not None and len(times):
        counts = values.get("token_counts", [1] * len(times))
        sent = values.get("sent_s", 0.0)
        row |= {
            "token_counts": counts,
            "output_tokens": sum(counts),
            "first_token_s": sent + times[0],
            "last_token_s": sent + times[-1],
        }
    return row | values


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `requests` as `records.load` would return them."""
    return records.to_pandas(records.table(rows, schemas.REQUESTS))


def cell(**values: Any) -> dict[str, Any]:
    """One row of `cells` with everything required filled in."""
    keys = ["study", "cell", "setting", "setting_id", "workload", "workload_id", "repeat", "load", "concurrency"]
    row = {name: request()[name] for name in keys} | CELL
    row |= {"schema_version": 1, "requests": 20, "requests_failed": 0, "resolved": "{}", "resolved_id": "ra"}
    return row | values


def cells(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `cells` as `records.load` would return them."""
    return records.to_pandas(records.table(rows, schemas.CELLS))
