"""What the page on predictions says beside its figures, as HTML. Every number comes from records or from the fit."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import pandas as pd

from latency_lab import gpus, observations, outlook, predictions, published, recommend, records, tables
from latency_lab.fitting import Fit
from latency_lab.panels import seconds, three
from latency_lab.recommend import Oracle, Question
from latency_lab.tables import Cell, Html

_NONE = Html('<p class="absent">No machine was measured here with a study that the fit knows.</p>')
_NO_GPU = Html('<p class="absent">No GPU was measured here whose costs could be carried over to another.</p>')


def costs(known: Mapping[str, Fit]) -> Html:
    """The fitted costs of each machine with their intervals."""
    rows: list[list[Cell]] = []
    for device, fit in known.items():
        for row in fit.table.to_dict("records"):
            ends = "" if pd.isna(row["low"]) else f" [{three(row['low'])}, {three(row['high'])}]"
            value = "-" if pd.isna(row["value"]) else f"{three(row['value'])}{ends}"
            rows.append([(device, None), (row["cost"], None), (value, float(row["value"])), (row["unit"], None)])
    if not rows:
        return _NONE
    amount = "; ".join(f"{device}: {fit.rows} rows of {fit.cells} cells" for device, fit in known.items())
    note = f"In brackets: 95 % bootstrap intervals over cells. Fitted: {amount}."
    return Html(tables.table(["machine", "cost", "fitted", "unit"], rows) + _note(note))


def machines() -> Html:
    """The table of GPUs, with sources."""
    rows: list[list[Cell]] = []
    for gpu in (*gpus.GPUS, gpus.CPU):
        wide = gpu.flops.get("16-bit", gpu.flops.get("float32", 0.0))
        fp8 = gpu.flops.get("fp8")
        row: list[Cell] = [(gpu.name, None), (f"{gpu.bandwidth / 1e9:,.0f}", gpu.bandwidth)]
        row += [(three(wide / 1e12), wide), ("-" if fp8 is None else three(fp8 / 1e12), fp8 or 0.0)]
        rows.append([*row, (f"{gpu.memory / 1e9:.0f}", gpu.memory), (gpu.source, None)])
    names = ["GPU", "bandwidth (GB/s)", "TFLOPS, 16-bit (CPU: 32-bit)", "TFLOPS, FP8", "memory (GB)", "source"]
    return Html(tables.table(names, rows))


def errors(cells: pd.DataFrame) -> Html:
    """Errors of predicted medians by machine and metric, beside what a repeat says of another repeat."""
    summary = predictions.summary(cells)
    if summary.empty:
        return _NONE
    rows: list[list[Cell]] = []
    for row in summary.to_dict("records"):
        fitted = "fitted" if row["fitted"] else "held out"
        head: list[Cell] = [(row["device"], None), (fitted, None), (row["metric"].upper(), None)]
        head.append((str(row["points"]), float(row["points"])))
        shown = ("median", "p90", "within_25", "repeats_median", "repeats_p90")
        rows.append([*head, *(_percent(row[name]) for name in shown)])
    names = ["machine", "cells", "metric", "points", "median error", "p90 error", "within 25 %"]
    names += ["repeats: median", "p90"]
    left = cells[cells["problem"].ne("")].drop_duplicates("cell")
    text = "; ".join(f"{n} cells: {problem}" for problem, n in left["problem"].value_counts(sort=False).items())
    return Html(tables.table(names, rows) + (_note(f"Not predicted: {text}.") if text else ""))


def step_errors(table: pd.DataFrame) -> Html:
    """Errors step by step: decode steps and steps with prompts, by machine and format of weights."""
    if table.empty:
        return _NONE
    rows: list[list[Cell]] = []
    for (device, fitted, kind, weights), own in table.groupby(["device", "fitted", "kind", "weights"], sort=True):
        error = own["error"].abs()
        head: list[Cell] = [(str(device), None), ("fitted" if fitted else "held out", None)]
        head += [(str(kind), None), (str(weights), None), (f"{len(own):,}", float(len(own)))]
        rows.append(
            [*head, *(_percent(float(v)) for v in (error.median(), error.quantile(0.9), own["error"].median()))]
        )
    names = ["machine", "cells", "steps with", "weights", "rows", "median error", "p90 error", "median, signed"]
    return Html(tables.table(names, rows))


def other_gpus(fit: Fit | None) -> Html:
    """Each published rate beside what the costs fitted here make of it, with its source."""
    if fit is None:
        return _NO_GPU
    table = published.check(fit)
    rows: list[list[Cell]] = []
    sources: list[str] = []
    for row in table.to_dict("records"):
        source = f"{row['url']} ({row['note']})"
        if source not in sources:
            sources.append(source)
        what = f"{row['model']}, {row['weights']}{', older kernel' if row['old_kernel'] else ''}"
        head: list[Cell] = [(row["gpu"], None), (what, None), (f"[{sources.index(source) + 1}]", None)]
        head.append((str(row["concurrency"]), float(row["concurrency"])))
        head.append((row["metric"].upper(), None))
        values: list[Cell] = [(seconds(row[name]), float(row[name])) for name in ("measured_s", "predicted_s")]
        rows.append([*head, *values, _percent(row["error"])])
    names = ["GPU", "model, weights", "source", "concurrency", "metric", "published", "predicted", "error"]
    kept = table[~table["old_kernel"]]
    said = ", ".join(
        f"{metric.upper()} {100 * own.abs().median():.1f} % (worst {100 * own.abs().max():.0f} %)"
        for metric, own in ((name, kept.loc[kept["metric"] == name, "error"]) for name in ("tpot", "ttft", "e2e"))
    )
    listed = "; ".join(f"[{number}] {source}" for number, source in enumerate(sources, 1))
    text = f"Median error without the older kernel: {said}. None of these rates was fitted. Sources: {listed}."
    return Html(tables.table(names, rows) + _note(text))


def floors(oracle: Oracle | None) -> Html:
    """The floor of TPOT and TTFT, and the longest output within a second, by format of weights."""
    if oracle is None:
        return _NO_GPU
    longest = outlook.longest(oracle, concurrency=(1, 8, 20, 64))
    rows: list[list[Cell]] = []
    for row in outlook.floors(oracle).to_dict("records"):
        line: list[Cell] = [(row["weights"], None), (three(row["weights_gb"]), float(row["weights_gb"]))]
        line.append((f"{1e3 * row['bytes_tpot_s']:.1f}", float(row["bytes_tpot_s"])))
        for name in ("tpot_s", "ttft_s"):
            low, high = 1e3 * row[f"{name}_low"], 1e3 * row[f"{name}_high"]
            line.append((f"{1e3 * row[name]:.1f} [{low:.1f}, {high:.1f}]", float(row[name])))
        own = longest[longest["weights"] == row["weights"]]
        line += [(f"{n} ({sure})", float(n)) for n, sure in zip(own["tokens"], own["sure"], strict=True)]
        rows.append(line)
    names = ["weights", "GB a step", "TPOT bound (ms)", "TPOT (ms)", "TTFT (ms)"]
    names += [f"in 1 s, {level} at once" for level in (1, 8, 20, 64)]
    note = "Predicted, not measured: TPOT and TTFT of a request alone, and how many tokens an output may have so that "
    note += (
        f"p95 of E2E is under 1 s. {oracle.note} In brackets: the band; in parentheses: tokens even at its upper end."
    )
    note += f" {oracle.unfitted(outlook.formats(oracle))}".rstrip()
    return Html(tables.table(names, rows) + _note(note))


def thread(oracle: Oracle | None, studies: Sequence[records.Records]) -> Html:
    """The thread's numbers in this picture, and what may lie between."""
    if oracle is None:
        return _NO_GPU
    said = outlook.THREAD
    row = next(row for row in outlook.thread(oracle).to_dict("records") if row["weights"] == "bf16")
    ratios = [three(said[name] / row["e2e_s"]) for name in ("e2e_s", "e2e_not_streaming_s")]
    text = [
        f"The thread reports {said['e2e_s']} s a request streaming and {said['e2e_not_streaming_s']} s not, "
        f"{said['requests']:.0f} at once, {said['output_tokens']:.0f} tokens each. Predicted for bf16 weights and CUDA "
        f"graphs: {three(row['e2e_s'])} s [{three(row['e2e_s_low'])}, {three(row['e2e_s_high'])}], so what it reports "
        f"is {ratios[0]} and {ratios[1]} times as slow. Its TTFT of about {said['ttft_s']} s stands against "
        f"{seconds(row['ttft_s'])}.",
        f"A request alone gets {three(row['alone_tokens_per_s'])} tokens/s by prediction. A log line that says "
        f"{said['alone_tokens_per_s']} is no proof of less: vLLM's log averages over 10 s, busy or not.",
    ]
    launch_s = oracle.shape.layers * oracle.fit.costs.launch_s["eager"]
    factor = outlook.eager_factors(studies)["factor"]
    if launch_s and len(factor):
        gpu_s = row["e2e_s"] / said["output_tokens"]
        step_s = (said["e2e_s"] - said["ttft_s"]) / (said["output_tokens"] - 1)
        text.append(
            f"Eager mode is the first suspect: measured on the {oracle.fit.gpu.name}, it multiplies E2E by "
            f"{three(factor.min())} to {three(factor.max())}. But there the GPU waits for the host, which takes "
            f"{1e3 * launch_s:.0f} ms to launch a step; on the {oracle.gpu.name} the host would wait for the GPU, "
            f"which needs {1e3 * gpu_s:.0f} ms. {outlook.EAGER_ELSEWHERE} For {1e3 * step_s:.0f} ms a step the "
            f"thread's host would have to launch {three(step_s / launch_s)} times as slowly as the one measured here, "
            "as a few shared cores of a cloud machine may. What it was, the report does not tell."
        )
    return Html("".join(f"<p>{html.escape(part)}</p>" for part in text))


def recommendation(asked: Question, studies: Sequence[records.Records], known: Mapping[str, Fit]) -> Html:
    """The answer to a question as a page has it: what is asked, the line to paste, the shortlist, and the notes."""
    if not any("16-bit" in fit.gpu.flops for fit in known.values()):
        return _NO_GPU
    found = recommend.recommend(asked, studies, known)
    names = list(asked.slo)
    rows: list[list[Cell]] = []
    for row in recommend.shortlist(found).to_dict("records"):
        line: list[Cell] = [(str(row["what"]), None), (str(row["setting"]) + " *" * bool(row["pareto"]), None)]
        line.append((str(row["meets"]), None))
        line += [(recommend.with_band(row, name), float(row[f"{name}_s"])) for name in names]
        line += [(three(row["goodput_per_s"]), float(row["goodput_per_s"]))]
        line += [(f"{row['output_tokens_per_s']:,.0f}", float(row["output_tokens_per_s"]))]
        rows.append(line)
    heads = ["from", "setting", "meets", *(name.replace("_", " ") for name in names)]
    heads += ["goodput (requests/s)", "output tokens/s"]
    load = f"{asked.concurrency} at once" if asked.concurrency else f"{asked.rate_per_s:g} requests/s"
    limits = ", ".join(f"{name.replace('_', ' ')} < {seconds(limit)}" for name, limit in asked.slo.items())
    head = f"{asked.model} on {asked.gpu}: {load}, {asked.output_tokens} output tokens, {limits}"
    command = f'<pre class="command">{html.escape(found.command)}</pre>' if found.command else ""
    pareto = (
        f"*: Pareto set of {len(found.candidates)} settings: no other has more goodput and stays further from limits."
    )
    notes = "".join(_note(note) for note in (pareto, *found.notes))
    return Html(f"<p><strong>{html.escape(head)}</strong></p>{command}{tables.table(heads, rows)}{notes}")


def fitted_cells() -> Html:
    """Which cells are fitted; all others are held out."""
    workloads: dict[tuple[str, str], list[str]] = {}
    for study, setting, workload in observations.FITTED:
        workloads.setdefault((study, setting), []).append(workload)
    settings: dict[tuple[str, str], list[str]] = {}
    for (study, setting), points in workloads.items():
        settings.setdefault((study, ", ".join(points)), []).append(setting)
    said = "; ".join(f"{study}: {points} on {', '.join(each)}" for (study, points), each in settings.items())
    return Html(_note(f"Fitted, where it was measured (* is any setting): {said}."))


def _percent(value: float) -> Cell:
    return ("-", float("nan")) if pd.isna(value) else (f"{100 * value:.1f} %", float(value))


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'
