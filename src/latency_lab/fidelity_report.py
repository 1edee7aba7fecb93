"""The report's section on agreement with vLLM's own benchmark: a figure, a table, and the causes of what differs."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pandas as pd

from latency_lab import fidelity, panels, records, style, tables
from latency_lab.fidelity import AGREED, OURS, SERVE
from latency_lab.style import Drawn
from latency_lab.tables import Cell, Html

HEADING = "Does this study agree with vLLM's own benchmark?"

_COLOUR = "#0173b2"
_BAND = "#e4e4e4"


def section(data: Path, figures: Path) -> Html:
    """Heading, figure, tables and notes from the folder that fidelity.latest finds; a sentence where there is none.

    The figure's files go to `figures`.
    """
    folder = fidelity.latest(data)
    if folder is None:
        return Html(
            '<p class="absent">Not compared with vLLM\'s own benchmark here: <code>make bench</code> does it.</p>'
        )
    parts = [f"<h3>{HEADING}</h3>"]
    if (folder / "serve").is_dir():
        study = records.load(folder / "serve")
        compared = fidelity.agreement(study)
        parts.append(_paragraph(fidelity.serve_text(compared, study.cells)))
        parts.append(style.show(figure(compared, study.cells), "agreement", figures).data)
        parts.append(tables.table(*_compared_rows(compared)))
    if (folder / fidelity.THROUGHPUT_FILE).exists():
        parts.append(_paragraph(fidelity.throughput_text(pd.read_csv(folder / fidelity.THROUGHPUT_FILE))))
    if (folder / fidelity.HTTP_FILE).exists():
        readings = pd.read_csv(folder / fidelity.HTTP_FILE)
        parts.append(_paragraph(fidelity.http_text(readings)))
        parts.append(tables.table(*_limit_rows(fidelity.limits(readings))))
    parts.append(_paragraph("What the two do differently:"))
    parts.append(f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in fidelity.NOTES)}</ul>")
    return Html("".join(parts))


def figure(compared: pd.DataFrame, cells: pd.DataFrame) -> Drawn:
    """Ratios with their intervals, a panel a workload; the grey band is agreement to 5 %."""
    known = compared[compared["ratio"].notna()]
    if known.empty:
        return Drawn(None, pd.DataFrame(), reason=str(compared["problem"].iloc[0]) if len(compared) else "no data.")
    workloads = list(dict.fromkeys(known["workload"]))
    names = list(dict.fromkeys(known["metric"]))
    with style.theme():
        made, axes = style.figure(0.6 + 0.24 * len(names), 1, len(workloads), sharey=True, sharex=True)
        for ax, workload in zip(axes[0], workloads, strict=True):
            own = known[known["workload"] == workload].set_index("metric").reindex(names)
            at = np.arange(len(names))[::-1]
            ax.axvspan(1 - AGREED, 1 + AGREED, color=_BAND, zorder=0)
            ax.axvline(1, color="#888888", lw=0.8, zorder=1)
            ends = [own["ratio"] - own["low"], own["high"] - own["ratio"]]
            ax.errorbar(own["ratio"], at, xerr=ends, fmt="o", color=_COLOUR, ms=4, elinewidth=1.1, zorder=3)
            ax.set_yticks(at, names)
            ax.set_title(workload)
            ax.grid(False, axis="y")
        made.supxlabel(f"{OURS} / {SERVE}", fontsize=style.FONT_PT)
        pairs = cells.groupby("setting")["repeat"].nunique().min()
        note = f"{style.context(cells).small_print}; {pairs} pairs of runs on one server; 95 % bootstrap intervals"
        style.finish(made, _title(known), note)
    return Drawn(made, known.drop(columns="problem"), f"Ratios of {OURS} to {SERVE}: {', '.join(names)}.")


def _title(known: pd.DataFrame) -> str:
    """The finding: the ratio that is furthest from 1."""
    furthest = known.iloc[int((known["ratio"] - 1).abs().argmax())]
    if abs(furthest["ratio"] - 1) <= AGREED:
        return f"All {len(known)} ratios are within {AGREED:.0%} of 1"
    return f"Furthest from agreement: {furthest['metric']} of {furthest['workload']}, ratio {furthest['ratio']:.2f}"


def _compared_rows(compared: pd.DataFrame) -> tuple[list[str], list[list[Cell]]]:
    names = ["workload", "metric", OURS, SERVE, "ratio", "95 % interval"]
    rows: list[list[Cell]] = []
    for row in compared.to_dict("records"):
        values = [_value(str(row["metric"]), row[who]) for who in (OURS, SERVE)]
        if np.isnan(row["ratio"]):
            last: list[Cell] = [("-", np.nan), (str(row["problem"]), None)]
        else:
            last = [(f"{row['ratio']:.3f}", float(row["ratio"])), (f"{row['low']:.3f} to {row['high']:.3f}", None)]
        rows.append([(str(row["workload"]), None), (str(row["metric"]), None), *values, *last])
    return names, rows


def _limit_rows(limits: pd.DataFrame) -> tuple[list[str], list[list[Cell]]]:
    units = {"tokens_per_s": "tokens/s", "requests_per_s": "requests/s"}
    columns = {f"{name} {who}": f"{unit}, {who}" for name, unit in units.items() for who in (OURS, SERVE)}
    rows: list[list[Cell]] = []
    for row in limits.to_dict("records"):
        cells: list[Cell] = [(f"{row['streams']:,.0f}", float(row["streams"]))]
        for column in columns:
            known = not np.isnan(row[column])
            cells.append((f"{row[column]:,.0f}" if known else "none of the rates", float(row[column])))
        rows.append(cells)
    return ["streams", *columns.values()], rows


def _value(metric: str, value: float) -> Cell:
    if np.isnan(value):
        return ("-", np.nan)
    return (panels.three(value) if metric.endswith("/s") else panels.seconds(value), value)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"
