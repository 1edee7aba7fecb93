"""The scheduler's rules and times on loads small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from latency_lab import gpus, predictions, shapes, simulate
from latency_lab.fitting import Fit
from latency_lab.roofline import Costs, Engine, StepTime
from latency_lab.simulate import Ask, Load, SimulationError, closed, poisson

INSTANT = Costs({"bf16": 0.0}, 0.0, 1.0, {"bf16": 1.0}, dict.fromkeys(("graph", "pieces", "kernels", "eager"), 0.0))


class Clock:
    """Steps of 10 ms and 1 ms more for each prompt token; launching takes `host_ms`."""

    context_s = pair_s = 0.0

    def __init__(self, host_ms: float = 0.0) -> None:
        self.host = host_ms / 1e3

    def padded(self, tokens: int) -> int:
        return tokens

    def gpu_s(self, tokens: int, requests: int, context: float, pairs: float) -> float:
        return 0.010 + 0.001 * (tokens - requests)

    def host_s(self, tokens: int, decode_only: bool) -> float:
        return 0.0 if decode_only else self.host


def run(loads: list[Load], costs: Costs = INSTANT, host_ms: float = 0.0, **engine) -> simulate.Run:
    setting = Engine(**{"max_num_seqs": 256, "max_num_batched_tokens": 8192, "asynchronous": False} | engine)
    return simulate.simulate(loads, setting, Clock(host_ms), costs)  # type: ignore[arg-type]


def ms(values) -> list[float]:
    return [round(1e3 * value, 6) for value in values]


# --- rules ------------------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_a_step_for_its_prompt_and_one_for_each_further_token():
    found = run([Load([Ask(11, 3)])])
    row = found.requests.iloc[0]
    assert ms([row["ttft_s"], row["tpot_s"], row["e2e_s"]]) == [20, 10, 40]
    assert ms(found.ends_s) == [20, 30, 40] and ms(found.itl_s()) == [10, 10]


def test_a_request_of_one_token_has_no_tpot():
    row = run([Load([Ask(1, 1)])]).requests.iloc[0]
    assert np.isnan(row["tpot_s"]) and row["ttft_s"] == row["e2e_s"] == 0.01


def test_the_budget_cuts_a_prompt_into_chunks_and_streams_come_first():
    """A stream decodes from 10 ms on; a prompt of 100 arrives then: chunks of 9, since the stream takes one of ten."""
    found = run([Load([Ask(1, 20)], name="stream"), Load([Ask(90, 1, due_s=0.01)])], max_num_batched_tokens=10)
    long = found.requests[found.requests["class_name"] == "all"].iloc[0]
    chunk_s = 0.010 + 0.001 * (10 - 2)
    assert long["last_step"] - 0 == 10 and long["ttft_s"] == pytest.approx(10 * chunk_s)


def test_whole_prompts_wait_until_they_fit_where_chunking_is_off():
    loads = [Load([Ask(6, 1), Ask(6, 1)])]
    assert run(loads, max_num_batched_tokens=10).requests["first_step"].tolist() == [0, 1]
    assert run(loads, max_num_batched_tokens=10, chunked=False).requests["first_step"].tolist() == [0, 1]
    assert ms(run(loads, max_num_batched_tokens=10).ends_s) == [10 + 10 - 2, 18 + 10 + 1]  # 6 + 4 tokens, then 2
    assert ms(run(loads, max_num_batched_tokens=10, chunked=False).ends_s) == [15, 30]


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_in_order():
    found = run([Load([Ask(1, 3)] * 5)], max_num_seqs=2)
    assert ms(found.requests["ttft_s"]) == [10, 10, 40, 40, 70]


def test_a_closed_loop_sends_the_next_when_one_has_been_answered():
    found = run(closed(2, 1, 2, requests_each=2))
    assert ms(found.requests["scheduled_s"]) == [0, 0, 20, 20]
    assert found.output_tokens_per_s == pytest.approx(8 / 0.04)


def test_open_arrivals_wait_for_the_step_under_way():
    found = run([Load([Ask(1, 1), Ask(1, 1, due_s=0.004)])])
    assert ms(found.requests["ttft_s"]) == [10, 16]


def test_with_async_scheduling_an_arrival_waits_for_the_next_choice():
    """A step is chosen when its predecessor starts: what arrives at 14 ms misses the step of 20 ms, not that of 30."""
    loads = [Load([Ask(1, 10)]), Load([Ask(1, 1, due_s=0.014)])]
    late = run(loads, asynchronous=True).requests.iloc[1]
    soon = run(loads).requests.iloc[1]
    assert ms([soon["first_token_s"], late["first_token_s"]]) == [30, 40]


def test_a_slow_launch_holds_back_the_tokens_of_the_step_before():
    """A prompt that arrives at 26 ms is chosen at 35 and launched until 60: the stream's token of 45 ms comes then."""
    loads = [Load([Ask(1, 10)], name="stream"), Load([Ask(1, 1, due_s=0.026)])]
    found = run(loads, asynchronous=True, host_ms=25)
    assert ms(found.ends_s[:5]) == [25, 35, 60, 60, 70]


def test_requests_sent_at_once_follow_each_other():
    spaced = Costs(**{**INSTANT.__dict__, "spacing_s": 0.004, "inbound_s": 0.001, "outbound_s": 0.002})
    found = run([Load([Ask(1, 1)] * 4)], spaced)
    # They arrive at 1, 5, 9 and 13 ms; steps begin at 1, 11 and 21 ms.
    assert ms(found.requests["first_token_s"]) == [13, 23, 23, 33]


# --- the same, faster -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_runs_of_equal_steps_are_exactly_the_steps_one_by_one(asynchronous, monkeypatch):
    shape, gpu = shapes.shape("qwen3-4b-instruct-2507"), gpus.find("H200")
    costs = Costs({"bf16": 40e-6}, 2e-6, 0.8, {"bf16": 0.7}, dict.fromkeys(INSTANT.launch_s, 3e-4), 1e-3, 1e-3, 1e-4)
    engine = Engine(16, 512, asynchronous=asynchronous, graphs=True)
    rng = np.random.default_rng(0)
    asks = [
        Ask(int(p), int(o), float(d))
        for p, o, d in zip(*rng.integers(1, 300, (2, 60)), rng.uniform(0, 3, 60), strict=True)
    ]
    loads = [Load(asks), *closed(4, 64, 100)]
    fast = simulate.simulate(loads, engine, StepTime(shape, gpu, costs, engine), costs)
    monkeypatch.setattr(simulate._Simulation, "_repeat", lambda self, step, *_: step)
    slow = simulate.simulate(loads, engine, StepTime(shape, gpu, costs, engine), costs)
    assert len(fast.ends_s) == len(slow.ends_s) > 500
    np.testing.assert_allclose(fast.ends_s, slow.ends_s, rtol=1e-9)
    np.testing.assert_allclose(fast.requests["e2e_s"], slow.requests["e2e_s"], rtol=1e-9)


def test_every_token_is_made_once():
    rng = np.random.default_rng(1)
    asks = [
        Ask(int(p), int(o), float(d))
        for p, o, d in zip(*rng.integers(1, 80, (2, 40)), rng.uniform(0, 1, 40), strict=True)
    ]
    found = run([Load(asks)], max_num_seqs=8, max_num_batched_tokens=64, asynchronous=True)
    tokens = found.requests["last_step"] - found.requests["first_step"] + 1
    assert (tokens >= found.requests["output_tokens"]).all()  # a stream may be left out of a full step, never doubled
    assert (np.diff(found.ends_s) >= 0).all()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_run_is_an_error():
    with pytest.raises(
        SimulationError, match=r"a prompt of 50 tokens never runs: .* budget of 10, chunked prefill off"
    ):
        run([Load([Ask(50, 1)])], max_num_batched_tokens=10, chunked=False)
    with pytest.raises(SimulationError, match="KV cache of 40 tokens"):
        run([Load([Ask(50, 1)])], kv_cache_tokens=40)


def test_outgrowing_the_kv_cache_is_an_error_and_a_full_one_makes_requests_wait():
    with pytest.raises(SimulationError, match="2 running requests outgrow the KV cache of 30 tokens"):
        run([Load([Ask(10, 10)] * 2)], kv_cache_tokens=30)
    assert ms(run([Load([Ask(10, 2)] * 2)], kv_cache_tokens=15).requests["ttft_s"]) == [19, 48]


def test_poisson_arrivals_come_at_their_rate_and_from_their_seed():
    load, again = poisson(5.0, 8, 4, 2000)[0], poisson(5.0, 8, 4, 2000)[0]
    assert load == again
    assert load.asks[-1].due_s == pytest.approx(400, rel=0.1)


# --- against records --------------------------------------------------------------------------------------------------


def test_a_recorded_cell_is_replayed_as_its_load_was():
    """Open arrivals when they were due, closed loops by concurrency, prompt tokens less what the cache held."""
    cell = {
        "model": "qwen3-4b-instruct-2507",
        "load": "closed",
        "concurrency": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "quantization": None,
        "dtype": "bfloat16",
        "async_scheduling": True,
    }
    rows = pd.DataFrame(
        {
            "request": range(4),
            "class_name": "chat",
            "prompt_tokens": 100,
            "cached_tokens": [None, None, 64, 64],
            "output_tokens": 5,
            "scheduled_s": [0.0, 0.0, 0.5, 0.5],
        }
    )
    fit = Fit("NVIDIA H200", gpus.find("H200"), INSTANT, pd.DataFrame(), 1, 1)
    found = predictions.replay(cell, rows, fit).requests
    assert found["prompt_tokens"].tolist() == [100, 100, 36, 36]
    assert found["scheduled_s"].iloc[2] == pytest.approx(found["last_token_s"].iloc[0])
    opened = predictions.replay(cell | {"load": "mix"}, rows, fit).requests
    assert opened["scheduled_s"].tolist() == [0, 0, 0.5, 0.5]
