"""The workload in which streams run beside longer prompts: what the figures of chunked prefill are about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from latency_lab import proofs, token_gaps
from latency_lab.records import Records

MOST_GAPS = 20_000
"""Most gaps of streams that are looked at one by one in a cell, from its start: more are neither seen in a figure nor
read in its CSV."""


@dataclass(frozen=True)
class Beside:
    """One workload of a study.

    study : its cells alone
    long, stream : names of the classes of requests with the longest prompts and outputs
    prompt_tokens : median of the long prompts
    """

    study: Records
    long: str
    stream: str
    prompt_tokens: float

    @property
    def workload(self) -> str:
        return str(self.study.cells["workload"].iloc[0])

    @property
    def traced(self) -> pd.DataFrame:
        """The cells whose steps were recorded."""
        return self.study.cells[self.study.cells["steps"].fillna(0) > 0]

    def first_repeat(self, setting: str) -> Records:
        """The setting's first repeat whose steps were recorded."""
        own = self.traced[self.traced["setting"] == setting]
        return self.study.part(own[own["repeat"] == own["repeat"].min()])

    def gaps(self, cell: Records) -> tuple[pd.DataFrame, float]:
        """Gaps of one cell's streams (see token_gaps.gaps), and how many seconds of the cell they cover.

        Those are all, and infinitely many seconds, unless there are more than MOST_GAPS.
        """
        requests = cell.requests_with(token_gaps.COLUMNS)
        streams = requests[requests["class_name"] != self.long].reset_index(drop=True)
        until_s = token_gaps.arrived_s(streams, MOST_GAPS)
        return token_gaps.gaps(streams, until_s), until_s

    @cached_property
    def stepped_gaps(self) -> tuple[pd.DataFrame, str]:
        """Gaps of all traced cells' streams with their steps, and which part of the cells they are, in words."""
        found, cut = [], False
        for one in self.study.part(self.traced).one_by_one():
            chunks, until_s = self.gaps(one)
            requests = one.requests_with(["cell", "request", "class_name", "prompt_tokens"])
            streams = requests[requests["class_name"] != self.long]
            found.append(gaps_with_steps(one.steps[one.steps["start_s"] <= until_s], streams, chunks))
            cut = cut or np.isfinite(until_s)
        covered = f"all repeats, the first {MOST_GAPS:,} tokens of each" if cut else "all repeats"
        return pd.concat(found, ignore_index=True), covered


def beside(study: Records) -> Beside | None:
    """The first workload in which streams run beside longer prompts.

    None where no workload has a class of long prompts, at least four times the others', and one of longer outputs.
    """
    cells = study.cells[(study.cells["load"] == "mix") & (study.cells["requests"] > 0)]
    for _, own in cells.groupby("workload", sort=False):
        part = study.part(own)
        rows = part.requests_with(["class_name", "prompt_tokens", "output_tokens"])
        sizes = rows.groupby("class_name")[["prompt_tokens", "output_tokens"]].median().astype(float)
        long, stream = sizes["prompt_tokens"].idxmax(), sizes["output_tokens"].idxmax()
        if len(sizes) == 2 and long != stream and sizes["prompt_tokens"].max() >= 4 * sizes["prompt_tokens"].min():
            return Beside(part, str(long), str(stream), float(sizes["prompt_tokens"].max()))
    return None


def gaps_with_steps(steps: pd.DataFrame, requests: pd.DataFrame, chunks: pd.DataFrame) -> pd.DataFrame:
    """Each gap between two tokens of a request with the step that ended it: gap_ms, and `prefill` tokens in that step.

    chunks : token_gaps.gaps of these requests.

    The step that produced output token j (from 0) is the first in which the request's computed positions reach
    prompt + j: no clock is needed. Chunks of several tokens are left out, as no single step made them.
    """
    parts = proofs.scheduled(steps)
    if parts.empty or chunks.empty:
        return pd.DataFrame(columns=["setting", "repeat", "cell", "request", "token", "gap_ms", "prefill"])
    chunks = chunks.assign(token=chunks.groupby("row")["tokens"].cumsum() - 1)
    chunks = chunks[(chunks["tokens"] == 1) & chunks["gap_s"].notna() & chunks["ok"]]
    parts["prompt_in_step"] = parts.groupby(proofs.PLACE)["prefill"].transform("sum")
    prompt = requests.set_index(["cell", "request"])["prompt_tokens"].rename("prompt_tokens")
    parts = parts.merge(prompt.reset_index(), on=["cell", "request"])
    parts["token"] = parts["computed"] + parts["tokens"] - parts["prompt_tokens"]
    made = parts[parts["token"] >= 0].drop_duplicates(["cell", "request", "token"])
    out = chunks.merge(made[["cell", "request", "token", "step", "prompt_in_step"]], on=["cell", "request", "token"])
    out = out.assign(gap_ms=out["gap_s"] * 1e3, prefill=out["prompt_in_step"])
    return out[["setting", "repeat", "cell", "request", "token", "step", "gap_ms", "prefill"]].reset_index(drop=True)
