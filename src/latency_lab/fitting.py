"""Fit `roofline.Costs` to the rows of a few cells (observations.py), so that the others can check the fit.

A step's time on the GPU is linear in what is fitted, so the fit is a least-squares one of relative errors, with no cost
below what is possible. Each kind of row (a format's decode steps, its prefill steps) weighs the same, however many
there are. Intervals are bootstraps over cells, since steps of one cell share its moods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import gpus, observations, records, shapes
from latency_lab.gpus import Gpu
from latency_lab.roofline import LAUNCHES, Costs
from latency_lab.shapes import FORMATS, Shape

DRAWS = 200
"""Bootstrap draws of an interval: each draws the fitted cells anew."""


@dataclass(frozen=True)
class Fit:
    """Costs fitted on one machine, and how sure they are.

    device : its name in the records
    table : a row a fitted cost: name, unit, value, low and high (95 % bootstrap over cells), note
    cells, rows : how much was fitted
    """

    device: str
    gpu: Gpu
    costs: Costs
    table: pd.DataFrame
    cells: int
    rows: int

    def costs_of(self, weights: str) -> Costs:
        """The costs for a format of weights; of one that was not fitted those of unquantized weights."""
        if weights in self.costs.kernel_s:
            return self.costs
        plain = next(name for name in ("bf16", "float32") if name in self.costs.kernel_s)
        return replace(
            self.costs,
            kernel_s={**self.costs.kernel_s, weights: self.costs.kernel_s[plain]},
            flops_fraction={**self.costs.flops_fraction, weights: self.costs.flops_fraction[plain]},
        )


def fit(studies: Sequence[records.Records], device: str, draws: int = DRAWS) -> Fit:
    """The costs of a machine from the FITTED cells of its studies. Raises ValueError where there are none."""
    gpu = gpus.find(device)
    parts, held, ends = [], [], []
    for study in studies:
        cells = study.cells[study.cells["device"] == device]
        cells = cells[observations.fitted(cells) & observations.predictable(cells)]
        if len(cells):
            parts.append(observations.rows(study, cells))
            held.append(observations.launches(study, cells))
            ends.append(observations.front_end(study, cells))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if table.empty:
        raise ValueError(f"{device}: no steps to fit; allowed: studies that hold cells of observations.FITTED")
    shape = shapes.shape(str(table["model"].iloc[0]))
    table["cache_bytes"] = table["cache"].map(shape.kv_bytes)
    matrix = design(table, shape, gpu)
    names = list(matrix.columns)
    least = np.array([float(name == "bandwidth" or name.startswith("flops")) for name in names])
    values, took_s = matrix.to_numpy(), table["took_s"].to_numpy()
    weight = 1 / np.sqrt(table.groupby(["kind", "weights"])["took_s"].transform("size").to_numpy(float))
    best = least_squares(values, took_s, weight, least)
    launch, passing = pd.concat(held, ignore_index=True), pd.concat(ends, ignore_index=True)
    owner, known = pd.factorize(table["cell"])
    rng = np.random.default_rng(0)
    drawn = np.empty((draws, len(names)))
    for draw in drawn:
        count = np.bincount(rng.integers(0, len(known), len(known)), minlength=len(known))[owner]
        draw[:] = least_squares(values, took_s, weight * np.sqrt(count), least)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    costs = _costs(dict(zip(names, best, strict=True)), launch, passing, shape)
    report = _report(names, best, low, high, launch, passing, shape, rng)
    return Fit(device, gpu, costs, report, len(known), len(table))


def design(table: pd.DataFrame, shape: Shape, gpu: Gpu) -> pd.DataFrame:
    """What each row would take, in seconds, for each cost of 1: a second a layer, a second a request, and so on."""
    plain = "float32" if "float32" in set(table["weights"]) else "bf16"
    out = pd.DataFrame(index=table.index)
    out["request_s"] = table["requests"]
    stored = table["steps"] * table["weights"].map(shape.step_bytes) + table["context"] * table["cache_bytes"]
    out["bandwidth"] = stored / gpu.bandwidth
    unquantized = 2 * shape.head_parameters * table["requests"] + shape.attention_flops * table["pairs"]
    out[f"flops {plain}"] = unquantized / gpu.rate(FORMATS[plain].operands)
    linear = 2 * shape.linear_parameters * table["tokens"]
    for name in table["weights"].unique():
        own = table["weights"] == name
        out[f"kernel {name}"] = (table["steps"] * shape.layers).where(own, 0.0)
        spent = (linear / gpu.rate(FORMATS[name].operands)).where(own, 0.0)
        out[f"flops {name}"] = out.get(f"flops {name}", 0.0) + spent
    return out.astype(float)


def predicted_s(table: pd.DataFrame, fit: Fit) -> np.ndarray:
    """What the fitted costs make of rows (see observations.rows), in seconds."""
    shape = shapes.shape(str(table["model"].iloc[0]))
    matrix = design(table.assign(cache_bytes=table["cache"].map(shape.kv_bytes)), shape, fit.gpu)
    costs = fit.costs
    cost = {"request_s": costs.request_s, "bandwidth": 1 / costs.bandwidth_fraction}
    cost |= {f"kernel {name}": value for name, value in costs.kernel_s.items()}
    cost |= {f"flops {name}": 1 / value for name, value in costs.flops_fraction.items()}
    return matrix.to_numpy() @ np.array([cost[str(name)] for name in matrix.columns])


def least_squares(matrix: np.ndarray, target: np.ndarray, weight: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Least squares of relative errors, with no cost below its `least`: 1 for what a GPU can't do faster, else 0.

    Costs that come out lower are held there, the furthest first, until none does.
    """
    scaled = matrix / target[:, None] * weight[:, None]
    rest = weight - scaled @ least
    out, free = least.copy(), list(range(matrix.shape[1]))
    while free:
        solution, *_ = np.linalg.lstsq(scaled[:, free], rest, rcond=None)
        if (solution >= 0).all():
            out[free] += solution
            break
        free.pop(int(solution.argmin()))
    return out


def _costs(best: Mapping[str, float], launch: pd.DataFrame, passing: pd.DataFrame, shape: Shape) -> Costs:
    host = _by_cell(launch).median() / shape.layers
    ways = passing[["inbound_s", "outbound_s", "spacing_s"]].median().fillna(0.0)
    return Costs(
        kernel_s={name.split()[1]: value for name, value in best.items() if name.startswith("kernel ")},
        request_s=best["request_s"],
        bandwidth_fraction=1 / best["bandwidth"],
        flops_fraction={name.split()[1]: 1 / value for name, value in best.items() if name.startswith("flops ")},
        launch_s={kind: float(host.get(kind, 0.0)) for kind in LAUNCHES},
        **{str(name): float(value) for name, value in ways.items()},
    )


def _by_cell(launch: pd.DataFrame) -> Any:
    """Median seconds of a cell's launches, grouped by kind: cells differ more than launches within one do."""
    return launch.groupby(["cell", "launch"])["launch_s"].median().groupby("launch")


def _report(
    names: Sequence[str],
    best: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    launch: pd.DataFrame,
    passing: pd.DataFrame,
    shape: Shape,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """The fitted costs in units that a reader can picture; fractions have their ends swapped, being inverses."""
    found = []
    for name, *ends in zip(names, best, low, high, strict=True):
        kind, _, weights = name.partition(" ")
        with np.errstate(divide="ignore"):
            if kind == "request_s":
                values, unit, called = [1e6 * end for end in ends], "us a request", "requests"
            elif kind == "kernel":
                values, unit, called = [1e6 * end for end in ends], "us a layer", f"kernels, {weights} weights"
            else:
                values = [float(1 / np.float64(end)) for end in (ends[0], ends[2], ends[1])]
                unit = "of the bandwidth" if kind == "bandwidth" else "of the FLOP/s"
                called = "bytes" if kind == "bandwidth" else f"FLOPs, {weights} weights"
        found.append((called, unit, *values))
    texts = {"pieces": "launch in pieces", "kernels": "launch kernel by kernel", "eager": "launch in eager mode"}
    for launched, own in _by_cell(launch):
        found.append((texts[str(launched)], "ms a step", *_median(1e3 * own.to_numpy(), rng)))
    for column, text in (("inbound_s", "client to scheduler"), ("outbound_s", "step's end to client")):
        found.append((text, "ms", *_median(1e3 * passing[column].dropna().to_numpy(), rng)))
    found.append(("between requests sent at once", "ms", *_median(1e3 * passing["spacing_s"].dropna().to_numpy(), rng)))
    return pd.DataFrame(found, columns=["cost", "unit", "value", "low", "high"])


def _median(values: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    if not len(values):
        return (np.nan, np.nan, np.nan)
    drawn = np.median(values[rng.integers(0, len(values), (DRAWS, len(values)))], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)
