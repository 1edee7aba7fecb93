"""The waits between a request's tokens, from the times at which its chunks of tokens arrived.

ITL is the wait for each token after the first. vLLM's benchmark counts one gap a chunk, so several tokens in one chunk
would count as one. Here the first token of a chunk has waited for the whole gap and the others 0 s, since they came
together: the stall that a reader sees is kept, and the mean ITL of a request is exactly its TPOT.

A study has as many gaps as tokens, so all is done on flat arrays: one after another those of each request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from latency_lab import lists
from latency_lab.metrics import POINT, as_float


class Chunks(NamedTuple):
    """One item a chunk of tokens, requests one after another."""

    row: np.ndarray  # position of its request
    after_s: np.ndarray  # arrival, after the request was sent
    gap_s: np.ndarray  # since the chunk before; NaN for a request's first
    tokens: np.ndarray  # in the chunk


COLUMNS = [*POINT, "cell", "repeat", "request", "max_num_batched_tokens", "load", "streaming", "error"]
COLUMNS += ["scheduled_s", "sent_s", "prompt_tokens", "output_tokens", "token_times_s", "token_counts"]
"""Of `requests`, what gaps are made from."""


def gaps(requests: pd.DataFrame, until_s: float = np.inf) -> pd.DataFrame:
    """One row a chunk of tokens: gap_s since the chunk before (null for a request's first), tokens in it,
    at_s in the cell.

    `row` is the request's position in `requests`. Requests without token times, and non-streaming ones, have
    no rows. Where it is not known what each chunk held, `tokens` is right in sum only. Chunks after `until_s` of the
    cell are left out.
    """
    chunks = _chunks(requests)
    at_s = _arrivals_s(requests, chunks)
    if np.isfinite(until_s):
        kept = at_s <= until_s
        chunks, at_s = Chunks(*(values[kept] for values in chunks)), at_s[kept]
    keys = [*POINT, "cell", "repeat", "request", "max_num_batched_tokens", "load"]
    own = requests[keys].take(chunks.row).reset_index(drop=True)
    ok = requests["error"].isna().to_numpy()[chunks.row]
    return own.assign(row=chunks.row, ok=ok, at_s=at_s, gap_s=chunks.gap_s, tokens=chunks.tokens)


def arrived_s(requests: pd.DataFrame, most: int) -> float:
    """When the first `most` chunks of tokens had arrived, on the cell's clock; infinite where there are no more."""
    at_s = _arrivals_s(requests, _chunks(requests))
    return float(np.partition(at_s, most - 1)[most - 1]) if len(at_s) > most else np.inf


def itl(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """ITL of each token after a request's first, of completed requests: the request's position, and the ITL in seconds.

    Both in the order of the requests.
    """
    chunks = _chunks(requests, requests["error"].isna().to_numpy())
    waited = ~np.isnan(chunks.gap_s)
    row, itl_s = chunks.row[waited], chunks.gap_s[waited]
    if not (chunks.tokens > 1).any():
        return row, itl_s
    row = np.concatenate([row, np.repeat(chunks.row, np.maximum(chunks.tokens - 1, 0))])
    order = np.argsort(row, kind="stable")
    return row[order], np.concatenate([itl_s, np.zeros(len(row) - len(itl_s))])[order]


def _arrivals_s(requests: pd.DataFrame, chunks: Chunks) -> np.ndarray:
    return np.asarray(as_float(requests["sent_s"]).to_numpy()[chunks.row] + chunks.after_s)


def _chunks(requests: pd.DataFrame, wanted: np.ndarray | bool = True) -> Chunks:
    """The chunks of tokens of streaming requests, of all or of those `wanted`."""
    (times, lengths), (tokens, known) = (lists.flat(requests[name]) for name in ("token_times_s", "token_counts"))
    mine = requests["streaming"].to_numpy(bool) & wanted
    if not mine.all():
        times, tokens = times[np.repeat(mine, lengths)], tokens[np.repeat(mine, known)]
        lengths, known = np.where(mine, lengths, 0), np.where(mine, known, 0)
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    after_s = times.astype(float)
    gap_s = np.diff(after_s, prepend=np.nan)
    first = np.cumsum(lengths) - lengths
    gap_s[first[lengths > 0]] = np.nan
    if (known != lengths).any():
        # Of some requests only the chunks' times are known: a token in each and the rest in the first. ITL comes out
        # the same however the rest is distributed.
        agree = known == lengths
        counted = tokens[np.repeat(agree, known)]
        tokens = np.ones(len(row), dtype=np.int32)
        tokens[agree[row]] = counted
        rest = (as_float(requests["output_tokens"]) - lengths).clip(lower=0).fillna(0).to_numpy(int)
        unknown = ~agree & (lengths > 0)
        tokens[first[unknown]] += rest[unknown]
    return Chunks(row, after_s, gap_s, tokens.astype(np.int32, copy=False))
