"""Ctrl-C and a polite end, taken note of and not broken off by: what runs is ended in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

BOTH = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def collected(first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """While the block runs, SIGINT and SIGTERM are collected in the list and break nothing off.

    `first` is called at the first of them. Only a process's main thread can do this.
    """
    found: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if not found:
            first()
        found.append(number)

    before = {number: signal.signal(number, note) for number in BOTH}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
