"""Tokens from an OpenAI-compatible server over HTTP: chat and completions, streamed or whole.

The client is aiohttp's, which vLLM's own benchmark uses as well; the events of a stream are read here, from the bytes
as they arrive. Whatever a client takes is found in the latencies that it measures, and the openai package takes more:
on one core it sent 370 requests a second (900 over aiohttp), this 3,000 and vLLM's benchmark 1,850 (64 in flight,
answers of 16 tokens that come at once), and a token took it 115 us of CPU time even with its events read here, this 70
and vLLM's benchmark 70.

Nothing is tried twice, no limit on connections holds a request back, and no time limit but the cell's own.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from latency_lab.client import Piece
from latency_lab.load import Request

SOCKETS = 8192


@dataclass(frozen=True)
class Address:
    """How to reach a server: base URL, the name of its model, and the key that was made for it."""

    url: str
    model: str
    key: str = field(repr=False)


class ServerError(Exception):
    """What a server said instead of tokens, or an answer that is not whole."""


class OpenAISource:
    """A client of one server. `token_ids`: ask for the ids of the output tokens, a few bytes each; vLLM gives them."""

    def __init__(self, address: Address, token_ids: bool = False) -> None:
        allow_many_sockets()
        self._address = address
        self._token_ids = token_ids

    async def __aenter__(self) -> OpenAISource:
        import aiohttp  # comes with vLLM: reading records needs none

        # No trust_env: it would send requests through a proxy that the user has for other hosts.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers={"Authorization": f"Bearer {self._address.key}"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def stream(self, request_id: str, request: Request) -> AsyncIterator[Piece]:
        """A request's tokens as they come, or all at once at its end where the request is not to be streamed. Greedy.

        Raises ServerError for a refusal (4xx, 5xx) and for an answer that is not whole, and aiohttp.ClientError where
        there is no server or the connection breaks.
        """
        path = "chat/completions" if request.door.api == "chat" else "completions"
        asked = self._http.post(
            f"{self._address.url}/{path}", json=self._body(request), headers={"X-Request-Id": request_id}
        )
        async with asked as response:
            if response.status != 200:
                raise ServerError(f"{response.status} {response.reason}: {_message(await response.read())}")
            if not request.door.stream:
                yield _whole(await response.read())
                return
            answer = _Answer()
            async for data in response.content.iter_any():
                for piece in answer.pieces(data):
                    yield piece
            yield answer.end()

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._address.model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": request.door.stream,
            # from here on vLLM's own
            "ignore_eos": request.ignore_eos,
            "repetition_penalty": 1.0,  # a server takes what it is not told from the model's generation_config.json
            "return_token_ids": self._token_ids,
        }
        if request.priority is not None:
            body["priority"] = request.priority
        if request.door.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if request.door.api == "chat":
            return {**body, "messages": [{"role": "user", "content": request.text}]}
        return {**body, "prompt": list(request.prompt)}


class _Answer:
    """A stream as it is read: what came so far, and the line that is not whole yet."""

    def __init__(self) -> None:
        self.rest = b""
        self.came = 0
        self.reason: str | None = None
        self.usage: dict[str, int] | None = None
        self.done = False

    def pieces(self, data: bytes) -> Iterator[Piece]:
        """The tokens in the events that these bytes complete. Raises ServerError.

        How many an event holds is in the usage that vLLM adds to each where it is asked to, else in their ids. Lines
        end at line feeds alone: text may hold what other readers of lines take for an end, such as U+2028.
        """
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if self.done or not line.startswith(b"data:"):
                continue  # also a comment, which keeps a connection open
            text = line[5:].strip()
            if text == b"[DONE]":
                self.done = True
            elif text and (piece := self._piece(json.loads(text))) is not None:
                yield piece

    def _piece(self, event: dict[str, Any]) -> Piece | None:
        if "error" in event:
            raise ServerError(f"the server broke off: {event['error'].get('message') or event['error']}")
        usage = self.usage = event.get("usage")
        if not event["choices"]:
            return None  # the last event, with the usage alone
        choice = event["choices"][0]
        ids = choice.get("token_ids") or ()
        count = usage["completion_tokens"] - self.came if usage else len(ids)
        self.came += count
        self.reason = choice["finish_reason"]
        return Piece(count, ids) if count else None

    def end(self) -> Piece:
        """What comes with the end of the stream, checked against the usage that it ends with. Raises ServerError."""
        if self.reason is None or self.usage is None:
            raise ServerError(f"the stream ended early, after {self.came} tokens")
        if self.usage["completion_tokens"] != self.came:
            raise ServerError(f"the server counts {self.usage['completion_tokens']} tokens, and {self.came} came")
        return Piece(0, (), self.reason, self.usage["prompt_tokens"])


def _message(body: bytes) -> str:
    """What a refusal says."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return text


def _whole(body: bytes) -> Piece:
    """The tokens of an answer that came as a whole."""
    answer = json.loads(body)
    choice, usage = answer["choices"][0], answer["usage"]
    return Piece(
        usage["completion_tokens"], choice.get("token_ids") or (), choice["finish_reason"], usage["prompt_tokens"]
    )


def allow_many_sockets() -> None:
    """Let this process open as many sockets as 1,024 requests in flight need on both of their ends, and more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOCKETS if hard == resource.RLIM_INFINITY else min(SOCKETS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
