"""The ways in which a study's requests reach a living engine: in its process, or through its server.

Both give the same records. What a request through the server takes longer is what HTTP, the chat template, the text of
the answer and the server's own code cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from latency_lab import client, client_process, server
from latency_lab.client_process import ClientProcess
from latency_lab.engine import Engine
from latency_lab.load import Stream
from latency_lab.openai_source import Address
from latency_lab.study import Point


@dataclass(frozen=True)
class Doors:
    """An engine, and its server with the process of the client that it is asked from, where they are open."""

    engine: Engine
    server: tuple[Address, ClientProcess] | None

    async def drive(self, point: Point, streams: Sequence[Stream], name: str, token_ids: bool) -> client.Run:
        """See client.drive. `token_ids`: ask the server for those of the answers, as the engine gives them."""
        if self.server is None or point.via == "engine":
            return await client.drive(self.engine, streams, name=name, timeout_s=point.timeout_s)
        address, process = self.server
        return await process.drive(address, streams, name=name, timeout_s=point.timeout_s, token_ids=token_ids)


@contextlib.asynccontextmanager
async def opened(engine: Engine, model: str, points: Sequence[Point], log: Path) -> AsyncIterator[Doors]:
    """The doors that the points need, while the block runs. `log` is the engine's. Raises server.ServerNotStarted."""
    if all(point.via == "engine" for point in points):
        yield Doors(engine, None)
        return
    async with server.serving(engine, model) as address, client_process.running(log) as process:
        yield Doors(engine, (address, process))
