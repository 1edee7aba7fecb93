"""Execute measure.ipynb for one engine start, and judge what it left behind.

The judge is the folder's content, never papermill's metadata, which calls a notebook completed after its kernel was
killed, and runs on with defaults after a misspelled parameter: a cell counts as done where records.read_cell finds it
whole, with status done, and the notebook counts only where the parameters that it wrote back are those it was given.

Every executor (sweep.py, ray_executor.py) comes here, in a process of its own choice: nothing here handles signals or
prints, and what is asked of the caller is a function that says when to stop.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import nbformat
import psutil

from latency_lab import ROOT, engine, files, leash, measure, processes, records

NOTEBOOK = ROOT / "notebooks" / "measure.ipynb"
POLL_S = 0.5
STOP_PATIENCE_S = 15.0


def execute(job: measure.Job, stopped: Callable[[], bool], holds: tuple[int, ...] = ()) -> bool:
    """Execute the notebook of one engine start, led by `job`, and see that each of its cells has a row.

    `stopped` is asked twice a second whether to end it. Where this process is killed, the notebook and its engine end
    too. `holds` are descriptors of locks that papermill holds as well, so that they are dropped when it has ended.

    Returns false where `stopped` ended it; cells that had finished by then are kept.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    due = cells_due(job)
    for member, plan in due:  # the notebook does so too, but may break off before
        member.forget([plan])
    limit_s = job.study.start_timeout_s + sum(plan.point.timeout_s for _, plan in due) + 60 * len(due)
    for stale in ("parameters.json", measure.CURRENT):
        (job.folder / stale).unlink(missing_ok=True)
    stop = False
    with _papermill(job, holds) as child:
        deadline = time.monotonic() + limit_s
        while child.poll() is None and not (stop := stopped()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        hung = child.poll() is None and not stop
        _stop(child)
    processes.end_orphans(job.runs)
    if stop:
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


def cells_due(job: measure.Job) -> list[tuple[measure.Job, measure.CellPlan]]:
    """The cells that the engine start led by `job` is to measure."""
    return [(member, plan) for member in job.lead() for plan in member.pending()]


def current(job: measure.Job) -> str:
    """The cell under way, as the notebook names it; the engine is starting where it has named none yet."""
    with contextlib.suppress(OSError):
        return (job.folder / measure.CURRENT).read_text()
    return "starting the engine"


class Ended:
    """Counts the cells of one engine start that have got their row since it was made.

    By what files say, whichever process or host writes them, and by change alone, since their clocks may differ.
    """

    def __init__(self, job: measure.Job) -> None:
        rows = [member.folder / f"{member.cell_id(plan)}.cell.parquet" for member, plan in cells_due(job)]
        self._before = {path: files.stamp(path) for path in rows}

    def count(self) -> int:
        """How many have ended so far."""
        return sum(files.stamp(path) not in (None, before) for path, before in self._before.items())

    def __len__(self) -> int:
        return len(self._before)


@contextlib.contextmanager
def _papermill(job: measure.Job, holds: tuple[int, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """papermill on measure.ipynb as a process of its own: its kernel, engine and memory go with it."""
    parameters = job.folder / ".parameters.yaml"
    files.write_text(json.dumps(job.parameters()), parameters)
    command = [
        *(sys.executable, "-m", "papermill", str(NOTEBOOK), str(job.folder / "measure.ipynb")),
        *("--parameters_file", str(parameters), "--kernel", "python3", "--cwd", str(ROOT)),
        *("--no-progress-bar", "--no-request-save-on-cell-execute", "--autosave-cell-every", "15"),
    ]
    with (job.folder / "papermill.log").open("w") as log:
        # Its own session, so that the terminal's Ctrl-C reaches the sweep alone, which then ends things in order.
        child = subprocess.Popen(
            leash.command(command),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=holds,
        )
        try:
            yield child
        finally:
            _stop(child)
            parameters.unlink(missing_ok=True)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End papermill, its kernel and the kernel's engine, if they still run."""
    if child.poll() is not None:
        return
    family = psutil.Process(child.pid).children(recursive=True)
    processes.end([psutil.Process(child.pid), *family], patience_s=STOP_PATIENCE_S)
    child.wait()


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
