"""One engine for several settings: which may share one, limits that a living engine obeys, and what records say."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pandas as pd
import pytest
from scenarios import ARGS, LOWERED, SEQS
from test_trace import prefill_chunks, run_engine_loop, vllm_scheduler

from latency_lab import engine, limits, measure, records, study_hot
from latency_lab.study import StudyError, load_study

STUDY = """\
question: One engine for all?
model: {source: config, config: smollm2-135m-instruct}
engine: {enforce_eager: true, kv_cache_memory_bytes: 1000000, dtype: float32}
engine_reuse: hot
order: listed
settings:
  axes: {max_num_batched_tokens: [64, 128], max_num_seqs: [2, 4]}
  named:
    half: {engine: {max_num_batched_tokens: 32, max_num_seqs: 32, dtype: bfloat16}}
    refused: {engine: {max_num_batched_tokens: 2, max_num_seqs: 4}, expect: invalid}
workloads:
  chat: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
repeats: 1
"""
AXES = ["budget=64 seqs=2", "budget=64 seqs=4", "budget=128 seqs=2", "budget=128 seqs=4"]


@pytest.fixture
def study(tmp_path):
    def read(text=STUDY):
        (tmp_path / "shared.yaml").write_text(text)
        return load_study(tmp_path / "shared.yaml")

    return read


# --- which settings share an engine -------------------------------------------------------------------------


def test_settings_that_differ_in_the_two_limits_alone_share_an_engine(study):
    hot = study()
    together = {one.label: [other.label for other in hot.together(one)] for one in hot.settings()}
    assert together == {**dict.fromkeys(AXES, AXES), "half": ["half"], "refused": ["refused"]}
    assert study_hot.largest(hot.together(hot.settings()[0])) == {"max_num_batched_tokens": 128, "max_num_seqs": 4}
    cold = study(STUDY.replace("engine_reuse: hot\n", ""))
    assert all(cold.together(one) == [one] for one in cold.settings())
    starts_s = (cold.estimate_s() - hot.estimate_s()) / hot.speed.start_s
    assert starts_s == pytest.approx(3), "three starts fewer"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("enforce_eager: true, ", "", "hot: setting 'budget=64 seqs=2' compiles or captures graphs"),
        (", kv_cache_memory_bytes: 1000000", "", "hot: the KV cache of setting 'budget=64 seqs=2' would be as large"),
        ("dtype: float32", "dtype: float32, speculative_config: {method: ngram}", "has speculative_config, by which"),
        ("dtype: float32", "dtype: float32, max_num_active_seqs: 2", "has max_num_active_seqs, by which"),
        (", max_num_seqs: [2, 4]", "", "hot: setting 'budget=64' leaves a limit to vLLM"),
        ("order: listed", "trace: false", "hot: trace: false, and the limits are changed by the scheduler"),
        ("[64, 128], max_num_seqs: [2, 4]", "[64], max_num_seqs: [4]", "hot: no two settings differ in"),
        ("engine_reuse: hot", "engine_reuse: warm", "'warm' is not known; allowed: cold, hot"),
    ],
)
def test_why_settings_can_not_share_an_engine_is_said_in_one_line(study, old, new, message):
    with pytest.raises(StudyError) as caught:
        study(STUDY.replace(old, new))
    (problem,) = caught.value.problems
    assert "shared.yaml:4: engine_reuse: " in problem and message in problem and "allowed: " in problem


def test_a_pinned_number_of_blocks_will_do_and_each_setting_keeps_its_own_checks(study):
    study(STUDY.replace("kv_cache_memory_bytes: 1000000", "num_gpu_blocks_override: 64"))
    with pytest.raises(StudyError, match="is less than max_num_seqs 128"):
        study(STUDY.replace("[2, 4]", "[2, 128]"))


def test_on_a_gpu_it_is_not_offered(study, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.machine, "has_gpu", lambda: True)
    with pytest.raises(StudyError, match=r"shared\.yaml: engine_reuse: hot: not shown .*; allowed: cold"):
        measure.jobs(study(), tmp_path / "runs")


# --- jobs and their records, with a made-up engine ----------------------------------------------------------


class MadeUp:
    """An engine that can be limited; it dies in the cells of the setting with the label `dies`."""

    def __init__(self, resolved, dies=None):
        self.facts = self.as_started = engine.EngineFacts(
            engine_start_s=1.0,
            resolved=resolved,
            resolved_id=engine._resolved_id(resolved),
            kv_cache_blocks=1,
            kv_cache_tokens=16,
            weight_bytes=None,
            memory_used_before_bytes=0,
            cpu_load_before=0.0,
        )
        self.tracer, self.dies, self.limits = SimpleNamespace(note=None), dies, []

    async def limit(self, given):
        self.limits.append(given)
        self.facts = self.as_started.limited(given)


@pytest.fixture
def made_up(monkeypatch):
    """Jobs measure with a made-up engine, which this gives a list of once they do; a cell is its row alone."""
    started, dies = [], []

    @contextlib.asynccontextmanager
    async def running(args, model, **_):
        started.append(MadeUp(dict(args), *dies))
        yield started[-1]

    async def measured(job, living, pending, show):
        if job.setting.label == living.dies:
            job._give_up(pending[:1], "failed", "the engine died", living.facts)
            raise engine.EngineDied("in chat")
        for plan in pending:
            row = {
                **job._keys(plan),
                **job._facts(living.facts),
                **living.facts.setting_values,
                "status": "done",
                "error": None,
            }
            records.write_cell(job.folder, row, [])
            job.rows.append({**row, "_requests": []})
        show()

    monkeypatch.setattr(measure.engine, "running", running)
    monkeypatch.setattr(measure.Job, "_measure", measured)
    monkeypatch.setattr(measure.machine, "has_gpu", lambda: False)
    return started, dies


def cells(runs):
    return records.load(runs / "shared").cells.set_index("setting")


def test_one_engine_of_the_largest_limits_serves_them_and_each_cell_says_which_applied(study, tmp_path, made_up):
    started, _ = made_up
    jobs = measure.jobs(study(), tmp_path / "runs")
    leads = measure.starts(jobs)
    assert [lead.setting.label for lead in leads] == [AXES[0], "half", "refused"]
    tables = []
    asyncio.run(leads[0].run(tables.append))
    asyncio.run(leads[1].run())
    (shared, alone) = started
    assert (shared.as_started.resolved["max_num_batched_tokens"], shared.as_started.resolved["max_num_seqs"]) == (
        128,
        4,
    )
    assert shared.limits == [{"max_num_batched_tokens": b, "max_num_seqs": s} for b in (64, 128) for s in (2, 4)]
    assert alone.limits == []
    assert list(tables[-1]["setting"]) == AXES

    found = cells(tmp_path / "runs")
    own = found.loc[AXES]
    assert list(zip(own["max_num_batched_tokens"], own["max_num_seqs"], strict=True)) == [
        (64, 2),
        (64, 4),
        (128, 2),
        (128, 4),
    ]
    assert (
        own["hot"].all()
        and set(own["started_max_num_batched_tokens"]) == {128}
        and set(own["started_max_num_seqs"]) == {4}
    )
    assert not found.loc["half", "hot"] and pd.isna(found.loc["half", "started_max_num_seqs"])
    for label in AXES:  # the same configuration and id as if it had run alone
        (job,) = [job for job in jobs if job.setting.label == label]
        resolved = json.loads(own.loc[label, "resolved"])
        assert resolved == job.setting.args
        assert own.loc[label, "resolved_id"] == engine._resolved_id(resolved)
        assert (job.folder / f"{own.loc[label, 'cell']}.cell.parquet").exists() and job.pending() == []
    assert [(lead.folder / "parameters.json").exists() for lead in leads] == [True, True, False]


def test_hot_cells_have_the_ids_of_cold_ones_so_that_either_resumes_the_other(study, tmp_path, made_up):
    started, _ = made_up
    cold = measure.jobs(study(STUDY.replace("engine_reuse: hot\n", "")), tmp_path / "runs")
    hot = measure.jobs(study(), tmp_path / "runs")
    assert [job.id for job in hot] == [job.id for job in cold]
    asyncio.run(cold[0].run())
    leads = measure.starts(hot)
    assert leads[0].setting.label == AXES[1], "the first with something to measure"
    asyncio.run(leads[0].run())
    assert started[1].limits == [
        {"max_num_batched_tokens": b, "max_num_seqs": s} for b, s in ((64, 4), (128, 2), (128, 4))
    ]
    found = cells(tmp_path / "runs")
    assert found.loc[AXES, "hot"].tolist() == [False, True, True, True]
    by_hand = measure.open_job(tmp_path / "shared.yaml", AXES[2], tmp_path / "runs")
    assert [job.setting.label for job in by_hand.members] == AXES and by_hand.lead() == []


def test_what_a_dead_engine_did_not_get_to_is_skipped(study, tmp_path, made_up):
    _, dies = made_up
    dies.append(AXES[1])
    lead, *_ = measure.starts(measure.jobs(study(), tmp_path / "runs"))
    with pytest.raises(engine.EngineDied):
        asyncio.run(lead.run())
    assert cells(tmp_path / "runs")["status"].to_dict() == {
        AXES[0]: "done",
        AXES[1]: "failed",
        AXES[2]: "skipped",
        AXES[3]: "skipped",
    }


def test_limits_that_can_not_be_changed_fail_the_settings_that_needed_them(study, tmp_path, made_up, monkeypatch):
    async def limit(self, given):
        raise engine.EngineError("the limits of the living engine could not be changed: requests are still running")

    monkeypatch.setattr(MadeUp, "limit", limit)
    lead, *_ = measure.starts(measure.jobs(study(), tmp_path / "runs"))
    with pytest.raises(engine.EngineError, match="still running"):
        asyncio.run(lead.run())
    found = cells(tmp_path / "runs")
    assert found["status"].eq("failed").all() and len(found) == 4 and found["hot"].isna().all()
    assert found.loc[AXES[0], "max_num_batched_tokens"] == 64, "what was asked, where nothing was measured"


# --- vLLM's own schedulers, without a model -----------------------------------------------------------------


def numbers(scheduler):
    """All that a scheduler holds in whole numbers, of itself and of its configuration."""
    holders = {"": vars(scheduler), "config.": vars(scheduler.scheduler_config)}
    return {
        prefix + name: value for prefix, held in holders.items() for name, value in held.items() if type(value) is int
    }


@pytest.mark.engine
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [101, 25], ids=["roomy", "preempting"])
def test_a_limited_scheduler_decides_as_one_that_was_made_with_these_limits(asynchronous, blocks):
    requests = [(150, 100), (50, 90), (70, 110), (17, 120), (90, 20)]
    made = vllm_scheduler(asynchronous, traced=False, blocks=blocks, budget=48, seqs=3)
    large = vllm_scheduler(asynchronous, traced=True, blocks=blocks)
    before = numbers(large)
    run_engine_loop(large, requests[:2], 2 if asynchronous else 1)
    assert large.latency_lab.limit(48, 3) is None
    assert numbers(large) | {"current_step": 0} == numbers(made) | {"current_step": 0}
    assert large.vllm_config.scheduler_config.max_num_batched_tokens == 128, "the worker's may be the same object"
    ahead = 2 if asynchronous else 1
    decided = run_engine_loop(made, requests, ahead)
    assert run_engine_loop(large, requests, ahead) == decided
    assert max(sum(step.values()) for step in decided[0]) == 48 and max(map(len, decided[0])) <= 3
    assert large.latency_lab.limit(128, 8) is None
    assert numbers(large) | {"current_step": 0} == before | {"current_step": 0}


@pytest.mark.engine
def test_a_scheduler_that_can_not_be_limited_says_why_and_stays_as_it_was():
    from vllm import SamplingParams
    from vllm.v1.request import Request as EngineRequest

    scheduler = vllm_scheduler(False, traced=True)
    before = numbers(scheduler)
    assert "not within those that the engine was started with, 128 and 8" in limits.limit(scheduler, 129, 4)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    scheduler.add_request(EngineRequest("c1-0-0123abcd", [5, 6, 7], params, None))
    assert limits.limit(scheduler, 64, 4) == "requests are still running"
    scheduler.vllm_config.lora_config = object()
    assert "LoRA" in limits.limit(scheduler, 64, 4)
    assert "not as expected: AttributeError" in type(scheduler.latency_lab)("Paper", object()).limit(64, 4)
    assert numbers(scheduler) == before


# --- a real engine ------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_living_engine_obeys_other_limits_and_its_own_again(limited):
    lone, burst = (limited[name][1].table.to_pylist() for name in ("lone", "burst"))
    assert prefill_chunks(limited["lone"][1].table, 0) == [LOWERED["max_num_batched_tokens"]] * 8
    for row in [*lone, *burst]:
        assert sum(row["tokens"]) <= LOWERED["max_num_batched_tokens"]
        assert len(row["requests"]) <= row["running"] <= LOWERED["max_num_seqs"]
    assert max(row["running"] for row in burst) == LOWERED["max_num_seqs"]
    again = limited["burst as started"][1].table.to_pylist()
    assert max(row["running"] for row in again) == SEQS
    assert max(sum(row["tokens"]) for row in again) > LOWERED["max_num_batched_tokens"]


@pytest.mark.engine
def test_limits_change_no_token(limited, measured):
    for name in ("lone", "burst", "burst as started"):
        tokens = [one.token_ids for one in limited[name][0].timings]
        assert tokens == [one.token_ids for one in measured[name.split()[0]][0].timings], name


@pytest.mark.engine
def test_the_engine_says_which_limits_apply_and_which_it_was_started_with(limited):
    started, lowered = limited["facts"]
    assert started.started is None
    assert lowered.started == {name: ARGS[name] for name in LOWERED}
    assert {name for name in started.resolved if started.resolved[name] != lowered.resolved[name]} == set(LOWERED)
    assert lowered.setting_values | LOWERED == lowered.setting_values and lowered.resolved_id != started.resolved_id
    again = limited["facts as started"]
    assert (again.resolved_id, again.started) == (started.resolved_id, lowered.started)
