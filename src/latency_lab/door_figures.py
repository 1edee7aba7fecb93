"""What it costs to come through the front door: latencies through the server beside those of the engine itself."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from latency_lab import effects, metrics, panels, style, tables
from latency_lab.records import Records
from latency_lab.study_grid import DOOR_KEYS
from latency_lab.style import Context, Drawn

IDS, ENGINE = "engine, token ids", "engine"
ZERO = "#4d4d4d"
LOOKS = {
    IDS: (ZERO, "o", True),
    ENGINE: ("#949494", "D", True),
    "completions": ("#0173b2", "o", True),
    "chat": ("#de8f05", "o", True),
    "completions, not streamed": ("#0173b2", "s", False),
    "chat, not streamed": ("#de8f05", "s", False),
}
"""Doors in the order of what they add, each with its colour, marker, and whether its marker is filled. Colours stand
for doors here, not for settings."""

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
MOST_ROWS = 3

_NO_DATA = pd.DataFrame()
_DOOR = re.compile(rf"\s*\b(?:{'|'.join(DOOR_KEYS)})=\S+")


def costs(study: Records) -> pd.DataFrame:
    """Each latency through each door, and how much more it is than through the engine's own; empty without two doors.

    One row a setting, workload (without its door), class, door, metric and percentile: `latency_s`, and `added_s`
    from `added_low_s` to `added_high_s`, a 95 % bootstrap interval (see effects.effect). What is added is counted from
    the engine's token ids where they were measured, else from the engine as it is. Null where a percentile has too few
    requests, or too many of them failed.
    """
    labelled = study.cells[study.cells["workload"].map(plain) != study.cells["workload"]]
    requests = study.part(labelled).requests_with([*metrics.COLUMNS, "via", "api", "detokenize"])
    requests = requests.assign(workload=requests["workload"].map(plain), door=_names(requests))
    requests = requests.sort_values("concurrency", ascending=False, kind="stable")  # the busiest first
    rows: list[dict[str, Any]] = []
    for (setting, workload, class_name), own in requests.groupby(metrics.POINT, sort=False):
        doors = [door for door in LOOKS if (own["door"] == door).any()]
        if doors[0] not in (IDS, ENGINE) or not own["via"].eq("openai").any():
            continue
        point = {"setting": setting, "workload": workload, "class_name": class_name}
        as_settings = own.assign(setting=own["door"])
        for metric in METRICS:
            for door in doors:
                if metric != "e2e" and not own.loc[own["door"] == door, "streaming"].all():
                    continue
                for percentile in metrics.PERCENTILES:
                    found = effects.effect(as_settings, f"{metric}_p{percentile}_s", (door, doors[0]), ratio=False)
                    known = {"latency_s": found.of, "added_s": found.value}
                    known |= {"added_low_s": found.low, "added_high_s": found.high}
                    rows.append({**point, "door": door, "metric": metric, "percentile": percentile, **known})
    return pd.DataFrame(rows)


def plain(workload: str) -> str:
    """A workload without its door: 'chat c=8 via=openai stream=off' is 'chat c=8'."""
    return _DOOR.sub("", workload)


def front_door(found: pd.DataFrame, context: Context) -> Drawn:
    """What each door adds to TTFT, TPOT and E2E at each percentile; one row of panels a workload."""
    if found.empty:
        return Drawn(None, _NO_DATA, reason="no workload was measured through both the engine and its server.")
    if found["added_s"].isna().all():
        return Drawn(None, _NO_DATA, reason="no percentile has enough requests, in two repeats, through both doors.")
    points = found[metrics.POINT].drop_duplicates().head(MOST_ROWS)
    data = found.merge(points, on=metrics.POINT)
    with style.theme():
        made, axes = style.figure(0.4 + 1.9 * len(points), len(points), len(METRICS), sharex=True)
        for row, (_, point) in zip(axes, points.iterrows(), strict=True):
            for ax, (metric, called) in zip(row, METRICS.items(), strict=True):
                own = data[(data[metrics.POINT] == point).all(axis=1) & (data["metric"] == metric)]
                unit, factor = ("s", 1.0) if own["added_s"].abs().max() >= 1 else ("ms", 1e3)
                _panel(ax, own, factor)
                ax.set_ylabel(f"added to {called} ({unit})")
            first = data.loc[(data[metrics.POINT] == point).all(axis=1), "door"].iloc[0]
            row[0].set_title(f"{_called(point, points)}: more than {first}")
        for ax in axes[-1]:
            ax.set_xlabel("percentile of requests")
        shown = [door for door in LOOKS if data.loc[data["door"] == door, "added_s"].fillna(0).any()]
        handles = [_handle(door) for door in shown]
        note = "Each panel has its own scale; bars: 95 % bootstrap intervals of the difference"
        style.finish(made, _title(data), f"{note}. {context.small_print}.", (handles, shown))
    alt = f"What each door adds to TTFT, TPOT and E2E at p50 to p99, for {len(points)} workloads: {', '.join(shown)}."
    return Drawn(made, data.reset_index(drop=True), alt)


def table(found: pd.DataFrame) -> tables.Html | None:
    """Each latency at each percentile, and in brackets what it is more than through the engine, with its interval."""
    if found.empty:
        return None
    names = ["setting", "workload", "door", "latency", *(f"p{percentile}" for percentile in metrics.PERCENTILES)]
    rows: list[list[tables.Cell]] = []
    for (setting, workload, _, door, metric), own in found.groupby([*metrics.POINT, "door", "metric"], sort=False):
        unit, factor = ("s", 1.0) if metric == "e2e" else ("ms", 1e3)
        cells = [_cell(row, factor) for row in own.to_dict("records")]
        words = (str(setting), str(workload), str(door), f"{METRICS[str(metric)]} ({unit})")
        rows.append([*((word, None) for word in words), *cells])
    return tables.Html(tables.table(names, rows))


def _names(requests: pd.DataFrame) -> pd.Series:
    """How each request's door is called in LOOKS."""
    ids = ~requests["detokenize"].fillna(True).astype(bool)
    engine = pd.Series(np.where(ids, IDS, ENGINE), index=requests.index)
    whole = np.where(requests["streaming"].astype(bool), "", ", not streamed")
    return engine.where(requests["via"] == "engine", requests["api"].fillna("").astype(str) + whole)


def _panel(ax: Any, own: pd.DataFrame, factor: float) -> None:
    """What each door but the first adds, over percentiles; the first is the line at zero."""
    ax.axhline(0, color=ZERO, lw=1.2)
    doors = [door for door in LOOKS if door in set(own["door"])][1:]
    for number, door in enumerate(doors):
        colour, marker, filled = LOOKS[door]
        line = own[(own["door"] == door) & own["added_s"].notna()]
        at = line["percentile"].map(metrics.PERCENTILES.index) + 0.13 * (number - (len(doors) - 1) / 2)
        y = line["added_s"] * factor
        errors = [y - line["added_low_s"] * factor, line["added_high_s"] * factor - y]
        face = colour if filled else "white"
        errors = [error.clip(lower=0) for error in errors]
        ax.errorbar(at, y, yerr=errors, color=colour, marker=marker, mfc=face, ls="", elinewidth=0.9, zorder=3)
    ax.set_xticks(range(len(metrics.PERCENTILES)), [f"p{percentile}" for percentile in metrics.PERCENTILES])
    ax.set_xlim(-0.5, len(metrics.PERCENTILES) - 0.5)
    ax.grid(False, axis="x")


def _handle(door: str) -> Line2D:
    colour, marker, filled = LOOKS[door]
    return Line2D([], [], color=colour, marker=marker, mfc=colour if filled else "white", ls="")


def _called(point: pd.Series, points: pd.DataFrame) -> str:
    """What a row of panels is about: its workload, and what else differs between rows."""
    title = str(point["workload"])
    title += f", {point['class_name']}" if points.duplicated(["setting", "workload"]).any() else ""
    return title + (f", {point['setting']}" if points["setting"].nunique() > 1 else "")


def _title(data: pd.DataFrame) -> str:
    """The median E2E of the first workload through the last door that streams, against the engine's."""
    own = data[(data["metric"] == "e2e") & (data["percentile"] == 50) & data["added_s"].notna()]
    own = own[own["workload"] == own["workload"].iloc[0]] if len(own) else own
    streamed = [door for door in ("chat", "completions") if door in set(own["door"])]
    if not streamed:
        return "What comes through the server, beside the engine itself"
    row = own[own["door"] == streamed[0]].iloc[0]
    before_s = row["latency_s"] - row["added_s"]
    what = f"{row['workload']}: median E2E {panels.seconds(row['latency_s'])} through {streamed[0]}"
    if row["added_low_s"] <= 0 <= row["added_high_s"]:
        return f"{what}, not told apart from the engine's {panels.seconds(before_s)}"
    return f"{what}, {row['added_s'] / before_s:+.1%} against the engine's {panels.seconds(before_s)}"


def _cell(row: Mapping[Hashable, Any], factor: float) -> tables.Cell:
    """A latency, and what of it was added."""
    if pd.isna(row["latency_s"]):
        return ("too few", np.nan)
    value, added, low, high = (row[name] * factor for name in ("latency_s", "added_s", "added_low_s", "added_high_s"))
    text = panels.three(value)
    if (added, low, high) != (0, 0, 0):
        text += f" ({_signed(added)} [{_signed(low)}, {_signed(high)}])"
    return (text, float(value))


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + panels.three(value)
