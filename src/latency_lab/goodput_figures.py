"""Measured goodput as curves: requests a second within all limits of the study, over concurrency and over rate."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from latency_lab import figures, metrics, panels, style
from latency_lab.style import Context, Drawn

MOST_PANELS = 4
ATTAINED = 0.95
"""A point where a smaller share of the requests is within the limits is drawn hollow."""
AXES = {"concurrency": "concurrency (requests in flight, log)", "rate_per_s": "rate (requests/s sent)"}


def curves(points: pd.DataFrame, context: Context) -> Drawn:
    """A panel for each workload with an SLO that was measured at two or more load levels; one line a setting.

    points : as goodput.of_study has them
    """
    data = _levels(points)
    if data.empty:
        return Drawn(None, data, reason="no workload with an SLO was measured at two or more load levels.")
    shown = data.groupby("family", sort=False).ngroup().max() + 1
    best = data.sort_values("goodput_per_s", ascending=False)["setting"].drop_duplicates()
    coloured = sorted(best.head(figures.MOST_LOOKS), key=metrics.natural_key)
    with style.theme():
        columns = min(shown, 2)
        rows = -(-shown // columns)
        made, axes = style.figure(2.6 * rows, rows, columns)
        for ax in axes.flat[shown:]:
            ax.set_visible(False)
        for ax, (name, own) in zip(axes.flat, data.groupby("family", sort=False), strict=False):
            _panel(ax, own, context, coloured)
            ax.set_title(f"{name}: {own['slo'].iloc[0]}", fontsize=style.FONT_PT)
            ax.set_xlabel(AXES[str(own["axis"].iloc[0])])
        for ax in axes[:, 0]:
            ax.set_ylabel("goodput (requests/s)")
        handles, texts = panels.legend(coloured, context)
        if data["attained"].lt(ATTAINED).any():
            handles.append(Line2D([], [], color="#444444", marker="o", mfc="white", ls=""))
            texts.append(f"fewer than {100 * ATTAINED:.0f} % of requests within the limits")
        if data["axis"].eq("rate_per_s").any():
            handles.append(Line2D([], [], color=panels.GREY, lw=0.8))
            texts.append("all that is sent")
        if data["setting"].nunique() > len(coloured):
            handles.append(Line2D([], [], color=panels.GREY, marker="."))
            texts.append("other settings")
        note = "Requests within every limit, over the time of all; bars: 95 % bootstrap intervals over repeats"
        style.finish(made, _title(data), f"{note}. {context.small_print}.", (handles, texts))
    alt = f"Goodput of {data['setting'].nunique()} settings over load, for {shown} workloads."
    return Drawn(made, data.drop(columns="n").reset_index(drop=True), alt)


def _levels(points: pd.DataFrame) -> pd.DataFrame:
    """Points of the families with most load levels, with `family`, `axis` (the load's column) and `level`."""
    if points.empty:
        return points
    closed = points["load"].eq("closed")
    out = points.assign(
        family=points["workload"].map(figures.family),
        axis=closed.map({True: "concurrency", False: "rate_per_s"}),
        level=points["concurrency"].where(closed, points["rate_per_s"]).astype(float),
    )
    out = out[out["level"].notna()]
    levels = out.groupby(["family", "slo"], sort=False)["level"].nunique().rename("levels")
    out = out.join(levels, on=["family", "slo"])
    kept = levels[levels > 1].sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("family")
    out = out.merge(kept[["family", "slo"]].head(MOST_PANELS), on=["family", "slo"])
    order = {name: number for number, name in enumerate(kept["family"])}
    out = out.sort_values("level").sort_values("setting", key=metrics.natural, kind="stable")
    return out.sort_values("family", key=lambda names: names.map(order), kind="stable").drop(columns="levels")


def _panel(ax: Any, own: pd.DataFrame, context: Context, coloured: list[str]) -> None:
    if own["axis"].iloc[0] == "rate_per_s":
        top = own["level"].max()
        ax.plot([0, top], [0, top], color=panels.GREY, lw=0.8, zorder=1)
    else:
        ax.set_xscale("log", base=2)
        levels = sorted(own["level"].astype(int).unique())
        ax.set_xticks(levels, [f"{level}" for level in levels])
        ax.minorticks_off()
    for setting, line in own.groupby("setting", sort=False):
        if setting not in coloured:
            ax.plot(line["level"], line["goodput_per_s"], color=panels.GREY, lw=0.7, marker=".", zorder=1)
            continue
        look, y = context.looks[str(setting)], line["goodput_per_s"]
        ends = [(y - line["goodput_per_s_low"]), (line["goodput_per_s_high"] - y)]
        ax.errorbar(
            line["level"],
            y,
            yerr=[end.clip(lower=0).fillna(0) for end in ends],
            color=look.colour,
            ls=look.dash,
            elinewidth=0.9,
            zorder=2,
        )
        few = line["attained"] < ATTAINED
        for part, fill in ((line[~few], look.colour), (line[few], "white")):
            if len(part):  # the box of an unclipped line without points is endless, and takes all room
                ax.plot(part["level"], part["goodput_per_s"], look.marker, color=look.colour, mfc=fill, clip_on=False)
    ax.set_ylim(0, ax.get_ylim()[1] if own["goodput_per_s"].any() else 1.0)


def _title(data: pd.DataFrame) -> str:
    """The most and the least that a setting reaches in the first panel."""
    own = data[data["family"] == data["family"].iloc[0]]
    best = own.groupby("setting", sort=False)["goodput_per_s"].max().sort_values(ascending=False)
    title = f"{own['family'].iloc[0]}: goodput reaches {panels.three(best.iloc[0])} requests/s with {best.index[0]}"
    return title if len(best) == 1 else f"{title}, {panels.three(best.iloc[-1])} with {best.index[-1]}"
