"""What runs on the nodes of a Ray cluster: a look at the node before anything starts, and one engine start.

Ray ships these functions by name: every node imports this package from its own installation of it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from latency_lab import ROOT, machine, pinning, processes

POLL_S = 0.5
SHARED_PATIENCE_S = 20.0
"""A file server may show a new file this late to another host."""


@dataclass(frozen=True)
class Node:
    """What a node says of itself; `problem` is why it cannot measure, None where it can."""

    host: str
    device: str
    vllm_version: str | None
    ended: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Order:
    """One engine start, and what it may use: whole GPUs and logical cores, by number of each."""

    study: str
    setting: str
    runs: str
    folder: str
    force: bool
    gpus: int
    cores: int


class TaskError(Exception):
    """An engine start that could not begin; the message is one line."""


def look(study: str, study_text: str, runs: str, probe: str, answer: str, cores: int) -> Node:
    """Whether the node sees the study and the runs folder, both ways, and what it would measure with.

    It reads the file `probe`, whose text is its own name, and writes `answer`. What a killed engine left here is ended.
    """
    # A task without GPUs of its own sees none.
    here = Node(socket.gethostname(), machine.device(cores, hidden=True), machine.vllm_version())
    problem = _unseen(Path(study), study_text, Path(probe), Path(answer))
    if problem is None and not (ROOT / "notebooks" / "measure.ipynb").exists():
        problem = f"{ROOT} is not a clone of this repository"
    if problem is not None:
        return Node(here.host, here.device, here.vllm_version, problem=problem)
    return Node(here.host, here.device, here.vllm_version, tuple(processes.end_orphans(Path(runs))))


def start(order: Order) -> bool:
    """Measure what is pending of one engine start on cores of its own; false where it was cancelled.

    Whatever becomes of this process, the engine ends with it: see one_start.py. Safe to be run again, on this node or
    another, after it was lost: cells that have finished are kept. Raises TaskError.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if len(visible) != order.gpus and (order.gpus or machine.has_gpu()):
        raise TaskError(
            f"Ray gave {order.gpus} GPUs, but CUDA_VISIBLE_DEVICES lists {len(visible)}: unset "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES on the nodes"
        )
    try:
        with pinning.claimed(order.cores, machine.cores_near_gpus()) as (cores, holds), pinning.pinned(cores):
            return _run(order, holds)
    except ValueError as error:
        raise TaskError(f"{socket.gethostname()}: {error}") from error


def _run(order: Order, holds: tuple[int, ...]) -> bool:
    command = [sys.executable, "-m", "latency_lab.one_start", order.study, order.setting, order.runs, order.folder]
    command += ["--force"] * order.force + ["--parent", str(os.getpid()), "--holds", *map(str, holds)]
    # Ray sets it to the number of cores for numpy's sake; an engine has its own mind, or the study's.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    cancelled = False
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, pass_fds=holds, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    while True:
        try:
            said, _ = child.communicate(timeout=POLL_S)
            break
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:  # how Ray cancels a task
            cancelled = True
            child.terminate()
    if child.returncode and not cancelled:
        last = (said.strip().splitlines() or [f"it ended with exit code {child.returncode}"])[-1]
        raise TaskError(f"{socket.gethostname()}: {last}")
    return not cancelled


def _unseen(study: Path, study_text: str, probe: Path, answer: Path) -> str | None:
    """What of the sweep's files this node does not see, or may not write; None where all is well."""
    if not appears(study) or study.read_text() != study_text:
        return f"{study} is not there, or another file than where the sweep was started"
    if not appears(probe) or probe.read_text() != probe.name:
        return f"{probe.parent} is not shared with the machine where the sweep was started"
    try:
        answer.write_text(answer.name)
    except OSError as error:
        return f"{answer.parent} is not writable ({error.strerror})"
    return None


def appears(path: Path) -> bool:
    """Whether a file that another host has written is there, or comes to be in time."""
    deadline = time.monotonic() + (SHARED_PATIENCE_S if path.parent.exists() else 0)
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
