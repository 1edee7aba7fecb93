"""Noted scheduler steps as a table of schemas.STEPS: one row a step, one list item for each request in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from latency_lab import schemas

if TYPE_CHECKING:
    from latency_lab.trace import Steps


def table(recorded: list[Steps], zero_s: float, keys: Mapping[str, Any]) -> pa.Table:
    """Noted steps as a table of schemas.STEPS, in seconds from `zero_s`; `recorded` has an item for each scheduler."""
    parts = [_part(number, steps, zero_s, keys) for number, steps in enumerate(recorded)]
    return pa.concat_tables(parts) if parts else schemas.STEPS.empty_table()


def _part(engine: int, steps: Steps, zero_s: float, keys: Mapping[str, Any]) -> pa.Table:
    count = len(steps.start)
    width = np.asarray(steps.width)
    offsets = pa.array(np.concatenate([[0], np.cumsum(width)]).astype(np.int32))
    request, tokens, computed = (np.asarray(values) for values in (steps.request, steps.tokens, steps.computed))
    prefill, recomputed = _split(steps, np.repeat(np.arange(count), width), request, tokens, computed)
    index = np.array([request_number(name, keys["cell"]) for name in steps.numbers], dtype=np.int32)
    end = np.asarray(steps.end) - zero_s
    columns: dict[str, Any] = {
        "engine": np.full(count, engine),
        "step": np.arange(count),
        "start_s": np.asarray(steps.start) - zero_s,
        "end_s": pa.array(end, mask=np.isnan(end)),
        "requests": _lists(offsets, index[request] if len(request) else request),
        "tokens": _lists(offsets, tokens),
        "computed": _lists(offsets, computed),
        "prefill": _lists(offsets, prefill),
        "recomputed": _lists(offsets, recomputed),
        "waiting": np.asarray(steps.waiting),
        "running": np.asarray(steps.running),
        "preempted": np.bincount(np.asarray(steps.preempted_step), minlength=count)[:count],
        "kv_cache_usage": np.asarray(steps.usage),
    }
    for column in schemas.KEYS:
        columns[column.name] = pa.repeat(pa.scalar(keys[column.name], type=column.type), count)
    arrays = [pa.array(values) if isinstance(values, np.ndarray) else values for values in columns.values()]
    found = pa.table(arrays, names=list(columns))
    return pa.table([found.column(one.name).cast(one.type) for one in schemas.STEPS], schema=schemas.STEPS)


def _lists(offsets: pa.Array, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, pa.array(values.astype(np.int32)))


def _split(
    steps: Steps, step: np.ndarray, request: np.ndarray, tokens: np.ndarray, computed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each request's tokens in each step: those of its prompt for the first time, and those given to it before.

    A preempted request loses its KV cache and is computed anew up to the furthest token that it had reached (`reached`
    below): up to there, tokens are recomputed, whether of the prompt or of the output.
    """
    reached = np.zeros(len(request), dtype=np.int64)
    for number, at in zip(steps.preempted, steps.preempted_step, strict=True):
        own = np.flatnonzero(request == number)
        before = own[step[own] < at]
        if len(before):
            reached[own[step[own] >= at]] = (computed[before] + tokens[before]).max()
    prompt = np.asarray(steps.prompts)[request] if len(request) else request
    recomputed = np.clip(reached - computed, 0, tokens)
    prefill = np.clip(prompt - computed - recomputed, 0, tokens - recomputed)
    return prefill, recomputed


def request_number(name: str, cell: str) -> int:
    """The number in its cell of a request by its id inside vLLM; -1 where it is none of the cell's.

    Of the id '<cell>-<number>' that it was given, vLLM's server makes 'chatcmpl-<id>' or 'cmpl-<id>-0', for the first
    prompt of a completion. Inside, the engine adds '-' and eight hex digits.
    """
    own = re.escape(cell) + r"-(\d+)"
    match = re.fullmatch(rf"(?:cmpl-{own}-0|(?:chatcmpl-)?{own})(?:-[0-9a-f]{{8}})?", name)
    return int(match[1] or match[2]) if match else -1
