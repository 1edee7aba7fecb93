"""Chunked prefill on a real engine: nothing of a prompt is lost, and outputs are those of whole prompts, alone.

Two engines get the same requests: one cuts prompts into chunks, batches all it can and has too little KV cache for it;
the other computes each prompt in one step, one request at a time.
"""

import asyncio
import math

import pandas as pd
import pytest
from conftest import write_study

from latency_lab import measure, proofs, records

pytestmark = pytest.mark.engine

STUDY = """
question: Does chunking lose anything?
model: {source: smollm2}
engine: {dtype: float32, enforce_eager: true, max_model_len: 4224, enable_prefix_caching: false}
settings:
  named:
    # 36 blocks of 128 tokens, 46,080 bytes a token: the long prompt fits, eight growing requests do not.
    chunked: {engine: {max_num_batched_tokens: 1024, max_num_seqs: 8, kv_cache_memory_bytes: 212336640}}
    whole: {engine: {enable_chunked_prefill: off, max_num_batched_tokens: 4608, max_num_seqs: 1}}
workloads:
  lone: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 4096}, output: {tokens: 12}}
  shared:
    settings: [chunked]
    classes:
      chat: {load: {kind: closed, concurrency: 2, requests_each: 1}, prompt: {tokens: 16}, output: {tokens: 48}}
      long: {load: {kind: burst, requests: 1, start_s: 0.5}, prompt: {tokens: 4000}, output: {tokens: 2}}
  crowd: {load: {kind: burst, requests: 8}, prompt: {tokens: 500}, output: {tokens: 32}, keep_logprobs: true}
repeats: 1
warmup: 1
keep_token_ids: true
timeout_s: 120
"""


@pytest.fixture(scope="module")
def study(data_root, tmp_path_factory):
    path = write_study(tmp_path_factory.mktemp("studies"), STUDY, "chunks")
    for setting in ("chunked", "whole"):
        asyncio.run(measure.open_job(path, setting, data_root / "runs").run())
    loaded = records.load(data_root / "runs" / "chunks")
    assert (loaded.cells["status"] == "done").all(), loaded.cells["error"].tolist()
    assert loaded.cells["steps"].notna().all(), loaded.cells["steps_note"].tolist()
    return loaded


def prompts(study, workload, setting="chunked"):
    own = study.requests[(study.requests["workload"] == workload) & (study.requests["setting"] == setting)]
    return proofs.prompts(study.steps, own)


def test_every_prompt_is_computed_whole(study):
    table = proofs.prompts(study.steps, study.requests)
    assert len(table) == len(study.requests) == 21
    assert table["ok"].all(), table["reason"].tolist()
    assert (table["prefill_tokens"] == table["prompt_tokens"]).all()


def test_a_lone_prompt_of_4096_tokens_at_a_budget_of_1024_takes_exactly_4_steps(study):
    (row,) = prompts(study, "lone c=1").to_dict("records")
    assert row["alone"] and row["chunk_tokens"] == [1024, 1024, 1024, 1024]
    (row,) = prompts(study, "lone c=1", "whole").to_dict("records")
    assert row["chunk_tokens"] == [4096]


def test_beside_two_streams_the_chunks_leave_a_token_of_the_budget_to_each(study):
    table = prompts(study, "shared")
    (row,) = table[table["class_name"] == "long"].to_dict("records")
    assert not row["alone"] and row["chunk_tokens"][1:-1] == [1022] * (row["chunks"] - 2)
    assert row["chunks"] == math.ceil(4000 / 1022)


def test_no_step_exceeds_budget_or_max_num_seqs(study):
    table = proofs.limits(study.steps, study.cells)
    assert len(table) == len(study.cells) and table["ok"].all(), table["reason"].tolist()
    assert table.loc[table["setting"] == "chunked", "tokens_max"].max() == 1024
    assert table.loc[table["setting"] == "whole", "requests_max"].max() == 1


def test_first_come_first_served(study):
    table = proofs.order(study.steps, study.requests)
    assert table["ok"].all(), table["reason"].tolist()
    queued = table[(table["setting"] == "whole") & (table["workload"] == "crowd")]
    assert queued["waited"].tolist() == [7]


def test_a_forced_preemption_loses_nothing(study):
    table = prompts(study, "crowd")
    preempted = table[table["restarts"] > 0]
    assert len(preempted) > 0 and (preempted["recomputed_tokens"] >= 500).all()
    counted = study.requests[(study.requests["workload"] == "crowd") & (study.requests["setting"] == "chunked")]
    merged = table.merge(counted[["request", "preemptions"]], on="request")
    known = merged[merged["preemptions"].notna()]
    assert (known["restarts"] == known["preemptions"]).all()


def test_outputs_equal_those_of_whole_prompts_alone(study):
    table = proofs.same_tokens(study.requests, "chunked", "whole")
    assert len(table) == 9 and table["tokens"].sum() == 12 + 8 * 32
    parted = table[~table["ok"]]
    # float32 rounds as well: a token may flip, but only where the best two are a near-tie.
    assert parted.empty or (parted["gap_nats"] < 1e-3).all(), parted[["request", "same", "gap_nats"]].to_string()
    gaps = study.requests.loc[study.requests["workload"] == "crowd", "logprob_gaps"]
    assert gaps.map(len).eq(32).all() and pd.concat([pd.Series(one) for one in gaps]).ge(0).all()
