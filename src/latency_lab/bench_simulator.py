"""What predictions rest on and what they cost: the parts `cpu` and `simulator` of `make bench`. No vLLM, no engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import ROOT, files, gpus, machine, metrics, observations, outlook, predictions, records
from latency_lab.fitting import Fit
from latency_lab.simulate import Ask, Load, SimulationError, closed, poisson
from latency_lab.vllm_bench import BenchError

REFERENCE = ROOT / "data" / "reference"
MODEL = "qwen3-4b-instruct-2507"
GPUS = ("H200", "L4")
ROUNDS = 5

_PROMPT, _OUTPUT = outlook.PROMPT_TOKENS, int(outlook.THREAD["output_tokens"])
LOADS: dict[str, Callable[[], list[Load]]] = {
    "thread: 20 at once": lambda: [Load([Ask(_PROMPT, _OUTPUT)] * int(outlook.THREAD["requests"]))],
    "closed loop of 20, 10 requests each": lambda: closed(20, _PROMPT, _OUTPUT, requests_each=10),
    "Poisson arrivals, 16/s, 480 requests": lambda: poisson(16, _PROMPT, _OUTPUT, requests=480),
}


def cost(results: Path) -> None:
    """Print simulated over wall time of the thread's load and others, and of the committed cells; write it as CSV.

    The cells' simulated time is that of the recorded requests, from the first one sent to the last token. Raises
    BenchError where no GPU's records are there to fit.
    """
    studies = [records.load(path) for path in records.studies(REFERENCE)]
    known = predictions.fits(studies)
    rows = [row for gpu in GPUS for row in _loads(gpu, studies, known)]
    rows += [row for study in studies if (row := _replayed(study, known))]
    table = pd.DataFrame(rows)
    table["ratio"] = table["simulated_s"] / table["wall_s"]
    facts = {"machine": machine.device(), "commit": machine.git_commit()}
    files.write_text(table.assign(**facts).to_csv(index=False, float_format="%.4g"), results)
    print(f"simulator: simulated over wall time on one core, median of {ROUNDS} rounds (cells: once)")
    print(table.to_string(index=False, float_format="{:,.4g}".format))


def cpu() -> None:
    """Print this CPU's copy bandwidth and float32 FLOP/s, beside those that predictions for gpus.CPU are made with."""
    bandwidth, flops = gpus.measure_cpu()
    print(f"cpu: {machine.device()}: copies {bandwidth / 1e9:.1f} GB/s, float32 products {flops / 1e12:.3f} TFLOP/s")
    known = gpus.CPU
    print(f"predictions: {known.name}: {known.bandwidth / 1e9:.1f} GB/s, {known.flops['float32'] / 1e12:.3f} TFLOP/s")


def _loads(gpu: str, studies: Sequence[records.Records], known: Mapping[str, Fit]) -> list[dict[str, Any]]:
    oracle = outlook.oracle(gpu, MODEL, studies, known)
    if oracle is None:
        raise BenchError(f"simulator: no GPU was measured in {REFERENCE}, so there are no costs to simulate with")
    engine = oracle.engine("bf16")
    assert engine is not None
    rows = []
    for name, load in LOADS.items():
        walls_s = []
        for _ in range(ROUNDS):
            loads = load()
            began = time.perf_counter()
            run = oracle.run(engine, loads)
            walls_s.append(time.perf_counter() - began)
        simulated_s = float(run.requests["last_token_s"].max())
        row = {"load": name, "on": f"{gpu} (bf16)", "requests": len(run.requests), "steps": len(run.ends_s)}
        rows.append(row | {"simulated_s": simulated_s, "wall_s": statistics.median(walls_s)})
    return rows


def _replayed(study: records.Records, known: Mapping[str, Fit]) -> dict[str, Any] | None:
    """A study's cells that can be predicted, one after another; None where there are none."""
    cells = study.cells[observations.predictable(study.cells) & study.cells["device"].isin(list(known))]
    if cells.empty:
        return None
    requests = study.part(cells).requests_with([*metrics.COLUMNS, "cached_tokens"])
    by_cell = dict(list(requests.groupby("cell")))
    done = count = steps = 0
    simulated_s = wall_s = 0.0
    for cell in cells[cells["cell"].isin(list(by_cell))].to_dict("records"):
        own = by_cell[cell["cell"]]
        began = time.perf_counter()
        try:
            run = predictions.replay(cell, own, known[str(cell["device"])])
        except SimulationError:  # a cell that was made to run out of KV cache, which is not simulated
            continue
        wall_s += time.perf_counter() - began
        done, count, steps = done + 1, count + len(own), steps + len(run.ends_s)
        simulated_s += float(run.requests["last_token_s"].max())
    row = {"load": f"{study.path.name}: {done} recorded cells", "on": str(cells["device"].iloc[0])}
    return row | {"requests": count, "steps": steps, "simulated_s": simulated_s, "wall_s": wall_s}
