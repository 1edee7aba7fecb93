"""An engine that its notebook left behind is found and ended; nobody else's process is."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil

from latency_lab import processes

# Like a kernel: leads its session, registers, starts a child that ignores SIGTERM, and waits.
KERNEL = """
import subprocess, sys, pathlib
from latency_lab import processes
processes.register(pathlib.Path(sys.argv[1]))
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
import time; time.sleep(600)
"""


# Like papermill: starts the kernel in a session of its own, says the numbers of both processes, and waits.
PAPERMILL = """
import os, subprocess, sys, time
kernel = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, start_new_session=True,
                          env={**os.environ, "JPY_PARENT_PID": str(os.getpid())})
print(kernel.pid, int(kernel.stdout.readline()), sep="\\n", flush=True)
time.sleep(600)
"""

GUARD = "guard, processes\n"


def start_kernel(folder, script=KERNEL):
    kernel = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    return kernel, int(kernel.stdout.readline())


def test_what_a_killed_kernel_left_is_ended(tmp_path, monkeypatch):
    kernel, engine = start_kernel(tmp_path)
    assert processes.end_orphans(tmp_path) == [], "its kernel lives"
    assert psutil.pid_exists(engine)
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    ended = processes.end_orphans(tmp_path)
    assert [line.split()[0] for line in ended] == [str(engine)]
    assert not psutil.pid_exists(engine) or psutil.Process(engine).status() == psutil.STATUS_ZOMBIE
    assert processes.end_orphans(tmp_path) == [], "the ledger forgets what is settled"


def test_a_zombie_is_not_waited_for(tmp_path):
    """The orphan of a first process that reaps nobody: here its parent lives and does not look."""
    parent = (
        "import subprocess, sys, time; child = subprocess.Popen(['true']); print(child.pid, flush=True); time.sleep(60)"
    )
    careless = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    try:
        child = psutil.Process(int(careless.stdout.readline()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert processes.wait_gone([child], timeout_s=0)
        assert not processes.wait_gone([child, psutil.Process(careless.pid)], timeout_s=0)
    finally:
        careless.kill()
        careless.wait()


def test_a_session_number_given_to_somebody_else_is_left_alone(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        entry = entry_of(stranger.pid) | {"pid": 1, "started": processes.started(stranger.pid) + 1}
        (tmp_path / processes.LEDGER).write_text(json.dumps(entry) + "\n")
        assert processes.end_orphans(tmp_path) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()


def test_what_another_run_of_the_machine_left_in_the_ledger_names_nobody(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        entry = entry_of(stranger.pid) | {"pid": 1, "boot": "an earlier one"}
        (tmp_path / processes.LEDGER).write_text(json.dumps(entry) + "\n")
        assert processes.end_orphans(tmp_path) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()


def entry_of(pid):
    return {"session": pid, "pid": pid, "started": processes.started(pid), "boot": processes._boot(), "parent": None}


def test_a_kernel_whose_papermill_was_killed_is_ended_with_its_engine(tmp_path):
    """It would end by itself within a second; the next engine is started by then."""
    papermill = subprocess.Popen(
        [sys.executable, "-c", PAPERMILL, KERNEL, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    kernel, engine = (int(papermill.stdout.readline()) for _ in range(2))
    assert processes.end_orphans(tmp_path) == [], "papermill lives"
    papermill.kill()
    papermill.wait()
    assert {int(line.split()[0]) for line in processes.end_orphans(tmp_path)} == {kernel, engine}
    assert gone(kernel) and gone(engine)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(what):
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_guard_ends_what_a_killed_kernel_left(tmp_path):
    guarded = KERNEL.replace("child = ", "watch = guard.watching(); watch.__enter__(); child = ").replace(
        "processes\n", GUARD, 1
    )
    kernel, engine = start_kernel(tmp_path, guarded)
    (other,) = [child for child in psutil.Process(kernel.pid).children() if child.pid != engine]
    assert "latency_lab.guard" in other.cmdline()
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    wait_until(lambda: gone(engine) and gone(other.pid))


def test_a_guard_ends_with_its_block_and_watches_over_no_terminal():
    script = (
        "import psutil, sys; from latency_lab import guard, processes\n"
        "with guard.watching(): print(len(psutil.Process().children()))\n"
        "print(len(psutil.Process().children()))"
    )
    for leads, expected in ((True, ["1", "0"]), (False, ["0", "0"])):
        done = subprocess.run(
            [sys.executable, "-c", script], start_new_session=leads, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == expected


def test_a_child_on_a_leash_is_killed_with_its_parent():
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    parent = (
        "import subprocess, sys, time; from latency_lab import leash\n"
        f"child = subprocess.Popen(leash.command([sys.executable, '-c', {stubborn!r}]), stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    sweep = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    child = int(sweep.stdout.readline())
    assert not gone(child)
    sweep.kill()
    sweep.wait()
    wait_until(lambda: gone(child))


def test_a_child_whose_parent_has_ended_before_it_looks_is_not_started():
    done = subprocess.run([sys.executable, "-m", "latency_lab.leash", "1", "/bin/echo", "started"], capture_output=True)
    assert done.returncode == -signal.SIGKILL and done.stdout == b""


def test_a_jump_of_the_clock_kills_no_living_kernels_engine(tmp_path, monkeypatch):
    """Creation times that psutil tells are times of day, which move with the clock."""
    kernel, engine = start_kernel(tmp_path)
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 3600)
    try:
        assert processes.end_orphans(tmp_path) == []
        assert not gone(engine)
    finally:
        os.killpg(kernel.pid, signal.SIGKILL)
        kernel.wait()


def test_a_script_does_not_put_its_terminal_into_the_ledger(tmp_path):
    script = "import pathlib, sys; from latency_lab import processes; processes.register(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert not (tmp_path / processes.LEDGER).exists()


def test_a_damaged_ledger_line_names_nobody(tmp_path):
    (tmp_path / processes.LEDGER).write_text('{"session": 1, "pi')
    assert processes.end_orphans(tmp_path) == []


def test_children_leaves_out_pythons_resource_tracker():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "resource_tracker"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pids = {process.pid for process in processes.children()}
        assert other.pid in pids and child.pid not in pids
        assert os.getpid() not in pids
    finally:
        child.kill()
        other.kill()
