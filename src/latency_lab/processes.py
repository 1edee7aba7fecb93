"""No engine outlives its notebook: find and end the processes that one left behind.

Jupyter starts every kernel as the leader of a session of its own, and the engine's processes stay in that session also
when their parent is gone (their names and environments don't survive: vLLM retitles its processes). So a kernel that
starts engines writes its session into a ledger, and whoever starts the next engine ends what still runs in sessions
whose leader has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil

LEDGER = f"engines.{socket.gethostname()}.jsonl"
"""Of this host alone: process numbers mean nothing on another that shares the folder."""
POLL_S = 0.2


def register(folder: Path) -> None:
    """Write this process's session into the ledger of `folder`, before it starts an engine.

    Only a session's leader is written down, which a kernel is: a script shares its session with the terminal it was
    started from, and whatever else runs there is nobody's orphan.
    """
    own = psutil.Process()
    if os.getsid(0) != own.pid:
        return
    entry = {"session": os.getsid(0), "pid": own.pid, "started": started(own.pid), "boot": _boot(), "parent": _keeper()}
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / LEDGER) as file:
        file.write(json.dumps(entry) + "\n")


def end_orphans(folder: Path) -> list[str]:
    """End every process in a session of the ledger whose registrant has died; returns what was ended, for the record.

    A session number that the system has given to somebody else since is told apart by when the processes were started.
    """
    if not (folder / LEDGER).exists():
        return []
    with _opened(folder / LEDGER) as file:
        file.seek(0)
        entries = _entries(file.read())
        dead = [entry for entry in entries if not _lives(entry)]
        orphans = [process for entry in dead for process in _left_by(entry)]
        ended = [f"{process.pid} {_name(process)}" for process in orphans]
        end(orphans)
        if dead:
            file.truncate(0)
            file.write("".join(json.dumps(entry) + "\n" for entry in entries if entry not in dead))
    return ended


def children() -> list[psutil.Process]:
    """All living descendants of this process but Python's own resource tracker."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if not _is_tracker(process)]


def end(processes: Iterable[psutil.Process], patience_s: float = 5.0) -> None:
    """Terminate processes, then kill those that are still there after `patience_s`."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in _wait(processes, patience_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(processes, patience_s)


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> bool:
    """Wait until all have ended; false where some still run after `timeout_s`."""
    return not _wait(list(processes), timeout_s)


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after `timeout_s`.

    A zombie has ended (psutil.wait_procs would wait for it): where the first process reaps nobody's orphans, as in many
    containers, it stays one.
    """
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            break
        psutil.wait_procs(alive, timeout=POLL_S)  # which reaps our own children
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def members(session: int, since: int) -> list[psutil.Process]:
    """Living processes of a session, but this one, that were started at or after `since` (see `started`)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            mine = os.getsid(process.pid) == session and process.pid != os.getpid()
            if mine and started(process.pid) >= since and _runs(process):
                found.append(process)
    return found


def started(pid: int) -> int:
    """When a process was started, in clock ticks since the machine was: no jump of its clock changes that.

    psutil's creation times are times of day, which move when the clock is set. Raises OSError where there is no such
    process.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # starttime in proc(5)


def _boot() -> str:
    """Names the run of the machine that ticks are counted in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _keeper() -> int | None:
    """The process without which this one ends by itself within a second, as Jupyter's kernels do; None for a script."""
    parent = os.getppid()
    return parent if os.environ.get("JPY_PARENT_PID") == str(parent) else None


@contextlib.contextmanager
def _opened(ledger: Path) -> Iterator[TextIO]:
    """The ledger, to append to, and nobody else's meanwhile: several engines may start and end on one host at once."""
    with ledger.open("a+") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _entries(text: str) -> list[dict[str, Any]]:
    entries = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # a line cut short by a full disk names nobody
            entries.append(json.loads(line))
    return entries


def _lives(entry: dict[str, Any]) -> bool:
    try:
        process = psutil.Process(entry["pid"])
        same = entry.get("boot") == _boot() and started(process.pid) == entry["started"] and _runs(process)
        return same and entry["parent"] in (None, process.ppid())
    except (psutil.NoSuchProcess, OSError):
        return False


def _left_by(entry: dict[str, Any]) -> list[psutil.Process]:
    return members(entry["session"], entry["started"]) if entry.get("boot") == _boot() else []


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return "?"


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any("resource_tracker" in part for part in process.cmdline())
    return False
