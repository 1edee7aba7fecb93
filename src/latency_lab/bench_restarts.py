"""What engine starts cost a sweep: the parts `restarts` and `restarts-vllm` of `make bench`.

One grid of 24 cells (notebooks/studies/restarts.yaml), swept as a user sweeps it: by this study with an engine for each
setting (cold) and with one for all (hot), and by `vllm bench sweep serve` with the same engine arguments, lengths and
concurrencies. Wall time is that of the whole command, from its start until it has ended.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import ROOT, engine, files, machine, models, records, vllm_args, vllm_bench
from latency_lab.study import Study, load_study
from latency_lab.vllm_bench import BenchError

STUDY = ROOT / "notebooks" / "studies" / "restarts.yaml"
HOT, COLD, VLLM = "this study, hot", "this study, cold", "vllm bench sweep serve"
ANSWER_S = 1800


def ours(results: Path) -> None:
    """Wall time of the grid with `engine_reuse: hot` and with cold, by `python -m latency_lab sweep`."""
    text = STUDY.read_text()
    for way, reuse in ((HOT, "hot"), (COLD, "cold")):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / STUDY.name
            path.write_text(text.replace("engine_reuse: hot", f"engine_reuse: {reuse}"))
            command = [sys.executable, "-m", "latency_lab", "sweep", str(path), "--runs", str(Path(name) / "runs")]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
            wall_s = time.monotonic() - began
            if done.returncode:
                raise BenchError(f"{way}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
            cells = records.load(Path(name) / "runs" / STUDY.stem).cells
            _note(results, way, wall_s, len(cells), cells["engine_start_s"].nunique(), cells["duration_s"].sum())
    show(results)


def vllms(results: Path) -> None:
    """Wall time of the same grid by vLLM's own tool, which starts a server for each setting and a client for each cell.

    Its server is started as `python -m vllm.entrypoints.openai.api_server` (see vllm_bench.py), on 127.0.0.1.
    """
    study = load_study(STUDY, vllm_args.installed())
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        asyncio.run(vllm_bench.run("sweep serve", _options(study, Path(name)), _environment(), timeout_s=ANSWER_S))
        wall_s = time.monotonic() - began
        found = [json.loads(path.read_text())[0] for path in Path(name).glob("grid/*/summary.json")]
    if short := [run for run in found if run["completed"] < run["num_prompts"]]:
        raise BenchError(f"{VLLM}: {len(short)} of {len(found)} cells completed fewer requests than they were to")
    _note(results, VLLM, wall_s, len(found), len(study.settings()), sum(run["duration"] for run in found))
    show(results)


def _options(study: Study, folder: Path) -> dict[str, Any]:
    """The study's grid as options of `vllm bench sweep serve`; its points have one class, a closed loop."""
    model = models.prepare(study.model, ROOT / "data" / "models")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    varied = ("max_num_batched_tokens", "max_num_seqs")
    fixed = {key: value for key, value in study.settings()[0].args.items() if key not in varied}
    if not machine.has_gpu():
        fixed["distributed_executor_backend"] = "uni"
    serve = {"host": "127.0.0.1", "port": port, "model": model.location, "seed": study.seed, **fixed}
    (traffic,) = {point.classes[0].prompt.tokens for point in study.points() if point.classes[0].prompt}
    (output,) = {point.classes[0].output.tokens for point in study.points() if point.classes[0].output}
    bench = {
        "base_url": f"http://127.0.0.1:{port}",
        "model": model.location,
        "dataset_name": "random",
        "random_input_len": traffic,
        "random_output_len": output,
        "ignore_eos": True,
        "num_warmups": study.warmup,
        "temperature": 0,
    }
    loads = [point.classes[0].load for point in study.points()]
    params = {
        "serve": [{key: setting.args[key] for key in varied} for setting in study.settings()],
        "bench": [
            {"max_concurrency": load.concurrency, "num_prompts": (load.concurrency or 0) * (load.requests_each or 0)}
            for load in loads
        ],
    }
    for side, values in params.items():
        (folder / f"{side}.json").write_text(json.dumps(values))
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *vllm_bench.flags(serve)]
    return {
        "serve_cmd": shlex.join(server),
        "bench_cmd": shlex.join(vllm_bench.command("serve", bench)),
        "after_bench_cmd": "true",  # what it would do resets a prefix cache, which is off here
        "serve_params": folder / "serve.json",
        "bench_params": folder / "bench.json",
        "num_runs": study.repeats,
        "output_dir": folder,
        "experiment_name": "grid",
    }


def _environment() -> dict[str, str]:
    return {**engine.default_env(), "HF_HUB_OFFLINE": "1"}


def _note(results: Path, way: str, wall_s: float, cells: int, starts: int, cells_s: float) -> None:
    """Keep one way's figures in a table, in place of those of an earlier run."""
    facts = machine.provenance()
    names = ("device", "vllm_version", "git_commit")
    row = {"way": way, "cells": cells, "engine_starts": starts, "wall_s": wall_s, "in_cells_s": cells_s}
    row |= {name: facts[name] for name in names} | {"date": f"{datetime.date.today()}"}
    rows = _rows(results)
    rows = [one for one in rows if one["way"] != way] + [row]
    files.write_text(pd.DataFrame(rows).to_csv(index=False, float_format="%.1f"), results)


def _rows(results: Path) -> list[dict[Any, Any]]:
    return pd.read_csv(results).to_dict("records") if results.exists() else []


def show(results: Path) -> None:
    """Print what is known so far."""
    print(text(pd.read_csv(results)))


def text(table: pd.DataFrame) -> str:
    """The ways of sweeping the grid as Markdown, the quickest first."""
    first = table.iloc[0]
    lines = [
        f"{first['device']}, vLLM {first['vllm_version']}, {first['date']}.",
        "",
        "| way | cells | engine starts | wall time | of it in cells |",
        "|---|---|---|---|---|",
    ]
    for row in table.sort_values("wall_s").to_dict("records"):
        times = f"{row['wall_s']:.0f} s | {row['in_cells_s']:.0f} s"
        lines.append(f"| {row['way']} | {row['cells']} | {row['engine_starts']} | {times} |")
    return "\n".join(lines)
