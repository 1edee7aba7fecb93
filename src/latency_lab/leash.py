"""A child that ends when its parent does, also where the parent is killed and can see to nothing any more.

The sweep keeps papermill on such a leash; papermill's kernel ends by itself when papermill has (ipykernel looks every
second), and guard.py ends what the kernel had started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def command(words: Sequence[str]) -> list[str]:
    """A command that runs the program `words` as a child of this process, to be killed when this process ends.

    It must be started from a thread that lives as long: the system goes by the thread, not by the process.
    """
    return [sys.executable, "-m", __name__, str(os.getpid()), *words]


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the system send a signal to this process when `parent`, which started it, ends; at once where it has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # which keeps the process, and so the leash
