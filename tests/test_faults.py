"""What a machine does to a sweep: full disks, harmed records, notebooks that break off. The notebooks are made up."""

import ast
import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import write_study
from test_records import request

from latency_lab import ROOT, engine, measure, notebook, records, sweep
from latency_lab.study import load_study

STUDY = """
question: What survives?
model: {source: config, config: smollm2-135m-instruct}
settings: {axes: {max_num_seqs: [2, 4]}}
workloads:
  chat: {load: {kind: closed, concurrency: [1, 2, 4], requests_each: 1}, prompt: {tokens: 8}, output: {tokens: 4}}
repeats: 2
order: listed
"""


def made_up(monkeypatch, measured=lambda number: True):
    """In place of papermill: a notebook that writes the cells it is asked for, and breaks off where it can't.

    `measured` says whether it measures a cell, by the cell's number in this notebook, or breaks off before.
    """

    @contextlib.contextmanager
    def papermill(job, holds):
        broken = OSError("broke off")
        try:
            for number, plan in enumerate(job.pending()):
                if not measured(number):
                    raise broken
                write(job, plan)
        except OSError as error:
            with contextlib.suppress(OSError):
                (job.folder / "papermill.log").write_text(str(error))
        yield SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(notebook, "_papermill", papermill)


def write(job, plan, **values):
    """A cell of one long answer, whose times no compression makes small."""
    keys = job._keys(plan)
    times = [random.random() for _ in range(10_000)]
    shared = {name: value for name, value in keys.items() if name not in ("concurrency", "rate_per_s", "burstiness")}
    one = {**request(0, token_times_s=times, token_counts=[1] * 10_000, output_tokens=10_000), **shared}
    records.write_cell(job.folder, {**keys, "status": "done", **values}, [one])


def the_study(folder):
    return load_study(write_study(folder, STUDY, "s"))


def jobs(folder, **options):
    return measure.jobs(the_study(folder), folder / "runs", **options)


def statuses(runs):
    return Counter(records.load(runs / "s").cells["status"])


def on_a_small_disk(folder):
    """What test_a_disk_that_fills_up... runs, in a file system of its own at `folder`; prints what it finds."""
    patch = pytest.MonkeyPatch()
    made_up(patch)
    patch.setattr(sweep, "FREE_DISK_BYTES", 0)
    try:
        sweep.run(the_study(folder), folder / "runs")
    except sweep.SweepError as error:
        print("SAID", error)
    done = sum(len(job.finished()) for job in jobs(folder))
    print("KEPT", done, len(list(folder.rglob("*.part"))))
    subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
    print("AGAIN", sweep.run(the_study(folder), folder / "runs"), statuses(folder / "runs")["done"])


def test_a_disk_that_fills_up_costs_no_finished_cell_and_is_told_in_one_line(tmp_path):
    script = (
        f"import pathlib, subprocess, sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=400k', 'small', {str(tmp_path)!r}], check=True)\n"
        f"print('MOUNTED', flush=True); import test_faults as t; t.on_a_small_disk(pathlib.Path({str(tmp_path)!r}))"
    )
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1) here")
    done = subprocess.run([*own, sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if "MOUNTED" not in done.stdout:
        pytest.skip(f"may not mount a file system here: {done.stderr.strip().splitlines()[-1]}")
    told = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in ("SAID", "KEPT", "AGAIN")
    )
    assert "the disk is full (No space left on device); finished cells are kept" in told["SAID"], (
        done.stdout + done.stderr
    )
    kept, parts = map(int, told["KEPT"].split())
    assert 1 <= kept < 12 and parts == 0
    assert f"{kept} cells done before, {12 - kept} to measure" in done.stdout
    assert told["AGAIN"] == "0 12"


def test_no_engine_is_started_without_room_for_its_results(tmp_path, monkeypatch):
    made_up(monkeypatch)
    free = iter([10**10, 10**10, 10**8])
    monkeypatch.setattr(sweep.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    with pytest.raises(sweep.SweepError, match=r"only 100 MB free .* 500 MB at least; finished cells are kept") as told:
        sweep.run(the_study(tmp_path), tmp_path / "runs")
    assert "\n" not in str(told.value)
    assert statuses(tmp_path / "runs") == {"done": 6}, "those of the first engine"
    monkeypatch.undo()
    made_up(monkeypatch)
    assert sweep.run(the_study(tmp_path), tmp_path / "runs") == 0
    assert statuses(tmp_path / "runs") == {"done": 12}


def test_what_a_killed_writer_left_is_removed_before_anything_starts(tmp_path, monkeypatch):
    made_up(monkeypatch)
    (job, _) = jobs(tmp_path)
    part = job.folder / ".c1.requests.parquet.abc.part"
    part.parent.mkdir(parents=True)
    part.write_text("half a")
    bystander = tmp_path / "runs" / ".other.part"
    bystander.write_text("of another study, which may be running")
    assert sweep.run(the_study(tmp_path), tmp_path / "runs") == 0
    assert not part.exists() and bystander.exists()


def test_each_finished_cell_is_read_once_a_sweep(tmp_path, monkeypatch):
    made_up(monkeypatch)
    sweep.run(the_study(tmp_path), tmp_path / "runs")
    read = Counter()
    whole = records.read_cell

    def counted(folder, cell):
        read[cell] += 1
        return whole(folder, cell)

    monkeypatch.setattr(records, "read_cell", counted)
    assert sweep.run(the_study(tmp_path), tmp_path / "runs") == 0
    assert len(read) == 12 and set(read.values()) == {1}


def test_a_cell_is_read_again_where_any_of_its_files_changed(tmp_path, monkeypatch, capsys):
    made_up(monkeypatch)
    sweep.run(the_study(tmp_path), tmp_path / "runs")
    (job, _) = jobs(tmp_path)
    assert job.pending() == []
    harmed = next(job.folder.glob("*.requests.parquet"))
    harmed.write_bytes(harmed.read_bytes()[:-10])
    assert [job.cell_id(plan) for plan in job.pending()] == [harmed.name.split(".")[0]]
    assert capsys.readouterr().out.count(f"set aside, will be measured again: {harmed}") == 1
    assert harmed.with_name(f"{harmed.name}.bad").exists() and len(job.pending()) == 1


@pytest.mark.parametrize("harmed", [True, False])
def test_forced_cells_whose_notebook_broke_off_are_not_taken_for_measured(tmp_path, monkeypatch, harmed):
    made_up(monkeypatch)
    sweep.run(the_study(tmp_path), tmp_path / "runs")
    if harmed:
        for path in (tmp_path / "runs").rglob("*.parquet"):
            path.write_bytes(path.read_bytes()[:-10])
    made_up(monkeypatch, lambda number: number > 0)
    assert sweep.run(the_study(tmp_path), tmp_path / "runs", force=True) == 1
    assert statuses(tmp_path / "runs") == {"failed": 12}
    made_up(monkeypatch)
    assert sweep.run(the_study(tmp_path), tmp_path / "runs") == 0


def test_the_notebook_finds_a_study_that_was_named_from_another_folder(tmp_path, monkeypatch):
    write_study(tmp_path, STUDY, "s")
    monkeypatch.chdir(tmp_path)
    (job, _) = measure.jobs(load_study(type(tmp_path)("s.yaml")), type(tmp_path)("runs"))
    given = job.parameters()
    monkeypatch.chdir("/")
    assert measure.open_job(given["study"], "", given["runs"]).parameters() == given


OUT_OF_MEMORY = """\
(Worker pid=7) ERROR 12-07 12:47:16 [multiproc_executor.py:1063] WorkerProc hit an exception.
(Worker pid=7) ERROR 12-07 12:47:16 [multiproc_executor.py:1063] ValueError: Available memory on node 0 \
(20.36/23.54 GiB) on kv cache allocation is less than requested memory for kv (1048576.0 GiB).
(EngineCore pid=6) ERROR 12-07 12:47:16 [core.py:1510] EngineCore failed to start.
(EngineCore pid=6) ERROR 12-07 12:47:16 [core.py:1510] Exception: WorkerProc initialization failed
"""


def test_an_engine_without_enough_memory_is_recorded_with_vllms_own_reason(tmp_path):
    """The lines are vLLM 0.32's, of an engine that was asked for a KV cache of a million GiB."""
    (tmp_path / "engine.log").write_text(OUT_OF_MEMORY)
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    assert engine._reason(error, tmp_path / "engine.log") == (
        "ValueError: Available memory on node 0 (20.36/23.54 GiB) on kv cache allocation is less than requested memory "
        "for kv (1048576.0 GiB)."
    )


MEASURING = {
    *("client", "client_process", "openai_source", "doors", "server", "engine", "trace"),
    *("measure", "load", "machine", "steps", "token_gaps", "processes", "guard"),
}
OF_DAY = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def test_no_duration_is_measured_with_a_clock_that_can_jump():
    """Times of day are for `started_at` alone, which says when a cell was measured and is subtracted from nothing."""
    found = Counter()
    for name in MEASURING:
        tree = ast.parse((ROOT / "src" / "latency_lab" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                found[name] += any(alias.name in ("time", "time_ns") for alias in node.names)
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "attr", getattr(node.value, "id", None))
                found[name] += (owner, node.attr) in OF_DAY
                found[name] += node.attr in ("create_time", "boot_time")
    assert +found == {"measure": 2}
    source = (ROOT / "src" / "latency_lab" / "measure.py").read_text()
    assert source.count("datetime.datetime.now(datetime.UTC)") == 2 and "started_at -" not in source


def test_a_half_written_row_of_a_killed_sweep_is_no_result(tmp_path, monkeypatch):
    """Its requests are there, as they are written first; its row is not."""
    made_up(monkeypatch)
    sweep.run(the_study(tmp_path), tmp_path / "runs")
    (job, _) = jobs(tmp_path)
    row = next(job.folder.glob("*.cell.parquet"))
    os.rename(row, row.with_name(f".{row.name}.abc.part"))
    assert len(job.pending()) == 1
    assert statuses(tmp_path / "runs") == {"done": 11}
