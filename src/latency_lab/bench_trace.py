"""What step records cost an engine under load: the part `trace` of `make bench`."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from latency_lab import ROOT, client, engine, fidelity, machine, models
from latency_lab.load import Request, Stream
from latency_lab.study_schema import Config, SmolLM2

PAIRS = 30
"""Rounds of each kind on one engine, in alternation. Many short ones: what else the machine does then falls on both."""


async def cost() -> None:
    """What step records cost an engine under load, in three ways, each with its own blind spot.

    On one traced engine, rounds alternate between recording and not: precise, but both go through the tracing class.
    A traced engine between two starts of vLLM as it is compares the class as well, but starts differ among themselves.
    The recorder's own clock adds up the time in its code: exact, and blind to what that does to caches.
    Ratios above 1 mean slower for ITL and faster for throughput; in brackets, 95 % bootstrap intervals.
    """
    gpu = machine.has_gpu()
    streams, tokens = (64, 128) if gpu else (8, 12)
    source = Config(source="config", config="qwen3-4b-instruct-2507") if gpu else SmolLM2()
    model = models.prepare(source, ROOT / "data" / "models")
    print(
        f"trace: {model.name}, {streams} streams of {tokens} tokens, {PAIRS} rounds of each kind, three engine starts"
    )
    with tempfile.TemporaryDirectory() as folder:
        starts = [await _rounds(model, traced, streams, tokens, Path(folder)) for traced in (False, True, False)]
    before, traced, after = starts
    print(f"{'':>34} {'throughput':>24} {'ITL p50':>24}")
    compared = {
        "recording / not recording": (traced.on, traced.off),
        "traced engine / vLLM as it is": (traced.on, before.off + after.off),
        "vLLM as it is, start 2 / start 1": (after.off, before.off),
    }
    for name, (high, low) in compared.items():
        ratios = [_ratio(high, low, which, paired=low is traced.off) for which in (0, 1)]
        print(f"{name:>34} {ratios[0]:>24} {ratios[1]:>24}")
    share = traced.own_s / traced.steps_s * 100
    print(
        f"in the recorder's own code: {traced.own_s / traced.steps * 1e6:.0f} us for each of {traced.steps} steps of "
        f"{traced.steps_s / traced.steps * 1e3:.1f} ms: {share:.2f} %"
    )


class _Rounds:
    """(tokens a second, median ITL in seconds) of each round of one engine start, recorded or not, and its steps."""

    def __init__(self) -> None:
        self.on: list[tuple[float, float]] = []
        self.off: list[tuple[float, float]] = []
        self.steps, self.steps_s, self.own_s = 0, 0.0, 0.0


async def _rounds(model: models.Model, traced: bool, streams: int, tokens: int, folder: Path) -> _Rounds:
    args: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False}
    if not machine.has_gpu():
        args |= {"dtype": "float32", "enforce_eager": True}
    found = _Rounds()
    keys = dict.fromkeys(("study", "setting", "setting_id", "workload", "workload_id"), "bench") | {"repeat": 0}
    async with engine.running(args, model, log=folder / "engine.log", ledger=folder, trace=traced) as living:
        if traced and living.tracer.note:
            print(living.tracer.note)
        # On a traced engine each kind comes first in every second pair; the first two rounds only warm up.
        kinds = itertools.cycle([True, False, False, True]) if traced else itertools.repeat(False)
        count = 2 * PAIRS if traced else PAIRS
        for number, recording in zip(range(-2, count), kinds, strict=False):
            name = f"round{number + 2}"
            if recording:
                await living.tracer.begin()
            prompts = np.random.default_rng(number + 2).integers(1000, 30_000, (streams, 16)).tolist()
            requests = (Request(i, "bench", None, tuple(ids), tokens, True, None) for i, ids in enumerate(prompts))
            load = Stream("bench", streams, None, 0.0, requests)
            run = await client.drive(living, [load], name=name, timeout_s=300)
            gaps = np.concatenate([np.diff(timing.chunk_s) for timing in run.timings])
            result = (streams * tokens / run.duration_s, float(np.median(gaps)))
            if recording:
                steps = await living.tracer.end(run.zero_s, {**keys, "cell": name})
                if steps.table is None:
                    raise RuntimeError(steps.note)
                if number >= 0:
                    found.steps += steps.table.num_rows
                    found.steps_s += run.duration_s
                    found.own_s += steps.own_s
            if number >= 0:
                (found.on if recording else found.off).append(result)
    return found


def _ratio(high: list[tuple[float, float]], low: list[tuple[float, float]], which: int, paired: bool) -> str:
    """Ratio of `high` to `low` in one of their two numbers, with its interval, as text."""
    above, below = (np.array([one[which] for one in rounds]) for rounds in (high, low))
    return fidelity.ratio_text(*fidelity.median_ratio(above, below, paired))
