"""The front door over real HTTP on 127.0.0.1: a made-up server in the client's way, then vLLM's own on an engine."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time

import psutil
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from latency_lab import client, client_process, server
from latency_lab.load import Request, Stream
from latency_lab.openai_source import Address, OpenAISource
from latency_lab.study_grid import Door

COMPLETIONS = Door("openai", "completions")
CHAT = Door("openai", "chat")
WHOLE = Door("openai", "chat", False)


def request(index=0, door=COMPLETIONS, tokens=3, priority=None):
    return Request(index, "c", priority, (5, 6, 7), tokens, True, None, text="Why?", door=door)


def closed(requests, concurrency=1):
    return Stream("c", concurrency, None, 0.0, iter(requests))


def event(tokens=None, ids=None, reason=None, text="a"):
    """A token's event as vLLM's server writes it; `tokens`: how many there are so far, in its usage."""
    choice = {"index": 0, "text": text, "finish_reason": reason} | ({"token_ids": ids} if ids else {})
    usage = tokens and {"prompt_tokens": 3, "completion_tokens": tokens}
    return "data: " + json.dumps({"choices": [choice], "usage": usage}, ensure_ascii=False) + "\n\n"


def ending(tokens):
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    return "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\ndata: [DONE]\n\n"


async def played(*parts):
    """What a stream writes, part by part; a number is a pause in seconds, an exception breaks the connection."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
        if isinstance(part, float):
            await asyncio.sleep(part)
        else:
            yield part


def app(answer, seen=None):
    """A server that gives every request what `answer(body)` returns."""

    async def handle(asked):
        body = await asked.json()
        if seen is not None:
            seen.append({"path": asked.url.path, "headers": dict(asked.headers), **body})
        found = answer(body)
        return found if isinstance(found, Response) else StreamingResponse(found, media_type="text/event-stream")

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, handle, methods=["POST"]) for path in paths])


def drive(application, requests, concurrency=1, timeout_s=20.0, token_ids=False):
    async def run():
        async with server.listening(application) as url, OpenAISource(Address(url, "m", "k"), token_ids) as source:
            return await client.drive(source, [closed(requests, concurrency)], name="cell", timeout_s=timeout_s)

    return asyncio.run(run())


def error_of(application, **options):
    (timing,) = drive(application, [request(tokens=9)], **options).timings
    assert timing.finished_s is not None
    return timing.error


def test_tokens_are_counted_and_stamped_as_they_come():
    script = (event(1), 0.2, event(3), 0.2, event(4, reason="length"), ending(4))
    (timing,) = drive(app(lambda body: played(*script)), [request()]).timings
    assert timing.error is None
    assert timing.chunk_tokens == [1, 2, 1], "two tokens in one event are two, at one time"
    first, second, third = timing.chunk_s
    assert second - first > 0.05 and third - second > 0.05
    assert (timing.finish_reason, timing.prompt_tokens) == ("length", 3)


def test_ids_count_tokens_where_a_server_gives_no_usage_on_the_way():
    script = (event(ids=[8]), event(ids=[9, 10], reason="stop"), ending(3))
    (timing,) = drive(app(lambda body: played(*script)), [request()], token_ids=True).timings
    assert (timing.chunk_tokens, timing.token_ids, timing.error) == ([1, 2], [8, 9, 10], None)


def test_a_role_without_tokens_is_no_first_token():
    script = ("data: " + json.dumps({"choices": [{"index": 0, "finish_reason": None}], "usage": None}) + "\n\n", 0.1)
    script += (event(1, reason="length"), ending(1))
    (timing,) = drive(app(lambda body: played(*script)), [request(door=CHAT)]).timings
    assert timing.chunk_s[0] - timing.sent_s > 0.1 and timing.chunk_tokens == [1]


def test_text_with_line_separators_and_events_cut_anywhere_are_read_whole():
    data = (event(1, text="a\u2028b\x85c") + event(2, reason="length") + ": a comment\n\n" + ending(2)).encode()
    cuts = [data[i : i + 7] for i in range(0, len(data), 7)]
    (timing,) = drive(app(lambda body: played(*cuts)), [request()]).timings
    assert (timing.chunk_tokens, timing.error) == ([1, 1], None)


def test_an_answer_as_a_whole_has_no_first_token():
    whole = {
        "choices": [{"finish_reason": "stop", "token_ids": [1, 2]}],
        "usage": {"prompt_tokens": 41, "completion_tokens": 2},
    }
    run = drive(app(lambda body: JSONResponse(whole)), [request(door=WHOLE)], token_ids=True)
    (row,) = client.rows(run, True, {}, {})
    assert (row["via"], row["api"], row["streaming"]) == ("openai", "chat", False)
    assert row["first_token_s"] is None and row["sent_s"] < row["last_token_s"]
    assert (row["output_tokens"], row["token_ids"], row["prompt_tokens"]) == (2, [1, 2], 41)


def test_what_is_asked():
    seen = []
    requests = [request(0, CHAT), request(1, COMPLETIONS, priority=2), request(2, WHOLE)]
    drive(app(lambda body: JSONResponse({}, 500), seen), requests)
    chat, completion, whole = seen
    assert chat["path"] == whole["path"] == "/v1/chat/completions" and completion["path"] == "/v1/completions"
    assert chat["messages"] == [{"role": "user", "content": "Why?"}] and completion["prompt"] == [5, 6, 7]
    assert chat["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert chat["stream"] and not whole["stream"] and "stream_options" not in whole
    assert completion["priority"] == 2 and "priority" not in chat
    for body in seen:
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (3, 0.0, True)
        assert body["headers"]["authorization"] == "Bearer k"
    assert [body["headers"]["x-request-id"] for body in seen] == ["cell-0", "cell-1", "cell-2"]


@pytest.mark.parametrize(
    ("status", "name"), [(400, "Bad Request"), (401, "Unauthorized"), (503, "Service Unavailable")]
)
def test_a_refusal_is_a_row_and_is_not_tried_again(status, name):
    seen = []
    refused = {"error": {"message": "no such model"}}
    error = error_of(app(lambda body: JSONResponse(refused, status), seen))
    assert error == f"ServerError: {status} {name}: no such model"
    assert len(seen) == 1


def test_a_server_that_is_not_there_is_a_row():
    async def run():
        with socket.socket() as closed_port:
            closed_port.bind(("127.0.0.1", 0))
            address = Address(f"http://127.0.0.1:{closed_port.getsockname()[1]}/v1", "m", "k")
            async with OpenAISource(address) as source:
                return await client.drive(source, [closed([request()])], name="cell", timeout_s=5)

    (timing,) = asyncio.run(run()).timings
    assert timing.error.startswith("ClientConnectorError: Cannot connect to host 127.0.0.1")


def test_a_stream_that_breaks_is_a_row_with_what_came():
    run = drive(app(lambda body: played(event(1), event(2), 0.05, RuntimeError("gone"))), [request()])
    (row,) = client.rows(run, False, {}, {})
    assert row["output_tokens"] == 2
    assert row["error"].startswith("ClientPayloadError")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ((event(1), event(2)), "ended early, after 2 tokens"),
        ((event(1), 'data: {"error": {"message": "the engine died"}}\n\n', "data: [DONE]\n\n"), "the engine died"),
        ((event(1), event(2, reason="length"), ending(7)), "counts 7 tokens, and 2 came"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_row(script, said):
    assert said in error_of(app(lambda body: played(*script)))


def test_a_request_that_outlives_the_cell_is_cut_off():
    began = time.perf_counter()
    error = error_of(app(lambda body: played(event(1), 0.6, event(2))), timeout_s=0.3)
    assert error == "timeout: the cell's time limit cut it off"
    assert time.perf_counter() - began < 3


def test_nothing_holds_back_1024_requests_in_flight():
    """Every one of them is answered when the last one has come."""

    async def run():
        waiting = []

        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            waiting.append(writer)
            if len(waiting) == 1024:
                body = (event(1, reason="length") + ending(1)).encode()
                for one in waiting:
                    one.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        listening = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        async with listening, OpenAISource(Address(url, "m", "k")) as source:
            requests = closed([request(index) for index in range(1024)], 1024)
            found = await client.drive(source, [requests], name="cell", timeout_s=60)
            for one in waiting:
                one.close()
            return found

    timings = asyncio.run(run()).timings
    assert len(timings) == 1024 and {timing.error for timing in timings} == {None}


def test_small_events_do_not_wait_for_one_another():
    """Nagle's algorithm is off on the server's side, as it is under `vllm serve`."""

    async def run():
        made = app(lambda body: JSONResponse({}))
        async with server.listening(made) as url:
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[-1].split("/")[0]))
            while not (connections := made.state.server.server_state.connections):
                await asyncio.sleep(0.01)
            accepted = next(iter(connections)).transport.get_extra_info("socket")
            writer.close()
            return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert asyncio.run(run())


def test_the_port_is_closed_when_the_server_ends():
    async def run():
        async with server.listening(app(lambda body: JSONResponse({}))) as url:
            port = int(url.split(":")[-1].split("/")[0])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def apart(answer, log):
    """A client process, its system process, and a server with a made-up answer."""
    async with server.listening(app(answer)) as url, client_process.running(log) as process:
        yield process, psutil.Process().children()[-1], Address(url, "m", "k")


def test_the_client_in_a_process_of_its_own_measures_the_same(tmp_path):
    """Both kinds of streams cross the pipe, clocks agree, and nothing is left of the process."""

    async def run():
        script = (event(1), 0.02, event(2, reason="length"), ending(2))
        endless = Stream("e", 2, 0.5, 0.0, (request(index) for index in itertools.count(100)))
        options = {"timeout_s": 20, "token_ids": False}
        async with apart(lambda body: played(*script), tmp_path / "log") as (process, child, address):
            streams = [closed([request(index) for index in range(4)], 2), endless]
            began = time.perf_counter()
            found = await process.drive(address, streams, name="a", **options)
            assert began < found.zero_s < found.zero_s + found.duration_s < time.perf_counter()
            again = await process.drive(address, [closed([request()])], name="b", **options)
        assert not child.is_running()
        return found, again

    found, again = asyncio.run(run())
    assert [timing.request.index for timing in found.timings[:4]] == [0, 1, 2, 3]
    assert len(found.timings) > 4 and {timing.error for timing in found.timings} == {None}
    assert found.client_cpu_s > 0 and found.frontend_cpu_s > 0
    assert [timing.request_id for timing in again.timings] == ["b-0"]


def test_the_client_process_runs_on_the_loop_that_vllm_runs_on(monkeypatch):
    uvloop = pytest.importorskip("uvloop")
    with contextlib.closing(client_process._event_loop()) as loop:
        assert isinstance(loop, uvloop.Loop)
    monkeypatch.setitem(sys.modules, "uvloop", None)  # not installed
    with contextlib.closing(client_process._event_loop()) as loop:
        assert isinstance(loop, asyncio.SelectorEventLoop)


def test_a_client_process_that_dies_is_an_error_in_one_line(tmp_path):
    async def run():
        asked = asyncio.Event()

        async def answer():
            asked.set()
            yield event(1)
            await asyncio.sleep(5)

        async with apart(lambda body: answer(), tmp_path / "log") as (process, child, address):
            driving = process.drive(address, [closed([request()])], name="a", timeout_s=20, token_ids=False)
            cell = asyncio.create_task(driving)
            await asked.wait()
            child.kill()
            await cell

    with pytest.raises(RuntimeError, match="client's process ended"):
        asyncio.run(run())


# --- vLLM's own server, on an engine ------------------------------------------------------------------------


@pytest.mark.engine
def test_vllms_server_gives_the_engines_tokens(answers):
    expected = answers["engine"].token_ids
    assert len(expected) == 6
    for name in ("token ids", "as a whole"):
        assert answers[name].error is None
        assert (answers[name].token_ids, answers[name].prompt_tokens) == (expected, 24)
    assert sum(answers["token ids"].chunk_tokens) == 6 and answers["as a whole"].chunk_tokens == [6]


@pytest.mark.engine
def test_vllms_server_refuses_who_has_not_the_key_of_the_run(answers):
    assert answers["no key"] == 401
    assert "401" in answers["another key"].error and not answers["another key"].token_ids


@pytest.mark.engine
def test_what_vllms_server_refuses_is_a_row_with_its_reason(answers):
    assert "maximum context length is 1024 tokens" in answers["too long"].error


@pytest.mark.engine
def test_nothing_is_left_of_vllms_server_and_the_engine_lives_on(answers):
    assert "open port" not in answers
    assert answers["engine"].error is None
    left = [process for process in psutil.Process().children(recursive=True) if "VLLM" in process.name()]
    assert left == []
