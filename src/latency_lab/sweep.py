"""Run a study: measure.ipynb is executed for each engine start (notebook.py), with a lock, a bar and a final table."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from latency_lab import files, measure, notebook, processes, ray_executor, signals
from latency_lab.study import Study

FREE_DISK_BYTES = 500_000_000
"""No engine is started with less: a full disk would cost it its results."""

RESUME = "finished cells are kept: make room and run the same command again to go on from here"


class SweepError(Exception):
    """A sweep that cannot start; the message is one line."""


def run(
    study: Study,
    runs: Path,
    force: bool = False,
    executor: str = "local",
    ray_address: str | None = None,
    cores: int | None = None,
) -> int:
    """Measure what of a study is not measured yet, setting by setting, and print a table of the outcome.

    Parameters
    ----------
    executor : "local", one engine after another on this machine, or "ray", as many at a time as a cluster has room for.
    ray_address : the cluster; by default one is started on this machine for as long as the sweep takes.
    cores : logical cores for each engine that runs under Ray (default: see ray_executor.Cluster.cores).

    Returns the exit code: 0 where every cell is done (or refused as expected), 1 where any is not, 130 after Ctrl-C,
    which ends the engine and keeps all finished cells. Raises models.ModelError and ray_executor.ClusterError before
    anything is started, and SweepError then or where the disk is too full for another engine's results.
    """
    folder = runs / study.name
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(folder)
    with _full_disk_in_one_line(folder), _locked(folder) as lock, contextlib.ExitStack() as held:
        files.remove_parts(folder)
        cluster = held.enter_context(ray_executor.connected(ray_address, cores)) if executor == "ray" else None
        if cluster is not None:
            cluster.check(study)
        jobs = measure.jobs(study, runs, force, cores=None if cluster is None or cluster.gpu else cluster.cores(0))
        todo = measure.starts(jobs)
        cells = sum(len(job.pending()) for job in jobs)
        kept = sum(len(study.cells(job.setting)) for job in jobs) - cells
        print(
            f"{study.name}: {len(jobs)} engine settings; {kept} cells done before, "
            f"{cells} to measure in {len(todo)} engine starts"
        )
        if study.question:
            print(f"  {study.question}")
        if todo:
            estimate = _minutes(study.estimate_s() * cells / (cells + kept))
            print(f"  estimated time: {estimate}, if nothing fails; results: {folder}")
            for line in study.traffic():
                print(f"  {line}")
            for line in ray_executor.look_around(cluster, study, folder) if cluster else ():
                print(f"  {line}")
        interrupted = False
        # In a log file, a bar that moves twice a second is noise.
        with tqdm(total=cells, unit="cell", disable=not todo, mininterval=0.5 if sys.stderr.isatty() else 30) as bar:
            if cluster is not None:
                interrupted = not ray_executor.run(cluster, todo, bar, _say_stopping)
                todo = []
            for number, job in enumerate(todo):
                _check_room(folder)
                bar.set_description(f"engine {number + 1}/{len(todo)} {job.setting.label}{' and others' * job.hot}")
                interrupted = not _execute(job, bar, lock)
                if interrupted:
                    break
        return _conclude(jobs, interrupted)


def _execute(job: measure.Job, bar: tqdm, lock: int) -> bool:
    """Execute the notebook of one engine start here, moving the bar. Returns false where Ctrl-C ended it."""
    for line in processes.end_orphans(job.runs):
        tqdm.write(f"ended a process left over from an earlier engine: {line}")
    ended, before = notebook.Ended(job), bar.n
    with signals.collected(_say_stopping) as interrupted:

        def stopped() -> bool:
            bar.set_postfix_str(notebook.current(job), refresh=False)
            bar.update(before + ended.count() - bar.n)
            return bool(interrupted)

        whole = notebook.execute(job, stopped, holds=(lock,))
    bar.update(before + len(ended) - bar.n)
    return whole


def _say_stopping() -> None:
    tqdm.write("stopping: every engine is being ended; finished cells are kept")


def _conclude(jobs: list[measure.Job], interrupted: bool) -> int:
    """Print what became of every setting; returns the exit code."""
    print(f"\n{'setting':<40} {'cells':>5}  outcome")
    bad = 0
    for job in jobs:
        rows = [row for plan in job.study.cells(job.setting) if (row := job.row(job.cell_id(plan)))]
        counts = Counter(row["status"] for row in rows)
        missing = len(job.study.cells(job.setting)) - len(rows)
        if missing:
            counts["not measured"] = missing
        bad += sum(count for status, count in counts.items() if status not in measure.FINISHED)
        outcome = ", ".join(f"{count} {status}" for status, count in counts.items())
        error = next((row["error"] for row in rows if row["error"]), "")
        print(f"{job.setting.label:<40} {sum(counts.values()):>5}  {outcome}{'  ' + error[:160] if error else ''}")
    failed = sum(row["requests_failed"] for job in jobs for row in job.finished().values())
    if failed:
        print(f"{failed} requests failed in cells that are done; the report counts them.")
    if interrupted:
        print("stopped by a signal; run the same command again to go on from here")
        return 130
    return 1 if bad else 0


def _check_room(folder: Path) -> None:
    if (free := shutil.disk_usage(folder).free) < FREE_DISK_BYTES:
        raise SweepError(
            f"{folder}: only {free / 1e6:.0f} MB free on its disk, and an engine is started with "
            f"{FREE_DISK_BYTES / 1e6:.0f} MB at least; {RESUME}"
        )


@contextlib.contextmanager
def _full_disk_in_one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SweepError(f"{folder}: the disk is full ({os.strerror(error.errno)}); {RESUME}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """One sweep a folder: the system drops the lock when its holders end, however they end. Gives its descriptor."""
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SweepError(f"{folder}: another sweep is at work here (process {file.read() or '?'})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _minutes(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
