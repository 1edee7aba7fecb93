"""What each figure of scheduler steps draws on one pair of axes. Colours stand for kinds of work, not for settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from latency_lab.style import Context

DECODE = "#0173b2"
PREFILL = "#de8f05"
RECOMPUTED = "#949494"
QUEUE = "#d9d9d9"
LONG = "#de8f05"
STREAM = "#0173b2"
"""From seaborn's colour-blind-safe palette: blue for decode and the streams, orange for prefill and long prompts."""

_SHARES = (("#0173b2", "o", "-"), ("#029e73", "s", (0, (5, 1.5))), ("#d55e00", "^", (0, (1.5, 1.2))))


def step_tokens(ax: Any, own: pd.DataFrame) -> None:
    """Bars as wide as their step took: decode below, prefill on it, recompute above; the budget as a line."""
    width = own["took_s"]
    ax.bar(own["at_s"], own["decode"], width, align="edge", color=DECODE, lw=0)
    style = {"align": "edge", "edgecolor": "white", "lw": 0.4}
    ax.bar(own["at_s"], own["prefill"], width, bottom=own["decode"], color=PREFILL, hatch="////", **style)
    if (own["recomputed"] > 0).any():
        below = own["decode"] + own["prefill"]
        ax.bar(own["at_s"], own["recomputed"], width, bottom=below, color=RECOMPUTED, hatch="xxxx", **style)
    ax.axhline(own["budget"].iloc[0], color="#222222", ls="--", lw=1.1)


def token_axis(ax: Any, most: float) -> None:
    """An axis of tokens on which four decodes show beside a prompt of thousands: linear up to 8, then logarithmic."""
    ax.set_yscale("symlog", linthresh=8, linscale=0.4)
    ax.set_ylim(0, most * 1.35)
    ticks = [tick for tick in (0, 4, 16, 64, 256, 1024, 4096, 16384) if tick <= most * 1.35]
    ax.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()


def step_times(ax: Any, own: pd.DataFrame) -> None:
    """How long each step took, in the colour of the work that it held."""
    colours = np.where(own["prefill"] > 0, PREFILL, DECODE)
    ax.bar(own["at_s"], own["took_s"] * 1e3, own["took_s"], align="edge", color=colours, edgecolor="white", lw=0.4)
    ax.set_ylim(0, max(ax.get_ylim()[1], own["took_s"].max() * 1.1e3))


def lives(ax: Any, data: pd.DataFrame, order: list[str]) -> None:
    """A row for each setting: a bar while queued, a box a chunk with its tokens, a tick for each output token."""
    unit, factor = ("s", 1e-3) if data["to_ms"].max() >= 1000 else ("ms", 1.0)
    width = data["to_ms"].max() * factor
    for y, setting in enumerate(order):
        own = data[data["setting"] == setting]
        for piece in own.to_dict("records"):
            start, end = piece["from_ms"] * factor, piece["to_ms"] * factor
            if piece["what"] == "queued":
                ax.barh(y, end - start, left=start, height=0.5, color=QUEUE, lw=0)
            elif piece["what"] == "chunk":
                ax.barh(y, end - start, left=start, height=0.5, color=PREFILL, edgecolor="white", lw=0.7)
                text = f"{piece['tokens']:,}"
                if end - start > width * 0.014 * len(text):
                    ax.text((start + end) / 2, y, text, ha="center", va="center", color="black")
            else:
                ax.plot([start], [y], marker="|", color=DECODE, ms=15, mew=1.6, ls="", zorder=4)
    ax.set_yticks(range(len(order)), order)
    ax.set_ylim(-0.6, len(order) - 0.4)
    ax.set_xlim(0, width * 1.02)
    ax.grid(False, axis="y")
    ax.set_xlabel(f"time since it was sent ({unit})")


def gaps_by_prefill(ax: Any, data: pd.DataFrame, order: list[str], context: Context) -> None:
    """A mark for each gap; those of one setting share its colour and marker."""
    for setting in order:
        own, look = data[data["setting"] == setting], context.looks[setting]
        # thousands of marks: as pixels inside the SVG too
        marks = {"ls": "", "ms": 4, "alpha": 0.55, "mew": 0, "rasterized": True}
        ax.plot(own["prefill"], own["gap_ms"], color=look.colour, marker=look.marker, **marks)
    ax.set_ylim(0, data["gap_ms"].max() * 1.08)
    ax.set_xlim(-0.03 * max(data["prefill"].max(), 1), None)


def over_settings(ax: Any, own: pd.DataFrame, order: list[str], colour: str) -> None:
    """One metric over the settings in order, with its interval; a setting without chunking stands apart."""
    own = own.set_index("setting").reindex(order)
    at = np.arange(len(order))
    budgets = np.array([setting.startswith("budget=") for setting in order])
    for part in (budgets, ~budgets):
        ax.plot(at[part], own["value"].to_numpy()[part], color=colour, marker="o")
    errors = [(own["value"] - own["low"]).clip(lower=0).fillna(0), (own["high"] - own["value"]).clip(lower=0).fillna(0)]
    ax.errorbar(at, own["value"], yerr=errors, fmt="none", ecolor=colour, elinewidth=1, capsize=3)
    for x, value, high in zip(at, own["value"], own["high"].fillna(own["value"]), strict=True):
        if np.isfinite(value):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            ax.annotate(text, (x, high), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom")
    ax.set_ylim(0, np.nanmax(own[["value", "high"]].to_numpy()) * 1.22)
    ax.set_xlim(-0.4, len(order) - 0.6)


def shares(ax: Any, data: pd.DataFrame, order: list[str]) -> list[Any]:
    """A line for each threshold over the settings in order; returns the legend's handles."""
    handles = []
    at = np.arange(len(order))
    budgets = np.array([setting.startswith("budget=") for setting in order])
    groups = data.groupby("factor", sort=True)
    for shift, (colour, marker, dash), (_, own) in zip((-0.06, 0, 0.06), _SHARES, groups, strict=True):
        own = own.set_index("setting").reindex(order)
        for part in (budgets, ~budgets):
            ax.plot((at + shift)[part], own["value"].to_numpy()[part], color=colour, marker=marker, ls=dash)
        errors = [(own["value"] - own["low"]).clip(lower=0), (own["high"] - own["value"]).clip(lower=0)]
        ax.errorbar(at + shift, own["value"], yerr=errors, fmt="none", ecolor=colour, elinewidth=1)
        handles.append(Line2D([], [], color=colour, marker=marker, ls=dash))
    low = data["low"].min()
    ax.set_ylim(max(0.0, low - 0.15 * (1 - low) - 0.005), 1 + 0.05 * (1 - low) + 0.002)
    ax.set_xlim(-0.4, len(order) - 0.6)
    return handles
