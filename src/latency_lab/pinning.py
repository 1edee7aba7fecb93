"""Cores of its own for each engine, where one host runs several: they don't disturb one another's timing on the CPU.

Who starts an engine claims cores, and pins itself to them before it starts anything, which passes them on to all that
it starts. A claim is a lock on a file for each core in a folder of the host, so it holds across sweeps, and the system
drops it when the last process that holds it has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
POLL_S = 0.5


def in_order(cores: Collection[int]) -> list[int]:
    """Logical cores so that neighbours share as much as they can: by socket, then physical core, then number.

    Their numbers don't say so: often the second thread of every physical core comes after the first ones of all.
    """
    return sorted(cores, key=lambda core: (_place(core, "physical_package_id"), _place(core, "core_id"), core))


def choose(free: Collection[int], cores: Sequence[int], count: int, near: Collection[int] = ()) -> list[int] | None:
    """`count` of the free cores; None where fewer are free.

    `cores` are all cores of the host in the order of `in_order`. It is cut into slots of `count` cores, and the slot
    with most cores in `near` (those next to the engine's GPUs) is taken, the first of equals. Where no slot is free as
    a whole, since engines of several sizes share the host, it is the first free cores.
    """
    slots = [list(cores[at : at + count]) for at in range(0, len(cores) - count + 1, count)]
    whole = [slot for slot in slots if set(slot) <= set(free)]
    if whole:
        return max(whole, key=lambda slot: len(set(slot) & set(near)))
    rest = [core for core in cores if core in set(free)]
    return rest[:count] if len(rest) >= count else None


@contextlib.contextmanager
def claimed(
    count: int, near: Collection[int] = (), waiting: Callable[[], None] = lambda: None, folder: Path | None = None
) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Claim `count` of the cores that this process may use, and give them with the descriptors that hold the claim.

    A process that is started with the descriptors (`pass_fds`) holds the claim too. Waits until enough are free,
    calling `waiting` twice a second: an engine of another sweep, or one that is just ending, may have them. Raises
    ValueError where this process may not use as many.
    """
    cores = in_order(os.sched_getaffinity(0))
    if count > len(cores):
        raise ValueError(f"{count} cores asked for, and only {len(cores)} may be used here ({spell(cores)})")
    folder = folder or Path(tempfile.gettempdir()) / f"latency-lab-{os.getuid()}" / "cores"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    while (held := _try(count, cores, near, folder)) is None:
        waiting()
        time.sleep(POLL_S)
    try:
        yield sorted(held), tuple(held.values())
    finally:
        for descriptor in held.values():
            os.close(descriptor)


@contextlib.contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """While the block runs, this thread, and what it starts, runs on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spell(cores: Collection[int]) -> str:
    """Cores as Linux writes them: '0-3,8'."""
    runs = groupby(enumerate(sorted(cores)), key=lambda pair: pair[1] - pair[0])
    spans = [[core for _, core in run] for _, run in runs]
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def _try(count: int, cores: Sequence[int], near: Collection[int], folder: Path) -> dict[int, int] | None:
    """Descriptors by core of a claim on `count` cores; None, and nothing held, where fewer are free."""
    with (folder / "claiming").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # two that claim at once would each hold half of what is free
        free = {core: descriptor for core in cores if (descriptor := _lock(folder / str(core))) is not None}
        chosen = choose(free, cores, count, near) or []
        for core in free.keys() - set(chosen):
            os.close(free[core])
    return {core: free[core] for core in chosen} or None


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _place(core: int, what: str) -> int:
    """Number of the socket or physical core that a logical core belongs to; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int((TOPOLOGY / f"cpu{core}" / "topology" / what).read_text())
    return 0
