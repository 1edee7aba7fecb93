"""What the analysis notebook prints beside its figures, as HTML: the study's head, settings, verdicts,
summary.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from latency_lab import ROOT, metrics, panels, schemas
from latency_lab import validity as validation
from latency_lab.records import Records

Cell = tuple[str, float | None]
"""What a table's cell shows, and the number it is sorted by: NaN where a number is missing, None for text."""


class Html(str):
    """A piece of HTML that notebooks display as such."""

    def _repr_html_(self) -> str:
        return str(self)


def facts(study: Records) -> dict[str, str]:
    """What a study is, in words: for the head of its page and for the index. No value is typed, all are from
    records.
    """
    cells = study.cells
    times = cells["started_at"].dropna()
    days = sorted({f"{time:%Y-%m-%d}" for time in times})
    done = int((cells["status"] == "done").sum())
    out = {
        "Question": question(study.path),
        "Machine": _machine(cells),
        "Model": f"{_distinct(cells['model'])}, {_distinct(cells['weights'])} weights",
        "vLLM": _distinct(cells["vllm_version"]),
        "Measured": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "unknown",
        "Imported from": ", ".join(sorted(cells["imported_from"].dropna().unique())),
        "Settings": f"{cells['setting'].nunique()}",
        "Cells": f"{len(cells)}, of which {done} done" + _others(cells),
        "Requests": f"{cells['requests'].sum():,}, of which {cells['requests_failed'].sum():,} failed",
        "Left out": "; ".join(f"harmed: {line}" for line in study.harmed),
    }
    return {name: value for name, value in out.items() if value}


def question(folder: Path) -> str:
    """The question that the study's YAML asks; empty where it is not at hand."""
    for path in (folder / "study.yaml", ROOT / "notebooks" / "studies" / f"{folder.name}.yaml"):
        try:
            text = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError):
            continue
        if isinstance(text, Mapping) and text.get("question"):
            return str(text["question"]).strip()
    return ""


def head(study: Records) -> Html:
    """The study's facts as a list of terms."""
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts(study).items())
    return Html(f'<dl class="facts">{rows}</dl>')


def settings(cells: pd.DataFrame) -> Html:
    """One row a setting: the engine values that differ, its start, its KV cache, and how its cells went."""
    values = [field.name for field in schemas.SETTING_VALUES]
    # What vLLM refused or what failed early has no resolved values; beside real ones null is a value (no
    # quantization).
    resolved = cells[cells["resolved_id"].notna()]
    resolved = cells if resolved.empty else resolved
    varied = [name for name in values if resolved[name].nunique(dropna=False) > 1]
    measured = {
        "engine start (s)": ("engine_start_s", 1.0, "{:.0f}"),
        "KV cache (tokens)": ("kv_cache_tokens", 1.0, "{:,.0f}"),
        "weights (GiB)": ("weight_bytes", 2.0**-30, "{:.2f}"),
    }
    measured = {name: how for name, how in measured.items() if cells[how[0]].notna().any()}
    rows: list[list[Cell]] = []
    for label in sorted(cells["setting"].unique(), key=metrics.natural_key):
        own = cells[cells["setting"] == label]
        first = own.iloc[0]
        status = ", ".join(f"{n} {word}" for word, n in own["status"].value_counts(sort=False).items())
        row: list[Cell] = [(label, None), *(_plain(first[name]) for name in varied)]
        row += [_number(first[name] * factor, form) for name, factor, form in measured.values()]
        rows.append([*row, (status, None)])
    names = ["setting", *varied, *measured, "cells"]
    same = [f"{name} = {_plain(resolved[name].iloc[0])[0]}" for name in values if name not in varied]
    note = f"The same in all: {', '.join(text for text in same if not text.endswith('= -'))}."
    return Html(table(names, rows) + f'<p class="note">{_text(note)}</p>')


def validity(cells: pd.DataFrame, measured: pd.DataFrame) -> Html:
    """How many cells are valid measurements, the reasons for those that are not, and labels that mislead."""
    verdicts = validation.verdicts(cells, measured)
    bad = verdicts[~verdicts["valid"]]
    text = f"{len(verdicts) - len(bad)} of {len(verdicts)} cells are valid measurements."
    if (highest := int(verdicts["percentile_max"].max())) < metrics.PERCENTILES[-1]:
        text += f" No point has enough requests for a percentile above p{highest}."
    out = f"<p>{text}</p>"
    if len(bad):
        by = bad.groupby(["setting", "workload", "reasons"], sort=False)["repeat"].agg(list).reset_index()
        rows: list[list[Cell]] = [
            [(s, None), (w, None), (", ".join(str(n) for n in repeats), None), (why, None)]
            for s, w, why, repeats in by.itertuples(index=False)
        ]
        out += table(["setting", "workload", "repeats", "why it is not valid"], rows)
    for labels, problem in validation.label_conflicts(cells).itertuples(index=False):
        out += f'<p class="warning">{_text(", ".join(labels))}: {_text(problem)}.</p>'
    return Html(out + "".join(f'<p class="note">{_text(line)}</p>' for line in traffic(cells)))


def traffic(cells: pd.DataFrame) -> list[str]:
    """For each workload whose requests come from files: which, what was left out of them, and how much was cut."""
    lines = []
    known = cells[cells["traffic"].notna()]
    for (workload, files), own in known.groupby(["workload", "traffic"], sort=False):
        clamped, requests = int(own["requests_clamped"].sum()), int(own["requests"].sum())
        cut = f"{clamped:,} of {requests:,} requests were cut to max_model_len" if clamped else "no request was cut"
        lines.append(f"{workload}: {files}; {cut}{f' in {len(own)} cells' if len(own) > 1 else ''}.")
    return lines


SHOWN = (
    ("TTFT p50 (s)", "ttft_p50_s", 1.0, 50),
    ("TTFT p95 (s)", "ttft_p95_s", 1.0, 95),
    ("TPOT p50 (ms)", "tpot_p50_s", 1e3, 50),
    ("ITL p99 (ms)", "itl_p99_s", 1e3, 50),
    ("E2E p50 (s)", "e2e_p50_s", 1.0, 50),
    ("E2E p95 (s)", "e2e_p95_s", 1.0, 95),
    ("E2E p99 (s)", "e2e_p99_s", 1.0, 99),
    ("output tokens/s", "output_tokens_per_s", 1.0, 0),
    ("J/output token", "energy_j", 1.0, 0),
)
"""Columns of the summary: heading, column, factor to its unit, and the percentile that needs enough requests. A column
that no point has is left out.
"""


def summary(points: pd.DataFrame) -> Html:
    """The summary with its intervals; a percentile that too few requests support is left out and marked."""
    shown = [one for one in SHOWN if one[1] in points and (points[one[1]].notna().any() or one[1] != "energy_j")]
    rows: list[list[Cell]] = []
    for point in points.to_dict("records"):
        mixed = point["load"] == "mix"
        name = f"{point['workload']}: {point['class_name']}" if mixed else str(point["workload"])
        row: list[Cell] = [(str(point["setting"]), None), (name, None)]
        row += [(f"{point['n']:,}", float(point["n"])), (f"{point['failed']:,}", float(point["failed"]))]
        for _, column, factor, percentile in shown:
            if percentile and point["n"] < metrics.NEEDED[percentile]:
                row.append(("too few", np.nan))
                continue
            row.append(_interval(*(point[f"{column}{end}"] * factor for end in ("", "_low", "_high"))))
        rows.append(row)
    return Html(table(["setting", "workload", "requests", "failed", *(one[0] for one in shown)], rows))


def table(names: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A sortable table in a box that scrolls sideways on narrow screens. All text is escaped."""
    headings = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    inside = f"<thead><tr>{headings}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="sortable">{inside}</table></div>'


def _cell(cell: Cell) -> str:
    shown, key = cell
    if key is None:
        return f"<td>{_text(shown)}</td>"
    known = "" if np.isnan(key) else f' data-key="{key:.9g}"'
    return f'<td class="number"{known}>{_text(shown)}</td>'


def _interval(value: float, low: float, high: float) -> Cell:
    if pd.isna(value):
        return ("-", np.nan)
    ends = f" [{'?' if pd.isna(low) else panels.three(low)}, {'?' if pd.isna(high) else panels.three(high)}]"
    return (panels.three(value) + ("" if pd.isna(low) and pd.isna(high) else ends), float(value))


def _number(value: Any, form: str) -> Cell:
    return ("-", np.nan) if value is None or pd.isna(value) else (form.format(float(value)), float(value))


def _plain(value: Any) -> Cell:
    """A setting's value as vLLM's arguments are written."""
    if pd.isna(value):
        return ("-", None)
    if isinstance(value, bool | np.bool_):
        return ("on" if value else "off", None)
    return (str(value), float(value)) if not isinstance(value, str) else (value, None)


def _machine(cells: pd.DataFrame) -> str:
    device, cpu = _distinct(cells["device"]), _distinct(cells["cpu"])
    gpus = cells["device_count"].dropna()
    many = f"{int(gpus.max())} x " if len(gpus) and gpus.max() > 1 else ""
    memory = cells["memory_bytes"].dropna()
    cores = "" if "cores" in cpu else f", {_distinct(cells['cpu_cores'])} cores"
    host = f"{cpu}{cores}" + (f", {memory.max() / 2**30:.0f} GiB memory" if len(memory) else "")
    if cells["cpu"].isna().all():  # imported from a tool that does not say
        return f"{many}{device}"
    return host if device == cpu else f"{many}{device}; {host}"


def _others(cells: pd.DataFrame) -> str:
    counts = cells.loc[cells["status"] != "done", "status"].value_counts(sort=False)
    return "".join(f", {n} {status}" for status, n in counts.items())


def _distinct(column: pd.Series) -> str:
    values = sorted({str(value) for value in column.dropna()})
    return ", ".join(values) if values else "unknown"


def _text(value: object) -> str:
    return html.escape(str(value))
