"""Made-up steps with their requests, from a scheduler of thirty lines: never results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from synthetic import cell, request

from latency_lab import records, schemas

STREAMS = [("chat", 32, 60, 0.0)] * 4 + [("long", 1024, 4, at) for at in (1.0, 2.5)]
"""Class, prompt tokens, output tokens and arrival in seconds of each request of `streams`."""


def write(folder: Path, budgets: Sequence[int] = (128, 512, 2048), repeats: int = 2) -> Path:
    """A study of streams disturbed by long prompts and of long prompts alone, over budgets and with chunking off."""
    settings = [(f"budget={budget}", budget, True) for budget in budgets] + [("chunking-off", max(budgets), False)]
    workloads = {"streams": STREAMS, "long-alone c=1": [("long-alone", 1024, 8, 4.0 * i) for i in range(3)]}
    for label, budget, chunked in settings:
        for workload, asked in workloads.items():
            for repeat in range(repeats):
                keys = {
                    "study": folder.name,
                    "setting": label,
                    "setting_id": label,
                    "workload": workload,
                    "workload_id": workload,
                    "repeat": repeat,
                    "cell": f"{label}-{workload}-{repeat}".replace(" ", "-"),
                    "load": "mix" if workload == "streams" else "closed",
                    "concurrency": None if workload == "streams" else 1,
                    "max_num_batched_tokens": budget,
                    "max_num_seqs": 8,
                    "max_model_len": 2048,
                    "enable_chunked_prefill": chunked,
                    "scheduling_policy": "fcfs",
                }
                requests, steps = run(asked, budget, chunked, slower=1 + 0.03 * repeat)
                table = pa.Table.from_pylist([step | {k: keys[k] for k in _KEYS} for step in steps], schemas.STEPS)
                ends = max(row["finished_s"] for row in requests)
                rows = [request(**(keys | row)) for row in requests]
                records.write_cell(folder / label, cell(**(keys | {"duration_s": ends})), rows, table)
    return folder


_KEYS = [field.name for field in schemas.KEYS]


def run(
    asked: Sequence[tuple[str, int, int, float]], budget: int, chunked: bool = True, seqs: int = 8, slower: float = 1.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of requests and steps; a step takes 20 ms and 0.8 ms a token."""
    computed, first, times = ([0] * len(asked), [None] * len(asked), [[] for _ in asked])
    running: list[int] = []
    waiting = list(range(len(asked)))
    now, steps = 0.0, []
    while running or waiting:
        if not running:
            now = max(now, asked[waiting[0]][3])
        due = [i for i in waiting if asked[i][3] <= now]
        left, parts = budget, []
        for i in running:
            tokens = min(left, asked[i][1] - computed[i] if computed[i] < asked[i][1] else 1)
            parts += [(i, tokens)] if tokens else []
            left -= tokens
        while due and len(running) < seqs and left and (chunked or asked[due[0]][1] <= left):
            i = due.pop(0)
            running.append(i)
            waiting.remove(i)
            first[i] = now
            parts.append((i, min(left, asked[i][1])))
            left -= parts[-1][1]
        took = slower * (0.02 + 0.0008 * sum(tokens for _, tokens in parts))
        steps.append(
            {
                "engine": 0,
                "step": len(steps),
                "start_s": now,
                "end_s": now + took,
                "requests": [i for i, _ in parts],
                "tokens": [tokens for _, tokens in parts],
                "computed": [computed[i] for i, _ in parts],
                "prefill": [tokens if computed[i] < asked[i][1] else 0 for i, tokens in parts],
                "recomputed": [0] * len(parts),
                "waiting": len(due),
                "running": len(running),
                "preempted": 0,
                "kv_cache_usage": min(1.0, sum(computed) / 8192),
            }
        )
        now += took
        for i, tokens in parts:
            computed[i] += tokens
            if computed[i] >= asked[i][1]:
                times[i].append(now)
            if len(times[i]) == asked[i][2]:
                running.remove(i)
    rows = [_row(i, asked[i], first[i], times[i]) for i in range(len(asked))]
    return rows, steps


def _row(i: int, asked: tuple[str, int, int, float], first: Any, times: list[float]) -> dict[str, Any]:
    name, prompt, _, sent = asked
    return {
        "request": i,
        "request_id": f"r{i}",
        "class_name": name,
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "scheduled_s": sent,
        "sent_s": sent,
        "token_times_s": [at - sent for at in times],
        "queue_s": first - sent,
        "prefill_s": times[0] - first,
        "decode_s": times[-1] - times[0],
        "preemptions": 0,
        "finished_s": times[-1],
        "finish_reason": "length",
    }
