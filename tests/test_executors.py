"""Engine starts as Ray tasks: what each asks for, which cores it gets, and a study on a Ray that loses a worker."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import write_study

from latency_lab import machine, measure, one_start, pinning, ray_executor, ray_tasks, records, vllm_args
from latency_lab.__main__ import main
from latency_lab.ray_executor import Cluster, ClusterError, Host
from latency_lab.study import load_study

EIGHT = Host("a", "eight", cores=128, gpus=8)
TWO = Host("b", "two", cores=24, gpus=2)
LAPTOP = Host("c", "laptop", cores=2, gpus=0)
HEAD = Host("d", "head", cores=16, gpus=0)

RAYED = """
question: Does it hold on Ray?
model: {source: smollm2}
engine: {dtype: float32, enforce_eager: true, max_model_len: 512, max_num_seqs: 4, enable_prefix_caching: false}
settings:
  named:
    refused: {engine: {max_num_batched_tokens: 64, enable_chunked_prefill: false}, expect: invalid}
    small: {engine: {max_num_batched_tokens: 128}}
workloads:
  chat: {load: {kind: closed, concurrency: 2, requests_each: 1}, prompt: {tokens: 16}, output: {tokens: 8}}
warmup: 1
repeats: 1
"""


def node(host, alive=True):
    resources = {"CPU": float(host.cores)} | ({"GPU": float(host.gpus)} if host.gpus else {})
    return {"NodeID": host.node, "NodeManagerHostname": host.name, "Alive": alive, "Resources": resources}


# What a task asks for


def test_engines_run_on_hosts_with_gpus_or_on_all_of_a_cluster_without_any():
    assert ray_executor.hosts([node(HEAD), node(EIGHT), node(TWO)]) == (EIGHT, TWO)
    assert ray_executor.hosts([node(HEAD), node(LAPTOP)]) == (HEAD, LAPTOP)
    assert ray_executor.hosts([node(HEAD), node(EIGHT, alive=False)]) == (HEAD,)
    assert ray_executor.hosts([node(Host("e", "no CPUs", 0, 0))]) == ()


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 8),
    ],
)
def test_an_engine_asks_for_a_gpu_a_rank_and_their_share_of_the_cores(args, gpus):
    assert Cluster((EIGHT,)).gpus(args) == gpus
    assert Cluster((EIGHT,)).cores(gpus) == 16 * gpus
    assert Cluster((EIGHT, TWO)).cores(gpus) == 12 * gpus, "as much on every host, by the poorest"
    assert Cluster((EIGHT,), asked_cores=4).cores(gpus) == 4
    assert Cluster((LAPTOP,)).gpus(args) == 0


def test_without_gpus_an_engine_gets_a_whole_host():
    assert Cluster((LAPTOP, HEAD)).cores(0) == 2
    assert Cluster((HEAD,), asked_cores=4).cores(0) == 4


def test_what_no_host_can_run_is_named_in_one_line():
    assert Cluster((EIGHT, TWO)).lacks("tp=8", {"tensor_parallel_size": 8}) is None
    assert Cluster((EIGHT, TWO)).lacks("tp=16", {"tensor_parallel_size": 16}) == (
        "tp=16: needs 16 GPUs on one host, and the cluster's largest has 8"
    )
    assert Cluster((EIGHT, TWO), asked_cores=200).lacks("tp=4", {"tensor_parallel_size": 4}) == (
        "tp=4: 200 logical cores asked for, and the cluster's largest host has 128"
    )
    assert Cluster((LAPTOP,), asked_cores=4).lacks("base", {}) == (
        "base: 4 logical cores asked for, and the cluster's largest host has 2"
    )


def test_a_study_that_fits_nowhere_is_refused_before_anything_starts(tmp_path):
    text = RAYED.replace("{max_num_batched_tokens: 128}", "{max_num_batched_tokens: 128, tensor_parallel_size: 4}")
    study = load_study(write_study(tmp_path, text, "wide"), None)
    with pytest.raises(ClusterError, match="wide.yaml: small: needs 4 GPUs on one host, .* has 2"):
        Cluster((TWO,)).check(study)
    Cluster((EIGHT,)).check(study)


# Which cores it gets


def test_engines_side_by_side_take_whole_slots_next_to_their_gpus():
    cores = list(range(8))
    assert pinning.choose(cores, cores, 4) == [0, 1, 2, 3]
    assert pinning.choose([4, 5, 6, 7], cores, 4) == [4, 5, 6, 7]
    assert pinning.choose(cores, cores, 4, near=[5, 6]) == [4, 5, 6, 7]
    assert pinning.choose([1, 2, 5, 6, 7], cores, 4) == [1, 2, 5, 6], "no slot is free as a whole"
    assert pinning.choose([1, 2], cores, 4) is None


def test_claims_hold_across_processes_until_the_last_holder_ends(tmp_path):
    def give_up():
        raise TimeoutError

    own = pinning.in_order(os.sched_getaffinity(0))
    with pinning.claimed(len(own), folder=tmp_path) as (cores, holds):
        assert cores == sorted(own)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=holds)
    try:
        with pytest.raises(TimeoutError), pinning.claimed(1, waiting=give_up, folder=tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
    with pinning.claimed(1, folder=tmp_path) as (cores, _):
        assert cores == own[:1]
    with pytest.raises(ValueError, match="cores asked for"), pinning.claimed(len(own) + 1, folder=tmp_path):
        pass


def test_a_pinned_engine_says_on_which_cores_and_that_it_had_not_all():
    own, all_ = sorted(os.sched_getaffinity(0)), os.cpu_count()
    with pinning.pinned(own[:1]):
        code = "from latency_lab import machine as m; print(m.provenance()['affinity'], m.cpu_name(), sep=chr(10))"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert os.sched_getaffinity(0) == set(own)
    affinity, name = said.splitlines()
    assert affinity == str(own[0])
    assert name == machine.cpu_name(1) and name.endswith("(1 cores)" if all_ == 1 else f"(1 of {all_} cores)")


def test_cores_are_spelled_as_linux_does():
    assert pinning.spell({8, 0, 2, 1, 3}) == "0-3,8"
    assert pinning.spell([5]) == "5" and pinning.spell([]) == ""


# What goes wrong, in one line


def test_errors_are_one_line_each(tmp_path, monkeypatch, capsys):
    path = write_study(tmp_path, RAYED, "rayed")
    command = ["sweep", str(path), "--runs", str(tmp_path / "runs")]
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    assert main([*command, "--executor", "ray"]) == 2
    said = "Ray is not installed in this environment: pip install -e '.[ray]'\n"
    assert capsys.readouterr().err == said
    assert main([*command, "--cores", "1"]) == 2
    assert capsys.readouterr().err == "--ray-address and --cores go with --executor ray\n"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "127.0.0.1:1: no Ray cluster answers there (Connection refused)"),
        ("ray://127.0.0.1:10001", "start the sweep on a host of the cluster"),
        ("somewhere", "somewhere: not a Ray address; allowed: HOST:PORT or auto"),
    ],
)
def test_an_address_without_a_cluster_is_named(address, says):
    pytest.importorskip("ray")
    with pytest.raises(ClusterError) as error, ray_executor.connected(address):
        pass
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_node_that_does_not_see_the_sweeps_files_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_tasks, "SHARED_PATIENCE_S", 0)
    study, probe, answer = tmp_path / "study.yaml", tmp_path / "probe", tmp_path / "answer"

    def look(text="asked"):
        return ray_tasks.look(str(study), text, str(tmp_path), str(probe), str(answer), 1).problem

    assert "study.yaml is not there, or another file" in look()
    study.write_text("asked")
    assert look() == f"{tmp_path} is not shared with the machine where the sweep was started"
    probe.write_text("probe")
    assert look("changed") == f"{study} is not there, or another file than where the sweep was started"
    assert look() is None and answer.read_text() == "answer"


def test_gpus_that_ray_does_not_show_are_not_taken(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ray_tasks.TaskError, match="Ray gave 1 GPUs, but CUDA_VISIBLE_DEVICES lists 3"):
        ray_tasks.start(ray_tasks.Order("s.yaml", "base", "runs", "folder", False, gpus=1, cores=1))


def test_a_start_waits_for_one_that_was_given_up_for_lost(tmp_path):
    with one_start._alone(tmp_path, []) as first:
        assert not one_start._locks(os.open(tmp_path / ".start.lock", os.O_RDWR))
        with one_start._alone(tmp_path, [signal.SIGTERM]):
            pass  # Ctrl-C ends the waiting
        os.fstat(first)
    with one_start._alone(tmp_path, []):
        pass


# On a local Ray with real engines


def below(pid, name):
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join([process.name(), *process.cmdline()]):
                    return process
    return None


def wait_for(condition, sweep):
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert sweep.poll() is None and time.monotonic() < deadline, sweep.communicate()[0]
        time.sleep(0.2)
    return found


@pytest.fixture
def start(data_root):
    """Starts sweeps on a local Ray; whatever happens, none of their processes is left."""
    started = []

    def begin(path, *options):
        command = [sys.executable, "-m", "latency_lab", "sweep", str(path), "--runs", str(data_root / "ray-runs")]
        sweep = subprocess.Popen(
            [*command, "--executor", "ray", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(sweep)
        return sweep

    yield begin
    for sweep in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(sweep.pid).children(recursive=True), psutil.Process(sweep.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        sweep.wait()


def left_over(text):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or ())]


@pytest.mark.engine
def test_a_study_on_ray_survives_a_lost_worker_and_ctrl_c(start, data_root, tmp_path):
    pytest.importorskip("ray")
    path = write_study(tmp_path, RAYED, "rayed")
    sweep = start(path)
    lost = wait_for(lambda: below(sweep.pid, "latency_lab.one_start"), sweep)
    wait_for(lambda: below(lost.pid, "papermill"), sweep)
    lost.parent().kill()  # Ray's worker: what a lost host looks like to Ray
    output, _ = sweep.communicate(timeout=200)
    assert sweep.returncode == 0, output
    cells = records.load(data_root / "ray-runs" / "rayed").cells.set_index("setting")
    assert cells["status"].to_dict() == {"small": "done", "refused": "refused"}, output
    assert set(cells["affinity"]) == {pinning.spell(os.sched_getaffinity(0))}
    local = {job.setting.label: job for job in measure.jobs(load_study(path, vllm_args.installed()), data_root / "x")}
    assert cells["setting_id"].to_dict() == {label: job.id for label, job in local.items()}, "as the local executor"
    assert left_over(str(path)) == []

    rows = {file: file.stat().st_mtime_ns for file in Path(data_root / "ray-runs").glob("rayed/*/*.cell.parquet")}
    path.write_text(path.read_text().replace("repeats: 1", "repeats: 2"))
    again = start(path)
    wait_for(lambda: below(again.pid, "papermill"), again)
    again.send_signal(signal.SIGINT)
    output, _ = again.communicate(timeout=100)
    assert again.returncode == 130, output
    assert "2 cells done before, 2 to measure" in output and "run the same command again" in output
    assert left_over(str(path)) == []
    assert rows == {file: file.stat().st_mtime_ns for file in rows}, "finished cells are kept"
