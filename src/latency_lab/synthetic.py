"""Made-up studies of any size in the real layout: for tests and for `make bench`. Never results.

A crude engine gives them believable shapes: a step costs some milliseconds plus a share for each running request, a
prompt longer than the budget is cut into chunks, and every stream waits for the chunk that shares its step. All of a
cell is computed in whole arrays, so that ten million requests take a minute or two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from latency_lab import files, records, schemas

SLO = '{"e2e_p95_s": 2.0}'

CELL: dict[str, Any] = {
    "status": "done",
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
    "asked": "{}",
}
"""What a made-up cell's row says of its engine and machine."""

CHAT_PROMPT, LONG_PROMPT = 34, 1000
LONG_OUTPUT, STREAM_OUTPUT = 4, 150
STREAMS, APART = 3, 45
"""In the mix: chats that are answered side by side, and engine steps between two arrivals of long prompts."""


SLO = '{"e2e_p95_s": 3.0}'
"""What the chats of the closed loop want."""


def write_study(
    folder: Path,
    budgets: Sequence[int] = (128, 512, 2048),
    seqs: Sequence[int] = (4, 32),
    concurrency: Sequence[int] = (1, 4, 20),
    repeats: int = 3,
    each: int = 8,
    tokens: int = 64,
    mix: bool = True,
    failures: bool = True,
    seed: int = 7,
) -> Path:
    """Write a study as a sweep would: every budget x max_num_seqs, a closed loop at each concurrency, and a mix.

    each : requests of a cell, at least one for each of those in flight; the mix has about as many
    tokens : output tokens of a chat
    failures : one setting is refused, and on the smallest one the last request at the highest load timed out
    """
    rng = np.random.default_rng(seed)
    started = datetime(2026, 1, 2, 3, 0, 0, tzinfo=UTC)
    number = 0
    for budget in budgets:
        for slots in seqs:
            for repeat in range(repeats):
                points: list[tuple[str, int | None]] = [(f"chat c={level}", level) for level in concurrency]
                points += [("chat + long prompts", None)] if mix else []
                for label, level in points:
                    number += 1
                    keys = _setting(folder.name, budget, slots) | {
                        "cell": f"cell{number:04d}",
                        "workload": label,
                        "workload_id": f"w-{label}",
                        "repeat": repeat,
                        "load": "closed" if level else "mix",
                        "concurrency": level,
                    }
                    made = _closed(rng, budget, slots, level, each, tokens) if level else _mix(rng, budget, slots, each)
                    if failures and (budget, slots, level) == (budgets[0], seqs[0], max(concurrency)):
                        made = _last_timed_out(made)
                    requests = _table(made, keys)
                    row = CELL | keys | {"started_at": started + timedelta(seconds=60 * number)}
                    row["slo"] = SLO if level else None
                    row["duration_s"] = float(np.nanmax(made["last_token_s"]))
                    records.write_cell(folder / keys["setting"], row, requests)
    if failures:
        keys = _setting(folder.name, 4, 32) | {"cell": "cell9999", "workload": "chat c=1", "workload_id": "w-chat c=1"}
        keys |= {"repeat": 0, "load": "closed", "resolved": None, "resolved_id": None, "status": "refused"}
        error = "max_num_batched_tokens (4) must be at least max_num_seqs (32)"
        records.write_cell(folder / keys["setting"], CELL | keys | {"error": error}, [])
    return folder


def _setting(study: str, budget: int, slots: int) -> dict[str, Any]:
    resolved = json.dumps({"max_num_batched_tokens": budget, "max_num_seqs": slots})
    return {
        "study": study,
        "setting": f"budget={budget} seqs={slots}",
        "setting_id": f"s{budget}-{slots}",
        "resolved": resolved,
        "resolved_id": files.digest(resolved),
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "max_model_len": 2048,
        "enable_chunked_prefill": True,
        "enforce_eager": True,
        "dtype": "float32",
        "scheduling_policy": "fcfs",
        "enable_prefix_caching": False,
    }


def _closed(
    rng: np.random.Generator, budget: int, slots: int, level: int, each: int, tokens: int
) -> dict[str, np.ndarray]:
    """Chats of a closed loop: `level` in flight, of which `slots` run, one after another in each slot."""
    n, running = max(each, level), min(level, slots)
    step_s = 0.012 + 0.0012 * running
    prefill_s = 0.03 + 0.0004 * CHAT_PROMPT * running**0.5 + 0.02 * max(1, 128 / budget)
    output = np.clip(rng.normal(tokens, tokens / 8, n).round().astype(np.int64), 2, None)
    gap_s = rng.lognormal(np.log(step_s), 0.12, int(output.sum()))
    starts = np.cumsum(output) - output
    prefill = prefill_s * rng.lognormal(0, 0.1, n)
    gap_s[starts] = 0.002 + prefill
    running_s = np.cumsum(gap_s)
    times = running_s - np.repeat(running_s[starts] - gap_s[starts], output)  # since the request was scheduled
    took = times[starts + output - 1]
    turns = np.zeros(-(-n // running) * running)
    turns[:n] = took
    end = np.cumsum(turns.reshape(-1, running), axis=0).ravel()[:n]
    begun = end - took
    sent = np.zeros(n)
    sent[level:] = np.minimum(end[: n - level], begun[level:])
    times += np.repeat(begun - sent, output)
    return {
        "long": np.zeros(n, bool),
        "sent_s": sent,
        "output": output,
        "times": times,
        "last_token_s": sent + times[starts + output - 1],
        "queue_s": begun - sent,
        "prefill_s": prefill,
    }


def _mix(rng: np.random.Generator, budget: int, slots: int, each: int) -> dict[str, np.ndarray]:
    """Chats side by side, one token each a step, while a long prompt arrives every APART steps and slows its own."""
    chats = max(1, round(each / (STREAMS + STREAM_OUTPUT / APART)))
    count = chats * STREAM_OUTPUT
    chunks, chunk_s = -(-LONG_PROMPT // budget), 0.0006 * min(budget, LONG_PROMPT)
    at = np.arange(30, count, APART)  # the steps at which long prompts arrive
    step_s = 0.016 * rng.lognormal(0, 0.08, count + chunks + LONG_OUTPUT)
    if slots > STREAMS:
        for chunk in range(chunks):
            np.add.at(step_s, at + chunk, chunk_s)
    end_s = 0.05 + np.cumsum(step_s)
    chat_steps = np.tile(np.arange(count), STREAMS)
    long_steps = (at[:, None] + chunks + np.arange(LONG_OUTPUT)).ravel()
    output = np.repeat([STREAM_OUTPUT, LONG_OUTPUT], [STREAMS * chats, len(at)])
    starts = np.cumsum(output) - output
    begun = np.concatenate([np.tile(np.arange(chats) * STREAM_OUTPUT - 1, STREAMS), at - 1])
    sent = np.where(begun < 0, 0.0, end_s[begun])
    arrival = end_s[np.concatenate([chat_steps, long_steps])]
    # the client sees the tokens of a step one after another
    arrival += 1e-4 * rng.random(len(arrival))
    times = arrival - np.repeat(sent, output)
    n = len(output)
    return {
        "long": np.arange(n) >= STREAMS * chats,
        "sent_s": sent,
        "output": output,
        "times": times,
        "last_token_s": sent + times[starts + output - 1],
        "queue_s": np.full(n, 0.001),
        "prefill_s": times[starts] - 0.001,
    }


def _last_timed_out(made: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same requests, of which the last got no token in time."""
    out = {name: values.copy() for name, values in made.items()}
    out["times"] = out["times"][: -out["output"][-1]]
    out["output"][-1] = 0
    for name in ("last_token_s", "queue_s", "prefill_s"):
        out[name][-1] = np.nan
    return out


def _table(made: Mapping[str, np.ndarray], keys: Mapping[str, Any]) -> pa.Table:
    """A cell's rows of schemas.REQUESTS. A request without output timed out."""
    output, times, sent, last = (made[name] for name in ("output", "times", "sent_s", "last_token_s"))
    n, failed = len(output), output == 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(output)]), pa.int32())
    first = np.full(n, np.nan)
    first[~failed] = sent[~failed] + times[offsets.to_numpy()[:-1][~failed]]
    columns: dict[str, Any] = {
        "request": np.arange(n),
        "request_id": [f"{keys['cell']}-{i}" for i in range(n)],
        "class_name": pa.array(np.where(made["long"], "long", "chat")),
        "prompt_tokens": np.where(made["long"], LONG_PROMPT, CHAT_PROMPT),
        "target_output_tokens": output,
        "output_tokens": output,
        "scheduled_s": sent,
        "sent_s": sent,
        "first_token_s": first,
        "last_token_s": last,
        "finished_s": last,
        "token_times_s": pa.ListArray.from_arrays(offsets, pa.array(times, pa.float32())),
        "token_counts": pa.ListArray.from_arrays(offsets, pa.array(np.ones(len(times), np.int32))),
        "queue_s": made["queue_s"],
        "prefill_s": made["prefill_s"],
        "decode_s": last - first,
        "error": pa.array(np.full(n, "timed out after 60 s"), pa.string(), mask=~failed),
        "finish_reason": pa.array(np.full(n, "length"), pa.string(), mask=failed),
    }
    same = {"via": "engine", "streaming": True, "preemptions": 0, **keys}
    arrays = []
    for field in schemas.REQUESTS:
        if field.name in columns:
            values = columns[field.name]
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type, from_pandas=True))
        else:
            arrays.append(pa.repeat(pa.scalar(same.get(field.name), field.type), n))
    return pa.table(arrays, schema=schemas.REQUESTS)
