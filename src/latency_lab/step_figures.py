"""Figures of what the scheduler did: each function takes tables and returns a `Drawn`, or why it cannot be drawn."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from latency_lab import panels, proofs, step_panels, style
from latency_lab.long_prompts import Beside
from latency_lab.records import Records
from latency_lab.step_panels import DECODE, LONG, PREFILL, QUEUE, STREAM
from latency_lab.style import Context, Drawn

STALL_FACTORS = (2.0, 4.0, 8.0)
"""A gap of a stream is a stall where it is longer than so many times the median gap of steps without any prefill."""

_NO_DATA = pd.DataFrame()
_Figure = Callable[[Beside | None, Context], Drawn]
_NO_STEPS = "no scheduler steps were recorded for a workload that mixes streams with long prompts."
_NO_MIX = "the study has no workload that mixes streams with longer prompts."


def _where_traced(draw: Callable[[Beside, Context], Drawn]) -> _Figure:
    """The figure, or the reason where no workload mixes streams with long prompts or its steps were not recorded."""

    @wraps(draw)
    def drawn(mixed: Beside | None, context: Context) -> Drawn:
        if mixed is None or mixed.traced.empty:
            return Drawn(None, _NO_DATA, reason=_NO_MIX if mixed is None else _NO_STEPS)
        return draw(mixed, context)

    return drawn


def _with_gaps(draw: Callable[[Beside, pd.DataFrame, list[str], Context], Drawn]) -> _Figure:
    """The figure from the streams' gaps and the settings that have some, in order; or the reason where none has."""

    @_where_traced
    @wraps(draw)
    def drawn(mixed: Beside, context: Context) -> Drawn:
        gaps, _ = mixed.stepped_gaps
        known = set(gaps["setting"].unique())
        order = [setting for setting in _by_budget(mixed.study.cells) if setting in known]
        return draw(mixed, gaps, order, context) if order else Drawn(None, _NO_DATA, reason=_NO_STEPS)

    return drawn


@_where_traced
def timeline(mixed: Beside, context: Context) -> Drawn:
    """Tokens of each step, prefill on decode, against the budget, and what each step took, while a long prompt runs.

    The settings with the smallest budget and with chunking off (else the largest budget) side by side.
    """
    order = _by_budget(mixed.traced)
    shown = list(dict.fromkeys([order[0], order[-1]]))
    found = []
    for setting in shown:
        one = mixed.first_repeat(setting)
        own = one.requests
        table = proofs.per_step(one.steps)
        sent = float(own.loc[own["class_name"] == mixed.long, "sent_s"].min())
        held = table[(table["prefill"] > 0) & (table["start_s"] >= sent - 0.001)]
        found.append(table.assign(setting=setting, at_s=_begun(table) - sent, budget=_budget(own)))
        found[-1].attrs["until"] = float(held["end_s"].iloc[: _chunks(one.steps, own, mixed.long)].max() - sent)
    until = max(table.attrs["until"] for table in found)
    window = (-0.25 * until, 1.45 * until)
    data = pd.concat(table[table["at_s"].between(*window)] for table in found)
    data = data[["setting", "step", "at_s", "took_s", "prefill", "recomputed", "decode", "budget"]].reset_index(
        drop=True
    )
    with style.theme():
        made, axes = style.figure(3.5, 2, len(shown), sharex=True, sharey="row", height_ratios=[3, 2])
        for column, setting in enumerate(shown):
            own = data[data["setting"] == setting]
            step_panels.step_tokens(axes[0, column], own)
            step_panels.step_times(axes[1, column], own)
            axes[0, column].set_title(setting)
            axes[1, column].set_xlabel("time since the long prompt was sent (s)")
        step_panels.token_axis(axes[0, 0], max(data["budget"].max(), data[["prefill", "decode"]].sum(axis=1).max()))
        axes[0, 0].set_ylabel("tokens of a step")
        axes[1, 0].set_ylabel("step took (ms)")
        longest = data[data["prefill"] > 0].groupby("setting", sort=False)["took_s"].max()
        title = f"A long prompt holds up the batch for {panels.seconds(longest[shown[-1]])} a step with {shown[-1]}"
        if len(shown) > 1:
            title += f", for {panels.seconds(longest[shown[0]])} with {shown[0]}"
        handles: list[Any] = [Patch(facecolor=DECODE), Patch(facecolor=PREFILL, hatch="////", edgecolor="white")]
        handles.append(Line2D([], [], color="#222222", ls="--"))
        note = f"{mixed.workload}, first repeat, around its first long prompt; each bar is one step"
        style.finish(made, title, _small(context, note), (handles, ["decode", "prefill", "budget"]))
    alt = f"Tokens and duration of each scheduler step while a long prompt is processed: {', '.join(shown)}."
    return Drawn(made, data, alt)


@_where_traced
def life(mixed: Beside, context: Context) -> Drawn:
    """One long prompt from its sending to its last token on each setting: queued, its chunks, its output tokens."""
    order = _by_budget(mixed.traced)
    pieces = [piece for setting in order for piece in _life(mixed.first_repeat(setting), setting, mixed.long)]
    if not pieces:
        return Drawn(None, _NO_DATA, reason=_NO_STEPS)
    data = pd.DataFrame(pieces)
    known = set(data["setting"])
    order = [setting for setting in order if setting in known]
    with style.theme():
        made, axes = style.figure(0.8 + 0.42 * len(order), 1, 1)
        step_panels.lives(axes[0, 0], data, order[::-1])
        chunks = data.loc[data["what"] == "chunk", "setting"].value_counts(sort=False)
        most, least = str(chunks.idxmax()), str(chunks.idxmin())
        title = f"The same prompt in {_count(chunks[most])} with {most}"
        title += f", in {_count(chunks[least])} with {least}" if most != least else ""
        note = f"{mixed.workload}, first repeat, its first long prompt ({mixed.prompt_tokens:,.0f} tokens)"
        note += "; numbers are a chunk's tokens, where they fit"
        handles = [
            Patch(facecolor=QUEUE),
            Patch(facecolor=PREFILL, edgecolor="white"),
            Line2D([], [], color=DECODE, marker="|", ms=9, mew=1.6, ls=""),
        ]
        style.finish(
            made, title, _small(context, note), (handles, ["queued", "a chunk of the prompt", "an output token"])
        )
    return Drawn(
        made, data, f"One long request's queue time, prompt chunks and output tokens on {len(order)} settings."
    )


@_with_gaps
def stalls_by_prefill(mixed: Beside, gaps: pd.DataFrame, order: list[str], context: Context) -> Drawn:
    """Each gap of a stream against the prompt tokens in the step that ended it."""
    data = gaps.loc[gaps["setting"].isin(order), ["setting", "prefill", "gap_ms"]].reset_index(drop=True)
    with style.theme():
        made, axes = style.figure(2.9, 1, 1)
        ax = axes[0, 0]
        step_panels.gaps_by_prefill(ax, data, order, context)
        ax.set_xlabel("prompt tokens in the same step (tokens)")
        ax.set_ylabel("gap of a stream (ms)")
        plain, full = data[data["prefill"] == 0]["gap_ms"], data[data["prefill"] > 0]
        title = "The more prompt tokens share a step, the longer the streams in it wait"
        if len(plain) and len(full):
            slope = np.polyfit(data["prefill"], data["gap_ms"], 1)[0] * 100
            title += f": {panels.three(plain.median())} ms without, {panels.three(slope)} ms more for each 100"
        handles, texts = panels.legend(order, context)
        for handle in handles:
            handle.set_linestyle("")
        note = f"{mixed.workload}, {mixed.stepped_gaps[1]}; each mark is the wait for one token of a stream"
        style.finish(made, title, _small(context, note), (handles, texts))
    return Drawn(made, data, "Gaps between the tokens of running streams against the prompt tokens in the same step.")


def budget_tradeoff(mixed: Beside | None, points: pd.DataFrame, context: Context) -> Drawn:
    """What a budget costs the long prompt (its TTFT) and spares its neighbours (their p99 ITL)."""
    if mixed is None:
        return Drawn(None, _NO_DATA, reason=_NO_MIX)
    points = points[points["workload"] == mixed.workload]
    order = _by_budget(mixed.study.cells)
    parts = []
    for name, column, factor in ((mixed.long, "ttft_p50_s", 1.0), (mixed.stream, "itl_p99_s", 1e3)):
        own = points[points["class_name"] == name].set_index("setting").reindex(order)
        values = {end: own[f"{column}{end}"].to_numpy(float) * factor for end in ("", "_low", "_high")}
        parts.append(pd.DataFrame({"setting": order, "metric": column, "value": values[""], **_ends(values)}))
    data = pd.concat(parts, ignore_index=True)
    if len(order) < 2 or data["value"].isna().any():
        reason = "fewer than two budgets have completed long prompts and streams beside them."
        return Drawn(None, _NO_DATA, reason=reason)
    with style.theme():
        made, axes = style.figure(3.6, 2, 1, sharex=True)
        texts = ("TTFT of the\nlong prompt (s)", "p99 ITL of its\nneighbours (ms)")
        for ax, column, text, colour in zip(
            axes[:, 0], ("ttft_p50_s", "itl_p99_s"), texts, (LONG, STREAM), strict=True
        ):
            step_panels.over_settings(ax, data[data["metric"] == column], order, colour)
            ax.set_ylabel(text)
        axes[1, 0].set_xticks(range(len(order)), [_tick(setting) for setting in order])
        axes[1, 0].set_xlabel("budget (tokens a step)")
        itl = data[data["metric"] == "itl_p99_s"].set_index("setting")["value"]
        ttft = data[data["metric"] == "ttft_p50_s"].set_index("setting")["value"]
        first, last = order[0], order[-1]
        title = (
            f"From {last} to {first}, the neighbours' p99 gap goes from {panels.three(itl[last])} to "
            f"{panels.three(itl[first])} ms and the long prompt's TTFT from {panels.three(ttft[last])} to "
            f"{panels.three(ttft[first])} s"
        )
        note = f"{mixed.workload}, long prompts of {mixed.prompt_tokens:,.0f} tokens; median TTFT; bars: 95 % intervals"
        style.finish(made, title, _small(context, note))
    return Drawn(made, data, f"TTFT of long prompts and p99 ITL of streams beside them for {len(order)} budgets.")


@_with_gaps
def stall_free(mixed: Beside, gaps: pd.DataFrame, order: list[str], context: Context) -> Drawn:
    """Share of the streams' gaps that are no stall, over the budget, for three ideas of what a stall is."""
    plain = gaps.loc[gaps["prefill"] == 0, "gap_ms"]
    if plain.empty:
        return Drawn(None, _NO_DATA, reason="every step of a stream held prompt tokens too: no gap is usual.")
    usual = float(plain.median())
    parts = []
    for factor in STALL_FACTORS:
        free = gaps.assign(free=gaps["gap_ms"] <= factor * usual).groupby(["setting", "repeat"])["free"].mean()
        by_setting = free.groupby("setting").agg(["mean", "min", "max"]).reindex(order)
        by_setting.columns = ["value", "low", "high"]
        parts.append(by_setting.reset_index().assign(factor=factor, threshold_ms=factor * usual))
    data = pd.concat(parts, ignore_index=True)
    with style.theme():
        made, axes = style.figure(2.6, 1, 1)
        ax = axes[0, 0]
        handles = step_panels.shares(ax, data, order)
        ax.set_xticks(range(len(order)), [_tick(setting) for setting in order])
        ax.set_xlabel("budget (tokens a step)")
        ax.set_ylabel("gaps without a stall (share)")
        ends = [(data[data["factor"] == f].set_index("setting")["value"] * 100).round(1) for f in STALL_FACTORS[::-2]]
        first, last = order[0], order[-1]
        title = (
            f"Within {STALL_FACTORS[-1]:g} times the usual gap: {ends[0][first]:g} % of gaps with {first}, "
            f"{ends[0][last]:g} % with {last}; within {STALL_FACTORS[0]:g} times: {ends[1][first]:g} % and "
            f"{ends[1][last]:g} %"
        )
        labels = [f"up to {f:g} x the usual gap ({panels.three(f * usual)} ms)" for f in STALL_FACTORS]
        note = f"{mixed.workload}, {mixed.stepped_gaps[1]}; the usual gap is the median of steps without any prompt "
        note += f"tokens, {panels.three(usual)} ms; bars: lowest and highest repeat"
        style.finish(made, title, _small(context, note), (handles, labels))
    return Drawn(made, data, f"Share of the streams' gaps that are not stalls for {len(order)} budgets.")


def _by_budget(rows: pd.DataFrame) -> list[str]:
    """One setting for each budget in its order, then those without chunking; of several, one with most sequences."""
    settings = rows.drop_duplicates("setting").sort_values("max_num_seqs", ascending=False, kind="stable")
    settings = settings.drop_duplicates(["max_num_batched_tokens", "enable_chunked_prefill"])
    settings = settings.assign(off=~settings["enable_chunked_prefill"].fillna(True).astype(bool))
    return settings.sort_values(["off", "max_num_batched_tokens"], kind="stable")["setting"].tolist()


def _budget(own: pd.DataFrame) -> float:
    return float(own["max_num_batched_tokens"].astype("Float64").iloc[0])


def _begun(table: pd.DataFrame) -> pd.Series:
    """When each step had the engine to itself: at its start, or when its predecessor ended."""
    return table["end_s"] - table["took_s"]


def _chunks(steps: pd.DataFrame, own: pd.DataFrame, long: str) -> int:
    """How many chunks the first long prompt of a cell took."""
    first = own[own["class_name"] == long].sort_values("sent_s").iloc[:1]
    return max(1, int(proofs.prompts(steps, first)["chunks"].sum()))


def _life(one: Records, setting: str, long: str) -> list[dict[str, Any]]:
    """Pieces of the first long request of a cell, in ms since it was sent: queued, its chunks, its output tokens."""
    own = one.requests
    first = own[(own["class_name"] == long) & own["error"].isna()].sort_values("sent_s").head(1)
    if first.empty:
        return []
    request = first.iloc[0]
    parts = proofs.scheduled(one.steps).merge(proofs.per_step(one.steps)[["step", "took_s"]], on="step")
    parts = parts[(parts["request"] == request["request"]) & (parts["prefill"] + parts["recomputed"] > 0)]
    sent = float(request["sent_s"])
    begun = (parts["end_s"] - parts["took_s"] - sent) * 1e3
    pieces = [{"what": "queued", "from_ms": 0.0, "to_ms": float(begun.min()), "tokens": 0}] if len(parts) else []
    for start, part in zip(begun, parts.to_dict("records"), strict=True):
        end = (part["end_s"] - sent) * 1e3
        pieces.append({"what": "chunk", "from_ms": start, "to_ms": end, "tokens": part["tokens"]})
    for at in np.asarray(request["token_times_s"], float) * 1e3:
        pieces.append({"what": "token", "from_ms": at, "to_ms": at, "tokens": 1})
    return [{"setting": setting, **piece} for piece in pieces]


def _ends(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"low": values["_low"], "high": values["_high"]}


def _tick(setting: str) -> str:
    """A setting on an axis of budgets: 512 for budget=512."""
    return setting.removeprefix("budget=").replace(" ", "\n")


def _count(chunks: int) -> str:
    return f"{chunks} chunk{'' if chunks == 1 else 's'}"


def _small(context: Context, note: str) -> str:
    return f"{note}. {context.small_print}."
