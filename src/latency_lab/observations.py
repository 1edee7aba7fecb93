"""What recorded scheduler steps say of a step's cost: the rows that fitting.py fits, and that check its fit.

With async scheduling a step is chosen and launched while the one before runs, and its predecessor's tokens come back
only when the launch is done. So two kinds of rows give times that are the GPU's:

- decode: steps among decode steps, whose launch is hidden. A row is the median of a cell's steps of the same number of
  requests and, within a factor of two, the same context.
- prefill: a step with a long prompt together with the step whose tokens it held back; long enough (LONG_PREFILL) that
  the GPU, not the launch, took the time. Without async scheduling each step stands for itself.

What the host takes to launch a step that is not one graph shows in how long it held up the tokens of the step before,
or the choice of the next.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import gpus, lists, records, shapes
from latency_lab.models import ModelError
from latency_lab.roofline import Engine, captured, engine_of

Cell = Mapping[Any, Any]
"""A row of `cells`."""

FITTED = (
    ("h200-batching", "budget=8192 seqs=256", "chat c=1"),
    ("h200-batching", "budget=8192 seqs=256", "chat c=64"),
    ("h200-batching", "budget=8192 seqs=256", "long-prompts"),
    ("h200-batching", "fp8-weights", "chat c=1"),
    ("h200-batching", "fp8-weights", "chat c=64"),
    ("h200-batching", "fp8-weights", "long-prompts"),
    ("h200-batching", "eager", "chat c=1"),
    # Not those that share a format with one of these: whether its costs are theirs as well is what they check.
    *(
        ("h200-quantization", setting, workload)
        for setting in ("bf16", "fp8", "awq-int4", "w8a8-int8")
        for workload in ("alone c=1", "chat c=128", "document c=1")
    ),
    ("cpu-smoke", "*", "chat c=1"),
    ("cpu-smoke", "*", "long-prompts"),
    ("cpu-smoke", "budget=512 seqs=32", "chat c=20"),
)
"""Study, setting and workload point (globs) of the cells that are fitted; all others of these machines are held out."""

LONG_PREFILL = 4096
LEAST_STEPS = 10
"""Fewer steps than this make no median of decode steps."""
_SUMMED = ("took_s", "requests", "tokens", "context", "pairs")


def fitted(cells: pd.DataFrame) -> pd.Series:
    """Which cells are fitted."""
    keys = zip(cells["study"], cells["setting"], cells["workload"], strict=True)
    return pd.Series(
        [any(all(map(fnmatch.fnmatchcase, key, globs)) for globs in FITTED) for key in keys], cells.index, bool
    )


def weights_of(cell: Cell) -> str:
    """The format of a measured cell's weights, from vLLM's quantization and dtype."""
    quantization: str = "" if pd.isna(cell["quantization"]) else str(cell["quantization"])
    if not quantization:
        return "float32" if cell["dtype"] == "float32" else "bf16"
    if "fp8" in quantization:
        return "fp8"
    return "int4" if "awq" in quantization or "gptq" in quantization else "int8"


def unpredictable(cell: Cell) -> str:
    """Why the model of roofline.py and simulate.py does not speak of a measured cell; empty where it does."""
    if cell["status"] != "done":
        return f"{cell['status']}"
    try:
        shapes.shape(str(cell["model"]))
    except ModelError as error:
        return str(error)
    try:
        gpu = gpus.find(str(cell["device"]))
    except gpus.GpuError as error:
        return str(error)
    if weights_of(cell) == "float32" and "float32" not in gpu.flops:
        return "float32 on a GPU"
    if cell["scheduling_policy"] != "fcfs":
        return "priority scheduling"
    if (cell["tensor_parallel_size"], cell["pipeline_parallel_size"]) != (1, 1):
        return "more than one GPU"
    return ""


def predictable(cells: pd.DataFrame) -> pd.Series:
    """Which cells the model speaks of."""
    return pd.Series([not unpredictable(cell) for cell in cells.to_dict("records")], cells.index, bool)


def work(steps: pd.DataFrame) -> pd.DataFrame:
    """What each step computed, a row a step in order, and when the step before it had ended (before_s).

    tokens, prefill : computed, and of these first computations of a prompt's
    context : tokens whose keys and values are read, over all requests
    pairs : of a computed token and one that it looks at
    """
    ordered = steps.sort_values(["cell", "engine", "step"], kind="stable", ignore_index=True)
    (tokens, count), (computed, _), (prefill, _) = (
        lists.flat(ordered[name]) for name in ("tokens", "computed", "prefill")
    )
    row = np.repeat(np.arange(len(ordered)), count)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(row, values, len(ordered))

    keys = ["study", "setting", "workload", "repeat", "cell", "engine", "step", "start_s", "end_s"]
    return ordered[keys].assign(
        before_s=ordered.groupby(["cell", "engine"])["end_s"].shift(),
        requests=count,
        tokens=total(tokens),
        prefill=total(prefill),
        context=total(computed + tokens),
        pairs=total(tokens * (computed + (tokens + 1) / 2)),
    )


def rows(study: records.Records, cells: pd.DataFrame) -> pd.DataFrame:
    """The rows to fit of some cells of a study: took_s and what was computed meanwhile (see `work`), summed over steps.

    kind : decode or prefill; weights : the format; steps : in the sum; tokens : padded as they were computed
    """
    table = work(study.part(cells).steps)
    by_cell = dict(list(table.groupby("cell", sort=False)))
    found: list[dict[str, Any]] = []
    for cell in cells.to_dict("records"):
        if cell["cell"] not in by_cell:
            continue
        own = by_cell[cell["cell"]].reset_index(drop=True)
        engine = engine_of(cell, weights_of(cell))
        own["tokens"] = padded(own["tokens"].to_numpy(), engine)
        keys = {name: cell[name] for name in ("study", "device", "cell", "model")} | {"weights": engine.weights}
        found += [keys | row for row in (*_decode(own, engine), *_prefill(own, engine))]
    return pd.DataFrame(found)


def padded(tokens: np.ndarray, engine: Engine) -> np.ndarray:
    """Tokens as they are computed: those of the next captured graph, where there is one."""
    sizes = np.array(captured(engine.max_num_seqs) if engine.graphs else [])
    at = np.searchsorted(sizes, tokens)
    return np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], tokens) if len(sizes) else tokens


def launches(study: records.Records, cells: pd.DataFrame) -> pd.DataFrame:
    """What the host took to launch steps that are not one graph: a row for each, with the kind of launch and seconds.

    Only async scheduling shows it: the launch of a step held up the tokens of the step before if that ran, and else
    the choice of the next step.
    """
    table = work(study.part(cells).steps)
    found = []
    for cell in cells.to_dict("records"):
        engine = engine_of(cell, weights_of(cell))
        own = table[table["cell"] == cell["cell"]]
        if own.empty or not engine.asynchronous:
            continue
        largest = captured(engine.max_num_seqs)[-1]
        kind = np.where(own["tokens"] > largest, "kernels", np.where(own["prefill"] > 0, "pieces", "graph"))
        kind = kind if engine.graphs else np.full(len(own), "eager")
        held_s = own["before_s"] - own["start_s"]
        next_s = own["start_s"].shift(-1) - own["start_s"]
        # What follows a step that ran alone is chosen when it has been launched, unless there was nothing to choose.
        alone = next_s.where((held_s.isna() | (held_s < 0)) & (next_s < own["end_s"] - own["start_s"]))
        seconds = held_s.where(held_s > 0).fillna(alone)
        part = pd.DataFrame({"cell": cell["cell"], "launch": kind, "launch_s": seconds, "prefill": own["prefill"]})
        found.append(part[part["launch_s"].notna() & ((part["prefill"] > 0) | (kind == "eager"))])
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["cell", "launch", "launch_s"])


def front_end(study: records.Records, cells: pd.DataFrame) -> pd.DataFrame:
    """What requests take on their way, a row a cell: seconds to the scheduler (inbound_s), from a step's end to the
    client (outbound_s), both of a cell's first request, and between requests sent at once (spacing_s).
    """
    steps = study.part(cells).steps
    first = steps[steps["start_s"] >= 0].sort_values("step").groupby("cell")[["start_s", "end_s"]].first().T.to_dict()
    found = []
    requests = study.part(cells).requests_with(["cell", "concurrency", "sent_s", "first_token_s"])
    for cell, own in requests.groupby("cell", sort=False):
        if cell not in first:
            continue
        at_once = own["concurrency"].iloc[0]
        early = own.sort_values("sent_s").head(1 if pd.isna(at_once) else int(at_once))
        lone = early.iloc[0] if len(early) == 1 else None
        found.append(
            {
                "cell": cell,
                "inbound_s": np.nan if lone is None else first[cell]["start_s"] - lone["sent_s"],
                "outbound_s": np.nan if lone is None else lone["first_token_s"] - first[cell]["end_s"],
                "spacing_s": early["sent_s"].diff().median() if len(early) > 1 else np.nan,
            }
        )
    return pd.DataFrame(found, columns=["cell", "inbound_s", "outbound_s", "spacing_s"])


def _decode(own: pd.DataFrame, engine: Engine) -> Iterable[dict[str, Any]]:
    """Medians of decode steps among decode steps."""
    quiet = own["prefill"] == 0
    if engine.asynchronous:
        # A step of prompts holds back the tokens of the step before it, and its own end may be held back likewise.
        for shift in (-1, 1, 2):
            quiet &= own["prefill"].shift(shift, fill_value=1) == 0
    if engine.asynchronous and not engine.graphs:
        return  # the host's time, not the GPU's
    steps = own[quiet & own["end_s"].notna()]
    took_s = steps["end_s"] - np.fmax(steps["start_s"], steps["before_s"])
    doubling = np.floor(np.log2(steps["context"] / steps["requests"]))
    grouped = steps.assign(took_s=took_s).groupby([steps["requests"].rename("width"), doubling.rename("length")])
    enough = grouped.size() >= LEAST_STEPS
    for total in grouped[list(_SUMMED)].median()[enough].to_dict("records"):
        yield _row("decode", 1, total, engine)


def _prefill(own: pd.DataFrame, engine: Engine) -> Iterable[dict[str, Any]]:
    """Steps with a long prompt, each with the one whose tokens it held back; of a synchronous engine all prefills."""
    least = LONG_PREFILL if engine.asynchronous else 1
    prefill, start_s, before_s, end_s = (
        own[name].to_numpy(float) for name in ("prefill", "start_s", "before_s", "end_s")
    )
    work = own[["requests", "tokens", "context", "pairs"]].to_numpy(float)
    for at in np.flatnonzero((prefill >= least) & ~np.isnan(end_s)):
        first = at
        if before_s[at] > start_s[at]:
            first = at - 1
            if first < 2 or (prefill[first - 2 : at] > 0).any():
                continue  # what ran before would be counted in
        took_s = end_s[at] - np.fmax(start_s[first], before_s[first])
        total = dict(zip(_SUMMED, (took_s, *work[first : at + 1].sum(axis=0)), strict=True))
        yield _row("prefill", int(at - first + 1), total, engine)


def _row(kind: str, steps: int, total: Mapping[Any, float], engine: Engine) -> dict[str, Any]:
    return {"kind": kind, "steps": steps, "cache": engine.cache} | {name: float(total[name]) for name in _SUMMED}
