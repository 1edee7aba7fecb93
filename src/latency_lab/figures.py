"""The study's figures: each function takes tables and returns a `Drawn`, or the reason why it cannot be
drawn.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from latency_lab import labels, metrics, panels, schemas, style, token_gaps
from latency_lab.long_prompts import Beside
from latency_lab.records import Records
from latency_lab.style import Context, Drawn

UNITS = {"e2e": ("E2E", "s", 1.0), "ttft": ("TTFT", "s", 1.0), "tpot": ("TPOT", "ms", 1e3)}
"""How a latency is called on an axis, its unit there, and the factor from seconds."""

MOST_LOOKS = 10
"""More settings than this are drawn a few at a time, or in grey where they are not the point of the figure.
"""

_NO_DATA = pd.DataFrame()
_TIMES = [*metrics.COLUMNS, "token_times_s", "token_counts"]
_HEAT = (
    ("p50 E2E (s)", "e2e_p50_s", 1.0),
    ("p95 E2E (s)", "e2e_p95_s", 1.0),
    ("output tokens/s", "output_tokens_per_s", 1.0),
    ("p50 TTFT (s)", "ttft_p50_s", 1.0),
    ("p50 TPOT (ms)", "tpot_p50_s", 1e3),
    ("p99 ITL (ms)", "itl_p99_s", 1e3),
)


def family(workload: str) -> str:
    """The workload without its load level: 'chat c=8' is 'chat', 'chat rate=2/s b=0.5' is 'chat b=0.5'."""
    return re.sub(r"\s*\b(?:c|n|rate|scale)=\S+", "", workload)


def families(summary: pd.DataFrame) -> list[str]:
    """Families of workloads with at least two load levels, those with most levels first."""
    steady = summary[(summary["load"] != "mix") & summary["output_tokens_per_s"].notna()]
    levels = steady["workload"].drop_duplicates().map(family).value_counts(sort=False)
    return [str(name) for name in levels[levels > 1].sort_values(ascending=False, kind="stable").index]


def busiest(table: pd.DataFrame) -> str | None:
    """The workload point with the highest load of the main family: what a reader most likely asks about."""
    points = table[table["load"] != "mix"].drop_duplicates("workload")
    if points.empty:
        return None
    main = points["workload"].map(family).value_counts(sort=False).sort_values(ascending=False, kind="stable").index[0]
    points = points[points["workload"].map(family) == main]
    return str(points.loc[_level(points).idxmax(), "workload"])


def tradeoff(summary: pd.DataFrame, context: Context, name: str | None = None) -> Drawn:
    """Output throughput against p50 and p95 of E2E, TTFT and TPOT; one line a setting, joined in order of
    load.
    """
    names = families(summary)
    name = name or (names[0] if names else "")
    if name not in names:
        return Drawn(None, _NO_DATA, reason="no workload was measured at two or more load levels.")
    points = summary[(summary["load"] != "mix") & (summary["workload"].map(family) == name)]
    points = points[points["output_tokens_per_s"].notna()].assign(level=_level(points))
    data = pd.concat(_tradeoff_panel(points, latency, p) for latency in ("e2e", "ttft", "tpot") for p in (50, 95))
    if data["latency"].isna().all():
        return Drawn(None, _NO_DATA, reason=f"no request of {name} completed with a latency to show.")
    best = data.loc[data["frontier"], "setting"].value_counts().index.tolist()
    every = sorted(data["setting"].unique(), key=metrics.natural_key)
    coloured = every if len(every) <= MOST_LOOKS else sorted(best[:MOST_LOOKS], key=metrics.natural_key)
    with style.theme():
        made, axes = style.figure(7.0, 3, 2, sharex=True)
        for ax, ((latency, p), panel) in zip(
            axes.flat, data.groupby(["metric", "percentile"], sort=False), strict=True
        ):
            panels.tradeoff(ax, panel, context, coloured)
            called, unit, _ = UNITS[str(latency)]
            ax.set_ylabel(f"p{p} {called} ({unit})")
        for ax in axes[-1]:
            ax.set_xlabel("output throughput (tokens/s)")
        handles, texts = panels.legend(coloured, context)
        handles.append(Line2D([], [], color="#444444", lw=5, alpha=0.25))
        texts.append("Pareto frontier")
        if not data["enough"].all():
            handles.append(Line2D([], [], color="#444444", marker="o", mfc="white", ls=""))
            texts.append("too few requests for this percentile")
        if len(coloured) < len(every):
            handles.append(Line2D([], [], color=panels.GREY, marker="."))
            texts.append("other settings")
        note = _small(context, _tradeoff_note(points))
        style.finish(made, _tradeoff_title(points), note, (handles, texts))
        labels.place(made, axes.flat)
    alt = (
        f"Six panels: output tokens per second against p50 and p95 of E2E, TTFT and TPOT under {name},"
        f" for {len(every)} settings."
    )
    return Drawn(made, data.reset_index(drop=True), alt)


def distributions(study: Records, context: Context, workload: str | None = None) -> Drawn:
    """ECDF of TTFT and ITL of each setting at one workload point; failed requests keep a curve from reaching
    1.
    """
    measured = study.cells[study.cells["requests"] > 0]
    workload = workload or busiest(measured)
    curves, medians = [], {}
    chosen = measured[measured["workload"] == workload]
    for setting in sorted(chosen["setting"].unique(), key=metrics.natural_key):
        requests = study.part(chosen[chosen["setting"] == setting]).requests_with(_TIMES)
        ttft = metrics.latencies(requests)["ttft_s"]
        if ttft.isna().all():
            continue
        medians[setting] = float(ttft.median())
        curves.append(_ecdf(ttft.to_numpy(float), len(ttft)).assign(metric="ttft", setting=setting))
        itl_s = token_gaps.itl(requests)[1]
        curves.append(_ecdf(itl_s * 1e3, len(itl_s)).assign(metric="itl", setting=setting))
    if not curves:
        return Drawn(None, _NO_DATA, reason=f"no request of {workload or 'a steady workload'} completed.")
    settings = list(medians)
    data = pd.concat(curves, ignore_index=True)[["metric", "setting", "value", "share"]]
    groups = [settings] if len(settings) <= MOST_LOOKS else [settings[i : i + 7] for i in range(0, len(settings), 7)]
    with style.theme():
        made, axes = style.figure(2.9 * len(groups), len(groups), 2, sharex="col", sharey=True)
        for row, group in zip(axes, groups, strict=True):
            for ax, metric in zip(row, ("ttft", "itl"), strict=True):
                panels.ecdf(ax, data[data["metric"] == metric], group, context)
            row[0].set_ylabel("share at or below")
            if len(groups) > 1:
                beside = panels.legend(group, context, marker=False)
                row[1].legend(*beside, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6, frameon=False)
        axes[-1, 0].set_xlabel("TTFT of a request (s, log)")
        axes[-1, 1].set_xlabel("ITL of a token (ms, log)")
        key = panels.legend(settings, context, marker=False) if len(groups) == 1 else ((), ())
        title = _spread_title(pd.Series(medians), f"{workload}: median TTFT is", panels.seconds)
        style.finish(made, title, _small(context, f"{workload}, all repeats"), key)
    alt = f"Cumulative distributions of TTFT and ITL at {workload} for {len(settings)} settings."
    return Drawn(made, data, alt)


def heat_maps(summary: pd.DataFrame, context: Context, workload: str | None = None) -> Drawn:
    """Each metric over max_num_batched_tokens and max_num_seqs at one workload point; darker is better."""
    workload = workload or busiest(summary)
    grid = summary[(summary["workload"] == workload) & summary["output_tokens_per_s"].notna()]
    grid, left_out = _one_grid(grid)
    budgets, slots = (sorted(grid[name].dropna().unique()) for name in ("max_num_batched_tokens", "max_num_seqs"))
    if len(budgets) * len(slots) < 2 or len(grid) < 2:
        return Drawn(None, _NO_DATA, reason="the study measured fewer than two pairs of budget and max_num_seqs.")
    keys = grid[["setting", "max_num_batched_tokens", "max_num_seqs"]]
    data = pd.concat([keys.assign(metric=text, value=grid[column] * factor) for text, column, factor in _HEAT])
    with style.theme():
        rows, columns = (2, 3) if len(budgets) <= 4 else (3, 2)
        made, axes = style.figure(rows * (0.75 + 0.36 * len(slots)), rows, columns, sharex=True, sharey=True)
        for ax, (text, _, _) in zip(axes.flat, _HEAT, strict=True):
            own = data[data["metric"] == text]
            table = own.pivot(index="max_num_seqs", columns="max_num_batched_tokens", values="value")
            panels.heat(ax, table.reindex(index=slots, columns=budgets), higher_is_better=text.startswith("output"))
            ax.set_title(text)
        for ax in axes[-1]:
            ax.set_xlabel("budget (tokens a step)")
        for ax in axes[:, 0]:
            ax.set_ylabel("max_num_seqs\n(requests)")
        low = grid.sort_values("e2e_p50_s").iloc[0] if grid["e2e_p50_s"].notna().any() else None
        title = f"{workload}: no setting has a completed median"
        if low is not None:
            title = f"{workload}: p50 E2E is lowest, {panels.seconds(low['e2e_p50_s'])}, in {low['setting']}"
            title += _ties(grid, "e2e_p50_s", low, higher=False)
        note = "each panel has its own scale, darker is better; -: not measured, or lost to failures"
        style.finish(made, title, _small(context, f"{workload}; {note}{left_out}"))
    alt = f"Heat maps of six metrics over budget and max_num_seqs at {workload}."
    return Drawn(made, data.reset_index(drop=True), alt)


def stalls(mixed: Beside | None, context: Context) -> Drawn:
    """Gaps between a stream's tokens over time while long prompts arrive, one panel a budget."""
    if mixed is None:
        return Drawn(None, _NO_DATA, reason="the study has no workload that mixes streams with long prompts.")
    cells = mixed.study.cells
    first = cells[cells["repeat"] == cells["repeat"].min()]
    shown = _a_setting_for_each_budget(first)
    dots, dues, until_s = [], [], np.inf
    for one in mixed.study.part(first[first["setting"].isin(shown)]).one_by_one():
        gaps, covered_s = mixed.gaps(one)
        until_s = min(until_s, covered_s)
        dots.append(gaps.loc[gaps["gap_s"].notna(), ["setting", "at_s", "gap_s"]].assign(what="gap of a stream"))
        requests = one.requests_with(["setting", "class_name", "scheduled_s"])
        long = requests[requests["class_name"] == mixed.long]
        dues.append(long[["setting"]].assign(at_s=long["scheduled_s"], what="long prompt due"))
    data = pd.concat([*dots, *dues], ignore_index=True)
    data = data[data["at_s"] <= until_s]
    gaps = data[data["gap_s"].notna()]
    if gaps.empty:
        return Drawn(None, _NO_DATA, reason="no stream received two tokens while long prompts arrived.")
    data = data.assign(gap_ms=data["gap_s"] * 1e3)[["setting", "at_s", "gap_ms", "what"]].reset_index(drop=True)
    with style.theme():
        made, axes = style.figure(0.5 + 1.25 * len(shown), len(shown), 1, sharex=True, sharey=True)
        for ax, setting in zip(axes[:, 0], shown, strict=True):
            own = data[data["setting"] == setting]
            panels.stalls(ax, own, context.looks[setting].colour)
            p99 = np.percentile(own["gap_ms"].dropna(), 99) if own["gap_ms"].notna().any() else np.nan
            ax.set_title(f"{setting}: p99 gap {panels.three(p99)} ms")
            ax.set_ylabel("gap (ms)")
        axes[0, 0].set_ylim(0, data["gap_ms"].max() * 1.12)
        axes[-1, 0].set_xlabel("time in the cell (s)")
        p99s = gaps.groupby("setting")["gap_s"].quantile(0.99) * 1e3
        what = "While long prompts arrive, the p99 gap of running streams is"
        title = _spread_title(p99s, what, lambda ms: f"{panels.three(ms)} ms")
        note = f"{mixed.workload}, first repeat; long prompts of {mixed.prompt_tokens:,.0f} tokens"
        note += f"; the first {panels.three(until_s)} s" if np.isfinite(until_s) else ""
        dot = Line2D([], [], color="#444444", marker="o", ms=3, ls="")
        due = Line2D([], [], color="#222222", marker="v", ls=":", lw=1)
        key = ([dot, due], ["gap between two tokens of a stream", "a long prompt is due"])
        style.finish(made, title, _small(context, note), key)
    alt = f"Gaps between tokens over time for {len(shown)} settings, with the arrivals of long prompts marked."
    return Drawn(made, data, alt)


def ttft_split(parts: pd.DataFrame, context: Context) -> Drawn:
    """Mean TTFT of each setting split in queue, prefill and the rest, at low, middle and high load."""
    parts = parts[parts["load"] != "mix"]
    if parts.empty:
        return Drawn(None, _NO_DATA, reason="no completed request has the engine's own queue and prefill times.")
    main = family(str(busiest(parts)))
    parts = parts[parts["workload"].map(family) == main]
    parts = parts.assign(level=_level(parts))
    levels = parts[["workload", "level"]].drop_duplicates().sort_values("level")["workload"].tolist()
    shown = [levels[i] for i in sorted({0, len(levels) // 2, len(levels) - 1})]
    columns = ["queue_s", "prefill_s", "frontend_s"]
    data = parts[parts["workload"].isin(shown)].reset_index(drop=True)
    data = data[["workload", "setting", *columns, "ttft_s", "n"]]
    # The engine's clock and the client's differ by microseconds; a negative rest is drawn as none.
    data["frontend_s"] = data["frontend_s"].clip(lower=0)
    settings = sorted(data["setting"].unique(), key=metrics.natural_key)[::-1]
    with style.theme():
        made, axes = style.figure(0.7 + 0.25 * len(settings), 1, len(shown), sharey=True)
        for ax, workload in zip(axes[0], shown, strict=True):
            panels.parts(ax, data[data["workload"] == workload].set_index("setting").reindex(settings), columns)
            ax.set_title(workload)
        share = (data["queue_s"] / data["ttft_s"]).fillna(0)
        most = data.iloc[int(share.to_numpy().argmax())]
        title = f"The queue is up to {100 * share.max():.0f} % of mean TTFT: {most['setting']} at {most['workload']}"
        key = [Patch(facecolor=colour, hatch=hatch, edgecolor="white") for colour, hatch in panels.PARTS]
        names = ["queue (waiting to be scheduled)", "prefill", "rest (front end and client)"]
        style.finish(made, title, _small(context, "Each panel has its own scale"), (key, names))
    alt = f"Mean TTFT split in queue, prefill and the rest: {len(settings)} settings, {len(shown)} loads."
    return Drawn(made, data, alt)


def _level(points: pd.DataFrame) -> pd.Series:
    """The number that a family varies: concurrency, else rate, else what the label says."""
    in_label = points["workload"].str.extract(r"\b(?:c|n|rate)=([\d.]+|inf)")[0].astype(float)
    level = pd.to_numeric(points["concurrency"]).astype("Float64").astype(float)
    if "rate_per_s" in points:
        level = level.fillna(points["rate_per_s"].astype(float))
    return level.fillna(in_label).fillna(0)


def _tradeoff_panel(points: pd.DataFrame, latency: str, p: int) -> pd.DataFrame:
    """What one panel shows: throughput and latency with interval ends, in the axis' unit."""
    factor = UNITS[latency][2]
    column = f"{latency}_p{p}_s"
    out = points[["setting", "workload", "level", "n", "failed"]].assign(
        metric=latency,
        percentile=p,
        enough=points["n"] >= metrics.NEEDED[p],
        throughput=points["output_tokens_per_s"],
        throughput_low=points["output_tokens_per_s_low"],
        throughput_high=points["output_tokens_per_s_high"],
        latency=points[column] * factor,
        latency_low=points[f"{column}_low"] * factor,
        latency_high=points[f"{column}_high"] * factor,
    )
    out["frontier"] = metrics.pareto(out["throughput"], out["latency"])
    return out.sort_values(["setting", "level"], key=lambda c: metrics.natural(c) if c.name == "setting" else c)


def _ecdf(values: np.ndarray, n: int, most: int = 400) -> pd.DataFrame:
    """Sorted values and the share of `n` at or below each; at most about `most` steps, evenly in share."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return pd.DataFrame({"value": [], "share": []})
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(most, len(ordered))).round().astype(int))
    table = pd.DataFrame({"value": ordered[kept], "share": (kept + 1) / n})
    return table.drop_duplicates("value", keep="last", ignore_index=True)


def _one_grid(grid: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Settings that differ in budget and max_num_seqs alone: the largest such group, and a note on what was
    left out.
    """
    fixed = ["max_num_batched_tokens", "max_num_seqs"]
    others = [field.name for field in schemas.SETTING_VALUES if field.name not in fixed]
    if not grid.duplicated(fixed).any():
        return grid, ""
    group = grid.groupby(others, dropna=False, sort=False).ngroup()
    kept = grid[group == group.value_counts(sort=False).idxmax()].drop_duplicates(fixed)
    return kept, f"; {len(grid) - len(kept)} settings that differ in more are left out"


def _a_setting_for_each_budget(rows: pd.DataFrame, most: int = 8) -> list[str]:
    """One setting for each budget and chunking, with the most sequences, so that streams are not held in the
    queue.
    """
    settings = rows.drop_duplicates("setting").sort_values("max_num_seqs", ascending=False, kind="stable")
    settings = settings.drop_duplicates(
        ["max_num_batched_tokens", "enable_chunked_prefill", "quantization", "enforce_eager"]
    )
    return sorted(settings["setting"], key=metrics.natural_key)[:most]


def _tradeoff_title(points: pd.DataFrame) -> str:
    most = points.iloc[int(points["output_tokens_per_s"].to_numpy().argmax())]
    latency = f" at p50 E2E {panels.seconds(most['e2e_p50_s'])}" if pd.notna(most["e2e_p50_s"]) else ""
    rate = panels.three(most["output_tokens_per_s"])
    ties = _ties(points, "output_tokens_per_s", most, higher=True)
    return f"{most['setting']} gives the most throughput, {rate} tokens/s{latency}{ties}"


def _ties(points: pd.DataFrame, column: str, best: pd.Series, higher: bool) -> str:
    """How many other settings the data cannot tell from the best: their interval overlaps the best's."""
    others = points[points["setting"] != best["setting"]]
    if higher:
        close = others[f"{column}_high"] >= best[f"{column}_low"]
    else:
        close = others[f"{column}_low"] <= best[f"{column}_high"]
    count = others.loc[close, "setting"].nunique()
    return f" (intervals of {count} more overlap)" if count else ""


def _tradeoff_note(points: pd.DataFrame) -> str:
    levels = points[["workload", "level"]].drop_duplicates().sort_values("level")["workload"]
    lost = int((points["failed"] > 0).sum())
    failed = f"; points with failed requests, which count as slowest: {lost}" if lost else ""
    return f"Lower right is better; lines join {', '.join(levels)}; bars: 95 % bootstrap intervals{failed}"


def _spread_title(values: pd.Series, what: str, form: Any) -> str:
    """The lowest and the highest setting in one sentence."""
    if len(values) == 1:
        return f"{what} {form(values.iloc[0])} ({values.index[0]})"
    return f"{what} {form(values.min())} ({values.idxmin()}) to {form(values.max())} ({values.idxmax()})"


def _small(context: Context, note: str) -> str:
    return f"{note}. {context.small_print}."
