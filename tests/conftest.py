"""What the engine tests share: one model, one swept study."""

import asyncio
import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from latency_lab import ROOT

MODELS = ROOT / "data" / "models"

SWEPT = """
question: Does the chain from grid to records hold?
model: {source: smollm2}
engine: {dtype: float32, enforce_eager: true, max_model_len: 512, enable_prefix_caching: false}
settings:
  named:
    small: {engine: {max_num_batched_tokens: 128, max_num_seqs: 4}}
    large: {engine: {max_num_batched_tokens: 512, max_num_seqs: 32}}
    refused: {engine: {max_num_batched_tokens: 64, enable_chunked_prefill: false}, expect: invalid}
workloads:
  chat: {load: {kind: closed, concurrency: 3, requests_each: 2}, prompt: {tokens: 24}, output: {tokens: 16}}
  open: {load: {kind: poisson, rate: 4, requests: 5}, prompt: {uniform: [8, 40]}, output: {tokens: 4}}
  words: {load: {kind: burst, requests: 2}, prompt: {text: "What is two plus two?", chat: true, distinct: false},
          output: {tokens: 12}, ignore_eos: false}
  slow:
    settings: [small]
    load: {kind: closed, concurrency: 2, requests_each: 1}
    prompt: {tokens: 16}
    output: {tokens: 450}
    timeout_s: 0.5
    repeats: 1
  trace: {load: {kind: replay, file: mooncake.jsonl}, repeats: 1}
  doors:
    settings: [small]
    via: [engine, openai]
    detokenize: [on, off]
    api: [chat, completions]
    stream: [on, off]
    load: {kind: closed, concurrency: 2, requests_each: 1}
    prompt: {text: "What is two plus two?", chat: true, distinct: false}
    output: {tokens: 12}
    repeats: 1
repeats: 2
warmup: 2
keep_token_ids: true
"""

MOONCAKE = """
{"timestamp": 0, "input_length": 24, "output_length": 6, "hash_ids": [7]}
{"timestamp": 200, "input_length": 600, "output_length": 6, "hash_ids": [8, 9]}
{"timestamp": 400, "input_length": 24, "output_length": 6, "hash_ids": [7]}
{"timestamp": 100, "input_length": 24, "output_length": 0, "hash_ids": [7]}
"""


PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@pytest.fixture(scope="session", autouse=True)
def adopt_orphans():
    """Processes that a killed kernel leaves become children of the test run: a test can see whether any lives."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def write_study(folder: Path, text: str, name: str = "swept") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    """A data/ of the tests' own, with the project's converted model in it."""
    root = tmp_path_factory.mktemp("data")
    MODELS.mkdir(parents=True, exist_ok=True)
    (root / "models").symlink_to(MODELS)
    return root


@pytest.fixture(scope="session")
def swept(data_root, tmp_path_factory):
    """A study measured by the real sweep: papermill, a kernel and a vLLM engine for each setting."""
    path = write_study(tmp_path_factory.mktemp("studies"), SWEPT)
    (path.parent / "mooncake.jsonl").write_text(MOONCAKE)
    command = [sys.executable, "-m", "latency_lab", "sweep", str(path), "--runs", str(data_root / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return path, data_root / "runs", done


@pytest.fixture(scope="session")
def traced_engine(tmp_path_factory):
    """All scenarios on a traced engine whose KV cache is small, and some once more with other limits."""
    import scenarios

    return asyncio.run(scenarios.run(scenarios.KV_TOKENS // 32 + 1, True, tmp_path_factory.mktemp("traced")))


@pytest.fixture(scope="session")
def measured(traced_engine):
    return traced_engine[0]


@pytest.fixture(scope="session")
def limited(traced_engine):
    return traced_engine[2]


@pytest.fixture(scope="session")
def plain_engine(tmp_path_factory):
    """The same on vLLM as it is, with room for everything, and what its OpenAI-compatible server answered."""
    import scenarios

    return asyncio.run(scenarios.run(None, False, tmp_path_factory.mktemp("untraced")))


@pytest.fixture(scope="session")
def untraced(plain_engine):
    return plain_engine[0]


@pytest.fixture(scope="session")
def answers(plain_engine):
    return plain_engine[1]
