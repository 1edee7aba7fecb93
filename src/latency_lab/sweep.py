"""Run a study: papermill executes measure.ipynb once for each engine setting, and what it left behind is judged here.

The judge is the folder's content, never papermill's metadata, which calls a notebook completed after its kernel was
killed, and runs on with defaults after a misspelled parameter: a cell counts as done where records.read_cell finds it
whole, with status done, and the notebook counts only where the parameters that it wrote back are those it was given.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import nbformat
import psutil
from tqdm import tqdm

from latency_lab import ROOT, engine, files, measure, processes, records
from latency_lab.study import Study

NOTEBOOK = ROOT / "notebooks" / "measure.ipynb"
POLL_S = 0.5
STOP_PATIENCE_S = 15.0
FREE_DISK_BYTES = 500_000_000
"""A sweep does not start with less: a full disk would cost it its results."""


class SweepError(Exception):
    """A sweep that cannot start; the message is one line."""


def run(study: Study, runs: Path, force: bool = False) -> int:
    """Measure what of a study is not measured yet, setting by setting, and print a table of the outcome.

    Returns the exit code: 0 where every cell is done (or refused as expected), 1 where any is not, 130 after Ctrl-C,
    which ends the engine and keeps all finished cells. Raises SweepError, models.ModelError before anything is started.
    """
    folder = runs / study.name
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < FREE_DISK_BYTES:
        raise SweepError(
            f"{folder}: only {free / 1e6:.0f} MB free on its disk; a sweep wants {FREE_DISK_BYTES / 1e6:.0f} MB"
        )
    with _locked(folder) as lock:
        jobs = measure.jobs(study, runs, force)
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
        interrupted = False
        # In a log file, a bar that moves twice a second is noise.
        with tqdm(total=cells, unit="cell", disable=not todo, mininterval=0.5 if sys.stderr.isatty() else 30) as bar:
            for number, job in enumerate(todo):
                bar.set_description(f"engine {number + 1}/{len(todo)} {job.setting.label}{' and others' * job.hot}")
                interrupted = not _execute(job, bar, lock)
                if interrupted:
                    break
        return _conclude(jobs, interrupted)


def _execute(job: measure.Job, bar: tqdm, lock: int) -> bool:
    """Execute the notebook of one engine start, led by `job`, and see that each of its cells has a row.

    Returns false where Ctrl-C ended it.
    """
    for line in processes.end_orphans(job.runs):
        tqdm.write(f"ended a process left over from an earlier engine: {line}")
    job.folder.mkdir(parents=True, exist_ok=True)
    due = [(member, plan) for member in job.lead() for plan in member.pending()]
    limit_s = job.study.start_timeout_s + sum(plan.point.timeout_s for _, plan in due) + 60 * len(due)
    for stale in ("parameters.json", measure.CURRENT):
        (job.folder / stale).unlink(missing_ok=True)
    before = bar.n
    with _papermill(job, lock) as child, _on_interrupt() as interrupted:
        deadline = time.monotonic() + limit_s
        first = time.time()
        while child.poll() is None and not interrupted:
            if time.monotonic() > deadline:
                break
            bar.set_postfix_str(_current(job), refresh=False)
            bar.update(before + _ended(due, since=first) - bar.n)
            time.sleep(POLL_S)
        hung = child.poll() is None and not interrupted
        _stop(child)
    processes.end_orphans(job.runs)
    bar.update(before + len(due) - bar.n)
    if interrupted:
        return False
    status, error = "failed", _wrong_parameters(job)
    if hung:
        status, error = "timeout", f"the notebook was still running after {limit_s:.0f} s and was ended"
    elif error is not None:
        for member, plan in due:
            for path in member.folder.glob(f"{member.cell_id(plan)}.*.parquet"):
                records.set_aside(path)
    for member in job.members:
        member.give_up(status, error or _broken_off(job, child.returncode))
    return True


@contextlib.contextmanager
def _papermill(job: measure.Job, lock: int) -> Iterator[subprocess.Popen[bytes]]:
    """papermill on measure.ipynb as a process of its own: its kernel, engine and memory go with it.

    It holds the folder's `lock` too: where this process is killed, it finishes its setting, and no second sweep starts
    an engine beside it meanwhile.
    """
    parameters = job.folder / ".parameters.yaml"
    files.write_text(json.dumps(job.parameters()), parameters)
    command = [
        *(sys.executable, "-m", "papermill", str(NOTEBOOK), str(job.folder / "measure.ipynb")),
        *("--parameters_file", str(parameters), "--kernel", "python3", "--cwd", str(ROOT)),
        *("--no-progress-bar", "--no-request-save-on-cell-execute", "--autosave-cell-every", "15"),
    ]
    with (job.folder / "papermill.log").open("w") as log:
        # Its own session, so that the terminal's Ctrl-C reaches this process alone, which then ends things in order.
        child = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=[lock]
        )
        try:
            yield child
        finally:
            _stop(child)
            parameters.unlink(missing_ok=True)


@contextlib.contextmanager
def _on_interrupt() -> Iterator[list[int]]:
    """While the block runs, SIGINT and SIGTERM are collected in the list and break nothing off."""
    signals: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if not signals:
            tqdm.write("stopping: the engine is being ended; finished cells are kept")
        signals.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End papermill, its kernel and the kernel's engine, if they still run."""
    if child.poll() is not None:
        return
    family = psutil.Process(child.pid).children(recursive=True)
    processes.end([psutil.Process(child.pid), *family], patience_s=STOP_PATIENCE_S)
    child.wait()


def _current(job: measure.Job) -> str:
    """The cell under way, as the notebook names it; the engine is starting where it has named none yet."""
    with contextlib.suppress(OSError):
        return (job.folder / measure.CURRENT).read_text()
    return "starting the engine"


def _ended(due: list[tuple[measure.Job, measure.CellPlan]], since: float) -> int:
    """How many of the cells that are due have got their row since the notebook began."""
    rows = (job.folder / f"{job.cell_id(plan)}.cell.parquet" for job, plan in due)
    return sum(path.exists() and path.stat().st_mtime >= since - 1 for path in rows)


def _wrong_parameters(job: measure.Job) -> str | None:
    """What the notebook says that it was run with, where that is not what it was given; None where all is well."""
    path = job.folder / "parameters.json"
    if not path.exists():
        return None  # it broke off before it could say; no cell was measured
    used = json.loads(path.read_text())
    asked = job.parameters()
    wrong = [
        f"{name}: given {asked.get(name)!r}, used {used.get(name)!r}" for name in asked if used.get(name) != asked[name]
    ]
    return f"the notebook did not use the parameters that it was given ({'; '.join(wrong)})" if wrong else None


def _broken_off(job: measure.Job, code: int) -> str:
    """Why a notebook ended without measuring all its cells, in one line: its own error, else papermill's last word."""
    executed = job.folder / "measure.ipynb"
    with contextlib.suppress(Exception):  # an unreadable notebook has no error to show
        for cell in nbformat.read(executed, as_version=4).cells:
            for output in cell.get("outputs", ()):
                if output.output_type == "error":
                    return f"the notebook broke off: {output.ename}: {' '.join(output.evalue.split())}"
    tail = engine.log_tail(job.folder / "papermill.log", lines=1)
    return f"the notebook broke off: {tail or f'papermill ended with exit code {code}'}"


def _conclude(jobs: list[measure.Job], interrupted: bool) -> int:
    """Print what became of every setting; returns the exit code."""
    print(f"\n{'setting':<40} {'cells':>5}  outcome")
    bad = 0
    for job in jobs:
        rows = [row for plan in job.study.cells(job.setting) if (row := _row(job, job.cell_id(plan)))]
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


def _row(job: measure.Job, cell: str) -> dict[str, Any] | None:
    try:
        return records.read_cell(job.folder, cell)
    except records.BadRecord:
        return None


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
