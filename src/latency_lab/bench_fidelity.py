"""Does this study measure what vLLM's own benchmark measures? The part `throughput` of `make bench`.

throughput  whole runs in alternation of an engine of this study and of `vllm bench throughput`: same engine arguments,
            same lengths, all requests at once.

What they find is read, compared and explained by fidelity.py.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latency_lab import ROOT, client, engine, fidelity, files, machine, models, vllm_bench
from latency_lab.fidelity import OURS, THROUGHPUT
from latency_lab.load import Request, Stream
from latency_lab.study_schema import Hub, SmolLM2

THROUGHPUT_PAIRS = 4

_CPU = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": engine.CPU_KV_CACHE_BYTES}
_CPU |= {"distributed_executor_backend": "uni"}


def throughput(folder: Path) -> None:
    """Tokens a second of this study's engine and client over those of `vllm bench throughput`, all requests at once."""
    model, args = _model(), _arguments()
    requests, prompt, output = (1024, 128, 128) if machine.has_gpu() else (96, 32, 32)
    print(
        f"throughput: {requests} requests of {prompt} + {output} tokens at once, max_num_seqs {args['max_num_seqs']}, "
        f"{model.name}; {THROUGHPUT_PAIRS} pairs of whole runs"
    )
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(THROUGHPUT_PAIRS):
            for who in _in_turn(pair, THROUGHPUT):
                one = _our_throughput if who == OURS else _their_throughput
                elapsed_s, tokens = asyncio.run(one(model, args, requests, prompt, output, pair, Path(name)))
                rows.append({"client": who, "pair": pair, "requests": requests, "output_tokens": tokens})
                rows[-1] |= {"elapsed_s": elapsed_s, "output_tokens_per_s": tokens / elapsed_s}
                print(f"  {who:<24} {tokens / elapsed_s:8.1f} output tokens/s in {elapsed_s:.1f} s", flush=True)
    table = _with_facts(pd.DataFrame(rows), model)
    files.write_text(table.to_csv(index=False, float_format="%.6g"), folder / "throughput.csv")
    print(f"{OURS} / {THROUGHPUT}: {fidelity.ratio_text(*fidelity.throughput_ratio(table))}")


async def _our_throughput(
    model: models.Model, args: dict[str, Any], requests: int, prompt: int, output: int, seed: int, folder: Path
) -> tuple[float, int]:
    """Seconds from the first request sent to the last token received, and output tokens."""
    usable = np.asarray(models.Tokens(model).usable)
    ids = usable[np.random.default_rng(seed).integers(0, len(usable), (requests, prompt))].tolist()
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


def _model() -> models.Model:
    """A model with a tokenizer, which vLLM's benchmark makes its random prompts with."""
    source = Hub(source="hub", id="Qwen/Qwen3-4B-Instruct-2507") if machine.has_gpu() else SmolLM2()
    return models.prepare(source, ROOT / "data" / "models")


def _in_turn(pair: int, other: str) -> Iterator[str]:
    """Both sides, the first of them in every second pair coming second."""
    yield from (OURS, other) if pair % 2 == 0 else (other, OURS)


def _with_facts(table: pd.DataFrame, model: models.Model) -> pd.DataFrame:
    """Every row says what it was measured on, so that the file speaks for itself."""
    facts = machine.provenance()
    return table.assign(
        model=model.name, device=facts["device"], vllm_version=facts["vllm_version"], git_commit=facts["git_commit"]
    )
