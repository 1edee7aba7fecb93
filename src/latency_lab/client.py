"""Drive requests through a source of tokens and time every token as it arrives.

The client is one coroutine a request on one event loop: of the process that also runs vLLM's front end where the
source is the engine, of a process of its own where it is a server (see client_process.py). Its work between two tokens
is a clock reading and three list appends; what that costs is measured in every cell (`client_us_per_token`,
`client_share`), and so is the lateness of the event loop itself (`loop_lag_p99_s`), since a late loop stamps tokens
late.

All times come from `time.perf_counter`, counted from the cell's start. Latency counts from the scheduled arrival: of an
open-loop request, its time in the arrival process; of a closed-loop request, the moment its predecessor ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from latency_lab.load import Request, Stream

LAG_PERIOD_S = 0.01


class Piece(NamedTuple):
    """Tokens that came together.

    tokens : how many
    ids : theirs; empty where a server was not asked for them
    finish_reason : with the last piece
    prompt_tokens : with the last piece of a server that has made the prompt's tokens itself: as it counted them
    """

    tokens: int
    ids: Sequence[int] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None


class Source(Protocol):
    """Where tokens come from: an engine in this process, or a server."""

    def stream(self, request_id: str, request: Request) -> AsyncIterator[Piece]:
        """A request's tokens as they come: greedy, so that the same prompt gives the same tokens."""
        ...


@dataclass
class Timing:
    """One request's life, in seconds from the cell's start."""

    request: Request
    request_id: str
    scheduled_s: float
    sent_s: float | None = None
    finished_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    error: str | None = None


@dataclass
class Run:
    """What `drive` returns: all requests in order of their number, and the client's own cost.

    zero_s : the reading of time.perf_counter at the cell's time 0
    frontend_cpu_s : CPU time of the process that runs vLLM's front end
    client_cpu_s : CPU time of the client's process where it has one of its own
    """

    timings: list[Timing]
    zero_s: float
    duration_s: float
    timed_out: bool
    client_s: float
    frontend_cpu_s: float
    loop_lag_p99_s: float | None
    client_cpu_s: float | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of `cells` that say what the client cost."""
        tokens = sum(sum(timing.chunk_tokens) for timing in self.timings)

        def share(spent_s: float | None) -> float | None:
            return spent_s / self.duration_s if self.duration_s and spent_s is not None else None

        return {
            "duration_s": self.duration_s,
            "client_us_per_token": self.client_s / tokens * 1e6 if tokens else None,
            "client_share": share(self.client_s),
            "frontend_cpu_share": share(self.frontend_cpu_s),
            "client_cpu_share": share(self.client_cpu_s),
            "loop_lag_p99_s": self.loop_lag_p99_s,
        }


async def drive(source: Source, streams: Sequence[Stream], *, name: str, timeout_s: float) -> Run:
    """Run all streams of a cell to their end, or until `timeout_s` has passed.

    `name` is the prefix of the request ids, unique to the cell.

    A request that failed, or that the timeout cut off, is in the result with its error; so are open-loop requests that
    were due but never sent. Only cancellation and the source's own end (see `engine.EngineDied`) leave this function
    before all requests have ended, the latter as an error of each request left.
    """
    cell = _Cell(source, name)
    lags: list[float] = []
    lag = asyncio.create_task(_watch_loop(lags))
    cpu = time.process_time()
    tasks = [asyncio.create_task(cell.run(stream)) for stream in streams]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, lag):
            task.cancel()
        await asyncio.gather(*tasks, lag, return_exceptions=True)
    duration_s = cell.now()
    for stream in streams if pending else ():
        cell.never_sent(stream, timeout_s)
    return Run(
        timings=sorted(cell.timings, key=lambda timing: timing.request.index),
        zero_s=cell.zero,
        duration_s=duration_s,
        timed_out=bool(pending),
        client_s=cell.own_s,
        frontend_cpu_s=time.process_time() - cpu,
        loop_lag_p99_s=sorted(lags)[int(0.99 * (len(lags) - 1))] if lags else None,
    )


class _Cell:
    def __init__(self, source: Source, name: str) -> None:
        self.source = source
        self.name = name
        self.timings: list[Timing] = []
        self.own_s = 0.0
        self.zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero

    async def run(self, stream: Stream) -> None:
        if stream.concurrency is None:
            await self._open(stream)
        else:
            await asyncio.gather(*(self._worker(stream) for _ in range(stream.concurrency)))

    async def _worker(self, stream: Stream) -> None:
        """One of a closed loop's workers: sends the stream's next request when its last one has ended."""
        await asyncio.sleep(stream.start_s - self.now())
        end_s = stream.start_s + stream.seconds if stream.seconds is not None else float("inf")
        while (due := self.now()) < end_s:
            request = next(stream.requests, None)
            if request is None:
                return
            await self._one(request, due)

    async def _open(self, stream: Stream) -> None:
        """Send each request when it is due, however many are in flight."""
        async with asyncio.TaskGroup() as group:
            for request in stream.requests:
                due = stream.start_s + (request.due_s or 0.0)
                if (wait := due - self.now()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._one(request, due))

    async def _one(self, request: Request, due: float) -> None:
        clock, zero = time.perf_counter, self.zero
        timing = Timing(request, f"{self.name}-{request.index}", due)
        self.timings.append(timing)
        seconds, counts, ids = timing.chunk_s, timing.chunk_tokens, timing.token_ids
        own = 0.0
        timing.sent_s = clock() - zero
        try:
            async for tokens, new, finish_reason, prompt_tokens in self.source.stream(timing.request_id, request):
                arrived = clock()
                if tokens:
                    seconds.append(arrived - zero)
                    counts.append(tokens)
                    ids.extend(new)
                if finish_reason is not None:
                    timing.finish_reason, timing.prompt_tokens = finish_reason, prompt_tokens
                own += clock() - arrived
            if timing.finish_reason in (None, "abort", "error"):
                timing.error = f"ended without finishing (finish reason: {timing.finish_reason})"
        except asyncio.CancelledError:
            timing.error = "timeout: the cell's time limit cut it off"
            raise
        except Exception as error:
            timing.error = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        finally:
            timing.finished_s = clock() - zero
            self.own_s += own

    def never_sent(self, stream: Stream, timeout_s: float) -> None:
        """Open-loop requests that were due before the timeout but had not been sent are rows as well."""
        if stream.concurrency is not None:
            return
        for request in stream.requests:
            due = stream.start_s + (request.due_s or 0.0)
            if due > timeout_s:
                return
            timing = Timing(request, f"{self.name}-{request.index}", due, error="timeout: due, but never sent")
            self.timings.append(timing)


async def _watch_loop(lags: list[float]) -> None:
    """Collect how late a periodic timer fires: the delay that any coroutine on this loop may see."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_PERIOD_S)
            lags.append(time.perf_counter() - before - LAG_PERIOD_S)


def rows(
    run: Run, keep_token_ids: bool, engine_stats: dict[str, dict[str, Any]], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of `requests` for a run; `common` holds the columns that are the same for the whole cell.

    Of an answer that came as a whole nobody saw the first token: its time is null.
    """
    return [
        {
            **common,
            "via": timing.request.door.via,
            "api": timing.request.door.api,
            "streaming": timing.request.door.stream,
            "detokenize": timing.request.door.detokenize,
            "request": timing.request.index,
            "request_id": timing.request_id,
            "class_name": timing.request.class_name,
            "priority": timing.request.priority,
            "prompt_tokens": timing.prompt_tokens or len(timing.request.prompt),
            "target_output_tokens": timing.request.output_tokens,
            "output_tokens": sum(timing.chunk_tokens),
            "scheduled_s": timing.scheduled_s,
            "sent_s": timing.sent_s,
            "first_token_s": timing.chunk_s[0] if timing.chunk_s and timing.request.door.stream else None,
            "last_token_s": timing.chunk_s[-1] if timing.chunk_s else None,
            "finished_s": timing.finished_s,
            "token_times_s": [at - (timing.sent_s or 0.0) for at in timing.chunk_s],
            "token_counts": timing.chunk_tokens,
            "token_ids": timing.token_ids if keep_token_ids else None,
            "finish_reason": timing.finish_reason,
            "error": timing.error,
            **engine_stats.get(timing.request_id, {}),
        }
        for timing in run.timings
    ]
