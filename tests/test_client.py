"""The client's clock and bookkeeping, on a scripted source of tokens (engine tests drive a real vLLM)."""

import asyncio
import itertools
import time

import pytest

from latency_lab import client
from latency_lab.client import Piece
from latency_lab.load import Request, Stream


def request(index: int, due_s: float | None = None, tokens: int = 3) -> Request:
    return Request(
        index=index, class_name="chat", priority=None, prompt=(1, 2), output_tokens=tokens, ignore_eos=True, due_s=due_s
    )


def closed(requests, concurrency, seconds=None):
    return Stream(class_name="chat", concurrency=concurrency, seconds=seconds, start_s=0.0, requests=iter(requests))


def opened(requests):
    return Stream(class_name="chat", concurrency=None, seconds=None, start_s=0.0, requests=iter(requests))


class Scripted:
    """Gives each request the chunks of its script: (delay in seconds, number of tokens)."""

    def __init__(self, script, error=None, finish="length"):
        self.script, self.error, self.finish = script, error, finish
        self.running = self.most_running = 0

    async def stream(self, request_id, request):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for number, (delay, tokens) in enumerate(self.script):
                await asyncio.sleep(delay)
                yield Piece(tokens, [7] * tokens, self.finish if number == len(self.script) - 1 else None)
            if self.error:
                raise self.error
        finally:
            self.running -= 1


def drive(source, streams, timeout_s=5.0):
    return asyncio.run(client.drive(source, streams, name="cell", timeout_s=timeout_s))


def test_every_chunk_is_stamped_when_it_comes():
    run = drive(Scripted([(0.05, 1), (0.0, 2), (0.1, 1)]), [closed([request(0)], 1)])
    (timing,) = run.timings
    assert timing.chunk_tokens == [1, 2, 1]
    assert timing.token_ids == [7, 7, 7, 7]
    first, second, third = timing.chunk_s
    assert 0.05 <= first < second < third
    assert third - second >= 0.1
    assert timing.finish_reason == "length" and timing.error is None


def test_rows_count_times_from_sending():
    run = drive(Scripted([(0.02, 1), (0.02, 1)]), [opened([request(0, due_s=0.1)])])
    (row,) = client.rows(run, False, {"cell-0": {"queue_s": 0.25}}, {})
    assert row["scheduled_s"] == 0.1
    assert row["sent_s"] + row["token_times_s"][0] == pytest.approx(row["first_token_s"])
    assert row["queue_s"] == 0.25
    assert row["output_tokens"] == 2 and row["token_ids"] is None


def test_a_closed_loop_keeps_its_concurrency_and_sends_every_request():
    source = Scripted([(0.01, 1)])
    run = drive(source, [closed([request(n) for n in range(9)], 3)])
    assert source.most_running == 3
    assert [timing.request.index for timing in run.timings] == list(range(9))


def test_a_timed_closed_loop_stops_sending_and_lets_requests_end():
    run = drive(Scripted([(0.03, 1)]), [closed((request(n) for n in itertools.count()), 2, seconds=0.2)])
    assert 4 <= len(run.timings) <= 14
    assert all(timing.error is None and timing.scheduled_s < 0.2 for timing in run.timings)


def test_an_open_loop_sends_on_time_however_many_are_in_flight():
    source = Scripted([(0.3, 1)])
    run = drive(source, [opened([request(n, due_s=n * 0.02) for n in range(10)])])
    assert source.most_running == 10
    assert all(0 <= timing.sent_s - timing.scheduled_s < 0.1 for timing in run.timings)


def test_a_stalled_client_cannot_hide_delay():
    """Latency counts from the scheduled arrival: a request that was sent late is late, not fast."""

    class Blocking(Scripted):
        async def stream(self, request_id, request):
            if request_id == "cell-0":
                time.sleep(0.3)  # stalls the event loop
            async for item in super().stream(request_id, request):
                yield item

    run = drive(Blocking([(0.0, 1)]), [opened([request(0, due_s=0.0), request(1, due_s=0.05)])])
    late = run.timings[1]
    assert late.scheduled_s == 0.05
    assert late.chunk_s[0] - late.scheduled_s > 0.2
    assert run.loop_lag_p99_s > 0.2


def test_a_failed_request_is_a_row_with_its_tokens_so_far():
    run = drive(Scripted([(0.0, 1)], error=RuntimeError("out of\nblocks"), finish=None), [closed([request(0)], 1)])
    (row,) = client.rows(run, False, {}, {})
    assert row["error"] == "RuntimeError: out of blocks"
    assert row["output_tokens"] == 1


def test_an_aborted_request_is_a_failure():
    run = drive(Scripted([(0.0, 1)], finish="abort"), [closed([request(0)], 1)])
    assert "abort" in run.timings[0].error


def test_a_timeout_keeps_what_was_done_and_marks_the_rest():
    source = Scripted([(0.0, 1), (0.15, 1), (10.0, 1)])
    requests = [request(n, due_s=due) for n, due in enumerate([0.0, 0.1, 0.25, 9.0])]
    run = drive(source, [opened(requests)], timeout_s=0.3)
    assert run.timed_out
    assert [timing.request.index for timing in run.timings] == [0, 1, 2], "request 3 was not due yet"
    assert all(timing.error.startswith("timeout") for timing in run.timings)
    assert sum(run.timings[0].chunk_tokens) == 2


def test_requests_that_were_due_but_never_sent_are_rows():
    class Stuck:
        def stream(self, *_):
            time.sleep(0.4)  # the loop stands still past the timeout
            raise ValueError("stuck")

    run = drive(Stuck(), [opened([request(n, due_s=n * 0.1) for n in range(5)])], timeout_s=0.2)
    unsent = [timing for timing in run.timings if timing.sent_s is None]
    assert [timing.error for timing in unsent] == ["timeout: due, but never sent"] * len(unsent)
    assert len(run.timings) >= 3


def test_the_clients_own_cost_is_measured():
    run = drive(Scripted([(0.001, 1)] * 50), [closed([request(n) for n in range(20)], 20)])
    assert 0 < run.client_s < run.duration_s
    columns = run.columns
    assert columns["client_us_per_token"] == pytest.approx(run.client_s / 1000 * 1e6)
    assert columns["client_share"] == pytest.approx(run.client_s / run.duration_s)
