"""Step records: the recorder and its tables by hand, vLLM's own schedulers without a model, and a real engine."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scenarios import BUDGET, KEYS, SEQS

from latency_lab import engine, models, records, schemas, trace
from latency_lab.steps import request_number, table

CELL = {**KEYS, "status": "done", "load": "closed"}


# --- the recorder, on a scheduler of paper ------------------------------------------------------------------


class Paper:
    """What the recorder looks at in a vLLM scheduler; `schedule` plays one step of the script."""

    def __init__(self, prompts):
        self.requests = {
            name: SimpleNamespace(num_prompt_tokens=tokens, num_computed_tokens=0) for name, tokens in prompts.items()
        }
        self.kv_cache_manager = SimpleNamespace(usage=0.25)

    def get_request_counts(self):
        return 2, 1

    def schedule(self, tokens, preempted=()):
        for name in preempted:
            self.requests[name].num_computed_tokens = 0
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        return SimpleNamespace(num_scheduled_tokens=tokens, preempted_req_ids=set(preempted))


def play(scheduler, script, limit=1000):
    """Record a script of steps, each (tokens by request, preempted requests); returns the Steps."""
    recorder = trace.Recorder("Paper")
    recorder.begin(limit)
    for tokens, preempted in script:
        output = scheduler.schedule(tokens, preempted)
        recorder.note(trace.Steps.scheduled, 10.0, scheduler, output)
        recorder.note(trace.Steps.returned, output)
    return recorder.end()


def lists(steps, *names):
    rows = table([steps], 10.0, KEYS).to_pylist()
    return [tuple(row[name] for name in names) for row in rows]


def test_a_step_is_split_into_prefill_and_decode():
    steps = play(Paper({"c1-0": 10, "c1-1": 3}), [({"c1-0": 8}, ()), ({"c1-0": 2, "c1-1": 3}, ()), ({"c1-0": 1}, ())])
    assert lists(steps, "requests", "tokens", "computed", "prefill", "recomputed") == [
        ([0], [8], [0], [8], [0]),
        ([0, 1], [2, 3], [8, 0], [2, 3], [0, 0]),
        ([0], [1], [10], [0], [0]),
    ]
    row = table([steps], 10.0, KEYS).to_pylist()[0]
    assert (row["start_s"], row["running"], row["waiting"], row["kv_cache_usage"]) == (0.0, 2, 1, 0.25)


def test_what_a_preempted_request_computes_again_is_no_prefill():
    """Its first 6 of 10 prompt tokens and then, a second time, 10 prompt tokens and 1 of output are computed again."""
    script = [({"c1-0": 6}, ()), ({"c1-1": 1}, ["c1-0"]), ({"c1-0": 10}, ()), ({"c1-0": 1}, ())]
    script += [({"c1-1": 1}, ["c1-0"]), ({"c1-0": 8}, ()), ({"c1-0": 4}, ())]
    steps = play(Paper({"c1-0": 10, "c1-1": 1}), script)
    rows = table([steps], 10.0, KEYS).to_pylist()
    mine = [(row["prefill"][0], row["recomputed"][0], row["tokens"][0]) for row in rows if row["requests"] == [0]]
    assert mine == [(6, 0, 6), (4, 6, 10), (0, 0, 1), (0, 8, 8), (0, 3, 4)]
    assert [row["preempted"] for row in rows] == [0, 1, 0, 0, 1, 0, 0]


def test_memory_is_bounded_and_what_was_dropped_is_counted():
    steps = play(Paper({"c1-0": 1, "c1-1": 1}), [({"c1-0": 1, "c1-1": 1}, ())] * 3 + [({"c1-0": 1}, ())] * 4, limit=5)
    assert (len(steps.start), len(steps.request), steps.dropped) == (2, 4, 5)
    assert table([steps], 0.0, KEYS).column("step").to_pylist() == [0, 1], "what is dropped is the end, without holes"


def test_steps_without_work_are_not_steps():
    assert len(play(Paper({}), [({}, ())]).start) == 0
    assert table([play(Paper({}), [])], 0.0, KEYS).schema == schemas.STEPS


def test_a_step_whose_end_is_not_known_has_none():
    recorder, scheduler = trace.Recorder("Paper"), Paper({"c1-0": 1})
    recorder.begin()
    recorder.note(trace.Steps.scheduled, 10.0, scheduler, scheduler.schedule({"c1-0": 1}))
    assert table([recorder.end()], 10.0, KEYS).column("end_s").to_pylist() == [None]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("c1-7", 7),
        ("c1-7-0123abcd", 7),
        ("c1-12-deadbeef", 12),
        ("c12-7-0123abcd", -1),
        ("warm-up-c1-7-0123abcd", -1),
        ("still-there-0123abcd", -1),
        ("cmpl-c1-7-0-0123abcd", 7),
        ("cmpl-c1-7-1-0123abcd", -1),
        ("chatcmpl-c1-7-0123abcd", 7),
        ("chatcmpl-c1-0-0-0123abcd", -1),
    ],
)
def test_requests_are_known_by_the_id_that_vllm_makes_of_ours(name, number):
    assert request_number(name, "c1") == number


class Odd:
    """A scheduler base that lacks what the recorder reads."""

    def schedule(self, throttle=False):
        return SimpleNamespace(num_scheduled_tokens={"a": 1}, preempted_req_ids=None)

    def update_from_output(self, output, result):
        return {0: result}


def test_a_scheduler_of_another_make_runs_on_and_the_cell_says_why_there_are_no_steps(tmp_path, monkeypatch):
    monkeypatch.delenv(trace.FOLDER, raising=False)
    scheduler = trace.traced(Odd)()
    with trace.offered(True) as tracer:
        listener = scheduler.latency_lab.serve(str(tracer.folder))
        asyncio.run(tracer.begin())
        output = scheduler.schedule(True)
        assert output.num_scheduled_tokens == {"a": 1}
        assert scheduler.update_from_output(output, "tokens") == {0: "tokens"}
        found = asyncio.run(tracer.end(0.0, KEYS))
        listener.close()
    assert found.table is None
    assert "not as expected" in found.note and "requests" in found.note


def test_steps_leave_through_the_socket_between_begin_and_end_only():
    recorder, scheduler = trace.Recorder("Paper"), Paper({"c1-0": 1})

    def step():
        recorder.note(trace.Steps.scheduled, 10.0, scheduler, scheduler.schedule({"c1-0": 1}))

    async def two_cells(tracer):
        found = []
        for limit in (10, 1):
            step()
            await tracer.begin(limit)
            step()
            step()
            found.append(await tracer.end(0.0, KEYS))
            step()
        return found

    with trace.offered(True) as tracer:
        assert tracer.env == {trace.FOLDER: str(tracer.folder)}
        listener = recorder.serve(str(tracer.folder))
        whole, cut = asyncio.run(two_cells(tracer))
        assert asyncio.run(tracer.end(0.0, KEYS)).note == "the engine's process had not begun to record steps"
        listener.close()
    assert not tracer.folder.exists()
    assert whole.table.num_rows == 2
    assert whole.columns == {"steps_dropped": 0, "steps_note": None}
    assert cut.table.num_rows == 1 and cut.dropped == 1 and cut.note.startswith("1 later steps were not kept")


def test_why_there_are_no_steps():
    async def cell(tracer):
        await tracer.begin()
        return await tracer.end(0.0, KEYS)

    with trace.offered(False) as tracer:
        assert tracer.engine_args({}) == {} and tracer.env == {}
        assert asyncio.run(cell(tracer)).columns == {
            "steps_dropped": None,
            "steps_note": "the study says trace: false",
        }
    with trace.offered(True) as tracer:
        assert "no scheduler of this engine" in asyncio.run(cell(tracer)).note
        (tracer.folder / "1").touch()  # a socket whose process has ended
        assert "did not answer" in asyncio.run(cell(tracer)).note
    with trace.offered(True) as tracer:
        assert tracer.engine_args({"scheduler_cls": "my.Scheduler"}) == {}
        assert "scheduler_cls of its own" in asyncio.run(cell(tracer)).note


# --- records ------------------------------------------------------------------------------------------------


def some_steps(cell="c1"):
    return table([play(Paper({f"{cell}-0": 4}), [({f"{cell}-0": 4}, ()), ({f"{cell}-0": 1}, ())])], 10.0, KEYS)


def test_steps_survive_writing_packing_and_loading(tmp_path):
    folder = tmp_path / "s" / "x"
    written = some_steps()
    records.write_cell(folder, CELL, [], written)
    records.write_cell(folder, {**CELL, "cell": "c2", "steps_note": "why"}, [])
    row = records.read_cell(folder, "c1")
    assert (row["steps"], row["steps_note"]) == (2, None)
    assert [records.read_cell(folder, "c2")[name] for name in ("steps", "steps_sha256", "steps_note")] == [
        None,
        None,
        "why",
    ]
    records.pack(tmp_path / "s", tmp_path / "packed")
    assert pq.ParquetFile(tmp_path / "packed" / "steps.parquet").num_row_groups == 1
    for place in (tmp_path / "s", tmp_path / "packed"):
        loaded = records.load(place).steps
        assert [list(values) for values in loaded["prefill"]] == [[4], [0]]
        assert pa.Table.from_pandas(loaded, schemas.STEPS, preserve_index=False).equals(written)


def test_a_harmed_steps_file_is_not_believed_and_a_stale_one_is_removed(tmp_path):
    records.write_cell(tmp_path, CELL, [], some_steps())
    file = tmp_path / "c1.steps.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(records.BadRecord, match=r"c1\.steps\.parquet: its digest"):
        records.read_cell(tmp_path, "c1")
    file.unlink()
    with pytest.raises(records.BadRecord, match=r"c1\.steps\.parquet: missing"):
        records.read_cell(tmp_path, "c1")
    records.write_cell(tmp_path, CELL, [], some_steps())
    records.write_cell(tmp_path, CELL, [])
    assert not file.exists() and records.read_cell(tmp_path, "c1")["steps"] is None


def test_records_from_before_there_were_steps_still_load(tmp_path):
    folder = tmp_path / "s" / "x"
    records.write_cell(folder, CELL, [])
    file = folder / "c1.cell.parquet"
    old = pq.read_table(file)
    pq.write_table(old.drop_columns([name for name in old.column_names if name.startswith("steps")]), file)
    assert records.read_cell(folder, "c1")["steps_note"] is None
    loaded = records.load(tmp_path / "s")
    assert loaded.cells["steps"].isna().all()
    assert len(loaded.steps) == 0 and list(loaded.steps.columns) == schemas.STEPS.names
    records.pack(tmp_path / "s", tmp_path / "packed")
    assert not (tmp_path / "packed" / "steps.parquet").exists()


# --- vLLM's own schedulers, without a model -----------------------------------------------------------------


def vllm_scheduler(asynchronous, traced, blocks=101, budget=128, seqs=8):
    """A scheduler as vLLM's engine makes it, with blocks of 16 tokens (one is never used)."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    folder = models.published_config("smollm2-135m-instruct")
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    scheduler = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=1024,
        is_encoder_decoder=False,
        scheduler_cls=trace.SCHEDULER if traced else None,
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    config = VllmConfig(scheduler_config=scheduler, model_config=model, cache_config=cache)
    config.scheduler_config.async_scheduling = asynchronous  # vLLM's CPU platform turns it off; nothing runs here
    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        log_stats=True,
    )


def run_engine_loop(scheduler, requests, ahead):
    """vLLM's engine loop with a model that always says 7; `ahead` steps are scheduled before one comes back.

    Returns what each step scheduled, and the tokens that each request got.
    """
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request as EngineRequest

    for number, (prompt, tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        scheduler.add_request(EngineRequest(f"c1-{number}-0123abcd", list(range(5, 5 + prompt)), params, None))
    flying, decided, got = deque(), [], {}
    while scheduler.has_requests() or flying:
        assert len(decided) < 5000, "the loop does not end"
        if scheduler.has_requests():
            output = scheduler.schedule()
            ids = list(output.num_scheduled_tokens)
            sampled = [[] if scheduler.requests[name].is_prefill_chunk else [7] for name in ids]
            decided.append(dict(output.num_scheduled_tokens))
            flying.append((output, ids, sampled))
            if len(flying) < ahead and ids:
                continue
        output, ids, sampled = flying.popleft()
        result = ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, sampled_token_ids=sampled)
        for outputs in scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                got[one.request_id] = got.get(one.request_id, 0) + len(one.new_token_ids)
    return decided, [got[f"c1-{number}-0123abcd"] for number in range(len(requests))]


def totals(steps):
    """Tokens by request number: {number: {"prefill": .., "recomputed": .., "decode": ..}} of a table or its rows."""
    found = {}
    for row in steps.to_pylist():
        split = zip(row["requests"], row["tokens"], row["prefill"], row["recomputed"], strict=True)
        for number, tokens, prefill, recomputed in split:
            one = found.setdefault(number, {"prefill": 0, "recomputed": 0, "decode": 0})
            one["prefill"] += prefill
            one["recomputed"] += recomputed
            one["decode"] += tokens - prefill - recomputed
    return found


@pytest.mark.engine
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [101, 25], ids=["roomy", "preempting"])
def test_the_schedule_is_vllms_own_and_every_token_is_accounted_for(asynchronous, blocks):
    """Also of the asynchronous scheduler, which vLLM does not use on a CPU: two steps are in flight there."""
    requests = [(150, 100), (50, 90), (70, 110), (17, 120)]
    plain = vllm_scheduler(asynchronous, traced=False, blocks=blocks)
    traced = vllm_scheduler(asynchronous, traced=True, blocks=blocks)
    assert type(traced).__mro__[1] is type(plain)
    assert type(plain).__name__ == ("AsyncScheduler" if asynchronous else "Scheduler")
    traced.latency_lab.begin()
    ahead = 2 if asynchronous else 1
    expected = run_engine_loop(plain, requests, ahead)
    assert run_engine_loop(traced, requests, ahead) == expected
    assert expected[1] == [tokens for _, tokens in requests]

    steps = traced.latency_lab.end()
    assert steps.error is None and steps.scheduler == type(plain).__name__
    found = table([steps], 0.0, KEYS)
    by_request = totals(found)
    assert [by_request[number]["prefill"] for number in range(4)] == [prompt for prompt, _ in requests]
    preempted = sum(found.column("preempted").to_pylist())
    recomputed = sum(one["recomputed"] for one in by_request.values())
    decode = [by_request[number]["decode"] for number in range(4)]
    if blocks == 101:
        assert preempted == recomputed == 0
    else:
        assert preempted > 0 and recomputed > 0
    # The first output token comes out of the prompt's last step; each later one takes a decode token.
    assert decode == [tokens - 1 for _, tokens in requests]
    assert found.column("end_s").null_count == 0


@pytest.mark.engine
def test_naming_a_scheduler_changes_nothing_else_that_vllm_resolves():
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = str(models.published_config("smollm2-135m-instruct"))
    configs = [
        AsyncEngineArgs(model=folder, skip_tokenizer_init=True, dtype="float32", **extra).create_engine_config()
        for extra in ({}, {"scheduler_cls": trace.SCHEDULER})
    ]
    plain, traced = (engine.resolve(config, {}) for config in configs)
    assert {name for name in plain if plain[name] != traced[name]} <= {"scheduler_cls", "instance_id"}
    assert trace.own_choice(configs[1]) is configs[0].scheduler_config.get_scheduler_cls()
    assert trace.unsupported() is None


# --- a real engine ------------------------------------------------------------------------------------------


def prefill_chunks(steps, number):
    """The prompt tokens of one request in each step that held any."""
    found = []
    for row in steps.to_pylist():
        if number in row["requests"] and (tokens := row["prefill"][row["requests"].index(number)]):
            found.append(tokens)
    return found


@pytest.mark.engine
def test_every_token_of_every_request_is_in_a_step(measured):
    for name, (run, recorded) in measured.items():
        assert recorded.note is None and recorded.dropped == 0, recorded.note
        by_request = totals(recorded.table)
        assert set(by_request) == {timing.request.index for timing in run.timings}, name
        for timing in run.timings:
            assert timing.error is None
            one = by_request[timing.request.index]
            assert one["prefill"] == len(timing.request.prompt), (name, timing.request_id)
            assert one["decode"] == len(timing.token_ids) - 1, (name, timing.request_id)


@pytest.mark.engine
def test_a_lone_prompt_of_four_budgets_takes_four_steps(measured):
    steps = measured["lone"][1].table
    assert prefill_chunks(steps, 0) == [BUDGET] * 4
    assert steps.column("computed").to_pylist()[:4] == [[0], [128], [256], [384]]


@pytest.mark.engine
def test_beside_decodes_a_prompt_gets_what_they_leave_of_the_budget(measured):
    steps = measured["beside"][1].table
    assert prefill_chunks(steps, 2) == [126, 126, 126, 126, 8]
    shared = [row for row in steps.to_pylist() if 2 in row["requests"] and row["prefill"][row["requests"].index(2)]]
    assert all(row["requests"] == [0, 1, 2] and row["tokens"][:2] == [1, 1] for row in shared)


@pytest.mark.engine
def test_no_step_exceeds_the_budget_or_max_num_seqs(measured):
    for _, recorded in measured.values():
        for row in recorded.table.to_pylist():
            assert 0 < sum(row["tokens"]) <= BUDGET
            assert len(row["requests"]) <= row["running"] <= SEQS
            assert 0 <= row["kv_cache_usage"] <= 1
    assert max(row["running"] for row in measured["burst"][1].table.to_pylist()) == SEQS


@pytest.mark.engine
def test_requests_are_first_scheduled_in_order_of_arrival(measured):
    rows = measured["burst"][1].table.to_pylist()
    assert list(dict.fromkeys(number for row in rows for number in row["requests"])) == list(range(12))
    waiting = [row["waiting"] for row in rows]
    assert max(waiting) >= 12 - SEQS - 1 and waiting[-1] == 0


@pytest.mark.engine
def test_a_preemption_is_seen_and_loses_nothing(measured, untraced):
    run, recorded = measured["crowded"]
    assert sum(recorded.table.column("preempted").to_pylist()) > 0
    assert sum(one["recomputed"] for one in totals(recorded.table).values()) > 0
    assert max(recorded.table.column("kv_cache_usage").to_pylist()) > 0.95
    roomy, _ = untraced["crowded"]
    assert [one.token_ids for one in run.timings] == [one.token_ids for one in roomy.timings]


@pytest.mark.engine
def test_outputs_are_those_of_an_untraced_engine(measured, untraced):
    assert {recorded.note for _, recorded in untraced.values()} == {"the study says trace: false"}
    for name, (run, _) in measured.items():
        plain, _ = untraced[name]
        assert [one.token_ids for one in run.timings] == [one.token_ids for one in plain.timings], name


@pytest.mark.engine
def test_steps_are_on_the_clients_clock(measured):
    """A token reaches the client just after its step has come back; on a CPU, steps do not overlap."""
    for name, (run, recorded) in measured.items():
        rows = recorded.table.to_pylist()
        assert all(row["start_s"] < row["end_s"] for row in rows)
        assert all(one["end_s"] <= other["start_s"] for one, other in zip(rows, rows[1:], strict=False)), name
        for timing in run.timings:
            own = [row for row in rows if timing.request.index in row["requests"]]
            assert timing.sent_s < own[0]["start_s"] and own[-1]["end_s"] < timing.chunk_s[-1]
        lone = [timing.chunk_s[-1] - rows[-1]["end_s"] for timing in run.timings if name == "lone"]
        assert all(late < 0.25 for late in lone)


@pytest.mark.engine
def test_a_sweep_keeps_the_steps_of_every_cell(swept):
    _, runs, _ = swept
    loaded = records.load(runs / "swept")
    cells, steps = loaded.cells, loaded.steps
    done = cells[cells["status"] == "done"]
    assert (done["steps"] > 0).all() and done["steps_note"].isna().all() and (done["steps_dropped"] == 0).all()
    assert steps.groupby("cell").size().to_dict() == cells[cells["steps"].notna()].set_index("cell")["steps"].to_dict()
    assert cells[cells["status"] == "refused"]["steps"].isna().all()
    requests = loaded.requests[loaded.requests["cell"].isin(done["cell"])]
    for cell, rows in requests.groupby("cell"):
        by_request = totals(pa.Table.from_pandas(steps[steps["cell"] == cell]))
        for row in rows.itertuples():
            assert by_request[row.request]["prefill"] == row.prompt_tokens
            assert by_request[row.request]["decode"] == row.output_tokens - 1
