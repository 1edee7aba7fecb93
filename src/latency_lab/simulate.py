"""An engine under load, request by request: vLLM's scheduling rules, with the times of steps from roofline.py.

The rules are those of vLLM's V1 scheduler with its FCFS policy (vllm/v1/core/sched/scheduler.py): a step holds at most
max_num_batched_tokens tokens and max_num_seqs requests; running requests come first, one token each or as much of their
prompt as fits; then waiting ones in order of arrival, with as much of their prompt as fits, or all of it where chunked
prefill is off.

With async scheduling two steps are under way at a time (EngineCore.step_with_batch_queue): a step is chosen and
launched while the one before runs, and only then are the tokens of that one awaited. So a request waits for the next
choice, and a slow launch holds back the tokens of the step before. Without it, a step is chosen when the last ended.

What is left out: preemption (running out of KV cache is an error that says so), priorities, prefix caching, stops
before max_tokens, and any noise: the same load gives the same run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from latency_lab.roofline import Costs, Engine, StepTime


class SimulationError(Exception):
    """A load that can't be simulated; the message says why."""


@dataclass(frozen=True)
class Ask:
    """A request: tokens of its prompt and output, and when it is due in an open loop."""

    prompt_tokens: int
    output_tokens: int
    due_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """Requests of one class. concurrency : of a closed loop, whose next request is sent when one ends; None: open."""

    asks: Sequence[Ask]
    concurrency: int | None = None
    name: str = "all"


@dataclass
class Run:
    """A simulated cell. Times in seconds from the start of the load.

    requests : a row each, in order of sending: class_name, prompt_tokens, output_tokens, scheduled_s, first_token_s,
        last_token_s, and the latencies ttft_s, tpot_s (null for one token), e2e_s
    ends_s : when each step's tokens came back; a request's tokens came with the steps first_step to last_step, and
        its client saw them outbound_s later
    """

    requests: pd.DataFrame
    ends_s: np.ndarray
    outbound_s: float

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the time from the first request's sending to the last token."""
        span_s = self.requests["last_token_s"].max() - self.requests["scheduled_s"].min()
        return float(self.requests["output_tokens"].sum() / span_s)

    def itl_s(self, class_name: str | None = None) -> np.ndarray:
        """All gaps between tokens of all requests, or of those of a class."""
        own = self.requests if class_name is None else self.requests[self.requests["class_name"] == class_name]
        gaps = np.diff(self.ends_s)
        parts = [gaps[a:b] for a, b in zip(own["first_step"], own["last_step"], strict=True)]
        return np.concatenate([np.empty(0), *parts])


@dataclass(slots=True)
class _Request:
    number: int
    load: int
    prompt: int
    output: int
    sent_s: float
    computed: int = 0
    made: int = 0
    first_step: int = -1
    last_step: int = -1


@dataclass(slots=True)
class _Step:
    number: int
    ready_s: float
    first: list[_Request] = field(default_factory=list)
    last: list[_Request] = field(default_factory=list)


def simulate(loads: Iterable[Load], engine: Engine, time: StepTime, costs: Costs) -> Run:
    """Run the loads until all requests have been answered.

    Raises SimulationError where a request can never run, or where running ones outgrow the KV cache.
    """
    return _Simulation(list(loads), engine, time, costs).run()


def closed(concurrency: int, prompt_tokens: int, output_tokens: int, requests_each: int = 4) -> list[Load]:
    """A closed loop of equal requests, as the studies' chats."""
    return [Load([Ask(prompt_tokens, output_tokens)] * (concurrency * requests_each), concurrency)]


def poisson(rate_per_s: float, prompt_tokens: int, output_tokens: int, requests: int, seed: int = 0) -> list[Load]:
    """An open loop of equal requests with exponential gaps."""
    due_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, requests))
    return [Load([Ask(prompt_tokens, output_tokens, float(at)) for at in due_s])]


class _Simulation:
    def __init__(self, loads: list[Load], engine: Engine, time: StepTime, costs: Costs) -> None:
        self.loads, self.engine, self.time, self.costs = loads, engine, time, costs
        self.depth = 2 if engine.asynchronous else 1
        self.capacity = engine.kv_cache_tokens or 1 << 62
        self.requests: list[_Request] = []
        self.arriving: list[tuple[float, int, _Request]] = []
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.flying: deque[_Step] = deque()
        self.ends_s: list[float] = []
        self.steps = 0
        self.now_s = 0.0  # when the scheduler is free
        self.gpu_s = 0.0  # when the GPU has done all that it was given
        self.client_s = 0.0  # when the client can send the next request
        self.cached = 0
        self.left = [iter(load.asks) for load in loads]

    def run(self) -> Run:
        for number, load in enumerate(self.loads):
            for _ in range(len(load.asks) if load.concurrency is None else load.concurrency):
                self._send(number, 0.0)
        while True:
            self._receive()
            if len(self.flying) < self.depth:
                step = self._next_step()
                if step is not None:
                    self.flying.append(step)
                    if len(self.flying) < self.depth:
                        continue
                elif not self.flying:
                    if not self.arriving:
                        break
                    self.now_s = max(self.now_s, self.arriving[0][0])
                    continue
            self._end_step(self.flying.popleft())
        if self.waiting:
            raise SimulationError(
                f"a prompt of {self.waiting[0].prompt} tokens never runs: KV cache of {self.capacity} tokens, budget "
                f"of {self.engine.max_num_batched_tokens}, chunked prefill {'on' if self.engine.chunked else 'off'}"
            )
        return self._result()

    def _send(self, load: int, at_s: float) -> None:
        """Send the next request of a load, if there is one, not before `at_s`."""
        ask = next(self.left[load], None)
        if ask is None:
            return
        due_s = ask.due_s if self.loads[load].concurrency is None else at_s
        self.client_s = max(self.client_s, due_s)
        request = _Request(len(self.requests), load, ask.prompt_tokens, ask.output_tokens, due_s)
        self.requests.append(request)
        heapq.heappush(self.arriving, (self.client_s + self.costs.inbound_s, request.number, request))
        self.client_s += self.costs.spacing_s

    def _receive(self) -> None:
        while self.arriving and self.arriving[0][0] <= self.now_s:
            self.waiting.append(heapq.heappop(self.arriving)[2])

    def _next_step(self) -> _Step | None:
        """Choose a step and launch it; None where there is nothing to do. Runs of equal steps are done at once."""
        budget = self.engine.max_num_batched_tokens
        step = _Step(self.steps, 0.0)
        tokens = requests = prefill = 0
        context = pairs = 0.0
        least = 1 << 62  # outputs that are left to the running request that has fewest
        for request in self.running:
            if request.made >= request.output:
                continue  # its last token is under way
            if budget <= 0:
                break
            due = request.prompt - request.computed
            if due <= 0:
                count = 1
                request.made += 1
                least = min(least, request.output - request.made)
            else:
                count = min(due, budget)
                prefill += count
                self._prompt_done(request, count, step)
            request.computed += count
            budget -= count
            tokens += count
            requests += 1
            context += request.computed
            pairs += count * (request.computed - (count - 1) / 2)
            if request.made == request.output:
                step.last.append(request)
        self.cached += tokens
        while self.waiting and len(self.running) < self.engine.max_num_seqs and budget > 0:
            request = self.waiting[0]
            count = min(request.prompt, budget)
            if (count < request.prompt and not self.engine.chunked) or self.cached + count > self.capacity:
                break
            self.running.append(self.waiting.popleft())
            self._prompt_done(request, count, step)
            request.computed = count
            budget -= count
            tokens += count
            prefill += count
            requests += 1
            context += count
            pairs += count * (count + 1) / 2
            self.cached += count
            if request.made == request.output:
                step.last.append(request)
        if not requests:
            return None
        if self.cached > self.capacity:
            raise SimulationError(
                f"{len(self.running)} running requests outgrow the KV cache of {self.capacity} tokens: preemption is "
                "not simulated; lower max_num_seqs"
            )
        computed = self.time.padded(tokens)
        seconds = self.time.gpu_s(computed, requests, context, pairs)
        host_s = self.time.host_s(tokens, not prefill)
        self.steps += 1
        step.ready_s = self._launch(seconds, host_s)
        blocked = self.waiting and len(self.running) < self.engine.max_num_seqs
        if not prefill and requests == len(self.running) and not blocked and least > 1:
            step = self._repeat(step, seconds, requests, host_s, least)
        return step

    def _prompt_done(self, request: _Request, count: int, step: _Step) -> None:
        if request.computed + count >= request.prompt:
            request.made = 1
            step.first.append(request)

    def _launch(self, seconds: float, host_s: float) -> float:
        """Launch a step now; returns when the GPU has done it. Kernels run as they are launched, one after another."""
        launched_s = self.now_s + host_s
        self.gpu_s = max(max(self.gpu_s, self.now_s) + seconds, launched_s)
        self.now_s = launched_s
        return self.gpu_s

    def _repeat(self, step: _Step, seconds: float, requests: int, host_s: float, least: int) -> _Step:
        """After a decode step, the same ones over and over: until a request is about to end, or one arrives.

        Each has a token more of context for each request, so takes `longer_s` more.
        """
        until_s = self.arriving[0][0] if self.arriving else float("inf")
        longer_s = requests * (self.time.context_s + self.time.pair_s)
        ends_s, flying, depth = self.ends_s, self.flying, self.depth
        room = min(least - 1, (self.capacity - self.cached) // requests)
        now_s, gpu_s, ready_s = self.now_s, self.gpu_s, step.ready_s
        done = 0
        if len(flying) + 1 < depth or (flying and (flying[0].first or flying[0].last)):
            return step  # not yet in step with the GPU, or what is under way has to be looked at when it comes back
        if flying:
            ready_s, last_s = flying[0].ready_s, step.ready_s
        while done < room:
            end_s = now_s if now_s > ready_s else ready_s
            if until_s <= end_s:
                break
            ends_s.append(end_s)
            seconds += longer_s
            launched_s = end_s + host_s
            gpu_s = (gpu_s if gpu_s > end_s else end_s) + seconds
            if gpu_s < launched_s:
                gpu_s = launched_s
            now_s = launched_s
            if flying:
                ready_s, last_s = last_s, gpu_s
            else:
                ready_s = gpu_s
            done += 1
        self.now_s, self.gpu_s = now_s, gpu_s
        for request in self.running:
            request.made += done
            request.computed += done
        self.cached += done * requests
        self.steps += done
        if flying and done:
            flying[0] = _Step(self.steps - 2, ready_s)
            return _Step(self.steps - 1, last_s)
        return _Step(self.steps - 1, ready_s, step.first, step.last) if done else step

    def _end_step(self, step: _Step) -> None:
        self.now_s = max(self.now_s, step.ready_s)
        self.ends_s.append(self.now_s)
        for request in step.first:
            request.first_step = step.number
        for request in step.last:
            request.last_step = step.number
            self.running.remove(request)
            self.cached -= request.computed
            if self.loads[request.load].concurrency is not None:
                self._send(request.load, self.now_s + self.costs.outbound_s)

    def _result(self) -> Run:
        ends_s = np.array(self.ends_s)
        names = ("load", "prompt", "output", "sent_s", "first_step", "last_step")
        load, prompt, output, sent_s, first, last = (
            np.array([getattr(request, name) for request in self.requests]) for name in names
        )
        first_s, last_s = (ends_s[at.astype(int)] + self.costs.outbound_s for at in (first, last))
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_s = np.where(output > 1, (last_s - first_s) / (output - 1), np.nan)
        table = pd.DataFrame(
            {
                "class_name": np.array([one.name for one in self.loads], object)[load.astype(int)],
                "prompt_tokens": prompt,
                "output_tokens": output,
                "scheduled_s": sent_s,
                "first_token_s": first_s,
                "last_token_s": last_s,
                "first_step": first,
                "last_step": last,
                "ttft_s": first_s - sent_s,
                "tpot_s": tpot_s,
                "e2e_s": last_s - sent_s,
            }
        )
        return Run(table, ends_s, self.costs.outbound_s)
