"""The sweep on a real vLLM: what it measures, what it keeps, and what survives a killed engine or kernel."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from conftest import write_study

from latency_lab import ROOT, measure, processes, records, sweep, vllm_args
from latency_lab.study import load_study

pytestmark = pytest.mark.engine

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(open(sys.argv[1]))
llm = LLM(model=given["model"], dtype="float32", enforce_eager=True, max_model_len=512, enable_prefix_caching=False,
          max_num_batched_tokens=512, max_num_seqs=32, kv_cache_memory_bytes=1 << 30, seed=0)
outputs = []
for prompt, tokens, ignore_eos in given["requests"]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=ignore_eos)
    outputs.append(list(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids))
json.dump(outputs, open(sys.argv[2], "w"))
"""


def ours(name):
    """Living processes below this one, or left by one that was (conftest adopts them), by the start of their name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(name) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def engines_left():
    return [str(process) for process in ours("VLLM")]


def jobs_of(path, runs):
    study = load_study(path, vllm_args.installed())
    return {job.setting.label: job for job in measure.jobs(study, runs)}


def test_every_cell_has_its_row_and_the_exit_code_tells_of_the_bad_one(swept):
    _, runs, done = swept
    cells = records.load(runs / "swept").cells
    outcome = cells.groupby(["setting", "status"]).size().to_dict()
    expected = {("small", "done"): 13, ("small", "timeout"): 1, ("large", "done"): 7, ("refused", "refused"): 7}
    assert outcome == expected, done.stdout + done.stderr
    assert done.returncode == 1
    assert "1 timeout" in done.stdout and "7 refused" in done.stdout


def test_no_engine_is_left_and_the_notebook_is_kept_with_its_data(swept):
    path, runs, _ = swept
    assert engines_left() == []
    for job in jobs_of(path, runs).values():
        notebook = nbformat.read(job.folder / "measure.ipynb", as_version=4)
        given = next(cell for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", ()))
        assert job.setting.label in given.source
        assert "MainProcess" not in str(notebook.cells), "what vLLM logs is in the engine's log"
        assert json.loads((job.folder / "parameters.json").read_text()) == job.parameters()


def test_requests_are_whole(swept):
    _, runs, _ = swept
    loaded = records.load(runs / "swept")
    done = loaded.cells[loaded.cells["status"] == "done"]
    requests = loaded.requests[loaded.requests["cell"].isin(done["cell"])]
    assert requests["error"].isna().all()
    chat = requests[requests["workload"].str.startswith("chat")]
    assert len(chat) == 2 * 2 * 6
    assert (chat["prompt_tokens"] == 24).all() and (chat["output_tokens"] == 16).all()
    for row in requests.itertuples():
        assert sum(row.token_counts) == row.output_tokens == len(row.token_ids)
        first_token_s = row.first_token_s if row.streaming else row.last_token_s
        assert row.scheduled_s <= row.sent_s < first_token_s <= row.last_token_s <= row.finished_s
        assert row.queue_s >= 0 and row.prefill_s > 0 and row.decode_s >= 0
        # The engine's own span from queueing to the last token lies inside the client's from sending to receiving it.
        assert row.queue_s + row.prefill_s + row.decode_s <= row.last_token_s - row.sent_s + 0.005
    assert requests["cached_tokens"].fillna(0).eq(0).all()


def test_through_the_front_door_come_the_same_tokens(swept):
    """By chat and completions, streamed and whole: as the engine gives them, with and without text, and with steps."""
    _, runs, _ = swept
    loaded = records.load(runs / "swept")
    requests = loaded.requests[loaded.requests["workload"].str.startswith("doors")]
    doors = requests.groupby("workload")[["via", "api", "streaming", "detokenize"]].first()
    assert {tuple(row) for row in doors.fillna("").itertuples(index=False)} == {
        ("engine", "", True, False),
        ("engine", "", True, True),
        *itertools.product(["openai"], ["chat", "completions"], [True, False], [True]),
    }
    assert len(requests) == 12 and requests["prompt_tokens"].nunique() == 1
    assert {tuple(ids) for ids in requests["token_ids"]} == {tuple(requests["token_ids"].iloc[0])}
    assert requests["first_token_s"].isna().tolist() == (~requests["streaming"]).tolist()
    assert {len(counts) for counts in requests.loc[requests["via"] == "openai", "token_counts"]} == {12, 1}
    cells = loaded.cells.set_index("workload").loc[doors.index]
    assert (cells["client_cpu_share"].isna() == doors["via"].eq("engine")).all()
    held = loaded.steps[loaded.steps["cell"].isin(cells["cell"])]
    assert set(held["cell"]) == set(cells["cell"])
    assert {number for numbers in held["requests"] for number in numbers} == {0, 1}


def test_prompts_differ_between_requests_and_repeats_but_not_between_settings(swept):
    _, runs, _ = swept
    requests = records.load(runs / "swept").requests
    chat = requests[requests["workload"].str.startswith("chat")]
    small, large = (chat[chat["setting"] == label] for label in ("small", "large"))
    outputs = [tuple(ids) for ids in small.sort_values(["repeat", "request"])["token_ids"]]
    assert len(set(outputs)) > 6, "different prompts give different greedy outputs"
    assert outputs == [tuple(ids) for ids in large.sort_values(["repeat", "request"])["token_ids"]]


def test_a_trace_is_replayed_with_what_its_prompts_share_and_says_what_was_cut(swept):
    _, runs, done = swept
    loaded = records.load(runs / "swept")
    cells = loaded.cells.query("workload == 'trace' and status == 'done'")
    assert cells["requests_clamped"].tolist() == [1, 1] and cells["load"].eq("replay").all()
    note = "all 3 requests in mooncake.jsonl (mooncake), left out for 0 prompt or output tokens: 1"
    assert cells["traffic"].eq(note).all()
    assert f"trace: {note}; 1 of 3 requests cut to max_model_len 512" in done.stdout
    requests = loaded.requests[loaded.requests["cell"].isin(cells["cell"])]
    for _, cell in requests.groupby("cell"):
        assert cell["prompt_tokens"].tolist() == [24, 506, 24] and cell["output_tokens"].eq(6).all()
        assert cell["scheduled_s"].tolist() == [0.0, 0.2, 0.4]
        first, _, again = (tuple(ids) for ids in cell["token_ids"])
        assert first == again, "equal blocks are equal prompts"
    others = loaded.cells[loaded.cells["workload"] != "trace"]
    assert others["traffic"].isna().all() and others["requests_clamped"].isna().all()


def test_cells_say_how_they_were_measured(swept):
    _, runs, _ = swept
    cells = records.load(runs / "swept").cells
    done = cells[cells["status"] == "done"]
    assert done["weights"].eq("real").all() and done["model"].eq("SmolLM2-135M-Instruct").all()
    assert done.groupby("setting")["max_num_batched_tokens"].first().to_dict() == {"small": 128, "large": 512}
    assert done["kv_cache_tokens"].gt(5000).all()
    assert done["client_share"].between(0, 0.05).all()
    assert done["resolved_id"].nunique() == 2
    resolved = json.loads(done["resolved"].iloc[0])
    assert resolved["dtype"] == "float32" and resolved["enforce_eager"] is True
    refused = cells[cells["status"] == "refused"].iloc[0]
    assert "max_num_batched_tokens (64)" in refused["error"]
    late = cells[cells["status"] == "timeout"].iloc[0]
    assert "0.5 s" in late["error"] and late["requests"] == 2 and late["log_tail"]


def test_tokens_equal_offline_generation(swept, tmp_path):
    """Streaming, batching and chunked prefill change no token: vLLM offline, one prompt at a time, says the same."""
    path, runs, _ = swept
    from latency_lab import load, models

    job = jobs_of(path, runs)["large"]
    vocabulary = models.Tokens(job.model)
    recorded = records.load(runs / "swept").requests.set_index("request_id")
    asked, expected = [], []
    for plan in job.study.cells(job.setting):
        if plan.repeat == 0:
            for stream in load.streams(plan.point, plan.repeat, plan.seed, vocabulary):
                for request in stream.requests:
                    asked.append((request.prompt, request.output_tokens, request.ignore_eos))
                    expected.append(list(recorded.loc[f"{job.cell_id(plan)}-{request.index}", "token_ids"]))
    given, got, script = (tmp_path / name for name in ("given.json", "got.json", "offline.py"))
    given.write_text(json.dumps({"model": job.model.location, "requests": asked}))
    script.write_text(
        f"if __name__ == '__main__':\n{''.join('    ' + line + chr(10) for line in OFFLINE.splitlines())}"
    )
    environment = {**os.environ, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    subprocess.run(
        [sys.executable, str(script), str(given), str(got)],
        check=True,
        timeout=300,
        env=environment,
        capture_output=True,
    )
    outputs = json.loads(got.read_text())
    assert len(outputs) == 16
    assert outputs == expected
    words = [row for row in recorded.itertuples() if row.workload.startswith("words")]
    assert all(row.output_tokens <= 12 for row in words)


def test_resuming_measures_only_what_is_not_done(swept):
    path, runs, _ = swept
    before = {file: file.stat().st_mtime_ns for file in (runs / "swept").glob("*/*.parquet")}
    jobs = jobs_of(path, runs)
    assert [plan.point.workload for plan in jobs["small"].pending()] == ["slow"]
    assert jobs["large"].pending() == [] and jobs["refused"].pending() == []
    harmed = next(jobs["large"].folder.glob("*.requests.parquet"))
    whole = harmed.read_bytes()
    harmed.write_bytes(whole[: len(whole) // 2])
    try:
        (again,) = jobs["large"].pending()
        assert harmed.name.startswith(jobs["large"].cell_id(again))
        assert harmed.with_name(harmed.name + ".bad").exists()
    finally:
        for bad in jobs["large"].folder.glob("*.bad"):
            bad.rename(bad.with_name(bad.name.removesuffix(".bad")))
        harmed.write_bytes(whole)
    assert jobs["large"].pending() == []
    assert {file: file.stat().st_size for file in before} == {file: file.stat().st_size for file in before}


FAULTS = """
question: What survives?
model: {source: smollm2}
engine: {dtype: float32, enforce_eager: true, max_model_len: 512, max_num_seqs: 4, enable_prefix_caching: false}
settings:
  axes: {max_num_batched_tokens: [64, 128]}
workloads:
  quick: {load: {kind: closed, concurrency: 1, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
  long: {load: {kind: closed, concurrency: 4, requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 200}}
repeats: 1
order: listed
warmup: 1
"""


@pytest.fixture
def fault_study(tmp_path):
    return write_study(tmp_path, FAULTS, "faults")


def start_sweep(path, runs):
    command = [sys.executable, "-m", "latency_lab", "sweep", str(path), "--runs", str(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(what, sweep, timeout_s=150):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        assert sweep.poll() is None, sweep.stdout.read()
        time.sleep(0.2)
    raise AssertionError(f"waited {timeout_s} s in vain")


def kernels(sweep):
    return [
        process
        for process in psutil.Process(sweep.pid).children(recursive=True)
        if "ipykernel_launcher" in " ".join(process.cmdline())
    ]


def finished_cells(runs):
    return list((runs / "faults").glob("*/*.cell.parquet"))


def rewritten(stamps):
    return [path for path, stamp in stamps.items() if path.exists() and path.stat().st_mtime_ns != stamp]


def test_killed_engine_killed_kernel_and_ctrl_c_cost_one_cell_each_and_are_recorded(fault_study, data_root):
    """An engine killed under load, the next one's kernel, then Ctrl-C: the same command goes on each time."""
    runs = data_root / "fault-runs"
    sweep = start_sweep(fault_study, runs)
    try:
        wait_until(lambda: len(finished_cells(runs)) == 1, sweep)
        time.sleep(1)
        for process in ours("VLLM"):
            process.kill()
        wait_until(lambda: len(finished_cells(runs)) == 3, sweep)  # quick and long of the first, quick of the second
        time.sleep(1)
        (kernel,) = kernels(sweep)
        kernel.kill()
        output, _ = sweep.communicate(timeout=120)
    finally:
        processes.end(psutil.Process().children(recursive=True))
    assert sweep.returncode == 1, output
    assert engines_left() == []
    cells = records.load(runs / "faults").cells.set_index(["setting", "workload"])
    assert cells["status"].to_dict() == {
        ("budget=64", "quick c=1"): "done",
        ("budget=64", "long c=4"): "failed",
        ("budget=128", "quick c=1"): "done",
        ("budget=128", "long c=4"): "failed",
    }, output
    assert "died" in cells.loc[("budget=64", "long c=4"), "error"]
    assert cells.loc[("budget=64", "long c=4"), "requests_failed"] > 0
    assert "kernel" in cells.loc[("budget=128", "long c=4"), "error"].lower()

    # The same command measures what is missing. Ctrl-C while the second engine starts keeps the first's new cell.
    stamps = {path: path.stat().st_mtime_ns for path in finished_cells(runs)}
    again = start_sweep(fault_study, runs)
    try:
        wait_until(lambda: len(rewritten(stamps)) == 1, again)
        wait_until(lambda: not ours("VLLM"), again)
        wait_until(lambda: ours("VLLM"), again)
        os.kill(again.pid, signal.SIGINT)
        output, _ = again.communicate(timeout=60)
    finally:
        processes.end(psutil.Process().children(recursive=True))
    assert again.returncode == 130, output
    assert "2 cells done before, 2 to measure" in output
    assert "run the same command again" in output
    assert engines_left() == []
    cells = records.load(runs / "faults").cells.set_index(["setting", "workload"])
    assert cells["status"].to_dict() == {
        ("budget=64", "quick c=1"): "done",
        ("budget=64", "long c=4"): "done",
        ("budget=128", "quick c=1"): "done",
    }, output
    assert len(rewritten(stamps)) == 1


def test_a_second_sweep_on_one_folder_says_so(fault_study, data_root):
    import fcntl

    folder = data_root / "locked-runs" / "faults"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        second = start_sweep(fault_study, folder.parent)
        output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert output.strip().splitlines() == [f"{folder}: another sweep is at work here (process 4711)"]


def test_errors_in_a_study_are_found_before_an_engine_starts(tmp_path):
    path = write_study(tmp_path, FAULTS.replace("max_num_seqs", "max_num_seq"), "typo")
    command = [sys.executable, "-m", "latency_lab", "sweep", str(path), "--runs", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"{path}:4" in done.stderr and "max_num_seq" in done.stderr and "max_num_seqs" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_notebook_that_outlives_its_sweep_keeps_the_folder_locked(tmp_path):
    with sweep._locked(tmp_path) as lock:
        notebook = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[lock])
    try:
        with pytest.raises(sweep.SweepError, match="another sweep is at work here"), sweep._locked(tmp_path):
            pass
    finally:
        notebook.kill()
        notebook.wait()
    with sweep._locked(tmp_path):
        pass
