"""Tokens from an OpenAI-compatible server, through `openai.AsyncOpenAI`: chat and completions, streamed or whole.

The SDK sends requests and keeps connections; the events of a stream are read here, from the bytes as they arrive. The
SDK's own reading checks every event against a model of its own, and on a machine that both client and server share
this took 0.3 ms of CPU time an event against 0.15 (20 streams of 50 events a second on two cores): time that would be
found in the latencies.

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

LANE = 16
"""Requests in flight that one SDK client is given. Its pool of connections looks through all of them at each request's
start and end: with 1,024 at once these looks alone took 3 s of CPU time."""


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
        self._lanes: list[_Lane] = []

    async def __aenter__(self) -> OpenAISource:
        return self

    async def __aexit__(self, *_: object) -> None:
        for lane in self._lanes:
            await lane.sdk.close()

    async def stream(self, request_id: str, request: Request) -> AsyncIterator[Piece]:
        """A request's tokens as they come, or all at once at its end where the request is not to be streamed. Greedy.

        Raises ConnectionError where there is no server, openai.APIStatusError for its refusals (4xx, 5xx),
        ServerError where it breaks off, and what the SDK's HTTP library raises where the connection breaks.
        """
        import openai

        body, headers = self._body(request), {"X-Request-Id": request_id}
        with self._lane() as sdk:
            api = sdk.chat.completions if request.door.api == "chat" else sdk.completions
            try:
                async with api.with_streaming_response.create(**body, extra_headers=headers) as response:
                    if request.door.stream:
                        async for piece in _pieces(response.iter_bytes()):
                            yield piece
                    else:
                        yield _whole(await response.read())
            except openai.APIConnectionError as error:
                raise ConnectionError(f"{error} ({error.__cause__})") from error

    @contextlib.contextmanager
    def _lane(self) -> Iterator[Any]:
        """An SDK client that has few requests in flight."""
        lane = next((lane for lane in self._lanes if lane.in_flight < LANE), None)
        if lane is None:
            self._lanes.append(lane := _Lane(_sdk(self._address)))
        lane.in_flight += 1
        try:
            yield lane.sdk
        finally:
            lane.in_flight -= 1

    def _body(self, request: Request) -> dict[str, Any]:
        extra = {
            "ignore_eos": request.ignore_eos,
            "repetition_penalty": 1.0,  # a server takes what it is not told from the model's generation_config.json
            "return_token_ids": self._token_ids,
        }
        if request.priority is not None:
            extra["priority"] = request.priority
        body: dict[str, Any] = {
            "model": self._address.model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": request.door.stream,
            "extra_body": extra,
        }
        if request.door.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if request.door.api == "chat":
            return {**body, "messages": [{"role": "user", "content": request.text}]}
        return {**body, "prompt": list(request.prompt)}


@dataclass
class _Lane:
    sdk: Any
    in_flight: int = 0


def _sdk(address: Address) -> Any:
    import openai

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=None)
    # trust_env would send requests through a proxy that the user has for other hosts. There is no TLS to verify, and
    # making ready for it takes 25 ms.
    http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=None, trust_env=False, verify=False)
    return openai.AsyncOpenAI(base_url=address.url, api_key=address.key, timeout=None, max_retries=0, http_client=http)


async def _pieces(data: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
    """The tokens in the events of a stream, checked against the usage that ends it.

    How many an event holds is in the usage that vLLM adds to each where it is asked to, else in their ids.
    Raises ServerError.
    """
    came, reason, usage = 0, None, None
    async for event in _events(data):
        if "error" in event:
            raise ServerError(f"the server broke off: {event['error'].get('message') or event['error']}")
        usage = event.get("usage")
        if not event["choices"]:
            continue  # the last event, with the usage alone
        choice = event["choices"][0]
        ids = choice.get("token_ids") or ()
        count = usage["completion_tokens"] - came if usage else len(ids)
        came += count
        reason = choice["finish_reason"]
        if count:
            yield Piece(count, ids)
    if reason is None or usage is None:
        raise ServerError(f"the stream ended early, after {came} tokens")
    if usage["completion_tokens"] != came:
        raise ServerError(f"the server counts {usage['completion_tokens']} tokens, and {came} came")
    yield Piece(0, (), reason, usage["prompt_tokens"])


async def _events(data: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream until the one that says it is done.

    Lines end at line feeds alone: text may hold what other readers of lines take for an end, such as U+2028.
    """
    rest = b""
    async for part in data:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            text = line.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            if text and line.startswith(b"data:"):  # not a comment, which keeps a connection open
                yield json.loads(text)


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
