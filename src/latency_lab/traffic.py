"""Traces of real traffic: when requests arrived, how long their prompts and answers were, what their prompts shared.

Layouts, as their publishers describe them:

- azure: CSV with TIMESTAMP (date and time; 7 decimals in 2023, 6 and +00:00 in 2024), ContextTokens, GeneratedTokens
  (github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md)
- burstgpt: CSV with Timestamp (seconds), Request tokens, Response tokens and others that are not needed here; responses
  of 0 tokens are failed requests (github.com/HPMLL/BurstGPT, README.md)
- mooncake: JSON lines with timestamp (milliseconds), input_length, output_length, hash_ids. Each of hash_ids stands for
  a block of 512 prompt tokens and all that come before it, the last for what is left of the prompt
  (github.com/kvcache-ai/Mooncake, FAST25-release/ with its paper; arXiv:2407.00079)

Rows of 0 prompt or output tokens cannot be sent: they are left out and counted. Rows out of order are sorted and
counted; rows of one time are as many requests, in the file's order. Whatever else is wrong is an error with its line.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from latency_lab.files import file_sha256
from latency_lab.study_file import show
from latency_lab.traffic_file import TrafficError, read_number, read_table, read_tokens

BLOCK_TOKENS = 512
"""Prompt tokens that each of Mooncake's hash_ids stands for."""

TRACES = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
}
"""The columns that a trace must have: arrival, prompt tokens, output tokens."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    digest : SHA-256 of the file
    at_s : arrival in seconds after the first
    blocks : for each request the ids of its prompt's blocks of BLOCK_TOKENS; equal ids stand for equal tokens. Empty
        where the trace does not say what its prompts share.
    rows : requests that the file holds, before any cut
    failed : rows left out, since they ask for 0 prompt or output tokens
    unsorted : rows earlier than one that stands above them in the file
    time_scale : by how much the gaps have been stretched
    """

    path: Path
    layout: str
    digest: str
    at_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    blocks: tuple[tuple[int, ...], ...]
    rows: int
    failed: int
    unsorted: int
    time_scale: float = 1.0

    def cut(self, time_scale: float, requests: int | None, seconds: float | None) -> Trace:
        """The first requests: at most `requests`, before `seconds` have passed; `time_scale` stretches their gaps."""
        at_s = self.at_s * time_scale
        in_time = len(at_s) if seconds is None else int(np.searchsorted(at_s, seconds))
        kept = slice(in_time if requests is None else min(in_time, requests))
        return replace(
            self,
            at_s=at_s[kept],
            prompt_tokens=self.prompt_tokens[kept],
            output_tokens=self.output_tokens[kept],
            blocks=self.blocks[kept],
            time_scale=self.time_scale * time_scale,
        )

    @property
    def rate_per_s(self) -> float | None:
        """Mean arrivals a second: one over the mean gap. None where all come at once."""
        return (len(self.at_s) - 1) / float(self.at_s[-1]) if self.at_s[-1] > 0 else None

    @property
    def note(self) -> str:
        """What a reader has to know of the file and of what was taken from it."""
        taken = (
            f"all {self.rows:,}" if len(self.at_s) == self.rows else f"the first {len(self.at_s):,} of {self.rows:,}"
        )
        parts = [f"{taken} requests in {self.path.name} ({self.layout})"]
        parts += [f"gaps times {self.time_scale:g}"] * (self.time_scale != 1)
        parts += [f"left out for 0 prompt or output tokens: {self.failed:,}"] * bool(self.failed)
        parts += [f"out of order and sorted: {self.unsorted:,}"] * bool(self.unsorted)
        return ", ".join(parts)


def fitted(prompt_tokens: Any, output_tokens: Any, limit: int) -> tuple[Any, Any]:
    """Lengths (numbers or arrays) cut to `limit` in all: the prompt gives way first, down to one token."""
    output = np.minimum(output_tokens, limit - 1)
    return np.minimum(prompt_tokens, limit - output), output


def read_trace(path: Path, layout: str | None = None) -> Trace:
    """Read a trace; without `layout`, its columns tell. Raises TrafficError."""
    table = read_table(path)
    layout = table.layout(layout, TRACES)
    when, asked, answered = TRACES[layout]
    read_time, per_s = _CLOCKS[layout]
    times, prompts, outputs = array("d"), array("q"), array("q")
    blocks: list[tuple[int, ...]] = []
    failed, column = 0, ""
    for line, row in table.rows:
        try:
            time = read_time(row[column := when])
            prompt = read_tokens(row[column := asked])
            output = read_tokens(row[column := answered])
            shared = _blocks(row.get(column := "hash_ids"), prompt) if layout == "mooncake" else ()
        except KeyError:
            raise TrafficError(path, line, f"{column} is missing; allowed: {', '.join(TRACES[layout])}") from None
        except ValueError as error:
            raise TrafficError(path, line, f"{column}: {error}") from None
        if not prompt or not output:
            failed += 1
            continue
        times.append(time)
        prompts.append(prompt)
        outputs.append(output)
        blocks.append(shared)
    if not times:
        raise TrafficError(path, 1, "no row asks for any tokens; allowed: at least one request")
    at = np.array(times)
    order = np.argsort(at, kind="stable")
    return Trace(
        path=path,
        layout=layout,
        digest=file_sha256(path),
        at_s=(at[order] - at.min()) / per_s,
        prompt_tokens=np.array(prompts)[order],
        output_tokens=np.array(outputs)[order],
        blocks=tuple(blocks[i] for i in order) if any(blocks) else (),
        rows=len(at),
        failed=failed,
        unsorted=int((at < np.maximum.accumulate(at)).sum()),
    )


def _date_us(value: Any) -> float:
    """Microseconds since 1970 of a date and time, in UTC where it names no zone. Further decimals are cut off."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        text = f"{show(value)} is not a date and time; allowed: as in 2023-11-16 18:15:46.6805900"
        raise ValueError(text) from None
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


_CLOCKS: dict[str, tuple[Callable[[Any], float], float]] = {
    "azure": (_date_us, 1e6),
    "burstgpt": (read_number, 1.0),
    "mooncake": (read_number, 1e3),
}
"""How the arrivals of a layout are read, and how many of its units make a second."""


def _blocks(value: Any, prompt_tokens: int) -> tuple[int, ...]:
    """The ids of a prompt's blocks; none where the trace gives none for it."""
    if value is None or value == []:
        return ()
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise ValueError(f"{show(value)} is not a list of ids; allowed: [0, 1, 2]")
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if len(value) != needed:
        text = f"{len(value)} ids for {prompt_tokens:,} prompt tokens; allowed: {needed}, one for each {BLOCK_TOKENS}"
        raise ValueError(text)
    return tuple(value)
