"""What the client costs and how punctual it is, without any engine: the parts `client` and `send` of `make bench`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

import numpy as np

from latency_lab import client
from latency_lab.load import Request, Stream

STREAMS = (1, 64, 256, 1024)
TOKENS = 20_000
ROUNDS = 5

RATE_PER_S = 200.0
ARRIVALS = 2000


def cost() -> None:
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

    async def stream(self, request_id: str, request: Request) -> AsyncIterator[client.Piece]:
        for number in range(self.each):
            await asyncio.sleep(0)
            yield client.Piece(1, [number], "length" if number == self.each - 1 else None)


async def _bare(source: _Fed, streams: int) -> None:
    async def consume(request: Request) -> None:
        async for _ in source.stream(str(request.index), request):
            pass

    await asyncio.gather(*(consume(request) for request in _requests(streams, source.each)))


async def _driven(source: _Fed, streams: int, runs: list[client.Run]) -> None:
    stream = Stream("bench", streams, None, 0.0, _requests(streams, source.each))
    runs.append(await client.drive(source, [stream], name="bench", timeout_s=600))


def _requests(count: int, tokens: int) -> Iterator[Request]:
    return (Request(index, "bench", None, (1,), tokens, True, None) for index in range(count))


def _cpu_us(work: Callable[[], Coroutine[None, None, None]]) -> float:
    began = time.process_time()
    asyncio.run(work())
    return (time.process_time() - began) / TOKENS * 1e6


def send_error() -> None:
    """How late an open loop sends, against its timetable: Poisson arrivals, while all requests stream tokens."""
    requests = (Request(index, "bench", None, (1,), 16, True, at) for index, at in enumerate(arrivals_s()))
    load = Stream("bench", None, None, 0.0, requests)
    run = asyncio.run(client.drive(_Paced(), [load], name="bench", timeout_s=600))
    print(f"send: {ARRIVALS} requests at {RATE_PER_S:.0f}/s, 16 tokens each")
    late_s = [timing.sent_s - timing.scheduled_s for timing in run.timings if timing.sent_s is not None]
    print(f"in-process source, a token every 20 ms: sent after it was due: {late_text(late_s)}")


def arrivals_s() -> list[float]:
    """When each request of the open loop is due."""
    gaps_s = np.random.default_rng(0).exponential(1 / RATE_PER_S, ARRIVALS)
    return [float(at) for at in np.cumsum(gaps_s)]


def late_text(late_s: Sequence[float] | np.ndarray) -> str:
    half, most, worst = np.percentile(late_s, [50, 99, 100]) * 1e3
    return f"p50 {half:.2f} ms, p99 {most:.2f} ms, most {worst:.2f} ms"


class _Paced:
    """Gives each request a token every 20 ms."""

    async def stream(self, request_id: str, request: Request) -> AsyncIterator[client.Piece]:
        for number in range(request.output_tokens):
            await asyncio.sleep(0.02)
            yield client.Piece(1, [number], "length" if number == request.output_tokens - 1 else None)
