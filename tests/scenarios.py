"""What is run on the two engines that tests of the scheduler's steps and of the server share (see conftest.py)."""

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from conftest import MODELS

from latency_lab import client, engine, models, server
from latency_lab.load import Request, Stream
from latency_lab.openai_source import OpenAISource
from latency_lab.study_grid import Door
from latency_lab.study_schema import SmolLM2

KEYS = {"study": "s", "cell": "c1", "setting": "x", "setting_id": "x", "workload": "w", "workload_id": "w", "repeat": 0}

BUDGET, SEQS, KV_TOKENS = 128, 4, 1024
ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": SEQS,
    "block_size": 32,
}


def prompt(seed, tokens):
    return tuple(np.random.default_rng(seed).integers(100, 40_000, tokens).tolist())


def request(number, prompt_tokens, output_tokens, due_s=0.0):
    return Request(number, "any", None, prompt(number, prompt_tokens), output_tokens, True, due_s)


SCENARIOS = {
    "lone": [request(0, 512, 8)],
    "beside": [request(0, 16, 120), request(1, 16, 120), request(2, 512, 8, due_s=1.0)],
    "burst": [request(number, 24 + number, 6) for number in range(12)],
    # Four answers that grow to 4 * 360 tokens, in a KV cache of 1,024.
    "crowded": [request(number, 60, 300) for number in range(4)],
}


LOWERED = {"max_num_batched_tokens": 64, "max_num_seqs": 2}
"""Limits that the traced engine is given while it lives, before it gets those of its start again."""


async def run(kv_blocks, traced, folder):
    """Of one engine start: {scenario: (client's run, recorded steps)}, what its server answered, and, where traced,
    the same of some scenarios with LOWERED limits and, in the end, with those of the start again.
    """
    model = models.prepare(SmolLM2(), MODELS)
    args = {**ARGS, **({"num_gpu_blocks_override": kv_blocks} if kv_blocks else {})}
    async with engine.running(args, model, log=folder / "engine.log", ledger=folder, trace=traced) as living:
        found = {name: await _measure(living, name) for name in SCENARIOS}
        answers, limited = await ask_server(living), {}
        if traced:
            as_started, too_many = living.facts, {**LOWERED, "max_num_seqs": SEQS + 1}
            with pytest.raises(engine.EngineError, match="not within"):
                await living.limit(too_many)
            await living.limit(LOWERED)
            limited = {name: await _measure(living, name) for name in ("lone", "burst")}
            limited["facts"] = as_started, living.facts
            await living.limit({name: ARGS[name] for name in LOWERED})
            limited["burst as started"] = await _measure(living, "burst")
            limited["facts as started"] = living.facts
        return found, answers, limited


async def _measure(living, name):
    await living.tracer.begin()
    stream = Stream("any", None, None, 0.0, iter(SCENARIOS[name]))
    run = await client.drive(living, [stream], name=name, timeout_s=120)
    return run, await living.tracer.end(run.zero_s, {**KEYS, "cell": name})


async def ask_server(living):
    """The timings of requests to the engine's server, by what is special about each, and what is left of it."""
    one = replace(request(0, 24, 6), door=Door("openai", "completions"))
    asked = {
        "token ids": one,
        "as a whole": replace(one, door=Door("openai", "completions", False)),
        "too long": replace(one, prompt=prompt(0, 1030)),
    }
    found = {}

    async def timing(name, source, request):
        stream = Stream("any", 1, None, 0.0, iter([request]))
        (found[name],) = (await client.drive(source, [stream], name=name, timeout_s=60)).timings

    async with server.serving(living, "the-model") as address:
        async with OpenAISource(address, token_ids=True) as source:
            for name, request_ in asked.items():
                await timing(name, source, request_)
        async with OpenAISource(replace(address, key="guess")) as source:
            await timing("another key", source, one)
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(urllib.request.urlopen, f"{address.url}/models")
        found["no key"] = refused.value.code
    await timing("engine", living, one)
    port = int(address.url.split(":")[-1].split("/")[0])
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        found["open port"] = port
    return found
