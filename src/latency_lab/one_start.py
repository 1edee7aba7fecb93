"""One engine start as a process of its own, for executors: python -m latency_lab.one_start STUDY SETTING RUNS FOLDER.

A worker of somebody else's (Ray's) may neither handle signals nor outlive its master. This process can: it ends its
notebook, kernel and engine in order on SIGTERM, and gets one from the system when the process that started it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from latency_lab import leash, measure, notebook, processes, signals

STOPPED = 130
POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Measure one engine start; returns 0 where all its cells have rows, STOPPED after a signal."""
    parser = argparse.ArgumentParser(prog="python -m latency_lab.one_start", description=__doc__)
    parser.add_argument("study")
    parser.add_argument("setting")
    parser.add_argument("runs")
    parser.add_argument("folder", type=Path, help="the job's: on a machine of another kind it would be another")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--parent", type=int, help="end when this process, which started it, does")
    parser.add_argument("--holds", type=int, nargs="*", default=(), help="descriptors that papermill holds too")
    options = parser.parse_args(arguments)
    # What starts this may block signals for all its children, as Ray's workers do.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.BOTH)
    with signals.collected() as interrupted:
        if options.parent is not None:
            leash.end_with(options.parent, signal.SIGTERM)
        job = measure.open_job(options.study, options.setting, options.runs, options.force)
        if job.folder != options.folder:
            what = f"{job.folder.name} here, {options.folder.name} where the sweep was started"
            print(f"another GPU, CPU, vLLM or version of the study than the sweep's ({what})", file=sys.stderr)
            return 2
        with _alone(job.folder, interrupted) as lock:
            for line in processes.end_orphans(job.runs):
                print(f"ended a process left over from an earlier engine: {line}")
            if interrupted:
                return STOPPED
            if not notebook.cells_due(job):  # measured by a start that was given up for lost
                return 0
            return 0 if notebook.execute(job, lambda: bool(interrupted), (*options.holds, lock)) else STOPPED


@contextlib.contextmanager
def _alone(folder: Path, interrupted: list[int]) -> Iterator[int]:
    """Wait until no other start of this job writes to its folder: one that was given up for lost may be ending still.

    Gives the descriptor that holds the lock, for papermill to hold too. Without locks on the file system, it is alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".start.lock").open("a") as file:
        while not interrupted and not _locks(file.fileno()):
            time.sleep(POLL_S)
        yield file.fileno()


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system knows no locks
        return True
    return True


if __name__ == "__main__":
    sys.exit(main())
