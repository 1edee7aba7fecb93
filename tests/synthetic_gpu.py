"""Costs of a made-up GPU, and a study whose steps and requests took exactly what they say: for tests, never results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import synthetic

from latency_lab import gpus, records, schemas, shapes
from latency_lab.fitting import Fit
from latency_lab.roofline import Costs, Engine, StepTime
from latency_lab.simulate import closed, simulate

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
QWEN = shapes.shape(MODEL)
COSTS = Costs(
    kernel_s={"bf16": 50e-6, "fp8": 60e-6},
    request_s=3e-6,
    bandwidth_fraction=0.8,
    flops_fraction={"bf16": 0.7, "fp8": 0.5},
    launch_s={"graph": 0.0, "pieces": 0.4e-3, "kernels": 0.8e-3, "eager": 0.6e-3},
    inbound_s=1e-3,
    outbound_s=1e-3,
)
FIT = Fit("NVIDIA H200", gpus.find("H200"), COSTS, pd.DataFrame(), 1, 1)
KNOWN = {"NVIDIA H200": FIT}


def made_up(costs: Costs, concurrency: tuple[int, ...] = (1, 64), noise: float = 0.0) -> records.Records:
    """Decode steps, and a long prompt in each cell, that took exactly what the costs say of an H200."""
    gpu, rng = gpus.find("H200"), np.random.default_rng(0)
    cells, steps = [], []
    for setting, weights in (("budget=8192 seqs=256", "bf16"), ("fp8-weights", "fp8")):
        time = StepTime(QWEN, gpu, costs, Engine(256, 8192, weights))
        for width in concurrency:
            name = f"{weights}-{width}"
            cells.append(cell(name, setting, f"chat c={width}", weights))
            at = 0.0
            for number in range(60):
                long = 6000 if number == 40 else 0
                context = [32 + number] * width + [6000] * bool(long)
                tokens = [1] * width + [long] * bool(long)
                pairs = sum(t * (c + (t + 1) / 2) for t, c in zip(tokens, [31 + number] * width + [0], strict=False))
                took = time.gpu_s(time.padded(sum(tokens)), len(tokens), sum(context), pairs)
                took *= 1 + noise * rng.standard_normal()
                steps.append(
                    {
                        **{key: cells[-1][key] for key in (field.name for field in schemas.KEYS)},
                        "engine": 0,
                        "step": number,
                        "start_s": at - 1e-3,
                        "end_s": at + took,
                        "requests": list(range(len(tokens))),
                        "tokens": tokens,
                        "computed": [c - t for c, t in zip(context, tokens, strict=True)],
                        "prefill": [0] * width + [long] * bool(long),
                        "recomputed": [0] * len(tokens),
                    }
                )
                at += took
    study = records.Records(Path("made-up"), synthetic.cells(cells))
    study.__dict__["requests"] = synthetic.frame([synthetic.request(cell=one["cell"]) for one in cells])
    study.__dict__["steps"] = records.to_pandas(records.table(steps, schemas.STEPS))
    return study


def answered(slower: float = 1.0) -> records.Records:
    """Chats on three settings, whose requests took `slower` times as long as the simulator says."""
    cells, rows = [], []
    settings = {"budget=8192 seqs=256": ("bf16", True), "fp8-weights": ("fp8", True), "eager": ("bf16", False)}
    for setting, (weights, graphs) in settings.items():
        for width in (1, 20):
            own = cell(f"{setting}-{width}", setting, f"chat c={width}", weights)
            own |= {"concurrency": width, "enforce_eager": not graphs}
            engine = Engine(256, 8192, weights, graphs=graphs)
            time = StepTime(QWEN, FIT.gpu, COSTS, engine)
            made = simulate(closed(width, 32, 16, 2), engine, time, COSTS).requests
            keys = {name: own[name] for name in ("study", "cell", "setting", "workload", "concurrency")}
            for number, row in enumerate(made.to_dict("records")):
                latency = [slower * row[name] for name in ("ttft_s", "e2e_s")]
                times = np.linspace(*latency, 16)
                sent = {"sent_s": row["scheduled_s"], "scheduled_s": row["scheduled_s"]}
                rows.append(
                    synthetic.request(**keys, **sent, request=number, prompt_tokens=32, token_times_s=times.tolist())
                )
            cells.append(own)
    study = records.Records(Path("answered"), synthetic.cells(cells))
    study.__dict__["requests"] = synthetic.frame(rows)
    study.__dict__["steps"] = records.to_pandas(records.table([], schemas.STEPS))
    return study


def cell(name: str, setting: str, workload: str, weights: str) -> dict[str, object]:
    return synthetic.cell(
        study="h200-batching",
        cell=name,
        setting=setting,
        workload=workload,
        model="qwen3-4b-instruct-2507",
        device="NVIDIA H200",
        dtype="bfloat16",
        quantization="fp8" if weights == "fp8" else None,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        async_scheduling=True,
        enforce_eager=False,
        scheduling_policy="fcfs",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        status="done",
    )
