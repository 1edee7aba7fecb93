"""vLLM in this process: start one engine for one setting, stream requests through it, stop it, leave nothing behind.

This module (with server.py and trace.py) is the only one that imports vLLM, and it does so inside functions, so that
everything else works without it. What differs between vLLM versions 0.24 to 0.33 is kept here and in vllm_args.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import gc
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from latency_lab import environment, guard, machine, processes, quantization
from latency_lab import trace as tracing
from latency_lab.client import Piece
from latency_lab.files import digest
from latency_lab.load import Request
from latency_lab.models import Model
from latency_lab.schemas import SETTING_VALUES

CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache on a CPU unless the study says otherwise: vLLM's own default takes a share of one NUMA node's memory, which
differs from start to start."""

STOP_PATIENCE_S = 20.0
"""An engine that has not ended by itself after this long is killed; on two cores it takes up to ten seconds."""

# Where VllmConfig keeps an engine argument under another name. Unlisted arguments are looked up by their own name in
# the parts of VllmConfig, and where no part has them, they are as asked.
_RENAMED = {
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
    "scheduling_policy": ("scheduler_config", "policy"),
    "attention_backend": ("attention_config", "backend"),
    "speculative_config": ("speculative_config", None),
    "compilation_config": (None, None),  # repeats what other arguments say, and holds paths and counters
}
_PARTS = (
    "model_config",
    "cache_config",
    "scheduler_config",
    "parallel_config",
    "load_config",
    "compilation_config",
    "kernel_config",
    "structured_outputs_config",
    "observability_config",
)


# How pydantic wraps the reason that vLLM gives for refusing a configuration.
_VALIDATION = re.compile(r"\d+ validation errors? for (\w+) (?:Value error|Assertion failed), (.*?)(?: \[type=.*)?$")


class EngineError(Exception):
    """An engine that did not start; the message is vLLM's own reason in one line."""


class EngineDied(Exception):
    """The engine's processes ended under load."""


class WorkerProbe:
    """Mixed into vLLM's worker class through its `worker_extension_cls` argument: answers questions from inside."""

    def latency_lab_weight_bytes(self) -> int:
        """Bytes of distinct storages behind the parameters and buffers that this worker has loaded; 0 if unknown.

        Unknown on a CPU, whose kernels repack most weights into memory of their own and empty the parameters.
        """
        model = self.model_runner.model  # type: ignore[attr-defined]
        if any(parameter.device.type == "cpu" for parameter in model.parameters()):
            return 0
        tensors = [*model.parameters(), *model.buffers()]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())


@dataclasses.dataclass
class EngineFacts:
    """What a started engine says of itself; the names are columns of `cells` (units there).

    unapplied : says so where weights that were to be quantized are not
    started : the limits that the engine was started with, where it has been given others since
    """

    engine_start_s: float
    resolved: dict[str, Any]
    resolved_id: str
    kv_cache_blocks: int | None
    kv_cache_tokens: int | None
    weight_bytes: int | None
    memory_used_before_bytes: int
    cpu_load_before: float
    unapplied: str | None = None
    started: dict[str, int] | None = None

    def limited(self, limits: Mapping[str, int]) -> EngineFacts:
        """The same of an engine that has been given other limits."""
        resolved = {**self.resolved, **limits}
        started = {name: self.resolved[name] for name in limits}
        return dataclasses.replace(self, resolved=resolved, resolved_id=_resolved_id(resolved), started=started)

    @property
    def setting_values(self) -> dict[str, Any]:
        """The typed columns of the setting, as vLLM resolved them."""
        return {column.name: self.resolved.get(column.name) for column in SETTING_VALUES}


class Engine:
    """A living engine. Use `running` to get one."""

    def __init__(self, llm: Any, stats: _Stats, facts: EngineFacts, tracer: tracing.Tracer) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.llm = llm
        self.facts = facts
        self.tracer = tracer
        self._stats = stats
        self._params = SamplingParams
        self._delta = RequestOutputKind.DELTA
        self._logprob_gaps: dict[str, list[float]] | None = None
        self._as_started = facts

    async def limit(self, limits: Mapping[str, int]) -> None:
        """Go on as an engine that was started with other max_num_batched_tokens and max_num_seqs, or lower ones again.

        `facts` say so from then on. What the prefix cache holds is dropped. Raises EngineError where it can't be.
        """
        resolved = {name: self._as_started.resolved[name] for name in limits}
        if any(limits[name] > resolved[name] for name in limits):
            raise EngineError(f"limits {dict(limits)} are not within what vLLM made of those of the start, {resolved}")
        try:
            await self.tracer.limit(limits["max_num_batched_tokens"], limits["max_num_seqs"])
        except tracing.TraceError as error:
            raise EngineError(f"the limits of the living engine could not be changed: {error}") from error
        if not await self.llm.reset_prefix_cache():
            raise EngineError("the limits of the living engine were changed, but its prefix cache could not be emptied")
        self.facts = self._as_started.limited(limits)

    async def stream(self, request_id: str, request: Request) -> AsyncIterator[Piece]:
        """A request's tokens as they come. Greedy.

        Raises EngineDied where the engine has ended, ValueError where vLLM refuses the request.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        gaps = None if self._logprob_gaps is None else self._logprob_gaps.setdefault(request_id, [])
        params = self._params(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=request.ignore_eos,
            output_kind=self._delta,
            detokenize=request.door.detokenize,
            logprobs=None if gaps is None else 2,
        )
        try:
            prompt = {"prompt_token_ids": list(request.prompt)}
            outputs = self.llm.generate(prompt, params, request_id, priority=request.priority or 0)
            async for output in outputs:
                completion = output.outputs[0]
                if gaps is not None:
                    gaps.extend(_gap(candidates) for candidates in completion.logprobs or ())
                yield Piece(len(completion.token_ids), list(completion.token_ids), completion.finish_reason)
        except EngineDeadError as error:
            raise EngineDied(str(error) or "the engine has died") from error

    def reset_stats(self, keep_logprobs: bool = False) -> None:
        """Forget what the engine has counted so far: called when a cell begins. `keep_logprobs`: of its requests."""
        self._stats.clear()
        self._logprob_gaps = {} if keep_logprobs else None

    async def request_stats(self, expected: int, patience_s: float = 2.0) -> dict[str, dict[str, Any]]:
        """Engine-side columns of `requests`, by request id; vLLM hands the last ones over just after the last token."""
        deadline = time.monotonic() + patience_s
        while len(self._stats.finished) < expected and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        gaps = self._logprob_gaps or {}
        return {
            name: {**columns, "logprob_gaps": gaps.get(name)} if gaps else columns
            for name, columns in self._stats.finished.items()
        }

    @property
    def kv_cache_usage_max(self) -> float | None:
        """Largest share of the KV cache in use since `reset_stats`, 0 to 1."""
        return self._stats.kv_cache_usage_max

    @property
    def dead(self) -> bool:
        """Whether the engine's processes have ended."""
        return bool(self.llm.errored)


@contextlib.asynccontextmanager
async def running(
    args: Mapping[str, Any],
    model: Model,
    *,
    log: Path,
    ledger: Path,
    env: Mapping[str, str] | None = None,
    seed: int = 0,
    trace: bool = False,
) -> AsyncIterator[Engine]:
    """Start an engine for one setting and stop it on leaving the block, whatever happened in it.

    Parameters
    ----------
    args : engine arguments as the study gives them; vLLM's default for all others.
    log : file that takes what the engine's processes print.
    ledger : folder of the processes' ledger; engines left behind by dead owners named there are ended first.
    env : environment variables for this engine, put back afterwards.
    trace : record scheduler steps where this vLLM lets us; `Engine.tracer` begins and ends it, and says why not.

    Raises EngineError where the engine does not start.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    ended = processes.end_orphans(ledger)
    processes.register(ledger)
    memory_before, load_before = machine.memory_used_bytes(), os.getloadavg()[0]
    wanted = {**default_env(), **(env or {})}
    with guard.watching(), tracing.offered(trace) as tracer, environment.holding({**wanted, **tracer.env}):
        before = set(processes.children())
        began = time.perf_counter()
        import vllm.logger  # noqa: F401 - sets up its logging, which the next line then redirects

        with _logging_to(log) as redirect:
            for name in ended:
                logging.getLogger("vllm").warning("ended before this engine started: %s", name)
            llm = None
            try:
                try:
                    with _output_to(log):
                        llm, stats = _start(args, model, seed, tracer)
                        redirect()
                except Exception as error:
                    raise EngineError(_reason(error, log)) from error
                start_s = time.perf_counter() - began
                facts = await _facts(llm, args, start_s, memory_before, load_before)
                # As `vllm serve` does: going through all objects that vLLM has made takes the garbage collector up to
                # two seconds on a slow core, and every token that comes meanwhile would be stamped late.
                gc.freeze()
                yield Engine(llm, stats, facts, tracer)
            finally:
                gc.unfreeze()
                await _stop(llm, before)


def log_tail(log: Path, lines: int = 30, width: int = 400) -> str | None:
    """The last lines of an engine's log, long lines cut; None where there is no log."""
    if not log.exists():
        return None
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:width] for line in text)


def default_env() -> dict[str, str]:
    """Environment that every engine gets unless the study or the user sets it otherwise."""
    # A kernel has threads and sockets of its own, which a forked engine would inherit in an unknown state.
    defaults = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}
    if not machine.has_gpu():
        # vLLM keeps one core for itself and so halves a 2-core machine.
        defaults |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_NUM_THREADS": str(machine.cores())}
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _start(args: Mapping[str, Any], model: Model, seed: int, tracer: tracing.Tracer) -> tuple[Any, _Stats]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    stats = _Stats()
    asked = {"seed": seed, **model.engine_args, **args, **tracer.engine_args(args)}
    if not machine.has_gpu():
        asked.setdefault("distributed_executor_backend", "uni")
        if "gpu_memory_utilization" not in asked:
            asked.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    engine_args = AsyncEngineArgs(
        model=model.location,
        revision=model.revision,
        worker_extension_cls=f"{WorkerProbe.__module__}.{WorkerProbe.__qualname__}",
        disable_log_stats=False,
        **asked,
    )
    return AsyncLLM.from_engine_args(engine_args, stat_loggers=[stats.logger()]), stats


async def _facts(
    llm: Any, args: Mapping[str, Any], start_s: float, memory_before: int, load_before: float
) -> EngineFacts:
    cache = llm.vllm_config.cache_config
    resolved = resolve(llm.vllm_config, args)
    blocks = cache.num_gpu_blocks
    try:
        weights = await asyncio.wait_for(llm.collective_rpc("latency_lab_weight_bytes"), timeout=60)
    except Exception:  # a worker without a PyTorch model of this shape: the column stays null
        logging.getLogger(__name__).warning("could not ask the workers for their weight bytes", exc_info=True)
        weights = None
    weight_bytes = sum(weights) or None if weights else None
    model = llm.vllm_config.model_config
    overrides = args.get("hf_overrides") or {}
    method = resolved["quantization"] or overrides.get("quantization_config", {}).get("quant_method")
    return EngineFacts(
        engine_start_s=start_s,
        resolved=resolved,
        resolved_id=_resolved_id(resolved),
        kv_cache_blocks=blocks,
        kv_cache_tokens=blocks * cache.block_size if blocks else None,
        weight_bytes=weight_bytes,
        memory_used_before_bytes=memory_before,
        cpu_load_before=load_before,
        unapplied=quantization.unapplied(method, weight_bytes, model.hf_text_config.to_dict(), model.dtype.itemsize),
    )


def _resolved_id(resolved: Mapping[str, Any]) -> str:
    """A traced scheduler decides as vLLM's own does: neither the seed nor tracing makes it another configuration."""
    identity = {name: value for name, value in resolved.items() if name != "seed"}
    if identity.get("scheduler_cls") == tracing.SCHEDULER:
        identity["scheduler_cls"] = None
    return digest(identity)


def resolve(config: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Every engine argument by name with the value that a VllmConfig gives it, as JSON values."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    resolved = {}
    for field in dataclasses.fields(AsyncEngineArgs):
        if field.name.startswith("_"):
            continue
        part, name = _RENAMED.get(field.name, (None, field.name))
        if name is None and part is None:
            continue
        holders = [part] if part else _PARTS
        value: Any = args.get(field.name)
        for holder in (getattr(config, holder, None) for holder in holders):
            if name is None or hasattr(holder, name):
                value = holder if name is None else getattr(holder, name)
                break
        resolved[field.name] = _plain(value)
    return resolved


def _plain(value: Any) -> Any:
    """A JSON value that reads the same in every process: no addresses, no object dumps."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    text = str(value)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    return f"<{type(value).__name__}>" if " at 0x" in text or dataclasses.is_dataclass(value) else text


async def _stop(llm: Any, before: set[psutil.Process]) -> None:
    """Shut the engine down and see its processes gone: asked first, then terminated, then killed."""
    started = [process for process in processes.children() if process not in before]
    if llm is not None:
        with contextlib.suppress(Exception):  # it may have died already; what counts is below
            llm.shutdown(timeout=STOP_PATIENCE_S)
        await asyncio.sleep(0)
    if not processes.wait_gone(started, timeout_s=STOP_PATIENCE_S):
        processes.end(started)


def _reason(error: BaseException, log: Path) -> str:
    """vLLM's reason in one line. Errors in the engine's own process reach us only through its log."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "initialization failed" in text:
        tail = log.read_text(errors="replace").splitlines() if log.exists() else []
        causes = [line.split("] ", 1)[-1].strip() for line in tail if "Error" in line and "Engine core" not in line]
        named = [line for line in causes if line.split(":")[0].split(".")[-1].endswith(("Error", "Exception"))]
        if named:
            text = named[0]
    refusal = _VALIDATION.match(text)
    return (f"{refusal[1]}: {refusal[2]}" if refusal else text)[:1000]


class _Stats:
    """Takes what vLLM's stat loggers report: engine-side times of each finished request, KV-cache usage."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.finished: dict[str, dict[str, Any]] = {}
        self.kv_cache_usage_max: float | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if scheduler_stats is not None:
            self.kv_cache_usage_max = max(self.kv_cache_usage_max or 0.0, scheduler_stats.kv_cache_usage)
        for done in iteration_stats.finished_requests if iteration_stats is not None else ():
            self.finished[done.request_id] = {
                "queue_s": _span(done.queued_time),
                "prefill_s": _span(done.prefill_time),
                "decode_s": _span(done.decode_time),
                "cached_tokens": done.num_cached_tokens,
                # since vLLM 0.27; before, the column stays null
                "preemptions": getattr(done, "num_preemptions", None),
            }

    def logger(self) -> Any:
        """A factory of vLLM stat loggers that report here."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self

        class Logger(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                stats.record(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Logger


def _gap(candidates: Mapping[int, Any]) -> float:
    """How far the best of a token's candidates is ahead of the second, in nats."""
    best = sorted((candidate.logprob for candidate in candidates.values()), reverse=True)
    return best[0] - best[1]


def _span(seconds: float) -> float | None:
    """A request that ended before it was scheduled has no such span: its stamps are 0 and the span negative."""
    return seconds if seconds >= 0 else None


@contextlib.contextmanager
def _logging_to(log: Path) -> Iterator[Callable[[], None]]:
    """Send what vLLM logs in this process to a file while the engine lives, keeping the notebook readable.

    Gives a function that does so again: since 0.32 (at the latest) vLLM sets up its logging once more with an engine.
    """
    logger = logging.getLogger("vllm")
    saved = logger.handlers
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"))

    def redirect() -> None:
        logger.handlers = [handler]

    redirect()
    try:
        yield redirect
    finally:
        logger.handlers = saved
        handler.close()


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Send to a file, appending, what this process prints, and writes to its descriptors 1 and 2.

    Processes started inside inherit the descriptors and keep writing there afterwards.
    """
    saved = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            # in a notebook, these two are no longer the descriptors'
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        finally:
            for target, source in zip((1, 2), saved, strict=True):
                os.dup2(source, target)
                os.close(source)
