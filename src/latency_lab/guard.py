"""An engine ends with the kernel that started it: a process beside them sees to it where the kernel is killed.

vLLM's processes don't notice that the kernel has died, and keep the memory, which on a GPU nobody else gets then. So
while an engine lives, this watches the kernel, and when it dies ends all that is left in its session. To watch is to
look twice a second who its own parent is, which disturbs no measurement.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from latency_lab import processes

POLL_S = 0.5
ROUNDS = 5
"""An engine may start another process while it is being ended: so often it is looked for more."""


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watch over this process's session while the block runs.

    Only where this process leads its session, as a kernel does: a script shares its session with the terminal it was
    started from, where nothing else is to be ended.
    """
    if os.getsid(0) != os.getpid():
        yield
        return
    quiet = subprocess.DEVNULL
    guard = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet
    )
    try:
        yield
    finally:
        guard.kill()
        guard.wait()


def main(kernel: int) -> None:
    """Wait until `kernel`, which started this process and leads its session, has ended; then end the session."""
    for polite in (signal.SIGTERM, signal.SIGINT):  # meant for the kernel and its engine: this one goes last
        signal.signal(polite, signal.SIG_IGN)
    since = processes.started(os.getpid())
    with contextlib.suppress(OSError):
        since = processes.started(kernel)
    while os.getppid() == kernel:
        time.sleep(POLL_S)
    for _ in range(ROUNDS):
        if not (left := processes.members(os.getsid(0), since)):
            return
        processes.end(left)


if __name__ == "__main__":
    main(int(sys.argv[1]))
