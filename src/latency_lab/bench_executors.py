"""Does a sweep on Ray measure the same as one without, and what does it cost? The part `executors` of `make bench`.

The same small study (notebooks/studies/executors.yaml) is swept by `python -m latency_lab sweep` on this machine with
the local executor and with a Ray of its own, in alternation. Under Ray an engine gets all cores of a machine without
GPUs, so one engine runs at a time both ways: two beside each other would share caches and memory bandwidth, pinned or
not, and that is not a matter of the executor. What a sweep costs beside its engine starts is timed by the same command
once more, which then finds nothing to measure.

The rule, fixed before the measurement: a metric agrees where the 95 % interval of its ratio, Ray to local, holds 1.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from latency_lab import ROOT, effects, files, records
from latency_lab.vllm_bench import BenchError

STUDY = ROOT / "notebooks" / "studies" / "executors.yaml"
ROUNDS = 2
"""In one go, of two engine starts each way; every go adds as many to those before."""

WAYS = ("local", "ray")
METRICS = ("ttft_p50_s", "tpot_p50_s", "e2e_p50_s", "output_tokens_per_s")
ANSWER_S = 900


def compare(results: Path) -> None:
    """Add some rounds to `results`, and print both ways over all of them. Raises BenchError where a sweep fails."""
    results.mkdir(parents=True, exist_ok=True)
    first = next(number for number in range(10_000) if not (results / f"round-{number}").exists())
    for number in range(first, first + ROUNDS):
        with tempfile.TemporaryDirectory(dir=results) as folder:  # a round that breaks off leaves nothing
            ways = WAYS if number % 2 == 0 else WAYS[::-1]
            times = {way: _swept(Path(folder) / way, way) for way in ways}
            files.write_text(json.dumps(times), Path(folder) / "times.json")
            shutil.copytree(folder, results / f"round-{number}", symlinks=True)
    rounds = sorted(results.glob("round-*"))
    print(text([json.loads((one / "times.json").read_text()) for one in rounds], *_records(rounds)))


def _swept(folder: Path, way: str) -> dict[str, float]:
    """Seconds of a sweep from its command to its end, and of the same command once all is measured."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    (folder / "models").symlink_to(ROOT / "data" / "models")
    command = [sys.executable, "-m", "latency_lab", "sweep", str(STUDY), "--runs", str(runs), "--executor", way]
    walls = []
    for _ in range(2):
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
        walls.append(time.monotonic() - began)
        if done.returncode:
            raise BenchError(f"{way}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    cells = records.load(runs / STUDY.stem).cells
    started = cells.groupby("setting")["engine_start_s"].first()
    return {
        "wall_s": walls[0],
        "fixed_s": walls[1],
        "settings": len(started),
        "starting_s": float(started.sum()),
        "in_cells_s": float(cells["duration_s"].sum()),
    }


def _records(rounds: list[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and cells of all rounds, with the way as the setting's last word, and every repeat of its own number."""
    found: dict[str, list[pd.DataFrame]] = {"requests": [], "cells": []}
    for number, path in enumerate(rounds):
        for way in WAYS:
            study = records.load(path / way / "runs" / STUDY.stem)
            for kind, table in (("requests", study.requests), ("cells", study.cells)):
                own = {"setting": table["setting"] + f" {way}", "repeat": table["repeat"] + 1000 * number}
                found[kind].append(table.assign(**own))
    requests, cells = (pd.concat(found[kind], ignore_index=True) for kind in ("requests", "cells"))
    return requests, cells


def text(times: list[dict[str, Any]], requests: pd.DataFrame, cells: pd.DataFrame) -> str:
    """Both ways as Markdown: seconds of a sweep (medians over the rounds), and the ratios of the metrics."""
    one = cells.iloc[0]
    head = f"{one['device']}, vLLM {one['vllm_version']}, {len(times)} rounds, one engine at a time both ways."
    lines = [
        head,
        "",
        "| executor | fixed | each engine start, notebook and cells | of it neither |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        own = [round_[way] for round_ in times]
        fixed = statistics.median(one["fixed_s"] for one in own)
        each = statistics.median((one["wall_s"] - one["fixed_s"]) / one["settings"] for one in own)
        spent = statistics.median((one["starting_s"] + one["in_cells_s"]) / one["settings"] for one in own)
        lines.append(f"| {way} | {fixed:.1f} s | {each:.1f} s | {each - spent:.1f} s |")
    lines += ["", "| metric | setting | workload | ray / local | 95 % interval |", "|---|---|---|---|---|"]
    agreeing = 0
    pairs = ratios(requests).to_dict("records")
    for row in pairs:
        agreeing += row["low"] <= 1 <= row["high"]
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(f"| {row['metric']} | {row['setting']} | {row['workload']} | {row['ratio']:.3f} | {interval} |")
    return "\n".join([*lines, "", f"{agreeing} of {len(pairs)} metrics agree (the interval holds 1)."])


def ratios(requests: pd.DataFrame) -> pd.DataFrame:
    """Ray's metrics over the local executor's: one row a metric, setting and workload, with the ratio's interval."""
    labels = requests["setting"].str.rsplit(" ", n=1).str[0]
    rows = []
    for (label, workload), own in requests.groupby([labels, requests["workload"]], sort=True):
        for metric in METRICS:
            found = effects.effect(own, metric, (f"{label} ray", f"{label} local"))
            if not found.problem:
                row = {"metric": metric, "setting": label, "workload": workload}
                rows.append(row | {"ratio": found.value, "low": found.low, "high": found.high})
    return pd.DataFrame(rows)
