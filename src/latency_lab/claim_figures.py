"""What decided a claim, as a figure: the effect of each condition with its interval, beside the threshold asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.markers import CARETLEFTBASE, CARETRIGHTBASE

from latency_lab import panels, style
from latency_lab.claims import Verdict
from latency_lab.proving import REFUTED, SUPPORTED, UNDECIDED
from latency_lab.style import Drawn

LOOKS = {SUPPORTED: ("#0173b2", "o"), REFUTED: ("#d55e00", "X"), UNDECIDED: ("#6b6b6b", "D")}
ROW_IN = 0.36


def effects(verdicts: Sequence[Verdict]) -> Drawn:
    """All conditions of one claim that have a number, machine by machine; one panel for each kind of number."""
    data = pd.DataFrame([row for verdict in verdicts for row in _rows(verdict)])
    if data.empty:
        return Drawn(None, data, reason="no condition of this claim is decided by a number with an interval.")
    kinds = list(data["kind"].unique())
    lines = [_lines(data[data["kind"] == kind]) for kind in kinds]
    heights = [len(one) * ROW_IN + 0.35 for one in lines]
    with style.theme():
        made, axes = style.figure(sum(heights) + 0.2, len(kinds), 1, height_ratios=heights)
        for ax, kind, own in zip(axes[:, 0], kinds, lines, strict=True):
            _panel(ax, own)
            ax.set_xlabel(f"{kind}, log" if ax.get_xscale() == "log" else kind)
        counts = {verdict: n for verdict in LOOKS if (n := int((data["verdict"] == verdict).sum()))}
        said = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        title = f"{verdicts[0].claim.id}: of {len(data)} condition{'s' * (len(data) > 1)}, {said}"
        handles: list[Any] = [Line2D([], [], color=LOOKS[v][0], marker=LOOKS[v][1], ls="-") for v in counts]
        handles.append(Line2D([], [], color="#222222", marker="|", ms=11, mew=1.6, ls=""))
        names = [*counts, "threshold, and the side asked for"]
        style.finish(made, title, small_print(verdicts), (handles, names))
    return Drawn(made, data, f"Effects with intervals and thresholds of {len(data)} conditions of {title}.")


def small_print(verdicts: Sequence[Verdict]) -> str:
    """What the bars are and, for each model, whether its weights were real; what random ones are good for."""
    note = "Bars: bootstrap intervals. " if any(not verdict.computed for verdict in verdicts) else ""
    models = dict.fromkeys(f"{v.model}, {v.weights} weights" for v in verdicts if v.weights)
    note += "; ".join(models) + "." * bool(models)
    if any("random" in verdict.weights for verdict in verdicts):
        note += f" Random weights: {style.RANDOM}."
    if any(verdict.computed for verdict in verdicts):
        note += " Shares of a bound are computed from sizes and bandwidth, not measured."
    return note.strip()


def _rows(verdict: Verdict) -> list[dict[str, Any]]:
    where = f"{verdict.machine}{' (computed)' * verdict.computed}, study {verdict.study}"
    return [
        {
            "where": where,
            "condition": finding.condition,
            "verdict": finding.verdict,
            "kind": finding.measured.kind,
            "value": finding.measured.value,
            "low": finding.measured.low,
            "high": finding.measured.high,
            "threshold": finding.measured.threshold,
            "at_most": finding.measured.at_most,
        }
        for finding in verdict.findings
        if finding.measured is not None
    ]


def _lines(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a panel from above: a heading for each machine, then its conditions."""
    out: list[dict[str, Any]] = []
    for where, own in data.groupby("where", sort=False):
        out.append({"heading": where})
        out += own.to_dict("records")  # type: ignore[arg-type]
    return out


def _panel(ax: Any, lines: Sequence[dict[str, Any]]) -> None:
    numbers = ("value", "low", "high", "threshold")
    values = np.array([line[name] for line in lines if "value" in line for name in numbers])
    known = values[np.isfinite(values)]
    if lines[1]["kind"] == "ratio" and known.max() > 3 * known.min() > 0:
        ax.set_xscale("log")
        widen = (known.max() / known.min()) ** 0.06 * 1.02
        ax.set_xlim(known.min() / widen, known.max() * widen)
        panels.plain_log(ax.xaxis)
    else:
        margin = 0.06 * (np.ptp(known) or abs(known[0]) or 1.0)
        ax.set_xlim(known.min() - margin, known.max() + margin)
    ax.set_ylim(len(lines) - 0.3, -0.7)
    ax.set_yticks([])
    ax.grid(False, axis="y")
    for y, line in enumerate(lines):
        beside = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": style.FONT_PT}
        if "heading" in line:
            ax.text(0, y, line["heading"], fontweight="bold", **beside)
            continue
        colour, marker = LOOKS[line["verdict"]]
        ax.text(0, y - 0.38, line["condition"], color="#444444", **beside)
        ax.axhline(y, color="#e4e4e4", lw=0.7, zorder=1)
        ax.plot([line["low"], line["high"]], [y, y], color=colour, lw=2.2, zorder=3)
        ax.plot([line["value"]], [y], color=colour, marker=marker, ms=6, zorder=4)
        ax.plot([line["threshold"]], [y], color="#222222", marker="|", ms=9, mew=1.6, zorder=2)
        side = CARETLEFTBASE if line["at_most"] else CARETRIGHTBASE
        ax.plot([line["threshold"]], [y], color="#222222", marker=side, ms=4, zorder=2)
