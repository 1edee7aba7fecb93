"""What one core sustains of this study's HTTP client and of `vllm bench serve`'s: the part `http` of `make bench`.

Both are driven by a source that is never late itself, on another core (bench_source.py). N streams start together and
get a token a period each, the streams one after the other; the periods become shorter and shorter. What a client adds
at a rate is the p99 of the gaps that it saw less the p99 of the gaps between the source's writes.

An engine's step hands out the tokens of all its streams at once instead, and a client stamps them one after the other:
the last of N is N times the time of one token late, whatever the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from latency_lab import bench_client, bench_source, client, client_process, fidelity, files, import_bench, vllm_bench
from latency_lab.fidelity import OURS, SERVE
from latency_lab.load import Request, Stream
from latency_lab.openai_source import Address
from latency_lab.study_grid import Door

STREAMS = (1, 64, 256, 1024)
RATES_PER_S = [round(2000 * 2 ** (step / 2)) for step in range(10)]
"""Tokens a second of all streams together, one after the other; the first only warms up (see fidelity.limits)."""

RUNG_S, RUNG_PERIODS = 0.7, 8
"""A rate is held for so long, and for so many periods at least."""

REQUESTS, REQUEST_TOKENS = 2000, 16
ROUNDS = 3


def cost(folder: Path) -> None:
    """Measure both clients in alternation, print what each sustains, and write every reading to http.csv."""
    free = cores()
    if len(free) < 2:
        print("http: left out, as it needs a core for the client and another for the source")
        return
    print(f"http: client on core {free[0]}, source of tokens on core {free[-1]}, {ROUNDS} rounds in alternation")
    rows = []
    for streams in STREAMS:
        for number in range(ROUNDS):
            for who in fidelity.in_turn(number, SERVE):
                with running(free[-1]) as source, _on_core(free[0]):
                    found = [*_tokens(who, source, streams), _requests(who, source, streams)]
                rows += [{"client": who, "streams": streams, "round": number, **row} for row in found]
    table = fidelity.with_facts(pd.DataFrame(rows).assign(request_tokens=REQUEST_TOKENS))
    files.write_text(table.to_csv(index=False, float_format="%.6g"), folder / fidelity.HTTP_FILE)
    print(fidelity.limits(table).to_string(index=False, float_format="{:,.0f}".format))


def send_error() -> None:
    """How late an open loop sends: in the process of its source, and over HTTP, by its own clock and the server's."""
    bench_client.send_error()
    free = cores()
    due = (request(number, REQUEST_TOKENS, at) for number, at in enumerate(bench_client.arrivals_s()))
    with running(free[-1]) as source, _on_core(free[0]):
        run = asyncio.run(_drive_ours(source.port, Stream(OURS, None, None, 0.0, due)))
        received_s = np.sort(source.times()) - run.zero_s
    due_s = np.array([timing.scheduled_s for timing in run.timings])
    sent_s = np.array([timing.sent_s for timing in run.timings], float)
    print(f"over HTTP, all tokens at once: sent after it was due: {bench_client.late_text(sent_s - due_s)}")
    print(f"  and at the server after it was due: {bench_client.late_text(received_s - due_s)}")


def _tokens(who: str, source: Source, streams: int) -> list[dict[str, Any]]:
    """One row a rate: what was really offered and what the client added to the p99 of the gaps."""
    periods_s = [streams / rate for rate in RATES_PER_S]
    ticks = [max(RUNG_PERIODS, round(RUNG_S / period)) for period in periods_s]
    source.plan(streams, np.repeat(periods_s, ticks).tolist())
    seen_s = np.array(_drive(who, source.port, streams, streams, sum(ticks)).gaps_s).T
    written_s = source.times().reshape(sum(ticks), streams)
    rung = np.repeat(np.arange(len(ticks)), ticks)[1:]  # of each token after the first
    rows = []
    for number, rate in enumerate(RATES_PER_S):
        own = rung == number
        before, after = written_s[:-1][own], written_s[1:][own]
        p99_s = [float(np.percentile(gaps, 99)) for gaps in (seen_s[own], after - before)]
        per_s = before.size / float(after.max() - before.min())
        rows.append({"kind": "tokens", "offered_per_s": rate, "per_s": per_s, "added_s": p99_s[0] - p99_s[1]})
    return rows


def _requests(who: str, source: Source, streams: int) -> dict[str, Any]:
    """Short answers that come at once, so many requests in flight: all time is the client's and the connection's."""
    source.plan(0, [])
    run = _drive(who, source.port, streams, REQUESTS, REQUEST_TOKENS)
    return {"kind": "requests", "per_s": REQUESTS / run.duration_s}


class _Drive(NamedTuple):
    gaps_s: list[list[float]]  # of each request, between its chunks
    duration_s: float


def _drive(who: str, port: int, concurrency: int, requests: int, tokens: int) -> _Drive:
    return asyncio.run((_ours if who == OURS else _theirs)(port, concurrency, requests, tokens))


async def _ours(port: int, concurrency: int, requests: int, tokens: int) -> _Drive:
    due = (request(number, tokens, None) for number in range(requests))
    run = await _drive_ours(port, Stream(OURS, concurrency, None, 0.0, due))
    return _Drive([np.diff(timing.chunk_s).tolist() for timing in run.timings], run.duration_s)


async def _drive_ours(port: int, stream: Stream) -> client.Run:
    address = Address(f"http://127.0.0.1:{port}/v1", "source", "none")
    with tempfile.TemporaryDirectory() as name:
        async with client_process.running(Path(name) / "client.log") as process:
            run = await process.drive(address, [stream], name="http", timeout_s=600, token_ids=False)
    if failed := [timing.error for timing in run.timings if timing.error]:
        raise vllm_bench.BenchError(f"http: {len(failed)} of {len(run.timings)} requests failed: {failed[0]}")
    return run


def request(number: int, tokens: int, due_s: float | None) -> Request:
    return Request(number, OURS, None, (1,) * 8, tokens, True, due_s, door=Door("openai", "completions"))


async def _theirs(port: int, concurrency: int, requests: int, tokens: int) -> _Drive:
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        options = {
            "base_url": f"http://127.0.0.1:{port}",
            "model": "source",
            "tokenizer": vllm_bench.model().location,
            "dataset_name": "random",
            "random_input_len": 8,
            "random_output_len": tokens,
            "num_prompts": requests,
            "max_concurrency": concurrency,
            "temperature": 0,
            "ready_check_timeout_sec": 0,  # which would be a request more than the source expects
            "disable_tqdm": True,
            "save_result": True,
            "save_detailed": True,
            "result_filename": result,
        }
        await vllm_bench.run("serve", options)
        (found,) = import_bench.read(result)
    if failed := [error for error in found.errors if error]:
        raise vllm_bench.BenchError(f"http: {len(failed)} of {requests} requests failed: {failed[0][-300:]}")
    return _Drive(found.itls, found.duration)


class Source:
    """The source as a process of its own; `port` is where it listens."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", bench_source.__name__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def plan(self, streams: int, periods_s: list[float]) -> None:
        self._ask("plan", json.dumps({"streams": streams, "periods_s": periods_s}).encode())

    def times(self) -> np.ndarray:
        return np.frombuffer(self._ask("times"))

    def _ask(self, what: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{what}", data=body) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def running(core: int) -> Iterator[Source]:
    with _on_core(core):
        source = Source()
    try:
        yield source
    finally:
        source.process.communicate()  # closes its stdin, which ends it


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """What is started in this block, and this thread while in it, runs on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
