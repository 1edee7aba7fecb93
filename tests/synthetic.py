"""Made-up records in the real schema, for tests: never results. A crude engine model gives them believable
shapes.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import files, records, schemas


def request(**values: Any) -> dict[str, Any]:
    """One row of `requests` with everything required filled in; give only what the test is about.

    `token_times_s` alone is enough for a request that completed: first, last and output tokens follow from
    it.
    """
    row: dict[str, Any] = {
        "study": "made-up",
        "cell": "cell0",
        "setting": "a",
        "setting_id": "sa",
        "workload": "chat c=1",
        "workload_id": "w",
        "repeat": 0,
        "request": 0,
        "request_id": "r",
        "class_name": "chat",
        "via": "engine",
        "streaming": True,
        "load": "closed",
        "concurrency": 1,
        "scheduled_s": 0.0,
        "sent_s": 0.0,
        "prompt_tokens": 8,
    }
    times = values.get("token_times_s")
    if times is not None and len(times):
        counts = values.get("token_counts", [1] * len(times))
        sent = values.get("sent_s", 0.0)
        row |= {
            "token_counts": counts,
            "output_tokens": sum(counts),
            "first_token_s": sent + times[0],
            "last_token_s": sent + times[-1],
        }
    return row | values


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `requests` as `records.load` would return them."""
    return records.to_pandas(records.table(rows, schemas.REQUESTS))


def cell(**values: Any) -> dict[str, Any]:
    """One row of `cells` with everything required filled in."""
    keys = (
        "study",
        "cell",
        "setting",
        "setting_id",
        "workload",
        "workload_id",
        "repeat",
        "load",
        "concurrency",
    )
    return (
        {name: request()[name] for name in keys}
        | {
            "schema_version": 1,
            "status": "done",
            "requests": 20,
            "requests_failed": 0,
            "duration_s": 10.0,
            "started_at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "engine_start_s": 40.0,
            "model": "made-up-135M",
            "weights": "random",
            "seed": 1,
            "client_us_per_token": 30.0,
            "client_share": 0.01,
            "loop_lag_p99_s": 0.001,
            "vllm_version": "0.0.0",
            "torch_version": "0.0.0",
            "python_version": "3.11.0",
            "git_commit": "0000000",
            "device": "made-up CPU",
            "device_count": 0,
            "cpu": "made-up CPU",
            "cpu_cores": 2,
            "memory_bytes": 24 << 30,
            "resolved": "{}",
            "resolved_id": "ra",
            "asked": "{}",
        }
        | values
    )


def cells(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `cells` as `records.load` would return them."""
    return records.to_pandas(records.table(rows, schemas.CELLS))


def write_study(
    folder: Path,
    budgets: tuple[int, ...] = (128, 512, 2048),
    seqs: tuple[int, ...] = (4, 32),
    concurrency: tuple[int, ...] = (1, 4, 20),
    repeats: int = 3,
    mix: bool = True,
    failures: bool = True,
    seed: int = 7,
) -> Path:
    """Write a whole study below `folder` as a sweep would; one setting is refused where `failures` is set."""
    rng = np.random.default_rng(seed)
    started = datetime(2026, 1, 2, 3, 0, 0, tzinfo=UTC)
    number = 0
    for budget in budgets:
        for slots in seqs:
            values = _setting(folder.name, budget, slots)
            for repeat in range(repeats):
                points = [("chat", f"chat c={c}", "closed", c) for c in concurrency]
                points += [("mix", "chat + long prompts", "mix", None)] if mix else []
                for kind, label, load, level in points:
                    number += 1
                    keys = values | {
                        "cell": f"cell{number:04d}",
                        "workload": label,
                        "workload_id": f"w-{label}",
                        "repeat": repeat,
                        "load": load,
                        "concurrency": level,
                    }
                    rows = _mix(rng, budget, slots) if kind == "mix" else _closed(rng, budget, slots, level or 1)
                    if failures and budget == budgets[0] and slots == seqs[0] and level == max(concurrency):
                        rows[-1] |= {
                            "error": "timed out after 60 s",
                            "output_tokens": 0,
                            "token_times_s": [],
                            "token_counts": [],
                        }
                        rows[-1] |= {
                            "first_token_s": None,
                            "last_token_s": None,
                            "queue_s": None,
                            "prefill_s": None,
                        }
                    ends = [row["last_token_s"] for row in rows if row["last_token_s"] is not None]
                    head = {"duration_s": max(ends), "started_at": started + timedelta(seconds=60 * number)}
                    records.write_cell(folder / values["setting"], _cell(keys, head), [_row(keys, row) for row in rows])
    if failures:
        keys = _setting(folder.name, 4, 32) | {
            "cell": "cell9999",
            "workload": "chat c=1",
            "workload_id": "w",
            "repeat": 0,
            "load": "closed",
        }
        head = {
            "status": "refused",
            "error": "max_num_batched_tokens (4) must be at least max_num_seqs (32)",
            "resolved_id": None,
        }
        records.write_cell(folder / keys["setting"], _cell(keys, head), [])
    return folder


def _setting(study: str, budget: int, slots: int) -> dict[str, Any]:
    return {
        "study": study,
        "setting": f"budget={budget} seqs={slots}",
        "setting_id": f"s{budget}-{slots}",
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "max_model_len": 2048,
        "enable_chunked_prefill": True,
        "enforce_eager": True,
        "dtype": "float32",
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": False,
    }


def _cell(keys: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    resolved = json.dumps(
        {"max_num_batched_tokens": keys["max_num_batched_tokens"], "max_num_seqs": keys["max_num_seqs"]}
    )
    return cell(**(keys | {"resolved": resolved, "resolved_id": files.digest(resolved)} | values))


def _row(keys: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return request(**(keys | values))


def _closed(rng: np.random.Generator, budget: int, slots: int, level: int) -> list[dict[str, Any]]:
    """`level` requests in flight until max(8, level) are served: a step costs 12 ms plus 1.2 ms a running
    request.
    """
    count, tokens, prompt = max(8, level), 64, 34
    free = np.zeros(min(level, slots))  # when each engine slot is next free
    arrived = np.zeros(level)  # when each client is next ready to send
    rows = []
    for i in range(count):
        client = int(arrived.argmin())
        slot = int(free.argmin())
        sent = float(arrived[client])
        start = max(sent, float(free[slot]))
        step = 0.012 + 0.0012 * min(level, slots)
        prefill = 0.03 + 0.0004 * prompt * min(level, slots) ** 0.5 + 0.02 * max(1, 128 / budget)
        steps = rng.lognormal(np.log(step), 0.12, tokens - 1)
        times = start - sent + 0.002 + prefill * rng.lognormal(0, 0.1) + np.concatenate([[0.0], np.cumsum(steps)])
        rows.append(_timed(i, sent, times, "chat", prompt, start - sent, prefill))
        free[slot] = arrived[client] = sent + times[-1]
    return rows


def _mix(rng: np.random.Generator, budget: int, slots: int) -> list[dict[str, Any]]:
    """Three chat streams of 150 tokens; a prompt of 1,000 tokens arrives every 1.5 s and slows each step it
    shares.
    """
    arrivals = np.arange(0.5, 4, 1.5)
    steps_each = int(np.ceil(1000 / budget))
    cost = 0.0006 * min(budget, 1000)
    rows = []
    for i in range(3):
        now, times, busy = 0.05, [], [steps_each] * len(arrivals)
        for _ in range(150):
            step = 0.016 * rng.lognormal(0, 0.08)
            active = next((j for j, at in enumerate(arrivals) if now >= at and busy[j] > 0), None)
            if active is not None and slots > 3:
                busy[active] -= 1
                step += cost
            now += step
            times.append(now)
        rows.append(_timed(i, 0.0, np.array(times), "chat", 34, 0.001, 0.04))
    for j, at in enumerate(arrivals):
        prefill = steps_each * (cost + 0.016)
        times = 0.003 + prefill + np.cumsum(np.full(4, 0.016))
        rows.append(_timed(3 + j, float(at), times, "long", 1000, 0.001, prefill))
    return rows


def _timed(
    i: int, sent: float, times: np.ndarray, name: str, prompt: int, queue: float, prefill: float
) -> dict[str, Any]:
    return {
        "request": i,
        "request_id": f"r{i}",
        "class_name": name,
        "prompt_tokens": prompt,
        "target_output_tokens": len(times),
        "output_tokens": len(times),
        "scheduled_s": sent,
        "sent_s": sent,
        "first_token_s": sent + float(times[0]),
        "last_token_s": sent + float(times[-1]),
        "finished_s": sent + float(times[-1]),
        "token_times_s": times.tolist(),
        "token_counts": [1] * len(times),
        "queue_s": queue,
        "prefill_s": prefill,
        "finish_reason": "length",
        "decode_s": float(times[-1] - times[0]),
        "preemptions": 0,
    }
