"""What each figure draws on one pair of axes, and how numbers are written there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from latency_lab import labels
from latency_lab.style import Context

GREY = "#c4c4c4"
MOST_LABELS = 4
PARTS = (("#4d4d4d", ""), ("#5b8db8", "////"), ("#d9d9d9", ""))
"""Colour and hatch of queue, prefill and the rest: none is a setting's colour."""


def tradeoff(ax: Any, panel: pd.DataFrame, context: Context, coloured: list[str]) -> None:
    frontier = panel[panel["frontier"]].sort_values("throughput")
    ax.plot(
        frontier["throughput"],
        frontier["latency"],
        color="#444444",
        lw=7,
        alpha=0.18,
        zorder=1,
        solid_capstyle="round",
    )
    for setting, line in panel[panel["latency"].notna()].groupby("setting", sort=False):
        look = context.looks[str(setting)]
        colour = look.colour if setting in coloured else GREY
        ax.plot(line["throughput"], line["latency"], color=colour, ls=look.dash, zorder=2 + (setting in coloured))
        errors = [(line["latency"] - line["latency_low"]), (line["latency_high"] - line["latency"])]
        sideways = [line["throughput"] - line["throughput_low"], line["throughput_high"] - line["throughput"]]
        ax.errorbar(
            line["throughput"],
            line["latency"],
            yerr=[e.clip(lower=0).fillna(0) for e in errors],
            xerr=[e.clip(lower=0).fillna(0) for e in sideways],
            fmt="none",
            ecolor=colour,
            elinewidth=0.9,
            alpha=0.8,
            zorder=2,
        )
        for enough, dots in line.groupby("enough"):
            face = colour if enough else "white"
            ax.plot(
                dots["throughput"],
                dots["latency"],
                color=colour,
                mfc=face,
                marker=look.marker,
                ls="",
                zorder=4,
            )
    ax.set_yscale("log")
    plain_log(ax.yaxis)
    ax.set_xlim(0, ax.get_xlim()[1])
    fastest = frontier[frontier["setting"].isin(coloured)].groupby("setting", sort=False).tail(1)
    for _, at in fastest.tail(MOST_LABELS).iterrows():
        setting = at["setting"]
        labels.ask(ax, (at["throughput"], at["latency"]), str(setting), context.looks[str(setting)].colour)


def over_concurrency(ax: Any, data: pd.DataFrame, column: str, factor: float, context: Context) -> None:
    """A column (with `_low`, `_high`) over concurrency, a line a setting; `name_lines` then names them."""
    known = data[data[column].notna()]
    for setting, line in known.groupby("setting", sort=False):
        look = context.looks[str(setting)]
        y = line[column] * factor
        errors = [y - line[f"{column}_low"] * factor, line[f"{column}_high"] * factor - y]
        x = line["concurrency"].astype(float)
        ax.errorbar(
            x,
            y,
            yerr=[error.clip(lower=0).fillna(0) for error in errors],
            color=look.colour,
            ls=look.dash,
            marker=look.marker,
            elinewidth=0.9,
        )
        ax.annotate(
            str(setting).replace(" ", "\n"),  # a long name would take the room of its panel
            (x.iloc[-1], y.iloc[-1]),
            xytext=(12, 0),
            textcoords="offset points",
            color=look.colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "lw": 0.7, "shrinkA": 0, "shrinkB": 3},
        ).set_gid("line")
    ax.set_xscale("log", base=2)
    levels = sorted(known["concurrency"].astype(int).unique())
    ax.set_xticks(levels, [f"{level}" for level in levels])
    ax.minorticks_off()
    if (known[column].max() / known[column].min()) > 8:
        ax.set_yscale("log")
        plain_log(ax.yaxis)
    else:
        ax.set_ylim(0, None)


def name_lines(made: Figure, axes: Iterable[Any]) -> None:
    """Move the names at the ends of lines apart, up and down, so that none covers another, in a figure laid out."""
    points_each = 72 / made.dpi
    for ax in axes:
        names = sorted(
            (text for text in ax.texts if text.get_gid() == "line"),
            key=lambda text: ax.transData.transform(text.xy)[1],
        )
        at = np.array([ax.transData.transform(text.xy)[1] for text in names])
        height = 1.1 * max((Text.get_window_extent(text).height for text in names), default=0.0)
        place = at.copy()
        for _ in range(20 * len(place)):  # each pair that is too close parts by half of what it lacks
            lacks = np.clip(height - np.diff(place), 0, None) / 2
            place[1:] += lacks
            place[:-1] -= lacks
        for text, y, where in zip(names, at, place, strict=True):
            text.set_position((12, (where - y) * points_each))


def ecdf(ax: Any, curves: pd.DataFrame, group: list[str], context: Context) -> None:
    for setting, curve in curves.groupby("setting", sort=False):
        look = context.looks[str(setting)]
        if setting in group:
            ax.plot(
                curve["value"],
                curve["share"],
                color=look.colour,
                ls=look.dash,
                drawstyle="steps-post",
                zorder=3,
            )
        else:
            ax.plot(curve["value"], curve["share"], color=GREY, lw=0.7, drawstyle="steps-post", zorder=2)
    ax.set_xscale("log")
    plain_log(ax.xaxis)
    ax.set_ylim(0, 1.02)


def heat(ax: Any, table: pd.DataFrame, higher_is_better: bool) -> None:
    values = table.to_numpy(float)
    norm = _log_norm(values, at_least=1.5)
    colours = "cividis_r" if higher_is_better else "cividis"
    mesh = ax.imshow(values, cmap=colours, norm=norm, aspect="auto", origin="lower")
    ax.grid(False)
    ax.set_xticks(range(table.shape[1]), [f"{c}" for c in table.columns])
    ax.set_yticks(range(table.shape[0]), [f"{i}" for i in table.index])
    for (i, j), value in np.ndenumerate(values):
        if np.isnan(value):
            ax.text(j, i, "-", ha="center", va="center", color="#333333")
            continue
        red, green, blue, _ = mesh.cmap(norm(value))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        ax.text(j, i, three(value), ha="center", va="center", color="white" if dark else "black")


def _log_norm(values: np.ndarray, at_least: float) -> LogNorm:
    """Shades by ratio over at least this ratio, so that differences of a few percent do not look like much."""
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (known.min(), known.max()) if len(known) else (1.0, 1.0)
    widen = max(1.0, at_least / (high / low)) ** 0.5
    return LogNorm(low / widen, high * widen)


def stalls(ax: Any, own: pd.DataFrame, colour: str) -> None:
    for at in own.loc[own["what"] == "long prompt due", "at_s"]:
        ax.axvline(at, color="#222222", ls=":", lw=1, zorder=1)
        ax.plot(
            [at],
            [1.0],
            marker="v",
            color="#222222",
            ms=5,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
            zorder=4,
        )
    # thousands of marks: as pixels inside the SVG too
    ax.vlines(own["at_s"], 0, own["gap_ms"], color=colour, lw=0.6, alpha=0.35, rasterized=True, zorder=2)
    ax.plot(own["at_s"], own["gap_ms"], marker="o", ms=2.6, mew=0, ls="", color=colour, rasterized=True, zorder=3)


def parts(ax: Any, table: pd.DataFrame, columns: list[str]) -> None:
    total_s = table[columns].fillna(0).sum(axis=1).to_numpy(float)
    unit, factor = ("ms", 1e3) if total_s.max() < 1 else ("s", 1.0)
    left, at = np.zeros(len(table)), np.arange(len(table))
    for column, (colour, hatch) in zip(columns, PARTS, strict=True):
        width = factor * table[column].fillna(0).to_numpy(float)
        ax.barh(at, width, left=left, color=colour, hatch=hatch, edgecolor="white", lw=0.5, height=0.72)
        left = left + width
    for y, total in zip(at, left, strict=True):
        text = three(total) if total else "-"
        ax.annotate(text, (total, y), xytext=(3, 0), textcoords="offset points", va="center")
    ax.set_xlim(0, left.max() * 1.3)
    ax.set_xlabel(f"mean TTFT ({unit})")
    ax.set_yticks(at, table.index)
    ax.set_ylim(-0.6, len(table) - 0.4)
    ax.grid(False, axis="y")
    ax.locator_params(axis="x", nbins=4)


def legend(settings: list[str], context: Context, marker: bool = True) -> tuple[list[Any], list[str]]:
    looks = [context.looks[setting] for setting in settings]
    lines = [Line2D([], [], color=k.colour, ls=k.dash, marker=k.marker if marker else "") for k in looks]
    return list(lines), list(settings)


def three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    return f"{three(value * 1e3)} ms" if value < 1 else f"{three(value)} s"


def plain_log(axis: Any) -> None:
    """Ticks of a log axis as plain numbers, as many as its span in powers of ten needs."""
    low, high = axis.get_view_interval()
    ratio = high / low
    if ratio < 4:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    elif ratio < 1000:
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if ratio < 20 else (1, 2, 5), numticks=50))
    else:
        axis.set_major_locator(LogLocator(numticks=50))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
