"""See inside the scheduler: what each step of an engine held, without changing what it decides.

vLLM builds its scheduler, in the engine's own process, by calling what its `scheduler_cls` argument names. Here that is
`tracing_scheduler`, which asks vLLM which scheduler it would have taken by itself for the resolved configuration (the
asynchronous one included) and makes a subclass of that. Naming a `scheduler_cls` changes nothing else that vLLM
resolves (0.24, 0.32: config/scheduler.py, config/vllm.py). The subclass passes every call on and notes, before and
after, what was decided.

Steps are appended to flat arrays in memory, between `begin` and `end` of a cell only, so warm-up and probes leave
nothing. They leave the process through a Unix socket in a private folder, whose path it inherits in its environment: a
thread waits there, and costs nothing until it is asked. vLLM's own ways lead elsewhere: `collective_rpc` reaches the
workers, not the scheduler; calls by name on the engine core are private; its stat loggers see no requests; and files
written while it runs would disturb what is measured.

Times are readings of `time.perf_counter`, which on Linux is CLOCK_MONOTONIC, one clock for all processes; `end` checks
at every cell that the engine's clock reads between two readings of ours. What differs between vLLM versions is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import shutil
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pyarrow as pa

from latency_lab import limits
from latency_lab.steps import table

SCHEDULER = "latency_lab.trace.tracing_scheduler"
FOLDER = "LATENCY_LAB_TRACE_DIR"
LIMIT = 16_000_000
"""Most requests-in-a-step that are kept of one cell, at 12 bytes each: an hour of 20 requests in 200 steps a second.
What comes later is counted, not kept."""

ANSWER_S = 30.0
SOCKET_PATH_BYTES = 100  # the system's limit is 108 on Linux, 104 on macOS


class TraceError(Exception):
    """Steps that could not be had; the message says why, for the cell's `steps_note`."""


# --- in the engine's process --------------------------------------------------------------------------------


def _doubles() -> Any:
    return array("d")


def _ints() -> Any:
    return array("i")


@dataclass
class Steps:
    """The steps of one scheduler as they were noted: a place in the first arrays for each step, in the second for each
    request in each step (the step's `width` says how many are its own), in the third for each preemption.

    Requests are numbered in order of appearance; `numbers` has their ids, `prompts` their prompts' tokens. Times are
    `time.perf_counter` readings, `own_s` is the time that noting took, `clock` a reading at the end.
    """

    scheduler: str = ""
    limit: int = LIMIT
    start: Any = field(default_factory=_doubles)
    end: Any = field(default_factory=_doubles)
    width: Any = field(default_factory=_ints)
    waiting: Any = field(default_factory=_ints)
    running: Any = field(default_factory=_ints)
    usage: Any = field(default_factory=_doubles)

    request: Any = field(default_factory=_ints)
    tokens: Any = field(default_factory=_ints)
    computed: Any = field(default_factory=_ints)

    preempted: Any = field(default_factory=_ints)
    preempted_step: Any = field(default_factory=_ints)

    numbers: dict[str, int] = field(default_factory=dict)
    prompts: Any = field(default_factory=_ints)
    open: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    own_s: float = 0.0
    clock: float = 0.0
    error: str | None = None

    def scheduled(self, start: float, scheduler: Any, output: Any) -> None:
        """Note a step that was just scheduled: `output` is vLLM's SchedulerOutput."""
        scheduled, preempted = output.num_scheduled_tokens, output.preempted_req_ids or ()
        if not scheduled and not preempted:
            return  # nothing to run: vLLM only tells its workers which requests have ended
        if self.dropped or len(self.request) + len(scheduled) > self.limit:
            self.dropped += 1
            return
        requests = scheduler.requests
        try:
            numbers = [self.numbers[name] for name in scheduled]
        except KeyError:
            numbers = [self._number(name, requests) for name in scheduled]
        step = len(self.start)
        self.request.extend(numbers)
        self.tokens.extend(scheduled.values())
        # schedule() has already counted this step's tokens as computed.
        self.computed.extend([requests[name].num_computed_tokens - tokens for name, tokens in scheduled.items()])
        for name in preempted:
            if name not in requests:
                continue  # it was aborted since
            self.preempted.append(self._number(name, requests))
            self.preempted_step.append(step)
        running, waiting = scheduler.get_request_counts()
        self.running.append(running)
        self.waiting.append(waiting)
        self.usage.append(scheduler.kv_cache_manager.usage)
        self.width.append(len(scheduled))
        self.start.append(start)
        self.end.append(float("nan"))
        self.open[id(output)] = step  # the engine holds the output until its step has come back

    def returned(self, output: Any) -> None:
        """Note that a step's tokens have come back."""
        step = self.open.pop(id(output), None)
        if step is not None:
            self.end[step] = time.perf_counter()

    def _number(self, name: str, requests: Any) -> int:
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.numbers)
            self.prompts.append(requests[name].num_prompt_tokens)
        return number


class Recorder:
    """Holds the steps of a scheduler while a cell runs. A failure here ends the recording, never the engine."""

    def __init__(self, scheduler: str, owner: Any = None) -> None:
        self.scheduler = scheduler
        self.owner = owner
        self.steps: Steps | None = None
        self.lock = threading.Lock()  # the thread that serves must not take steps away that are being written

    def begin(self, limit: int = LIMIT) -> None:
        """Record from now on, into memory; at most `limit` requests-in-a-step."""
        with self.lock:
            self.steps = Steps(self.scheduler, limit)

    def end(self) -> Steps | None:
        """Stop recording and give away what there is; None where recording was not on."""
        with self.lock:
            steps, self.steps = self.steps, None
        if steps is not None:
            steps.clock = time.perf_counter()
        return steps

    def limit(self, budget_tokens: int, seqs: int) -> str | None:
        """Change the limits of the scheduler itself; returns why that can't be."""
        with self.lock:
            try:
                return limits.limit(self.owner, budget_tokens, seqs)
            except Exception as error:  # a vLLM whose scheduler is not as limits.py knows it
                return f"the scheduler of this vLLM is not as expected: {type(error).__name__}: {error}"

    def note(self, method: Any, *details: Any) -> None:
        """Call a method of `Steps` on the steps, if they are being recorded and nothing has failed yet."""
        began = time.perf_counter()
        with self.lock:
            if self.steps is None or self.steps.error is not None:
                return
            try:
                method(self.steps, *details)
            except Exception as error:  # a vLLM whose scheduler is not as this file knows it
                self.steps.error = f"{type(error).__name__}: {error}"
            self.steps.own_s += time.perf_counter() - began

    def serve(self, folder: str) -> Listener:
        """Answer `begin`, `end` and `limit` on a socket in `folder`, in a thread that ends with the process."""
        listener = Listener(str(Path(folder) / str(os.getpid())), family="AF_UNIX")
        threading.Thread(target=self._serve, args=(listener,), daemon=True, name="latency-lab-trace").start()
        return listener

    def _serve(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return  # rather than to spin beside the engine
            with contextlib.suppress(OSError, EOFError), connection:
                name, arguments = connection.recv()
                connection.send(getattr(self, name)(*arguments))


def tracing_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """The scheduler that vLLM would make itself, traced. vLLM calls this in the place of its class."""
    return traced(own_choice(vllm_config))(*args, vllm_config=vllm_config, **kwargs)


def own_choice(vllm_config: Any) -> Any:
    """The scheduler class that vLLM takes for this configuration where nobody names one."""
    if getattr(vllm_config, "diffusion_config", None) is not None:
        # Since 0.32 vLLM names a scheduler for these itself, but only where nobody else has.
        raise ValueError("diffusion models have a scheduler of their own that is not traced: set `trace: false`")
    unnamed = copy.copy(vllm_config.scheduler_config)
    unnamed.scheduler_cls = None
    return unnamed.get_scheduler_cls()


def traced(base: Any) -> Any:
    """A subclass of a vLLM scheduler that notes each step and decides nothing, within limits that may be changed."""

    class TracingScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.latency_lab = Recorder(base.__name__, self)
            if folder := os.environ.get(FOLDER):
                try:
                    self.latency_lab.serve(folder)
                except OSError:  # the front end will find nobody there, and say so in every cell
                    logging.getLogger("vllm").exception("latency_lab: no socket for step records in %s", folder)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            output = super().schedule(*args, **kwargs)
            self.latency_lab.note(Steps.scheduled, start, self, output)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.latency_lab.note(Steps.returned, scheduler_output)
            return super().update_from_output(scheduler_output, *args, **kwargs)

    return TracingScheduler


# --- in the front end's process -----------------------------------------------------------------------------


@dataclass
class Recorded:
    """The steps of one cell: a table of schemas.STEPS, or None and the reason. `own_s`: see Steps."""

    table: pa.Table | None
    dropped: int | None = None
    note: str | None = None
    own_s: float = 0.0

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of `cells` that say what became of the steps."""
        return {"steps_dropped": self.dropped, "steps_note": self.note}


class Tracer:
    """The front end's side of an engine that may be traced. `offered` makes one; `note` says why it is not."""

    def __init__(self, folder: Path | None, note: str | None = None) -> None:
        self.folder = folder
        self.note = note
        self._begun: str | None = None

    @property
    def env(self) -> dict[str, str]:
        """What the engine's processes must find in their environment."""
        return {} if self.folder is None else {FOLDER: str(self.folder)}

    def engine_args(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The engine arguments that turn tracing on; none, and a note, where it can't be. Imports vLLM."""
        if self.note is None and args.get("scheduler_cls") is not None:
            self.note = "the study gives a scheduler_cls of its own, which is not traced"
        self.note = self.note or unsupported()
        return {} if self.note else {"scheduler_cls": SCHEDULER}

    async def begin(self, limit: int = LIMIT) -> None:
        """Start recording: called when a cell begins."""
        if self.note is None:
            try:
                await asyncio.to_thread(self._ask, "begin", limit)
                self._begun = None
            except TraceError as error:
                self._begun = str(error)

    async def end(self, zero_s: float, keys: Mapping[str, Any]) -> Recorded:
        """Stop recording: called when a cell has ended, which started at `zero_s` (a reading of time.perf_counter).

        `keys` has at least the columns schemas.KEYS. Never raises for an engine that has died or is not traced.
        """
        if (note := self.note or self._begun) is not None:
            return Recorded(None, note=note)
        before = time.perf_counter()
        try:
            steps = await asyncio.to_thread(self._ask, "end")
        except TraceError as error:
            return Recorded(None, note=str(error))
        after = time.perf_counter()
        wrong = next((one.error for one in steps if one.error), None)
        if wrong is not None:
            return Recorded(None, note=f"the scheduler of this vLLM is not as expected: {wrong}")
        if not all(before <= one.clock <= after for one in steps):
            return Recorded(None, note="the engine's process reads another clock than this one")
        dropped = sum(one.dropped for one in steps)
        return Recorded(
            await asyncio.to_thread(table, steps, zero_s, keys),
            dropped,
            f"{dropped} later steps were not kept: more than {steps[0].limit} requests in steps" if dropped else None,
            sum(one.own_s for one in steps),
        )

    async def limit(self, budget_tokens: int, seqs: int) -> None:
        """Change max_num_batched_tokens and max_num_seqs of the idle engine (see limits.py). Raises TraceError."""
        if self.note is not None:
            raise TraceError(self.note)
        for reason in await asyncio.to_thread(self._ask, "limit", budget_tokens, seqs):
            if reason is not None:
                raise TraceError(reason)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """What each scheduler answers, in the order of their processes' numbers."""
        sockets = sorted(self.folder.iterdir(), key=lambda path: int(path.name)) if self.folder else []
        if not sockets:
            raise TraceError("no scheduler of this engine offers its steps; see the engine's log")
        try:
            answers = []
            for path in sockets:
                with Client(str(path), family="AF_UNIX") as connection:
                    connection.send((name, arguments))
                    answers.append(_receive(connection))
        except (OSError, EOFError) as error:
            raise TraceError(f"the engine's process did not answer ({type(error).__name__})") from error
        if name == "end" and None in answers:
            raise TraceError("the engine's process had not begun to record steps")
        return answers


def _receive(connection: Connection) -> Any:
    if not connection.poll(ANSWER_S):
        raise TimeoutError
    return connection.recv()


@contextlib.contextmanager
def offered(wanted: bool) -> Iterator[Tracer]:
    """A tracer for one engine, with a private folder for the sockets while the block runs."""
    if not wanted:
        yield Tracer(None, "the study says trace: false")
        return
    folder = Path(tempfile.mkdtemp(prefix="latency-lab-"))  # readable for this user alone
    long = len(os.fsencode(folder)) + 10 > SOCKET_PATH_BYTES
    try:
        yield Tracer(folder, f"{folder}: too long a path for a socket; set TMPDIR to a shorter one" if long else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unsupported() -> str | None:
    """Why the installed vLLM can't be traced; None where it can."""
    try:
        from vllm.config.scheduler import SchedulerConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
    except ImportError as error:
        return f"this vLLM can't be traced: {error}"
    missing = [
        f"{owner.__name__}.{name}"
        for owner, name in (
            (AsyncEngineArgs, "scheduler_cls"),
            (SchedulerConfig, "get_scheduler_cls"),
            (Scheduler, "schedule"),
            (Scheduler, "update_from_output"),
            (Scheduler, "get_request_counts"),
        )
        if not hasattr(owner, name)
    ]
    return f"this vLLM can't be traced: it has no {', '.join(missing)}" if missing else None
