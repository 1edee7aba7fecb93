"""What the study's own tools cost: `make bench`. Ratios within one run, since machines and their moods differ."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from latency_lab import ROOT, client, engine, machine, models
from latency_lab.load import Request, Stream
from latency_lab.study_schema import Config, SmolLM2

STREAMS = (1, 64, 256, 1024)
TOKENS = 20_000
ROUNDS = 5
PAIRS = 30
"""Rounds of each kind on one engine, in alternation. Many short ones: what else the machine does then falls on both."""


def run() -> int:
    """Run all benches and print their tables; returns the exit code."""
    client_cost()
    if machine.vllm_version():
        asyncio.run(trace_cost())
    return 0


def client_cost() -> None:
    """CPU time of the client for each token, beside a loop that only consumes the same tokens.

    A paced source would measure its own pace; this one hands each of N streams a token a turn as fast as they are
    taken, the way that vLLM's front end feeds its queues, so that all the time is the loop's, the source's and the
    client's. The difference to the bare loop is the client's share.
    """
    print("client: CPU time for each token, in-process source, median of", ROUNDS, "rounds in alternation")
    print(f"{'streams':>8} {'bare us':>9} {'client us':>10} {'added us':>9} {'own clock us':>13} {'ratio':>6}")
    for streams in STREAMS:
        bare, ours, own = [], [], []
        for _ in range(ROUNDS):
            bare.append(_cpu_us(lambda n=streams: _bare(_Fed(n), n)))  # type: ignore[misc]
            runs: list[client.Run] = []
            ours.append(_cpu_us(lambda n=streams, runs=runs: _driven(_Fed(n), n, runs)))  # type: ignore[misc]
            own.append(runs[0].columns["client_us_per_token"])
        low, high = statistics.median(bare), statistics.median(ours)
        clock = statistics.median(own)
        print(f"{streams:>8} {low:>9.2f} {high:>10.2f} {high - low:>9.2f} {clock:>13.2f} {high / low:>6.2f}")


class _Fed:
    """Gives every stream one token a turn of the event loop."""

    def __init__(self, streams: int) -> None:
        self.each = TOKENS // streams

    async def stream(
        self, request_id: str, prompt: tuple[int, ...], output_tokens: int, ignore_eos: bool, priority: int | None
    ) -> AsyncIterator[tuple[list[int], str | None]]:
        for number in range(self.each):
            await asyncio.sleep(0)
            yield [number], "length" if number == self.each - 1 else None


async def _bare(source: _Fed, streams: int) -> None:
    async def consume(request_id: str) -> None:
        async for _ in source.stream(request_id, (1,), source.each, True, None):
            pass

    await asyncio.gather(*(consume(str(number)) for number in range(streams)))


async def _driven(source: _Fed, streams: int, runs: list[client.Run]) -> None:
    requests = (Request(index, "bench", None, (1,), source.each, True, None) for index in range(streams))
    stream = Stream("bench", streams, None, 0.0, requests)
    runs.append(await client.drive(source, [stream], name="bench", timeout_s=600))


def _cpu_us(work: Callable[[], Coroutine[None, None, None]]) -> float:
    began = time.process_time()
    asyncio.run(work())
    return (time.process_time() - began) / TOKENS * 1e6


async def trace_cost() -> None:
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
        f"\ntrace: {model.name}, {streams} streams of {tokens} tokens, {PAIRS} rounds of each kind, three engine starts"
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
    """Ratio of `high` to `low` with a 95 % bootstrap interval: the median over pairs, else the ratio of medians."""
    above, below = (np.array([one[which] for one in rounds]) for rounds in (high, low))
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(above), (10_000, len(above)))
    if paired:
        middle, ratios = np.median(above / below), np.median((above / below)[draws], axis=1)
    else:
        others = rng.integers(0, len(below), (10_000, len(below)))
        middle = np.median(above) / np.median(below)
        ratios = np.median(above[draws], axis=1) / np.median(below[others], axis=1)
    lower, upper = np.quantile(ratios, [0.025, 0.975])
    return f"{middle:.3f} [{lower:.3f}, {upper:.3f}]"
