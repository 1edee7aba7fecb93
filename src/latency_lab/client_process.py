"""The client in a process of its own, for requests that go through a server.

Reading a stream of events costs a client about as much as writing it costs the server. On the server's event loop, or
in a thread beside it (Python runs one thread at a time), the client would slow down what it measures: at 20 streams of
250 tokens a second, which a datacenter GPU gives, the two together need more than a core. In two processes each has
its own, and `loop_lag_p99_s` says whether the client kept up. With few cores they still share them with the engine, as
any client on that machine would.

The processes talk over the pipes of the child's stdin and stdout. Requests of finite streams go over at once; those of
endless ones one by one, as they are sent. Readings of time.perf_counter are comparable: it is one clock for all
processes of a machine. The child ends when its stdin is closed, so whenever its parent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from latency_lab import client
from latency_lab.load import Request, Stream
from latency_lab.openai_source import Address, OpenAISource

LENGTH_BYTES = 8
END_PATIENCE_S = 5.0


class ClientProcess:
    """A living client process. Use `running` to get one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout

    async def drive(
        self, address: Address, streams: Sequence[Stream], *, name: str, timeout_s: float, token_ids: bool
    ) -> client.Run:
        """As client.drive, on a server. `token_ids`: see OpenAISource. Raises RuntimeError where the process ended."""
        cpu = time.process_time()
        sent = [
            (dataclasses.replace(stream, requests=iter(())), None if _endless(stream) else list(stream.requests))
            for stream in streams
        ]
        try:
            await self._send((address, sent, name, timeout_s, token_ids))
            while isinstance(answer := await self._receive(), int):
                await self._send(next(streams[answer].requests, None))
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("the client's process ended in a cell; the engine's log says why") from error
        return dataclasses.replace(answer, frontend_cpu_s=time.process_time() - cpu, client_cpu_s=answer.frontend_cpu_s)

    async def _send(self, message: Any) -> None:
        self._to.write(_packed(message))
        await self._to.drain()

    async def _receive(self) -> Any:
        length = int.from_bytes(await self._from.readexactly(LENGTH_BYTES), "big")
        return pickle.loads(await self._from.readexactly(length))


@contextlib.asynccontextmanager
async def running(log: Path) -> AsyncIterator[ClientProcess]:
    """Start a client process and end it on leaving the block. `log` takes what it prints: errors, as a rule."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, stderr=file
        )
    try:
        yield ClientProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_PATIENCE_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _endless(stream: Stream) -> bool:
    """Whether a stream never runs out of requests."""
    return stream.seconds is not None


def _packed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


# --- in the child -------------------------------------------------------------------------------------------


def main() -> None:
    """Drive what comes on stdin, one cell after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes our stdin
    parent = _Parent(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)  # what libraries print is not for the pipe
    import aiohttp  # noqa: F401 - takes a moment, which would be the first cell's

    gc.freeze()  # what is imported needs no looking through for garbage while tokens come
    while True:
        gc.collect()
        gc.disable()  # a pass over a cell's tokens would hold up those that come meanwhile; it is made between cells
        address, sent, name, timeout_s, token_ids = parent.receive()
        streams = [
            dataclasses.replace(stream, requests=parent.requests(number) if requests is None else iter(requests))
            for number, (stream, requests) in enumerate(sent)
        ]
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            parent.send(runner.run(_drive(address, streams, name, timeout_s, token_ids)))


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, as with vLLM it is: the server's side of the wire runs on it too."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _drive(
    address: Address, streams: Sequence[Stream], name: str, timeout_s: float, token_ids: bool
) -> client.Run:
    async with OpenAISource(address, token_ids) as source:
        return await client.drive(source, streams, name=name, timeout_s=timeout_s)


class _Parent:
    """The pipes to the parent, read by a thread, so that its end is noticed at once."""

    def __init__(self, to: IO[bytes]) -> None:
        self._to = to
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while header := sys.stdin.buffer.read(LENGTH_BYTES):
            self._inbox.put(pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "big"))))
        os._exit(0)

    def receive(self) -> Any:
        return self._inbox.get()

    def send(self, message: Any) -> None:
        self._to.write(_packed(message))
        self._to.flush()

    def requests(self, number: int) -> Iterator[Request]:
        """The requests of an endless stream, asked for one by one."""
        while True:
            self.send(number)
            if (request := self.receive()) is None:
                return
            yield request


if __name__ == "__main__":
    main()
