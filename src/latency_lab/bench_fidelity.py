"""Does this study measure what vLLM's own benchmark measures? The parts `serve` and `throughput` of `make bench`.

serve       one server, and on it in alternation this study's client and `vllm bench serve`, each a process of its own:
            same lengths, same arrivals, same warm-up.
throughput  whole runs in alternation of an engine of this study and of `vllm bench throughput`: same engine arguments,
            same lengths, all requests at once.

What they find is read, compared and explained by fidelity.py.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import (
    client,
    client_process,
    engine,
    fidelity,
    files,
    import_bench,
    machine,
    models,
    records,
    server,
    vllm_bench,
)
from latency_lab.fidelity import OURS, SERVE, THROUGHPUT
from latency_lab.load import Request, Stream
from latency_lab.openai_source import Address
from latency_lab.study_grid import Door

SERVE_PAIRS, SERVE_WARMUPS = 10, 4
THROUGHPUT_PAIRS = 8

_CPU = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": engine.CPU_KV_CACHE_BYTES}
_CPU |= {"distributed_executor_backend": "uni"}


@dataclass(frozen=True)
class _Workload:
    """Requests of `prompt` + `output` tokens: `concurrency` at a time, else one each 1 / `rate_per_s`."""

    name: str
    requests: int
    prompt: int
    output: int
    concurrency: int | None = None
    rate_per_s: float | None = None

    def arrivals(self, ids: np.ndarray) -> Stream:
        """The requests as this study sends them, with one row of `ids` as the prompt of each."""
        due_s = [None if self.rate_per_s is None else i / self.rate_per_s for i in range(len(ids))]
        requests = (
            Request(i, self.name, None, tuple(prompt), self.output, True, due_s[i], door=Door("openai", "completions"))
            for i, prompt in enumerate(ids.tolist())
        )
        return Stream(self.name, self.concurrency, None, 0.0, requests)

    def options(self) -> dict[str, Any]:
        """The same as options of `vllm bench serve`. Infinite burstiness is a constant rate."""
        if self.rate_per_s is None:
            return {"max_concurrency": self.concurrency}
        return {"request_rate": self.rate_per_s, "burstiness": "inf"}


async def serve(folder: Path) -> None:
    """Ratios of this study's latencies and throughput to those of `vllm bench serve` on one server."""
    model, args = vllm_bench.model(), _arguments()
    if machine.has_gpu():
        workloads = [
            _Workload("closed", 512, 128, 128, concurrency=32),
            _Workload("open", 256, 128, 128, rate_per_s=16),
        ]
    else:
        workloads = [_Workload("closed", 48, 32, 32, concurrency=8)]
        workloads += [_Workload("open", 40, 32, 16, rate_per_s=3)]
    print(f"serve: {model.name}, {SERVE_PAIRS} pairs of runs of each workload, {SERVE_WARMUPS} requests before each")
    with tempfile.TemporaryDirectory() as name:
        study = Path(name) / "serve"
        async with (
            engine.running(args, model, log=study / "engine.log", ledger=study) as living,
            server.serving(living, model.name) as address,
            client_process.running(study / "client.log") as process,
        ):
            for pair in range(SERVE_PAIRS):
                for workload in workloads:
                    for who in fidelity.in_turn(pair, SERVE):
                        if who == OURS:
                            await _our_serve(process, address, model, workload, pair, study)
                        else:
                            await _their_serve(address, model, workload, pair, study)
                print(f"  {pair + 1} of {SERVE_PAIRS} pairs done", flush=True)
        records.pack(study, folder / "serve")
    study_records = records.load(folder / "serve")
    compared = fidelity.agreement(study_records)
    print(compared.drop(columns="problem").to_string(index=False, float_format="{:.4g}".format))
    print(fidelity.serve_text(compared, study_records.cells))


async def _our_serve(
    process: client_process.ClientProcess,
    address: Address,
    model: models.Model,
    workload: _Workload,
    pair: int,
    study: Path,
) -> None:
    cell = f"{workload.name}-{pair}"
    prompts = _prompts(model, workload.requests + SERVE_WARMUPS, workload.prompt, pair)
    first = replace(workload, concurrency=SERVE_WARMUPS, rate_per_s=None).arrivals(prompts[:SERVE_WARMUPS])
    await process.drive(address, [first], name=f"warm-up-{cell}", timeout_s=600, token_ids=False)
    started_at = datetime.datetime.now(datetime.UTC)
    run = await process.drive(
        address, [workload.arrivals(prompts[SERVE_WARMUPS:])], name=cell, timeout_s=600, token_ids=False
    )
    keys = {
        "study": "serve",
        "cell": cell,
        "setting": OURS,
        "setting_id": OURS,
        "workload": _label(workload),
        "workload_id": workload.name,
        "repeat": pair,
        "load": "constant" if workload.concurrency is None else "closed",
        "concurrency": workload.concurrency,
        "rate_per_s": workload.rate_per_s,
    }
    row = {
        **keys,
        **machine.provenance(),
        **run.columns,
        "status": "done",
        "started_at": started_at,
        "model": model.name,
        "weights": model.weights,
        "seed": pair,
    }
    records.write_cell(study / "ours", row, client.rows(run, False, {}, keys))


async def _their_serve(address: Address, model: models.Model, workload: _Workload, pair: int, study: Path) -> None:
    result = study / f"{workload.name}-{pair}.json"
    options = {
        "base_url": address.url.removesuffix("/v1"),
        "model": address.model,
        "tokenizer": model.location,
        "dataset_name": "random",
        "random_input_len": workload.prompt,
        "random_output_len": workload.output,
        "num_prompts": workload.requests,
        "num_warmups": SERVE_WARMUPS,
        "seed": pair,
        "temperature": 0,
        "disable_tqdm": True,
        "save_result": True,
        "save_detailed": True,
        "result_filename": result,
        **workload.options(),
    }
    await vllm_bench.run("serve", options, {"OPENAI_API_KEY": address.key})
    facts = machine.provenance()
    known = [f"{name}={facts[name]}" for name in ("device", "cpu", "vllm_version")] + [f"weights={model.weights}"]
    import_bench.import_file(result, study, setting=SERVE, workload=workload.name, facts=known)


def _prompts(model: models.Model, count: int, tokens: int, seed: int) -> np.ndarray:
    """Random token ids, none of them special: a row a prompt."""
    usable = np.asarray(models.Tokens(model).usable)
    return usable[np.random.default_rng(seed).integers(0, len(usable), (count, tokens))]


def _label(workload: _Workload) -> str:
    """The point's label as import_bench makes it."""
    if workload.concurrency is not None:
        return f"{workload.name} c={workload.concurrency}"
    return f"{workload.name} rate={workload.rate_per_s:g}/s"


def throughput(folder: Path) -> None:
    """Tokens a second of this study's engine and client over those of `vllm bench throughput`, all requests at once."""
    model, args = vllm_bench.model(), _arguments()
    requests, prompt, output = (1024, 128, 128) if machine.has_gpu() else (96, 32, 32)
    print(
        f"throughput: {requests} requests of {prompt} + {output} tokens at once, max_num_seqs {args['max_num_seqs']}, "
        f"{model.name}; {THROUGHPUT_PAIRS} pairs of whole runs"
    )
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(THROUGHPUT_PAIRS):
            for who in fidelity.in_turn(pair, THROUGHPUT):
                one = _our_throughput if who == OURS else _their_throughput
                elapsed_s, tokens = asyncio.run(one(model, args, requests, prompt, output, pair, Path(name)))
                rows.append({"client": who, "pair": pair, "requests": requests, "output_tokens": tokens})
                rows[-1] |= {"elapsed_s": elapsed_s, "output_tokens_per_s": tokens / elapsed_s}
                print(f"  {who:<24} {tokens / elapsed_s:8.1f} output tokens/s in {elapsed_s:.1f} s", flush=True)
    table = fidelity.with_facts(pd.DataFrame(rows).assign(model=model.name))
    files.write_text(table.to_csv(index=False, float_format="%.6g"), folder / fidelity.THROUGHPUT_FILE)
    print(f"{OURS} / {THROUGHPUT}: {fidelity.ratio_text(*fidelity.throughput_ratio(table))}")


async def _our_throughput(
    model: models.Model, args: dict[str, Any], requests: int, prompt: int, output: int, seed: int, folder: Path
) -> tuple[float, int]:
    """Seconds from the first request sent to the last token received, and output tokens."""
    ids = _prompts(model, requests, prompt, seed).tolist()
    due = (Request(number, OURS, None, tuple(one), output, True, 0.0) for number, one in enumerate(ids))
    async with engine.running(args, model, log=folder / "engine.log", ledger=folder) as living:
        run = await client.drive(living, [Stream(OURS, None, None, 0.0, due)], name=f"throughput-{seed}", timeout_s=600)
    if failed := [timing.error for timing in run.timings if timing.error]:
        raise RuntimeError(f"{len(failed)} of {requests} requests failed: {failed[0]}")
    ends = [timing.chunk_s[-1] for timing in run.timings]
    tokens = sum(sum(timing.chunk_tokens) for timing in run.timings)
    return max(ends) - min(timing.sent_s or 0.0 for timing in run.timings), tokens


async def _their_throughput(
    model: models.Model, args: dict[str, Any], requests: int, prompt: int, output: int, seed: int, folder: Path
) -> tuple[float, int]:
    """The time that `vllm bench throughput` gives, which leaves out the engine's start, and output tokens."""
    result = folder / f"{seed}.json"
    options = {
        "model": model.location,
        "dataset_name": "random",
        "random_input_len": prompt,
        "random_output_len": output,
        "num_prompts": requests,
        "seed": seed,
        "output_json": result,
        **args,
    }
    await vllm_bench.run("throughput", options, engine.default_env())
    return float(json.loads(result.read_text())["elapsed_time"]), requests * output


def _arguments() -> dict[str, Any]:
    """Engine arguments that both sides are given in full, so that no default of either differs."""
    args: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    return {**args, "max_num_seqs": 256} if machine.has_gpu() else {**args, "max_num_seqs": 32, **_CPU}
