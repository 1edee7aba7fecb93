"""Predicted against measured: every recorded cell simulated with the fitted costs of its machine.

What was fitted (observations.FITTED) and what was held out is told apart in every row: other batch sizes, lengths,
budgets and studies than the fitted ones are what the model has to prove itself on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import fitting, gpus, metrics, observations, records, shapes
from latency_lab.fitting import Fit
from latency_lab.roofline import StepTime, engine_of
from latency_lab.simulate import Ask, Load, Run, SimulationError, simulate

METRICS = ("ttft", "tpot", "e2e")
_CELLS = ["study", "device", "setting", "workload", "class_name", "metric", "fitted", "problem"]
_CELLS += ["measured_s", "predicted_s"]
POINT = ["study", "device", "setting", "workload", "class_name"]


def fits(studies: Sequence[records.Records]) -> dict[str, Fit]:
    """A fit for each machine that has cells to fit."""
    found = {}
    for device in sorted({str(name) for study in studies for name in study.cells["device"].dropna()}):
        try:
            found[device] = fitting.fit(studies, device)
        except (ValueError, gpus.GpuError):
            continue
    return found


def cells(studies: Iterable[records.Records], known: dict[str, Fit]) -> pd.DataFrame:
    """Each cell of the machines with a fit, simulated: a row a cell, class of request and metric.

    measured_s, predicted_s : medians over the cell's requests of TTFT, TPOT and E2E
    fitted : whether the cell was fitted; steps, predicted_steps : scheduler steps, as recorded and simulated
    problem : why it was not predicted; empty where it was
    """
    found = []
    for study in studies:
        own = study.cells.assign(fitted=observations.fitted(study.cells))
        requests = study.requests_with([*metrics.COLUMNS, "cached_tokens", "logprob_gaps"])
        extra = requests[["scheduled_s", "cached_tokens", "logprob_gaps"]]
        by_cell = dict(list(metrics.latencies(requests).join(extra).groupby("cell")))
        for cell in own.to_dict("records"):
            if str(cell["device"]) not in known or cell["cell"] not in by_cell:
                continue
            keys = {name: cell[name] for name in (*POINT[:-1], "cell", "repeat", "fitted", "steps")}
            requests = by_cell[cell["cell"]]
            problem, run = observations.unpredictable(cell), None
            if requests["logprob_gaps"].notna().any():
                problem = problem or "log probabilities are asked for, which cost the engine seconds at their first use"
            if not problem:
                try:
                    run = replay(cell, requests, known[str(cell["device"])])
                except SimulationError as error:
                    problem = str(error)
            found += [keys | row | {"problem": problem} for row in _medians(requests, run)]
    return pd.DataFrame(found, columns=_CELLS if not found else None)


def replay(cell: observations.Cell, requests: pd.DataFrame, fit: Fit) -> Run:
    """The cell's requests through the simulator: closed loops as such, others when they were due."""
    engine = engine_of(cell, observations.weights_of(cell))
    time = StepTime(shapes.shape(str(cell["model"])), fit.gpu, fit.costs, engine)
    loads = []
    for name, own in requests.sort_values("request").groupby("class_name", sort=False):
        lone = cell["load"] == "closed"
        prompts = (own["prompt_tokens"] - own["cached_tokens"].fillna(0)).astype(int).tolist()
        due_s = [0.0] * len(own) if lone else own["scheduled_s"].tolist()
        asks = [Ask(*ask) for ask in zip(prompts, own["output_tokens"].astype(int).tolist(), due_s, strict=True)]
        loads.append(Load(asks, int(cell["concurrency"]) if lone else None, str(name)))
    return simulate(loads, engine, time, fit.costs)


def points(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of `cells` pooled over repeats: a row a workload point, class and metric, with the error of the prediction.

    error : predicted over measured, minus 1; spread : largest over smallest median of the repeats
    """
    known = table[table["problem"].eq("") & table["measured_s"].notna() & (table["measured_s"] > 0)]
    grouped = known.groupby([*POINT, "metric"], sort=False)
    out = grouped[["measured_s", "predicted_s"]].median()
    out["fitted"] = grouped["fitted"].any()
    out["spread"] = grouped["measured_s"].max() / grouped["measured_s"].min()
    out["error"] = out["predicted_s"] / out["measured_s"] - 1
    return out.reset_index()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Median and p90 of the absolute error by machine, fitted or held out, and metric; beside it, the same of a repeat
    as a prediction of the other repeats of its point, which no model can do better than. Empty where nothing was
    predicted.
    """
    found = []
    pooled = points(table)
    for (device, fitted, metric), own in pooled.groupby(["device", "fitted", "metric"], sort=False):
        same = table[(table["device"] == device) & (table["metric"] == metric) & (table["fitted"] == fitted)]
        error, noise = own["error"].abs(), _between_repeats(same)
        found.append(
            {
                "device": device,
                "fitted": bool(fitted),
                "metric": metric,
                "points": len(own),
                "median": error.median(),
                "p90": error.quantile(0.9),
                "within_25": float((error <= 0.25).mean()),
                "repeats_median": noise.median(),
                "repeats_p90": noise.quantile(0.9),
            }
        )
    if not found:
        return pd.DataFrame()
    order = {metric: number for number, metric in enumerate(METRICS)}
    return pd.DataFrame(found).sort_values(
        ["device", "fitted", "metric"], key=lambda c: c.map(order) if c.name == "metric" else c, ignore_index=True
    )


def steps(studies: Iterable[records.Records], known: dict[str, Fit]) -> pd.DataFrame:
    """Step by step: the rows that observations.rows takes from steps, of all cells, with what the costs make of them.

    Adds predicted_s and error (predicted over recorded, minus 1) and whether the row's cell was fitted. Empty where no
    machine has a fit.
    """
    found = []
    for study in studies:
        for device, fit in known.items():
            own = study.cells[study.cells["device"] == device]
            usable = observations.predictable(own)
            table = observations.rows(study, own[usable]) if usable.any() else pd.DataFrame()
            if table.empty:
                continue
            table = table[table["weights"].isin(fit.costs.kernel_s)].reset_index(drop=True)
            table["predicted_s"] = fitting.predicted_s(table, fit)
            marks = own.set_index("cell").assign(fitted=observations.fitted(own).to_numpy())
            found.append(table.join(marks[["setting", "workload", "repeat", "fitted"]], on="cell"))
    if not found:
        return pd.DataFrame()
    out = pd.concat(found, ignore_index=True)
    return out.assign(error=out["predicted_s"] / out["took_s"] - 1)


def _medians(requests: pd.DataFrame, run: Run | None) -> Iterable[dict[str, Any]]:
    for name, own in requests.groupby("class_name", sort=False):
        simulated = None if run is None else run.requests[run.requests["class_name"] == name]
        for metric in METRICS:
            yield {
                "class_name": name,
                "metric": metric,
                "measured_s": own[f"{metric}_s"].median(),
                "predicted_s": np.nan if simulated is None else simulated[f"{metric}_s"].median(),
                "predicted_steps": np.nan if run is None else len(run.ends_s),
            }


def _between_repeats(table: pd.DataFrame) -> pd.Series:
    """Absolute error of each repeat's median as a prediction of the median of the other repeats of its point."""
    found = []
    for _, own in table[table["problem"].eq("")].groupby([*POINT, "metric"], sort=False):
        values = own["measured_s"].dropna().to_numpy()
        found += [abs(values[i] / np.median(np.delete(values, i)) - 1) for i in range(len(values)) if len(values) > 1]
    return pd.Series(found, dtype=float)
