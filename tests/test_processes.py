"""An engine that its notebook left behind is found and ended; nobody else's process is."""

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


def start_kernel(folder):
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
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
        line = f'{{"session": {stranger.pid}, "pid": 1, "created": {time.time() + 100}}}\n'
        (tmp_path / processes.LEDGER).write_text(line)
        assert processes.end_orphans(tmp_path) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()


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
