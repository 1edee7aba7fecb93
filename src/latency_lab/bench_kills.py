"""Is anything lost when a sweep is killed at random moments? The part `kills` of `make bench`.

The study kills.yaml is swept by `python -m latency_lab sweep`. Again and again the sweep, its notebook's kernel or one
of the engine's processes gets SIGKILL, chosen with its moment by a seed. After each kill these are looked at:

- the cells that had finished: are their files still the same, byte for byte?
- all cells that read as good: does each hold every request and every token that the study asks for?
- the processes below what was killed: has every one ended?

A sweep that has ended is started again with the same command, until the kills are done; then once more in peace, after
which the grid must be complete. A sweep that completes it earlier begins anew, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow.parquet as pq

from latency_lab import ROOT, files, machine, processes, records
from latency_lab.measure import FINISHED
from latency_lab.study import Study, load_study
from latency_lab.vllm_bench import BenchError

STUDY = ROOT / "notebooks" / "studies" / "kills.yaml"
SEED = 0
KILLS = 32
VICTIMS = ("sweep", "kernel", "engine")
START_S, CELLS_S = 20.0, 6.0
"""A kill comes up to so long after its victim has appeared, or after a cell has ended that this engine measured."""

PATIENCE_S = 90.0
"""What has not ended after this long is an orphan; a kernel gives its dead engine's other processes 20 s."""

POLL_S = 0.1
ANSWER_S = 1200.0
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


@dataclass
class Grid:
    """One folder of results, and what was seen in it."""

    study: Study
    runs: Path
    good: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    """Digests of the files of each cell that has been seen finished."""

    @property
    def folder(self) -> Path:
        return self.runs / self.study.name

    @property
    def cells(self) -> int:
        """How many cells the study has."""
        return sum(len(self.study.cells(setting)) for setting in self.study.settings())

    def look(self) -> tuple[int, int]:
        """How many cells that had finished are lost or changed, and how many read as good but are not whole."""
        lost = sum(_digests(row) != before for row, before in self.good.items())
        now = {}
        for row in sorted(self.folder.glob("*/*.cell.parquet")):
            try:
                read = records.read_cell(row.parent, row.name.split(".")[0])
            except records.BadRecord:
                continue
            if read is not None and read["status"] in FINISHED:
                now[row] = _digests(row)
        self.good |= now
        return lost, sum(not self._whole(row) for row in now)

    def _whole(self, row: Path) -> bool:
        """Whether a cell holds all requests and tokens of its point, by nothing that the sweep itself goes by."""
        label = pq.read_table(row).to_pylist()[0]["workload"]
        (traffic,) = next(point for point in self.study.points() if point.label == label).classes
        due = (traffic.load.concurrency or 0) * (traffic.load.requests_each or 0)
        requests = pq.read_table(row.with_name(row.name.replace(".cell.", ".requests."))).to_pylist()
        tokens = {(request["error"], request["output_tokens"], sum(request["token_counts"])) for request in requests}
        asked = traffic.output.tokens if traffic.output else None
        return len(requests) == due and tokens == {(None, asked, asked)}


def loop(results: Path, kills: int = KILLS) -> None:
    """Kill so many times, with a row of `results` for each kill, and complete the grid. Raises BenchError."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever is left over becomes a child of this process
    chance, rows = random.Random(SEED), list[dict[str, Any]]()
    folder = Path(tempfile.mkdtemp())
    (folder / "models").symlink_to(ROOT / "data" / "models")
    grids: list[Grid] = []
    sweep: Sweep | None = None
    try:
        while len(rows) < kills:
            if sweep is None or sweep.ended():
                if sweep is not None:
                    sweep.check()
                if not grids or len(grids[-1].good) == grids[-1].cells:
                    grids.append(Grid(load_study(STUDY), folder / f"runs-{len(grids)}"))
                sweep = Sweep(grids[-1])
            victim, moment = chance.choice(VICTIMS), chance.choice(("start", "cells"))
            wait_s = chance.uniform(0, START_S if moment == "start" else CELLS_S)
            if (process := sweep.wait_for(victim, moment, wait_s, chance)) is None:
                grids[-1].look()
                continue
            row: dict[str, Any] = {"kill": len(rows) + 1, "round": len(grids), "victim": victim, "moment": moment}
            row |= {"waited_s": wait_s}
            with contextlib.suppress(psutil.NoSuchProcess):  # it had just ended by itself
                rows.append(row | sweep.kill(victim, process))
                _note(results, rows)
                print(f"  {_line(rows[-1])}", flush=True)
        if sweep is not None:
            sweep.end()
        output = Sweep(grids[-1]).finish()
        lost, corrupt = grids[-1].look()
        complete = [len(grid.good) == grid.cells for grid in grids]
        left = [process for process in _ours() if process.status() != psutil.STATUS_ZOMBIE]
        for row in rows:
            row["grid_complete"] = complete[row["round"] - 1]
        _note(results, rows)
    except BaseException:
        print(f"kept to be looked at: {folder}", file=sys.stderr)
        raise
    print(text(pd.read_csv(results)))
    bad = sum(row["lost"] + row["corrupt"] + row["orphans"] for row in rows) + lost + corrupt + len(left)
    if bad or not all(complete):
        raise BenchError(f"kills: something was lost or left over; {folder} is kept:\n{output[-2000:]}")
    shutil.rmtree(folder)


class Sweep:
    """A sweep of a grid, and the processes below it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.log = grid.runs.parent / "sweep.log"
        command = [sys.executable, "-m", "latency_lab", "sweep", str(STUDY), "--runs", str(grid.runs)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.began = time.monotonic()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, victim: str, moment: str, wait_s: float, chance: random.Random) -> psutil.Process | None:
        """A living process of the victim's kind at the moment; None where the sweep ends before."""
        before, since = self._rows(), None
        while not self.ended():
            there = self._living(victim)
            ready = there and (moment == "start" or self._rows() - before)
            since = (since or time.monotonic()) if ready else None
            if since is not None and time.monotonic() >= since + wait_s:
                return chance.choice(there)
            time.sleep(POLL_S)
        return None

    def kill(self, victim: str, process: psutil.Process) -> dict[str, Any]:
        """Kill a process, wait until what it takes with it has ended, and say what is left."""
        finished = len(self.grid.good)
        below = self._living("engine") if victim == "engine" else process.children(recursive=True)
        name, at_s = process.name(), time.monotonic() - self.began
        process.kill()
        killed = time.monotonic()
        if victim == "sweep":
            self.process.wait()
            below += _ours()  # what it was just about to start
        else:
            processes.wait_gone([process], PATIENCE_S)
        gone = processes.wait_gone(below, PATIENCE_S)
        cleared_s = time.monotonic() - killed
        orphans = 0 if gone else sum(one.is_running() for one in below)
        lost, corrupt = self.grid.look()
        return {
            "process": name,
            "at_s": at_s,
            "cells_before": finished,
            "cells_finished": len(self.grid.good),
            "lost": lost,
            "corrupt": corrupt,
            "orphans": orphans,
            "cleared_s": cleared_s,
            "part_files": len(list(self.grid.folder.rglob("*.part"))),
        }

    def end(self) -> None:
        """As by Ctrl-C."""
        if not self.ended():
            self.process.terminate()
            self.process.wait(PATIENCE_S)

    def finish(self) -> str:
        """Let it run to its end; returns what it printed."""
        self.process.wait(ANSWER_S)
        return self.log.read_text()

    def check(self) -> None:
        """Raises BenchError where it has ended in a way that no kill explains."""
        if self.process.returncode not in (0, 1, -signal.SIGKILL):
            raise BenchError(f"kills: the sweep broke off:\n{self.log.read_text()[-2000:]}")

    def _rows(self) -> set[tuple[Path, int]]:
        """The files of cells' rows, each as often as it has been written."""
        found = set()
        for path in self.grid.folder.glob("*/*.cell.parquet"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path, path.stat().st_mtime_ns))
        return found

    def _living(self, victim: str) -> list[psutil.Process]:
        """The processes of one kind, which is never there more than once but for the engine."""
        try:
            sweep = psutil.Process(self.process.pid)
            if victim == "sweep":
                return [sweep]
            kernels = [one for one in sweep.children(recursive=True) if "ipykernel_launcher" in _words(one)]
            if victim == "kernel":
                return kernels
            return [one for kernel in kernels for one in kernel.children(recursive=True) if _is_engine(one)]
        except psutil.NoSuchProcess:
            return []


def _is_engine(process: psutil.Process) -> bool:
    """One of vLLM's, with the name that it gives itself or not yet."""
    return _words(process).startswith("VLLM::") or "multiprocessing.spawn" in _words(process)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _ours() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _digests(row: Path) -> tuple[str, ...]:
    """Of a cell's files, its row's and its requests'."""
    both = (row, row.with_name(row.name.replace(".cell.", ".requests.")))
    return tuple(files.file_sha256(path) if path.exists() else "" for path in both)


def _note(results: Path, rows: list[dict[str, Any]]) -> None:
    facts = machine.provenance()
    own = {name: facts[name] for name in ("device", "vllm_version", "git_commit")}
    table = pd.DataFrame([row | {"seed": SEED} | own | {"date": f"{datetime.date.today()}"} for row in rows])
    files.write_text(table.to_csv(index=False, float_format="%.2f"), results)


def _line(row: dict[str, Any]) -> str:
    return (
        f"kill {row['kill']}: {row['victim']} ({row['process']}) {row['at_s']:.0f} s after the start, "
        f"{row['cells_finished']} cells finished; {row['lost']} lost, {row['corrupt']} corrupt, "
        f"{row['orphans']} orphans, all ended after {row['cleared_s']:.1f} s"
    )


def text(table: pd.DataFrame) -> str:
    """The kills by victim as Markdown."""
    first = table.iloc[0]
    complete = "complete" if table["grid_complete"].all() else "not complete"
    lines = [
        f"{first['device']}, vLLM {first['vllm_version']}, {first['date']}, seed {first['seed']}; {len(table)} kills "
        f"in {table['round'].nunique()} grids, in the end {complete}.",
        "",
        "| killed | times | of them in cells | finished cells lost | corrupt, yet read | orphans | all ended after |",
        "|---|---|---|---|---|---|---|",
    ]
    for victim, rows in table.groupby("victim", sort=False):
        sums = " | ".join(str(rows[name].sum()) for name in ("lost", "corrupt", "orphans"))
        in_cells = rows["moment"].eq("cells").sum()
        after = f"{rows['cleared_s'].median():.1f} s, at most {rows['cleared_s'].max():.1f} s"
        lines.append(f"| {victim} | {len(rows)} | {in_cells} | {sums} | {after} |")
    return "\n".join(lines)
