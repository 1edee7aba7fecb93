"""A server that hands out tokens on a timetable: what a client costs shows against one that is never late itself.

    python -m latency_lab.bench_source        prints its port, serves 127.0.0.1 until its stdin is closed

It speaks as much of the OpenAI completions protocol as a streaming client needs, in the words of vLLM's own server,
with a usage in each event where the client asks for that. It is bare on purpose: an event costs it little more than
one system call, a fraction of what it costs any client.

    POST /plan               {"streams": N, "periods_s": [...]}: wait for N requests, then give each a token a period
                             {"streams": 0}: give each request all its tokens at once, as it comes
    POST /v1/completions     a stream of tokens
    GET /times               when each token of the plan was written, float64 [token, stream], on time.perf_counter,
                             which processes on one machine share; without a plan, when each request was received
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
SETTLE_S = 0.5
"""From the last request's arrival to the first token, so that what requests cost is over by then."""


def _event(text: str) -> bytes:
    body = f"data: {text}\n\n".encode()
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def _chunk(tokens: int, finish_reason: str | None, with_usage: bool) -> bytes:
    """An event of vLLM's completions stream, the same keys and about the same length, with its `tokens`-th token."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    choice |= {"token_ids": [7], "prompt_logprobs": None, "prompt_token_ids": None}
    return _body([choice], _usage(tokens) if with_usage else None)


def _body(choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
    body = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": 1700000000, "model": "source"}
    return _event(json.dumps(body | {"choices": choices, "usage": usage}, separators=(",", ":")))


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}


def _end(tokens: int, with_usage: bool) -> bytes:
    """The last token, the usage of the whole and the end of the stream."""
    return _chunk(tokens, "length", with_usage) + _body([], _usage(tokens)) + _event("[DONE]") + b"0\r\n\r\n"


class _Source:
    """What all connections share: the plan, the streams that wait for it, and the times."""

    def __init__(self) -> None:
        self.plan({"streams": 0})

    def plan(self, asked: dict[str, Any]) -> None:
        self.streams = int(asked["streams"])
        self.periods_s = [float(period) for period in asked.get("periods_s", ())]
        self.waiting: list[asyncio.Transport] = []
        self.times = array("d")

    def request(self, transport: asyncio.Transport, body: dict[str, Any]) -> None:
        transport.write(HEAD)
        self.with_usage = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        if not self.streams:
            self.times.append(time.perf_counter())
            tokens = int(body["max_tokens"])
            events = [_chunk(number, None, self.with_usage) for number in range(1, tokens)]
            transport.write(b"".join(events) + _end(tokens, self.with_usage))
            return
        self.waiting.append(transport)
        if len(self.waiting) == self.streams:
            self.task = asyncio.create_task(self.hand_out())

    async def hand_out(self) -> None:
        """One token to each stream a period, in the order of arrival, spread evenly over the period."""
        due, last = time.perf_counter() + SETTLE_S, len(self.periods_s)
        for number, period_s in enumerate(self.periods_s, 1):
            event = _chunk(number, None, self.with_usage) if number < last else _end(last, self.with_usage)
            for transport in self.waiting:
                while (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait - 0.002 if wait > 0.003 else 0)  # timers are good to a millisecond only
                self.times.append(time.perf_counter())
                transport.write(event)
                due += period_s / self.streams
            await asyncio.sleep(0)  # also where it is late: connections want to be looked after


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, for clients that send a Content-Length."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            lines = self.received[:end].decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(headers.get("content-length", 0))
            if len(self.received) < end + 4 + length:
                return
            body = self.received[end + 4 : end + 4 + length]
            self.received = self.received[end + 4 + length :]
            self.answer(lines[0].split(" ")[1], body)

    def answer(self, path: str, body: bytes) -> None:
        if path == "/v1/completions":
            self.source.request(self.transport, json.loads(body))
        elif path == "/plan":
            self.source.plan(json.loads(body))
            self.whole(200, b"{}")
        elif path == "/times":
            self.whole(200, self.source.times.tobytes())
        else:
            self.whole(404, b"{}")

    def whole(self, status: int, body: bytes) -> None:
        self.transport.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def serve() -> None:
    """Serve until stdin is closed, which the end of the process that started this does."""
    source, loop = _Source(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(source), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
